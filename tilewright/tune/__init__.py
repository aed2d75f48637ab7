"""Measuring: the best predicted plans of each kernel, timed inside the model, and the fastest kept."""
