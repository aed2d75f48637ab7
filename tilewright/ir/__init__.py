"""The forms a model takes on its way to machine code, and the interpreter that gives each its meaning."""
