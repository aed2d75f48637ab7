"""Independent computes that are alike, as one."""
