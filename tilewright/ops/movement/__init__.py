"""Operators that move elements: shapes, gathers, scatters, sequences."""
