"""Every form as text, and read back from it."""
