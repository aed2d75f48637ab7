"""CPUs: vector registers, caches, a team of cores."""
