"""Programs that no model of the zoo has: small networks of one to six operators with random sizes, as ONNX models.

Each is drawn from its number alone, so that a generator that goes on elsewhere, or later, makes other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bench.kernel_cases import OPSET

_ROWS = (16, 49, 64, 97, 128, 196, 197, 256, 384, 509, 512, 1024)
_WIDTHS = (31, 32, 61, 64, 96, 128, 192, 199, 256, 384, 512, 768)
_PIXELS = (7, 14, 17, 28, 32, 56)
_CHANNELS = (8, 16, 24, 32, 48, 64, 96, 128)


class Model:
    """Nodes one after the other; a name stands for what a node gives."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.constants: list[Any] = []

    def one(self, sizes: Sequence[int]) -> int:
        return int(self.rng.choice(sizes))

    def input(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(0.1 * self.rng.standard_normal(shape).astype(np.float32))

    def constant(self, array: np.ndarray) -> str:
        name = f"w{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def activation(self, x: str) -> str:
        return self.node(str(self.rng.choice(["Relu", "Tanh", "Sigmoid", "HardSwish"])), x)

    def layer_norm(self, x: str, width: int) -> str:
        return self.node("LayerNormalization", x, self.weight(width), self.weight(width), axis=-1)

    def finished(self, *results: str) -> onnx.ModelProto:
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
        graph = helper.make_graph(self.nodes, "outside", self.inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def _product(m: Model) -> str:
    rows, inner, columns = m.one(_ROWS), m.one(_WIDTHS), m.one(_WIDTHS)
    made = m.node("MatMul", m.input(rows, inner), m.weight(inner, columns))
    return m.activation(m.node("Add", made, m.weight(columns)))


def _product_of_activations(m: Model) -> str:
    batch, rows, inner, columns = m.one((1, 3, 8, 12)), m.one(_ROWS[:8]), m.one(_WIDTHS[:6]), m.one(_WIDTHS[:8])
    return m.node("MatMul", m.input(batch, rows, inner), m.input(batch, inner, columns))


def _long_product(m: Model) -> str:
    rows, inner, columns = m.one((1, 2, 4, 8)), m.one((2048, 4096, 8192)), m.one(_WIDTHS)
    return m.node("MatMul", m.input(rows, inner), m.weight(inner, columns))


def _mlp(m: Model) -> str:
    x, width = m.input(m.one(_ROWS), first := m.one(_WIDTHS[1:9])), first
    for _ in range(m.one((2, 3))):
        wider = m.one(_WIDTHS)
        x, width = m.activation(m.node("MatMul", x, m.weight(width, wider))), wider
    return x


def _norm_between(m: Model) -> str:
    rows, width, hidden = m.one(_ROWS), m.one(_WIDTHS[1:9]), m.one(_WIDTHS[3:])
    x = m.layer_norm(m.node("MatMul", m.input(rows, width), m.weight(width, hidden)), hidden)
    return m.node("MatMul", x, m.weight(hidden, width))


def _block(m: Model) -> str:
    rows, width = m.one(_ROWS), m.one((64, 96, 128, 192, 256))
    x = m.input(rows, width)
    wide = m.activation(m.node("MatMul", m.layer_norm(x, width), m.weight(width, 4 * width)))
    return m.node("Add", x, m.node("MatMul", wide, m.weight(4 * width, width)))


def _projections(m: Model) -> str:
    x, width = m.input(m.one(_ROWS), first := m.one(_WIDTHS[3:9])), first
    columns = m.one(_WIDTHS[1:8])
    q, k, v = (m.node("MatMul", x, m.weight(width, columns)) for _ in range(3))
    return m.node("Add", m.node("Mul", q, k), v)


def _attention(m: Model) -> str:
    heads, rows, keys, width = m.one((1, 3, 6, 12)), m.one(_ROWS[:9]), m.one(_ROWS[:9]), m.one((32, 48, 64))
    q, k, v = m.input(heads, rows, width), m.input(heads, width, keys), m.input(heads, keys, width)
    scores = m.node("Mul", m.node("MatMul", q, k), m.constant(np.array(width**-0.5, np.float32)))
    return m.node("MatMul", m.node("Softmax", scores, axis=-1), v)


def _rows_of_scores(m: Model) -> str:
    rows, keys, width = m.one(_ROWS[3:]), m.one(_ROWS[3:]), m.one((32, 64))
    scores = m.node("MatMul", m.input(rows, width), m.input(width, keys))
    apart = m.node("Sub", scores, m.node("ReduceMax", scores, axes=[-1], keepdims=1))
    return m.node("MatMul", m.node("Tanh", apart), m.input(keys, width))


def _convolve(m: Model, x: str, given: int, made: int, size: int, stride: int = 1, groups: int = 1) -> str:
    weight = m.weight(made, given // groups, size, size)
    pads = [size // 2] * 4
    return m.node("Conv", x, weight, m.weight(made), pads=pads, strides=[stride] * 2, group=groups)


def _convolution(m: Model) -> str:
    given, made, pixels = m.one((3, *_CHANNELS)), m.one(_CHANNELS), m.one(_PIXELS)
    size, stride = m.one((1, 3, 3, 5)), m.one((1, 1, 2))
    return m.activation(_convolve(m, m.input(1, given, pixels, pixels), given, made, size, stride))


def _convolutions(m: Model) -> str:
    channels, pixels = m.one(_CHANNELS[:6]), m.one(_PIXELS[2:])
    x = m.input(1, channels, pixels, pixels)
    for _ in range(m.one((2, 3))):
        x = m.node("Relu", _convolve(m, x, channels, channels, 3))
    return x


def _depthwise(m: Model) -> str:
    channels, pixels, stride = m.one(_CHANNELS[2:]), m.one(_PIXELS[1:]), m.one((1, 1, 2))
    x = m.input(1, channels, pixels, pixels)
    return m.node("Relu", _convolve(m, x, channels, channels, m.one((3, 3, 5)), stride, channels))


def _separable(m: Model) -> str:
    channels, wide, pixels = m.one(_CHANNELS[1:5]), m.one(_CHANNELS[3:]), m.one(_PIXELS[1:])
    x = m.input(1, channels, pixels, pixels)
    wider = m.node("Relu", _convolve(m, x, channels, wide, 1))
    turned = m.node("Relu", _convolve(m, wider, wide, wide, 3, m.one((1, 2)), wide))
    return _convolve(m, turned, wide, channels, 1)


def _grouped(m: Model) -> str:
    groups, each, pixels = m.one((4, 8, 16)), m.one((2, 4, 8)), m.one(_PIXELS[1:])
    channels = groups * each
    return m.node("Relu", _convolve(m, m.input(1, channels, pixels, pixels), channels, channels, 3, 1, groups))


def _cube(m: Model) -> tuple[str, tuple[int, int, int]]:
    shape = (m.one((4, 13, 16, 32)), m.one(_ROWS[:8]), m.one(_WIDTHS[:9]))
    return m.input(*shape), shape


def _reduction(m: Model) -> str:
    x, _ = _cube(m)
    operator = str(m.rng.choice(["ReduceMax", "ReduceMean", "ReduceL2", "ReduceSumSquare"]))
    return m.node(operator, x, axes=[m.one((0, 1, 2))], keepdims=1)


def _softmax(m: Model) -> str:
    return m.node("Softmax", _cube(m)[0], axis=m.one((1, 2, 2)))


def _norm(m: Model) -> str:
    x, shape = _cube(m)
    return m.activation(m.layer_norm(x, shape[-1]))


def _norms(m: Model) -> str:
    x, shape = _cube(m)
    for _ in range(m.one((3, 5))):
        x = m.node("Relu", m.layer_norm(x, shape[-1]))
    return x


def _map(m: Model) -> str:
    x, shape = _cube(m)
    return m.activation(m.node("Mul", m.activation(x), m.node("Add", x, m.weight(shape[-1]))))


def _maps_with_results(m: Model) -> tuple[str, str]:
    x, shape = _cube(m)
    h = m.activation(m.node("Mul", x, m.weight(shape[-1])))
    return m.node("Tanh", h), m.node("Add", h, x)


def _transpose(m: Model) -> str:
    x, _ = _cube(m)
    return m.node("Relu", m.node("Transpose", x, perm=[int(a) for a in m.rng.permutation(3)]))


def _pooling(m: Model) -> str:
    channels, pixels, size = m.one(_CHANNELS), m.one(_PIXELS[2:]), m.one((2, 3, 3, 5))
    x = m.input(m.one((1, 4)), channels, pixels, pixels)
    operator = str(m.rng.choice(["AveragePool", "MaxPool"]))
    return m.node(operator, x, kernel_shape=[size] * 2, strides=[m.one((1, 2))] * 2)


def _running_sum(m: Model) -> str:
    rows, width, hidden = m.one(_ROWS[:6]), m.one(_WIDTHS[:8]), m.one(_WIDTHS[:8])
    x = m.node("MatMul", m.input(rows, width), m.weight(width, hidden))
    return m.node("Tanh", m.node("CumSum", x, m.constant(np.array(0, np.int64))))


FAMILIES: Mapping[str, Callable[[Model], str | tuple[str, ...]]] = {
    "product": _product, "convolution": _convolution, "softmax": _softmax, "mlp": _mlp, "depthwise": _depthwise,
    "attention": _attention, "norm": _norm, "map": _map, "convolutions": _convolutions, "reduction": _reduction,
    "projections": _projections, "separable": _separable, "transpose": _transpose, "norm between": _norm_between,
    "long product": _long_product, "pooling": _pooling, "norms": _norms, "grouped": _grouped, "block": _block,
    "product of activations": _product_of_activations, "two results": _maps_with_results,
    "rows of scores": _rows_of_scores, "running sum": _running_sum,
}  # fmt: skip


def family_of(number: int) -> str:
    """Families take turns."""
    return list(FAMILIES)[number % len(FAMILIES)]


def model(number: int) -> tuple[str, onnx.ModelProto]:
    """The model of this number, and what it is called."""
    family = family_of(number)
    made = Model(np.random.default_rng([8, number]))
    results = FAMILIES[family](made)
    return f"{family} {number}", made.finished(*(results if isinstance(results, tuple) else (results,)))
