"""Models built here with `onnx` alone, for demonstrations and tests."""
