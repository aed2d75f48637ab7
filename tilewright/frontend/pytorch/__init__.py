"""Modules of PyTorch to Graphs."""
