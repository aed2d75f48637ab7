"""What small files can ask for is bounded: nodes and kernel calls are counted before they are made."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import tilewright
from tests.cpu_stages import model_of
from tests.ops.running import interpret_model
from tilewright import BudgetError, ModelError, Options, UnsupportedError
from tilewright.frontend.long_loops import _PIECE, in_pieces
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.budget import CALLS_A_NODE, MOST, MOST_IN_A_LOOP, Budget
from tilewright.ops import lower

FLOAT, WHOLE, FLAG = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
port = helper.make_tensor_value_info


def running(x: np.ndarray, op: str = "CumSum", axis: int = 0, **attributes: int) -> ModelProto:
    model = model_of([(op, ["x", "axis"], "y", attributes)], {"x": x.shape}, {"y": x.shape}, {"axis": np.array(axis)},
                     {n: helper.np_dtype_to_tensor_dtype(x.dtype) for n in "xy"})  # fmt: skip
    model.opset_import[0].version = 26
    return model


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize(("shape", "axis"), [((2051,), 0), ((4096, 2), 0), ((3, 2500), 1)])
def test_long_running_sums(shape: tuple[int, ...], axis: int, exclusive: int, reverse: int) -> None:
    """In blocks, the last of them not full; whole numbers are summed exactly."""
    x = np.random.default_rng(0).integers(-50, 50, shape)
    turned = np.flip(x, axis) if reverse else x
    wanted = np.cumsum(turned, axis) - (turned if exclusive else 0)
    model = running(x, "CumSum", axis, exclusive=exclusive, reverse=reverse)
    np.testing.assert_array_equal(interpret_model(model, {"x": x})["y"], np.flip(wanted, axis) if reverse else wanted)


def test_a_long_running_product() -> None:
    x = np.ones(3000, np.float32)
    x[[5, 1000, 2999]] = [2, -3, 4]
    np.testing.assert_array_equal(interpret_model(running(x, "CumProd"), {"x": x})["y"], np.cumprod(x))


def test_a_running_sum_of_a_million_numbers(kernel_cache: Path) -> None:
    x = np.random.default_rng(0).random(1_000_000, np.float32)
    model = tilewright.compile(running(x), options=Options(cache_dir=kernel_cache))
    assert len(model.calls) < 8192
    np.testing.assert_allclose(model(x)[0], np.cumsum(x.astype(np.float64)), rtol=2e-6)


def test_what_is_behind_an_infinity_in_a_long_sum() -> None:
    x = np.ones(4000, np.float32)
    x[1500] = np.inf
    found = interpret_model(running(x), {"x": x})["y"]
    np.testing.assert_array_equal(found, np.cumsum(x))


def loop(count: int, stacks: bool = True) -> ModelProto:
    nodes = [helper.make_node("Identity", ["c"], ["co"]), helper.make_node("Add", ["s", "x"], ["so"]),
             helper.make_node("Cast", ["i"], ["k"], to=FLOAT)]  # fmt: skip
    outputs = [port("co", FLAG, []), port("so", FLOAT, [4]), *([port("k", FLOAT, [])] if stacks else [])]
    body = helper.make_graph(nodes, "body", [port("i", WHOLE, []), port("c", FLAG, []), port("s", FLOAT, [4])], outputs)
    names = ["y", "z"] if stacks else ["y"]
    graph = helper.make_graph([helper.make_node("Loop", ["n", "", "x"], names, body=body)], "graph",
                              [port("x", FLOAT, [4])], [onnx.ValueInfoProto(name=n) for n in names],
                              [numpy_helper.from_array(np.array(count), "n")])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_loop_of_very_many_steps_is_one_model(kernel_cache: Path) -> None:
    count = MOST_IN_A_LOOP + 1
    model = tilewright.compile(loop(count), options=Options(cache_dir=kernel_cache))
    assert isinstance(model, tilewright.Model) and len(model.calls) < 20
    y, z = model(np.ones(4, np.float32))
    np.testing.assert_array_equal(y, np.full(4, count + 1, np.float32))
    np.testing.assert_array_equal(z, np.arange(count, dtype=np.float32))


@pytest.mark.parametrize("count", [MOST_IN_A_LOOP + 1, MOST_IN_A_LOOP + _PIECE])
def test_loops_in_pieces_where_no_driver_follows_them(count: int) -> None:
    graph = in_pieces(load(loop(count)))
    inner, rest = (n for n in graph.nodes if n.op == "Loop")
    pieces = int(graph.constants[inner.inputs[0]])
    assert pieces * _PIECE + int(graph.constants[rest.inputs[0]]) == count


def test_a_loop_of_a_million_steps(kernel_cache: Path) -> None:
    model = tilewright.compile(loop(1_000_000, stacks=False), options=Options(cache_dir=kernel_cache))
    start = time.process_time()
    np.testing.assert_array_equal(model(np.ones(4, np.float32))[0], np.full(4, 1_000_001, np.float32))
    assert time.process_time() - start < 10  # from Python, step by step, it would be minutes


def functions(count: int, calls: int) -> ModelProto:
    """Functions that each call the next so many times."""
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    made = []
    for k in range(count):
        names = ["x", *(f"v{n}" for n in range(calls - 1)), "y"]
        last = k == count - 1
        nodes = [helper.make_node("Relu" if last else f"f{k + 1}", [a], [b], domain="" if last else "own")
                 for a, b in pairwise(names)]  # fmt: skip
        made.append(helper.make_function("own", f"f{k}", ["x"], ["y"], nodes, domains))
    graph = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="own")], "graph", [port("x", FLOAT, [2])],
                              [port("y", FLOAT, [2])])  # fmt: skip
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    model.functions.extend(made)
    return model


def test_functions_that_call_functions_are_counted_before_they_are_written_out() -> None:
    with pytest.raises(BudgetError, match=f"f0 node 'y': with its functions written out .*{MOST} are compiled at once"):
        load(functions(40, 2))
    assert len(load(functions(4, 2)).nodes) == 16


def test_functions_that_call_each_other() -> None:
    model = functions(3, 1)
    model.functions[2].node[0].CopyFrom(helper.make_node("f0", ["x"], ["y"], domain="own"))
    with pytest.raises(ModelError, match="the model's function '.*' calls itself"):
        load(model)


def test_one_count_over_nodes_and_calls() -> None:
    budget = Budget(most=10)
    budget.spend(4, "Relu node 'a'", "it is one", "none")
    budget.spend(6, "Scan node 'b'", "its steps take 6 calls", "none")
    with pytest.raises(BudgetError) as caught:
        budget.spend(1, "Relu node 'c'", "it is one node too many", "simplify it")
    assert str(caught.value) == ("Relu node 'c': it is one node too many, with which the model comes to 11 nodes, 4 "
                                 "kernel calls counted as one; 10 are compiled at once: simplify it")  # fmt: skip


def test_every_node_that_is_lowered_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ops.builder.Budget", lambda: Budget(most=3))
    steps = [("Relu", [f"v{k}"], f"v{k + 1}", {}) for k in range(4)]
    with pytest.raises(BudgetError, match="Relu node 'Relu_v4': it is one node too many"):
        lower(load(model_of(steps, {"v0": (2,)}, {"v4": (2,)})))


@pytest.mark.parametrize("size", [1, 3])
def test_transposed_convolutions_with_any_stride(size: int) -> None:
    weight = np.ones((1, 1, 3, 3), np.float32)
    model = model_of([("ConvTranspose", ["x", "w"], "y", {"strides": [1 << 31] * 2})], {"x": (1, 1, size, size)},
                     {"y": ()}, {"w": weight})  # fmt: skip
    model.graph.output[0].CopyFrom(onnx.ValueInfoProto(name="y"))
    x = np.ones((1, 1, size, size), np.float32)
    if size == 1:
        np.testing.assert_array_equal(interpret_model(model, {"x": x})["y"], weight)
    else:
        with pytest.raises(UnsupportedError, match="its result would have the shape"):
            interpret_model(model, {"x": x})


def test_a_recurrence_of_too_many_steps_is_refused() -> None:
    graph = helper.make_graph([helper.make_node("RNN", ["x", "w", "r"], ["y"], hidden_size=1)], "graph",
                              [port("x", FLOAT, [CALLS_A_NODE * MOST + 1, 1, 1])], [onnx.ValueInfoProto(name="y")],
                              [numpy_helper.from_array(np.ones((1, 1, 1), np.float32), n) for n in "wr"])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(BudgetError, match="RNN node 'y': its .* steps take .* kernel calls.*run the model on parts"):
        lower(load(model))
