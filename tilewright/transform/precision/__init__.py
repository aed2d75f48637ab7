"""Which element types are computed in and stored."""
