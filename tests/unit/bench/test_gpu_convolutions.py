"""The benchmark of convolution layers, as far as it goes without a GPU: its layers are what they are called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench import gpu_convolutions
from bench.gpu_convolutions import LAYERS, Layer, Row, told
from tilewright.frontend.onnx.model import load
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops import lower


def test_there_are_sixty_layers_of_all_families() -> None:
    assert len(LAYERS) == len({(x.family, x.name) for x in LAYERS}) == 60
    assert {"first", "resnet", "vgg", "inception", "unet", "efficientnet", "depthwise", "grouped", "dilated",
            "transposed", "line", "volume", "odd"} == {x.family for x in LAYERS}  # fmt: skip


def small(layer: Layer) -> Layer:
    """The same with few channels and a small image."""
    groups = min(layer.groups, 2)
    size = tuple(min(n, 9) for n in layer.size)
    moved = {"padding": min(layer.pad, 2), "dilation": min(layer.dilation, 2)}
    return replace(layer, channels=(4, 6), size=size, groups=groups, **moved)


@pytest.mark.parametrize("layer", {x.family: x for x in reversed(LAYERS)}.values(), ids=lambda layer: layer.family)
def test_a_layer_is_what_pytorch_computes(layer: Layer) -> None:
    layer = small(layer)
    program = lower(load(gpu_convolutions.layer_model(layer, "float32", 2), {}))
    x = np.random.default_rng(0).standard_normal((2, *layer.size, layer.channels[0])).astype(np.float32)
    (output,) = program.outputs
    assert tuple(output.shape) == (2, *layer.result, layer.channels[1])
    weight, bias = map(torch.from_numpy, gpu_convolutions.parameters(layer))
    wanted = gpu_convolutions._by_torch(layer, torch.from_numpy(x), weight, bias)
    np.testing.assert_allclose(evaluate(program, {"x": x})[output.name], wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_what_is_told() -> None:
    rows = [Row("a", "f", 1, 10.0, 20.0), Row("b", "f", 1, 10.0, 5.0), Row("c", "f", 1, refused="no")]
    assert told("f", rows) == "f: 1.00 of cuDNN's speed, geometric mean of 2; at least 0.50"
    assert told("f", rows[2:]) == "f: none ran"
