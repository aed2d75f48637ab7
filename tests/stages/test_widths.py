"""Vectors of every width on sizes that do not fill them, natively: what a wider machine would run, compiled here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.target import machine

WIDTHS = {16: (32, False), 32: (16, False), 64: (32, False)}  # bytes -> registers, multiply by a lane


def model(columns: int, depth: int, rows: int):
    """Dense with bias and activation, a row's softmax, and an integer division: every kind of nest a vector meets."""
    rng = np.random.default_rng(columns * 1000 + depth * 10 + rows)
    constants = {
        "w": rng.standard_normal((depth, columns)).astype(np.float32),
        "b": rng.standard_normal(columns).astype(np.float32),
        "three": np.array(3, np.int32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["s"]),
        helper.make_node("Sigmoid", ["s"], ["y"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["x", "z"], ["q"]),
        helper.make_node("Div", ["i", "three"], ["d"]),
    ]
    inputs = {
        "x": rng.standard_normal((rows, depth)).astype(np.float32),
        "z": rng.standard_normal((depth, columns)).astype(np.float32),
        "i": rng.integers(0, 100, (rows, columns)).astype(np.int32),
    }
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()
    ]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (rows, columns)) for n in ("y", "p", "q")]
    outs.append(helper.make_tensor_value_info("d", TensorProto.INT32, (rows, columns)))
    graph = helper.make_graph(nodes, "g", values, outs, [numpy_helper.from_array(a, n) for n, a in constants.items()])
    x, z, i = (inputs[n].astype(np.float64) for n in "xzi")
    s = x @ constants["w"] + constants["b"]
    e = np.exp(s - s.max(1, keepdims=True))
    expected = {"y": 1 / (1 + np.exp(-s)), "p": e / e.sum(1, keepdims=True), "q": x @ z, "d": i // 3}
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), inputs, expected


# the narrowest and the widest vectors here, the others and one kernel an operator with --all
EVERY_TIME = {(size, "connected") for size in (min(WIDTHS), max(WIDTHS))}
CASES = [
    pytest.param(size, schedule, marks=() if (size, schedule) in EVERY_TIME else pytest.mark.slow)
    for size in WIDTHS
    for schedule in ("none", "connected")
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "schedule"), CASES)
def test_sizes_that_do_not_fill_vectors(size: int, schedule: str, kernel_cache: Path) -> None:
    registers, by_lane = WIDTHS[size]
    target = replace(machine("cpu"), vector_bytes=size, vector_registers=registers, lane_multiply=by_lane)
    for columns, depth, rows in ((1, 5, 3), (3, 7, 2), (7, 9, 5), (13, 3, 1), (15, 31, 4), (31, 17, 9), (67, 6, 3)):
        onnx_model, inputs, expected = model(columns, depth, rows)
        artifact = build(load(onnx_model, {}), target, Options(schedule=schedule, cache_dir=kernel_cache, threads=1))
        found = [np.full(p.shape, -9, p.dtype.numpy) for p in artifact.outputs]
        artifact.runner.run([np.ascontiguousarray(inputs[p.name]) for p in artifact.inputs], found)
        for port, array in zip(artifact.outputs, found, strict=True):
            np.testing.assert_allclose(
                array, expected[port.name], rtol=1e-5, atol=1e-5, err_msg=f"{port.name} {columns}"
            )
