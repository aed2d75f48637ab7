"""Benchmarks and the models that they run; reports only, nothing here asserts a time."""
