"""Python's own control in the source of a module: branches and loops of the graph where tensors decide it."""
