"""Maps and reductions that threads move in packets."""
