"""Small programs of many kinds, from a seed each, and machines whose caches are small enough to overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright.target import Target, machine

Rng = np.random.Generator


def small_caches(name: str, *capacities: int) -> Target:
    """A machine as it is but for its caches."""
    target = machine(name)
    levels = list(target.levels)
    for number, capacity in enumerate(capacities, 1):
        levels[number] = replace(levels[number], capacity=capacity, shared_by=1)
    return replace(target, levels=tuple(levels), near_ways=4)


def machine_of(seed: int) -> Target:
    kinds = (
        ("neoverse_n1", (8 << 10, 64 << 10, 256 << 10)),
        ("avx2_desktop", (4 << 10, 32 << 10, 512 << 10)),
        ("emerald_rapids_avx512", (12 << 10, 96 << 10, 384 << 10)),
    )
    name, capacities = kinds[seed % len(kinds)]
    return small_caches(name, *capacities)


def _weights(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _size(rng: Rng, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def _product(rng: Rng) -> ModelProto:
    m, k, n = (_size(rng, 20, 200) for _ in range(3))
    return model_of([("MatMul", ["x", "w"], "p", {}), ("Add", ["p", "b"], "q", {}), ("Relu", ["q"], "y", {})],
                    {"x": (m, k)}, {"y": (m, n)}, {"w": _weights(rng, k, n), "b": _weights(rng, n)})  # fmt: skip


def _two_inputs(rng: Rng) -> ModelProto:
    h, m, k, n = _size(rng, 1, 4), *(_size(rng, 16, 120) for _ in range(3))
    return model_of([("MatMul", ["x", "z"], "y", {})], {"x": (h, m, k), "z": (h, k, n)}, {"y": (h, m, n)}, {})


def _layers(rng: Rng) -> ModelProto:
    m, k, h, n = (_size(rng, 16, 160) for _ in range(4))
    return model_of([("MatMul", ["x", "w"], "p", {}), ("Relu", ["p"], "q", {}), ("MatMul", ["q", "v"], "y", {})],
                    {"x": (m, k)}, {"y": (m, n)}, {"w": _weights(rng, k, h), "v": _weights(rng, h, n)})  # fmt: skip


def _convolution(rng: Rng) -> ModelProto:
    c, o, size = _size(rng, 3, 24), _size(rng, 4, 32), _size(rng, 12, 40)
    pad = _size(rng, 0, 1)
    out = size + 2 * pad - 2
    return model_of([("Conv", ["x", "w"], "p", {"kernel_shape": [3, 3], "pads": [pad] * 4}), ("Relu", ["p"], "y", {})],
                    {"x": (1, c, size, size)}, {"y": (1, o, out, out)}, {"w": _weights(rng, o, c, 3, 3)})  # fmt: skip


def _strided(rng: Rng) -> ModelProto:
    c, o, size = _size(rng, 3, 32), _size(rng, 4, 48), 2 * _size(rng, 8, 24)
    return model_of([("Conv", ["x", "w"], "y", {"kernel_shape": [1, 1], "strides": [2, 2]})],
                    {"x": (1, c, size, size)}, {"y": (1, o, size // 2, size // 2)},
                    {"w": _weights(rng, o, c, 1, 1)})  # fmt: skip


def _pointwise(rng: Rng) -> ModelProto:
    c, o, size = _size(rng, 8, 96), _size(rng, 8, 96), _size(rng, 7, 40)
    return model_of([("Conv", ["x", "w"], "y", {"kernel_shape": [1, 1]})], {"x": (1, c, size, size)},
                    {"y": (1, o, size, size)}, {"w": _weights(rng, o, c, 1, 1)})  # fmt: skip


def _depthwise(rng: Rng) -> ModelProto:
    c, size = _size(rng, 8, 48), _size(rng, 12, 56)
    return model_of([("Conv", ["x", "w"], "p", {"kernel_shape": [3, 3], "pads": [1] * 4, "group": c}),
                     ("Relu", ["p"], "y", {})], {"x": (1, c, size, size)}, {"y": (1, c, size, size)},
                    {"w": _weights(rng, c, 1, 3, 3)})  # fmt: skip


def _two_convolutions(rng: Rng) -> ModelProto:
    c, size = _size(rng, 2, 8), _size(rng, 16, 64)
    return model_of([("Conv", ["x", "w"], "p", {"kernel_shape": [3, 3], "pads": [1] * 4}), ("Relu", ["p"], "q", {}),
                     ("Conv", ["q", "v"], "y", {"kernel_shape": [3, 3], "pads": [1] * 4})],
                    {"x": (1, c, size, size)}, {"y": (1, c, size, size)},
                    {"w": _weights(rng, c, c, 3, 3), "v": _weights(rng, c, c, 3, 3)})  # fmt: skip


def _softmax(rng: Rng) -> ModelProto:
    m, n, axis = _size(rng, 20, 400), _size(rng, 20, 400), _size(rng, 0, 1)
    return model_of([("Softmax", ["x"], "y", {"axis": axis})], {"x": (m, n)}, {"y": (m, n)}, {})


def _normalised(rng: Rng) -> ModelProto:
    m, n = _size(rng, 20, 400), _size(rng, 20, 400)
    steps = [("ReduceMean", ["x"], "m", {"axes": [1]}), ("Sub", ["x", "m"], "c", {}), ("Mul", ["c", "c"], "s", {}),
             ("ReduceMean", ["s"], "v", {"axes": [1]}), ("Add", ["v", "e"], "d", {}), ("Sqrt", ["d"], "r", {}),
             ("Div", ["c", "r"], "y", {})]  # fmt: skip
    return model_of(steps, {"x": (m, n)}, {"y": (m, n)}, {"e": np.float32(1e-5)})


def _transposed(rng: Rng) -> ModelProto:
    a, b, c = _size(rng, 2, 20), _size(rng, 10, 120), _size(rng, 10, 120)
    return model_of([("Transpose", ["x"], "t", {"perm": [0, 2, 1]}), ("Mul", ["t", "z"], "y", {})],
                    {"x": (a, b, c), "z": (a, c, b)}, {"y": (a, c, b)}, {})  # fmt: skip


def _maps(rng: Rng) -> ModelProto:
    m, n = _size(rng, 50, 500), _size(rng, 50, 500)
    return model_of([("Mul", ["x", "z"], "p", {}), ("Add", ["p", "b"], "q", {}), ("Sigmoid", ["q"], "y", {})],
                    {"x": (m, n), "z": (m, 1)}, {"y": (m, n)}, {"b": _weights(rng, n)})  # fmt: skip


def _sums(rng: Rng) -> ModelProto:
    a, b, c, axis = _size(rng, 4, 40), _size(rng, 10, 80), _size(rng, 10, 80), _size(rng, 0, 2)
    shape = tuple(n for i, n in enumerate((a, b, c)) if i != axis)
    return model_of([("ReduceSum", ["x", "axes"], "s", {"keepdims": 0}), ("Relu", ["s"], "y", {})],
                    {"x": (a, b, c)}, {"y": shape}, {"axes": np.array([axis])})  # fmt: skip


def _attention(rng: Rng) -> ModelProto:
    h, s, d = _size(rng, 1, 3), _size(rng, 24, 128), _size(rng, 8, 48)
    steps = [("Transpose", ["k"], "t", {"perm": [0, 2, 1]}), ("MatMul", ["q", "t"], "s", {}),
             ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "y", {})]  # fmt: skip
    return model_of(steps, dict.fromkeys("qkv", (h, s, d)), {"y": (h, s, d)}, {})


def _pooled(rng: Rng) -> ModelProto:
    c, size = _size(rng, 4, 32), 2 * _size(rng, 10, 40)
    return model_of([("MaxPool", ["x"], "y", {"kernel_shape": [2, 2], "strides": [2, 2]})],
                    {"x": (1, c, size, size)}, {"y": (1, c, size // 2, size // 2)}, {})  # fmt: skip


KINDS: tuple[Callable[[Rng], ModelProto], ...] = (
    _product, _two_inputs, _layers, _convolution, _strided, _pointwise, _depthwise, _two_convolutions, _softmax,
    _normalised, _transposed, _maps, _sums, _attention, _pooled,
)  # fmt: skip


def case(seed: int) -> ModelProto:
    return KINDS[seed % len(KINDS)](np.random.default_rng([seed, 31]))
