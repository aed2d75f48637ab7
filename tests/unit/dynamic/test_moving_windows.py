"""Slices and ranges both of whose bounds are data: their lengths are compiled for, and their places stay data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import tilewright
from tilewright import Options

F, I64, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
N = helper.make_node
ROWS = 12


def graph_of(nodes: list[onnx.NodeProto], inputs: object, outputs: object, **constants: object) -> onnx.GraphProto:
    ports = [[helper.make_tensor_value_info(n, *a) for n, a in side.items()] for side in (inputs, outputs)]  # type: ignore[attr-defined]
    return helper.make_graph(nodes, "g", *ports, [onnx.numpy_helper.from_array(np.asarray(a), n)
                                                  for n, a in constants.items()])  # fmt: skip


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def windows_of_a_loop() -> onnx.ModelProto:
    """Each step puts twice a row of `x` into its place in `v`, until the sum of `v` reaches a bound."""
    nodes = [
        N("Reshape", ["k", "[1]"], ["first"]),
        N("Add", ["first", "[1]"], ["next"]),
        N("Min", ["next", "rows"], ["last"]),
        N("Slice", ["x", "first", "last", "[0]"], ["row"]),
        N("Squeeze", ["first"], ["from"]),
        N("Squeeze", ["last"], ["to"]),
        N("Range", ["from", "to", "one"], ["places"]),
        N("Add", ["row", "row"], ["twice"]),
        N("Unsqueeze", ["places", "[1]"], ["indices"]),
        N("ScatterND", ["v", "indices", "twice"], ["w"]),
        N("Add", ["k", "one"], ["k_next"]),
        N("ReduceSum", ["w"], ["s"], keepdims=0),
        N("Less", ["s", "bound"], ["more"]),
    ]
    constants = {"[0]": [0], "[1]": [1], "rows": [ROWS], "one": 1}
    body = graph_of(
        nodes,
        {"step": (I64, []), "on": (B, []), "k": (I64, []), "v": (F, [ROWS, 3])},
        {"more": (B, []), "k_next": (I64, []), "w": (F, [ROWS, 3])},
        **{name: np.array(value, np.int64) for name, value in constants.items()},
    )
    loop = N("Loop", ["", "", "zero", "empty"], ["n", "y"], body=body)
    return model_of(graph_of([loop], {"x": (F, [ROWS, 3]), "bound": (F, [])}, {"n": (I64, []), "y": (F, [ROWS, 3])},
                             zero=np.int64(0), empty=np.zeros((ROWS, 3), np.float32)))  # fmt: skip


def test_a_window_that_moves_in_a_loop_is_compiled_once(kernel_cache: Path) -> None:
    model = tilewright.compile(windows_of_a_loop(), options=Options(cache_dir=kernel_cache, threads=1))
    x = np.arange(3 * ROWS, dtype=np.float32).reshape(ROWS, 3)
    compiled = []
    for steps in (2, ROWS):
        n, y = model(x, np.array(2 * x[: steps - 1].sum() + 1, np.float32))
        assert n == steps
        np.testing.assert_array_equal(y, np.where(np.arange(ROWS)[:, None] < steps, 2 * x, 0))
        compiled.append([line for line in model.explain().splitlines() if "compiled so far" in line])
    assert compiled[0] == compiled[1]


@pytest.mark.parametrize("steps", [*(pytest.param(s, marks=pytest.mark.slow) for s in ((1, 1), (3, -1))), (-2, -4)])
def test_windows_of_two_axes(kernel_cache: Path, steps: tuple[int, int]) -> None:
    nodes = [N("Cast", ["a"], ["starts"], to=I64), N("Cast", ["b"], ["ends"], to=I64),
             N("Slice", ["x", "starts", "ends", "axes", "steps"], ["y"])]  # fmt: skip
    inputs = {"x": (F, [6, 9]), "a": (F, [2]), "b": (F, [2])}
    source = model_of(graph_of(nodes, inputs, {"y": (F, [None, None])}, axes=np.array([1, -2]), steps=np.array(steps)))
    model = tilewright.compile(source, options=Options(cache_dir=kernel_cache, threads=1))
    evaluator = ReferenceEvaluator(source)
    x = np.arange(54, dtype=np.float32).reshape(6, 9)
    for first, last in (
        ((1, 0), (4, 3)),
        ((8, 5), (2, -9)),
        ((-3, 4), (99, 1)),
        ((-99, -1), (-1, -99)),
        ((5, 3), (5, 3)),
    ):
        given = {"x": x, "a": np.array(first, np.float32), "b": np.array(last, np.float32)}
        np.testing.assert_array_equal(model.run(given)["y"], evaluator.run(None, given)[0])


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["int32", "int64", "float32"])
@pytest.mark.parametrize("step", [1, 3, -2])
def test_ranges_between_data(kernel_cache: Path, kind: str, step: int) -> None:
    to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    nodes = [N("Cast", ["a"], ["first"], to=to), N("Cast", ["b"], ["last"], to=to),
             N("Range", ["first", "last", "step"], ["y"])]  # fmt: skip
    source = model_of(graph_of(nodes, {"a": (F, []), "b": (F, [])}, {"y": (to, [None])}, step=np.array(step, kind)))
    model = tilewright.compile(source, options=Options(cache_dir=kernel_cache, threads=1))
    for first, last in ((2, 9), (9, 2), (-4, 3), (11, -2), (5, 5)):
        got = model(np.float32(first), np.float32(last))[0]
        np.testing.assert_array_equal(got, np.arange(first, last, step, dtype=kind))
        assert got.dtype == kind
