"""Contractions by dot-product instructions."""
