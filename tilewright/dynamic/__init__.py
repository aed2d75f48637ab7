"""Models that compile when they are called, for the shapes and numbers that a call brings or its data decides."""
