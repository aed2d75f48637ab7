"""Tilewright inside other programs: ONNX's backend interface and suite, torch.compile, token generators."""
