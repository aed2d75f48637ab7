"""The compiler as a sequence of stages, each checked and settled."""
