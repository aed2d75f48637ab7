"""What is asked for before it is read: weights, rows, windows."""
