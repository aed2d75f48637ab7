"""Windows that slide over every channel by itself."""
