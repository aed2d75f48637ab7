"""States that no step of a loop changes are read of the graph around it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tilewright
from tilewright import Options
from tilewright.frontend.onnx.model import load

F, I64, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
N, V = helper.make_node, helper.make_tensor_value_info


def carrying(inside: str, *, ends: bool) -> onnx.ModelProto:
    """Multiplies by a matrix that goes through the states of the loop, by the name `inside`."""
    nodes = [N("MatMul", ["v", inside], ["w"]), N("ReduceMax", ["w"], ["most"], keepdims=0),
             N("Less", ["most", "bound"], ["more"]) if ends else N("Identity", ["on"], ["more"]),
             N("Identity", [inside], ["still"])]  # fmt: skip
    body = helper.make_graph(
        nodes, "body", [V("k", I64, []), V("on", B, []), V("v", F, [1, 3]), V(inside, F, [3, 3])],
        [V("more", B, []), V("w", F, [1, 3]), V("still", F, [3, 3])],
    )  # fmt: skip
    loop = N("Loop", ["" if ends else "four", "", "x", "m"], ["y", "m_after"], body=body)
    constants = {"four": np.int64(4), "m": 2 * np.eye(3, dtype=np.float32), "bound": np.float32(30)}
    given = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    outputs = [V("y", F, [1, 3]), V("m_after", F, [3, 3])]
    graph = helper.make_graph([loop], "g", [V("x", F, [1, 3])], outputs, given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize("inside", ["m", "n"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_matrix_that_is_handed_on_is_a_constant(kernel_cache: Path, inside: str, ends: bool) -> None:
    source = carrying(inside, ends=ends)
    loop = next(node for node in load(source).nodes if node.op == "Loop")
    assert loop.inputs[2:] == ("x",) and loop.outputs == ("y",)
    model = tilewright.compile(source, options=Options(cache_dir=kernel_cache, threads=1))
    y, m = model(np.array([[1, 2, 3]], np.float32))
    np.testing.assert_array_equal(y, [[16, 32, 48]])
    np.testing.assert_array_equal(m, 2 * np.eye(3))


def test_a_state_by_the_name_of_another_value_stays_one(kernel_cache: Path) -> None:
    """Inside, `m` is what a step makes: the matrix outside cannot be read there."""
    source = carrying("n", ends=False)
    body = next(a.g for a in source.graph.node[0].attribute if a.name == "body")
    body.node[0].output[0] = body.node[1].input[0] = body.output[1].name = "m"
    assert next(node for node in load(source).nodes if node.op == "Loop").inputs[2:] == ("x", "m")
    model = tilewright.compile(source, options=Options(cache_dir=kernel_cache, threads=1))
    np.testing.assert_array_equal(model(np.ones((1, 3), np.float32))[0], [[16, 16, 16]])
