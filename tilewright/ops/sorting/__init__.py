"""Operators that need an order: sorting, what is selected by it, and writes of which the last one counts."""
