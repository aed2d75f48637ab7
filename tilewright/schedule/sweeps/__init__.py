"""Programs that are larger than a memory: in sweeps, each part by part."""
