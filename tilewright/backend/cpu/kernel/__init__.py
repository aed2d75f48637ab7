"""A whole kernel on a CPU: its tiles, their traffic, memory, and loops around leaves."""
