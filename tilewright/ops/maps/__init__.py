"""Operators that are maps: an element of the result from elements at the same place."""
