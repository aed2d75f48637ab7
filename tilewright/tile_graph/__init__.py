"""The Plan and what it is made of: nests, propagation, streams, traffic and footprint; facts, no decisions."""
