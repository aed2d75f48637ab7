"""Alike computes as one: the merged Program means the same bit for bit, only what may be merged is, and it is merged
where that is predicted to take no longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import tilewright
from tests.cpu_stages import CPU, error, evaluated, lowered, model_of, programs, random_inputs, read_back
from tilewright.compiler import build
from tilewright.frontend.onnx import load
from tilewright.ir.compute import Map, Program, Reduce, Scan, factors
from tilewright.ir.expr import Load
from tilewright.ir.machine import Machine
from tilewright.ir.verify import verify_program
from tilewright.options import Options
from tilewright.target import machine
from tilewright.transform.horizontal import merge_alike
from tilewright.transform.layout import choose_layouts
from tilewright.transform.staging import stage_operands

RNG = np.random.default_rng(3)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def projections(widths: tuple[int, ...], rows: int = 5, inner: int = 12, bias: bool = True, transposed: str = "",
                given: str = "x") -> ModelProto:  # fmt: skip
    """Products of one x, each then squashed, so that no result of the model is a product itself. A letter of
    `transposed` t: that product's weights are stored the other way round."""
    steps, arrays, outputs = [], {}, {}
    for n, width in enumerate(widths):
        turned = n < len(transposed) and transposed[n] == "t"
        arrays[f"w{n}"] = weights(width, inner) if turned else weights(inner, width)
        if turned:
            steps.append(("Gemm", [given, f"w{n}"], f"p{n}", {"transB": 1}))
        else:
            steps.append(("MatMul", [given, f"w{n}"], f"p{n}", {}))
        if bias:
            arrays[f"b{n}"] = weights(width)
            steps.append(("Add", [f"p{n}", f"b{n}"], f"s{n}", {}))
        steps.append(("Tanh", [f"s{n}" if bias else f"p{n}"], f"t{n}", {}))
        steps.append(("Mul", [f"t{n}", f"t{n}"], f"y{n}", {}))
        outputs[f"y{n}"] = (rows, width)
    return model_of(steps, {"x": (rows, inner)}, outputs, arrays)


