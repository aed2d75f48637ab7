"""Operators over sliding windows and grids of places."""
