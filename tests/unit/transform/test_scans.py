"""Scans that are no recurrent operators: states of any rank, several of them in a model, of any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

import tilewright
from tests.cpu_stages import error, evaluated, lowered, model_of, programs, random_inputs
from tilewright import Options
from tilewright.frontend.onnx.model import load
from tilewright.ops import lower
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.transform.clean.fold import fold_constants

Shape = tuple[int, ...]


def port(name: str, shape: Shape) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def step(hidden: int, *, scaled: bool) -> GraphProto:
    """h = tanh((h · w + x) · scale) and scale = scale · shrink; without a scale where it is not wanted."""
    state = (1, hidden)
    nodes = [helper.make_node("MatMul", ["h", "w"], ["product"]), helper.make_node("Add", ["product", "x"], ["sum"])]
    given, gives = [port("h", state)], [port("h_next", state)]
    if scaled:
        nodes += [helper.make_node("Mul", ["sum", "scale"], ["scaled"]),
                  helper.make_node("Mul", ["scale", "shrink"], ["scale_next"])]  # fmt: skip
        given, gives = [*given, port("scale", ())], [*gives, port("scale_next", ())]
    nodes += [helper.make_node("Tanh", ["scaled" if scaled else "sum"], ["h_next"]),
              helper.make_node("Identity", ["h_next"], ["kept"])]  # fmt: skip
    return helper.make_graph(nodes, "step", [*given, port("x", state)], [*gives, port("kept", state)])


def model_of_scans(hidden: int, lengths: Shape, *, scaled: bool = False) -> ModelProto:
    """A Scan of each length, with the same weights and a state that begins with zeros."""
    rng = np.random.default_rng(4)
    constants = {
        "w": (rng.standard_normal((hidden, hidden)) / np.sqrt(hidden)).astype(np.float32),
        "zeros": np.zeros((1, hidden), np.float32),
        "one": np.array(1, np.float32),
        "shrink": np.array(0.9, np.float32),
    }
    begin = ["zeros", "one"] if scaled else ["zeros"]
    nodes = []
    for number, _ in enumerate(lengths):
        ends = [f"{name}_{number}" for name in begin]
        nodes.append(helper.make_node("Scan", [*begin, f"x{number}"], [*ends, f"y{number}"],
                                      body=step(hidden, scaled=scaled), num_scan_inputs=1))  # fmt: skip
    shapes = [(length, 1, hidden) for length in lengths]
    given, gives = ([port(f"{name}{i}", s) for i, s in enumerate(shapes)] for name in "xy")
    graph = helper.make_graph(
        nodes, "scans", given, gives, [numpy_helper.from_array(a, n) for n, a in constants.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def check(model: ModelProto, cache: Path, schedule: str = "connected") -> None:
    program = programs(model)["layout"]
    made = lowered(program, schedule)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)
    on_loops, natively = made.on_loops(inputs), made.natively(inputs, cache)
    for name, value in wanted.items():
        assert error(on_loops[name], value) < 1e-6
        assert error(natively[name], value) < 1e-6


@pytest.mark.parametrize("hidden", [24, 256])
def test_a_state_may_be_a_single_number(hidden: int, kernel_cache: Path) -> None:
    """It too is asked for early where several tiles share a step."""
    check(model_of_scans(hidden, (5,), scaled=True), kernel_cache)


@pytest.mark.sample(3)
@pytest.mark.parametrize("lengths", [(1, 5), (5, 1), (3, 3)])
@pytest.mark.parametrize("schedule", ["none", "connected"])
def test_equal_steps_of_scans_of_different_lengths(lengths: Shape, schedule: str, kernel_cache: Path) -> None:
    """Of a Scan of one step a kernel may know that it only ever sees the first, and how much it stores."""
    check(model_of_scans(24, lengths), kernel_cache, schedule)


def test_a_kernel_does_not_wait_for_itself_through_a_scan(kernel_cache: Path) -> None:
    """`b` reads a sum along an axis and what a second Scan makes of it: sum and `b` cannot be one kernel."""
    steps = [
        ("CumSum", ["x", "last"], "a", {"exclusive": 1}),
        ("CumSum", ["a", "first"], "s", {"exclusive": 1, "reverse": 1}),
        ("Add", ["a", "s"], "b", {}),
    ]
    constants = {"last": np.array(1), "first": np.array(0)}
    model = tilewright.compile(
        model_of(steps, {"x": (2, 4)}, {"a": (2, 4), "b": (2, 4)}, constants),
        options=Options(cache_dir=kernel_cache, threads=1),
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    a = np.cumsum(x, 1) - x
    s = np.cumsum(a[::-1], 0)[::-1] - a
    for got, want in zip(model(x), (a, a + s), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids"])
def test_what_feeds_a_scan_is_no_kernel_with_what_waits_for_it(name: str) -> None:
    rng = np.random.default_rng(4)
    constants = {"w": rng.standard_normal((32, 32)), "v": rng.standard_normal((32, 32)), "zeros": np.zeros((1, 32))}
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["fed"]),
        helper.make_node("Scan", ["zeros", "fed"], ["end", "kept"], body=step(32, scaled=False), num_scan_inputs=1),
        helper.make_node("Mul", ["fed", "kept"], ["product"]),
        helper.make_node("Softmax", ["product"], ["y"]),
    ]
    arrays = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "between", [port("x", (5, 1, 32))], [port("y", (5, 1, 32))], arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    plan = make_plan(fold_constants(lower(load(model.SerializeToString()))), machine(name), "connected")
    is_step = [around is not None for _, around in plan.launches()]
    assert is_step == [*sorted(is_step[:2]), False]  # the product, the steps, and what reads both
