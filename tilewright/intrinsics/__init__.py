"""Instructions a kernel may name: text per dialect, meaning, operand memories, execution scope."""
