"""Programs of small integers: scales, zero points and what is left of them."""
