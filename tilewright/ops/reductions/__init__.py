"""Operators that sum up: reductions, norms, products, transforms."""
