"""A whole kernel on a GPU: blocks, shared memory, limits, launches, persistent steps."""
