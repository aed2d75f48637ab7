"""ONNX files to Graphs."""
