"""Maps that move data: transposed blocks, rows walked as one, shared parts."""
