"""What a Plan means: its tree run with NumPy, part by part."""
