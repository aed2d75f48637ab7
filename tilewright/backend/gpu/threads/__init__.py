"""Nests on the threads of a block, operands through shared memory."""
