"""A leaf as loops over register tiles, vectors and matrix registers."""
