"""Nests on vector registers: register tiles, their order and cost, and the loops they become."""
