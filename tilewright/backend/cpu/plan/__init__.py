"""How a leaf runs on a core, and what it costs there."""
