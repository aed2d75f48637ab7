"""Contractions on matrix registers."""
