"""Compiled models as directories that start without the compiler: from Python, and from C without Python."""
