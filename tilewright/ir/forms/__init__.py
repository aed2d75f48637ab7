"""The forms themselves, pure data: Graph, Program, Loops, and the expressions and element types in them."""
