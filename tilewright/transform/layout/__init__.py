"""How tensors lie in memory: storage orders, runs of axes, staged copies."""
