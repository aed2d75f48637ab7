"""Rounding to bytes behind transposes and reshapes happens before them, with the same results."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Map, Program
from tilewright.ir.forms.expr import Load
from tilewright.ir.meaning.interpret import evaluate
from tilewright.options import Options
from tilewright.target import machine

_RNG = np.random.default_rng(3)
_STEP, _ZERO = np.float32(0.03), np.uint8(120)
_WEIGHTS = _RNG.integers(-127, 128, (32, 16)).astype(np.int8)
_SCALES = (0.01 + _RNG.random(16) / 50).astype(np.float32)


def program(kept: bool) -> Program:
    """Heads beside each other, as the product behind an attention reads them; `kept`: the floats are wanted, too."""
    make, known = helper.make_node, numpy_helper.from_array
    nodes = [
        make("Softmax", ["x"], ["y"], axis=-1), make("Transpose", ["y"], ["t"], perm=[0, 2, 1, 3]),
        make("Reshape", ["t", "shape"], ["r"]), make("QuantizeLinear", ["r", "step", "zero"], ["q"]),
        make("DequantizeLinear", ["q", "step", "zero"], ["d"]),
        make("DequantizeLinear", ["w", "scales", "zeros"], ["v"], axis=1), make("MatMul", ["d", "v"], ["o"]),
    ]  # fmt: skip
    initial = [known(np.array([1, 12, 32]), "shape"), known(_STEP, "step"), known(_ZERO, "zero"), known(_WEIGHTS, "w"),
               known(_SCALES, "scales"), known(np.zeros(16, np.int8), "zeros")]  # fmt: skip
    ends = {"o": (1, 12, 16), **({"r": (1, 12, 32)} if kept else {})}
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in ends.items()]
    graph = helper.make_graph(nodes, "heads", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 4, 12, 8))],
                              outputs, initial)  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found = build(load(model, {}), machine("cuda-emulated"), Options(target="cuda-emulated", stop_after="plan"))
    assert found.program is not None
    return found.program


def rounded_shapes(found: Program) -> list[tuple[int, ...]]:
    maps = [c for c in found.computes if isinstance(c, Map) and not isinstance(c.value, Load)]
    return [c.output.shape for c in maps if c.output.dtype.bytes == 1]


def test_bytes_are_rounded_where_they_are_computed() -> None:
    found = program(kept=False)
    assert rounded_shapes(found) == [(1, 4, 12, 8)]
    x = _RNG.standard_normal((1, 4, 12, 8)).astype(np.float32)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    y = (e / e.sum(axis=-1, keepdims=True)).transpose(0, 2, 1, 3).reshape(1, 12, 32)
    d = (np.clip(np.round(y / _STEP) + _ZERO, 0, 255) - _ZERO) * _STEP
    expected = d @ (_WEIGHTS * _SCALES)
    np.testing.assert_allclose(evaluate(found, {"x": x})["o"], expected, rtol=1e-4, atol=1e-4)


def test_what_else_reads_the_floats_keeps_them() -> None:
    assert rounded_shapes(program(kept=True)) == [(1, 12, 32)]
