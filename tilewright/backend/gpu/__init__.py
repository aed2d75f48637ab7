"""NVIDIA GPUs: blocks of threads, shared memory."""
