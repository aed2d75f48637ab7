"""One folder a kind of machine: how a leaf is planned, priced and lowered; how tiles are handed out and run."""
