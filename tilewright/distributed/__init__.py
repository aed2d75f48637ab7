"""One model on several ranks: shared out, compiled a rank, run together."""
