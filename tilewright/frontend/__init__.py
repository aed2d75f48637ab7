"""Frontends: model files and modules of other frameworks become a Graph."""
