"""Nests and what follows from their index maps: propagation, streams, rolling windows, cuts, signatures."""
