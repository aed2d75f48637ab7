"""Compiled models as files: whole models in the cache, and directories that start without the compiler."""
