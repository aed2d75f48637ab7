"""Streams that warps keep in registers."""
