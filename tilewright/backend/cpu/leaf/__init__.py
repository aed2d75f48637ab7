"""Which form a leaf takes, what it costs, and what it touches."""
