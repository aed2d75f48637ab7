"""The grammar of Plans: what cannot be meant is refused, with the place named."""