def attention(length: int = 6, width: int = 12, heads: int = 3, kept: int = 3) -> ModelProto:
    """An attention block; with fewer heads `kept` for K and V, each is read by several heads of Q."""
    size = width // heads
    wide, narrow = heads * size, kept * size
    arrays = {"wq": weights(width, wide), "wk": weights(width, narrow), "wv": weights(width, narrow),
              "bq": weights(wide), "bk": weights(narrow), "bv": weights(narrow), "wo": weights(wide, width),
              "q_shape": np.array([1, length, kept, heads // kept, size]), "k_shape": np.array([1, length, kept, 1, size]),
              "o_shape": np.array([1, length, wide])}  # fmt: skip
    steps = []
    for letter, shape, order in (("q", "q_shape", [0, 2, 3, 1, 4]), ("k", "k_shape", [0, 2, 3, 4, 1]), ("v", "k_shape", [0, 2, 3, 1, 4])):
        steps += [("MatMul", ["x", f"w{letter}"], f"{letter}p", {}), ("Add", [f"{letter}p", f"b{letter}"], f"{letter}s", {}),
                  ("Reshape", [f"{letter}s", shape], f"{letter}r", {}),
                  ("Transpose", [f"{letter}r"], letter, {"perm": order})]  # fmt: skip
    steps += [("MatMul", ["q", "k"], "s", {}), ("Softmax", ["s"], "a", {"axis": -1}), ("MatMul", ["a", "v"], "c", {}),
              ("Transpose", ["c"], "ct", {"perm": [0, 3, 1, 2, 4]}), ("Reshape", ["ct", "o_shape"], "cr", {}),
              ("MatMul", ["cr", "wo"], "y", {})]  # fmt: skip
    return model_of(steps, {"x": (1, length, width)}, {"y": (1, length, width)}, arrays)


def experts(batch: int = 3, count: int = 4, tasks: int = 2, layers: int = 1) -> ModelProto:
    """Experts of one or more layers and a gate a task, all of one input."""
    arrays: dict[str, np.ndarray] = {"axes": np.array([1]), "last": np.array([2])}
    steps, stacked, outputs = [], [], {}
    for n in range(count):
        before, width = "x", 10
        for layer in range(layers):
            arrays |= {f"w{n}_{layer}": weights(8, width), f"b{n}_{layer}": weights(8)}
            steps += [("Gemm", [before, f"w{n}_{layer}", f"b{n}_{layer}"], f"e{n}_{layer}", {"transB": 1}),
                      ("Relu", [f"e{n}_{layer}"], f"r{n}_{layer}", {})]  # fmt: skip
            before, width = f"r{n}_{layer}", 8
        steps.append(("Unsqueeze", [before, "axes"], f"u{n}", {}))
        stacked.append(f"u{n}")
    steps.append(("Concat", stacked, "experts", {"axis": 1}))
    for task in range(tasks):
        arrays |= {f"g{task}": weights(10, count), f"v{task}": weights(8, 5)}
        steps += [("MatMul", ["x", f"g{task}"], f"l{task}", {}), ("Softmax", [f"l{task}"], f"p{task}", {"axis": -1}),
                  ("Unsqueeze", [f"p{task}", "last"], f"q{task}", {}), ("Mul", [f"q{task}", "experts"], f"m{task}", {}),
                  ("ReduceSum", [f"m{task}", "axes"], f"h{task}", {"keepdims": 0}),
                  ("MatMul", [f"h{task}", f"v{task}"], f"y{task}", {})]  # fmt: skip
        outputs[f"y{task}"] = (batch, 5)
    return model_of(steps, {"x": (batch, 10)}, outputs, arrays)


def branches(channels: tuple[int, ...] = (5, 8, 3), rows: int = 7, window: int = 1) -> ModelProto:
    """Convolutions of one image beside each other, then concatenated; one of them goes on."""
    arrays, steps = {}, []
    pads = [window // 2] * 4
    for n, width in enumerate(channels):
        arrays |= {f"w{n}": weights(width, 6, window, window), f"b{n}": weights(width)}
        steps += [("Conv", ["x", f"w{n}", f"b{n}"], f"c{n}", {"pads": pads}), ("Relu", [f"c{n}"], f"r{n}", {})]
    arrays["w"] = weights(4, sum(channels), 3, 3)
    steps += [("Concat", [f"r{n}" for n in range(len(channels))], "all", {"axis": 1}),
              ("Conv", ["all", "w"], "y", {"pads": [1, 1, 1, 1]})]  # fmt: skip
    return model_of(steps, {"x": (1, 6, rows, rows)}, {"y": (1, 4, rows, rows)}, arrays)


def groups(count: int = 4, inside: int = 3, outside: int = 2, rows: int = 6) -> ModelProto:
    """A grouped convolution as it was before frameworks had one: split, convolve, concatenate."""
    arrays = {f"w{n}": weights(outside, inside, 3, 3) for n in range(count)}
    arrays |= {f"b{n}": weights(outside) for n in range(count)}
    arrays["w"] = weights(5, count * outside, 1, 1)
    nodes = [helper.make_node("Split", ["x"], [f"x{n}" for n in range(count)], name="split", axis=1)]
    for n in range(count):
        nodes += [helper.make_node("Conv", [f"x{n}", f"w{n}", f"b{n}"], [f"c{n}"], name=f"conv{n}", pads=[1, 1, 1, 1]),
                  helper.make_node("Relu", [f"c{n}"], [f"r{n}"], name=f"relu{n}")]  # fmt: skip
    nodes.append(helper.make_node("Concat", [f"r{n}" for n in range(count)], ["all"], name="concat", axis=1))
    nodes.append(helper.make_node("Conv", ["all", "w"], ["y"], name="mix"))
    model = model_of([], {"x": (1, count * inside, rows, rows)}, {"y": (1, 5, rows, rows)}, arrays)
    model.graph.node.extend(nodes)
    return model


CASES: dict[str, tuple[Callable[[], ModelProto], int]] = {
    "three projections": (lambda: projections((8, 8, 8)), 1),
    "of different widths": (lambda: projections((16, 4, 4)), 1),
    "of odd widths": (lambda: projections((5, 7, 1), rows=3, inner=11), 1),
    "stored both ways": (lambda: projections((6, 9, 4), transposed="t-t"), 1),
    "without biases": (lambda: projections((6, 9), bias=False), 1),
    "of a row": (lambda: projections((6, 9, 4), rows=1), 1),
    "attention": (attention, 2),
    "attention with few keys": (lambda: attention(heads=6, width=24, kept=2), 2),
    "experts and gates": (experts, 2),
    "experts of two layers": (lambda: experts(layers=2), 3),
    "branches": (branches, 2),
    "branches with windows": (lambda: branches((4, 4), window=3), 2),
    "groups": (groups, 2),
    "groups of one channel": (lambda: groups(3, 1, 1), 2),
}  # fmt: skip


def always(program: Program) -> Program:
    return merge_alike(program, None, lambda _: {})


def products(program: Program) -> list[Reduce]:
    """Sums over weights."""
    return [c for c in program.computes if isinstance(c, Reduce) and factors(c)
            and any(isinstance(f, Load) and f.source in program.constants for f in factors(c))]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_merged(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few products as can be, the same bits from the interpreter, and code that agrees."""
    # sums in the order that the Program gives: a library's product has one of its own for every shape
    monkeypatch.setattr(Machine, "_product", lambda *_: None)
    make, count = CASES[name]
    folded = programs(make())["fold"]
    merged = always(folded)
    verify_program(merged)
    assert len(products(merged)) == count < len(products(folded))
    inputs = random_inputs(folded)
    before, after = evaluated(folded, inputs), evaluated(read_back(merged), inputs)
    for key, array in before.items():
        np.testing.assert_array_equal(array, after[key])
    final = choose_layouts(stage_operands(merged, CPU), CPU)
    made = lowered(final)
    expected = evaluated(folded, inputs, wide=True)
    for found in (made.on_loops(inputs), made.natively(inputs, tmp_path)):
        assert all(error(found[key], expected[key]) < 1e-5 for key in expected)


@pytest.mark.parametrize("machine_name", ["neoverse_n1", "emerald_rapids"])
def test_slices_of_a_stored_tensor(machine_name: str) -> None:
    """A kernel that reads a slice of what others read too leaves the rest of it written all the same."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
             helper.make_node("Tanh", ["p"], ["t"], name="tanh"),
             helper.make_node("Split", ["t"], ["a", "b", "c"], name="split", axis=1)]  # fmt: skip
    model = model_of([], {"x": (5, 12)}, {"a": (5, 8), "b": (5, 8), "c": (5, 8)}, {"w": weights(12, 24)})
    model.graph.node.extend(nodes)
    target = machine(machine_name)
    program = choose_layouts(programs(model)["fold"], target)
    inputs = random_inputs(program)
    expected = evaluated(program, inputs, wide=True)
    found = lowered(program, target=target).on_loops(inputs)
    assert all(error(found[key], expected[key]) < 1e-5 for key in expected)
