"""Networks that learn from records what plans take (DLBCM, LPM), for the extra `learn`."""
