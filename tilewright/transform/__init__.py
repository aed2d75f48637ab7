"""Rewrites of a Program: the same model, better to plan."""
