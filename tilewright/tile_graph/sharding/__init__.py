"""Programs over a mesh of ranks: along what a compute can be cut, what then must lie where, and what is exchanged."""
