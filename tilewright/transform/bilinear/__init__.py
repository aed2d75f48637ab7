"""Products and convolutions with fewer multiplications."""
