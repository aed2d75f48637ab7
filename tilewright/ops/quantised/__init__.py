"""Operators on quantised tensors: to codes and back, and products and windows of codes."""
