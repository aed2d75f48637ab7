"""Ablations of the papers that Tilewright follows, a file a paper: `python -m bench.papers NAME`."""
