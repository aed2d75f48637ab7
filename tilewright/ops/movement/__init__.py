"""Operators that move elements: shapes, gathers, sequences."""
