"""Gradients: from a Program that computes a loss to one that also computes how it changes with its weights."""
