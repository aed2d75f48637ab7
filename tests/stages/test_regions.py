"""Loops that data end and branches that data choose: interpreter, Loops with their jumps and machine code agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

import tilewright
from tests.cpu_stages import CPU, MEANINGS, evaluated
from tilewright import Options
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, Region, Scatter
from tilewright.ir.forms.tensor import Layout
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.ir.text.parse import parse_loops, parse_program
from tilewright.ir.text.text import loops_text, program_text
from tilewright.lower.parts import RegionLoop, Straight, Update, cut
from tilewright.ops import lower
from tilewright.transform.recurrence.updates import update_in_place

F, WHOLE, FLAG = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
ROWS, WIDTH = 128, 96
N, port = helper.make_node, helper.make_tensor_value_info


def body_of(nodes: list[Any], takes: Mapping[str, Any], gives: Mapping[str, Any]) -> GraphProto:
    inputs, outputs = ([port(n, *kind) for n, kind in side.items()] for side in (takes, gives))
    return helper.make_graph(nodes, "body", inputs, outputs)


def whole(nodes: list[Any], takes: Mapping[str, Any], gives: Mapping[str, Any], **constants: Any) -> ModelProto:
    initial = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "g", [port(n, *k) for n, k in takes.items()],
                              [port(n, *k) for n, k in gives.items()], initial)  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def halving() -> ModelProto:
    """Halves until the sum is below a bound; how often is told too. With a bound above the sum there is no step."""
    body = body_of(
        [N("Mul", ["v", "half"], ["w"]), N("ReduceSum", ["w"], ["s"], keepdims=0), N("Less", ["bound", "s"], ["more"]),
         N("Add", ["n", "one"], ["m"])],
        {"k": (WHOLE, []), "on": (FLAG, []), "v": (F, [3, 5]), "n": (WHOLE, [])},
        {"more": (FLAG, []), "w": (F, [3, 5]), "m": (WHOLE, [])},
    )  # fmt: skip
    nodes = [N("ReduceSum", ["x"], ["sum"], keepdims=0), N("Less", ["bound", "sum"], ["begins"]),
             N("Loop", ["", "begins", "x", "zero"], ["y", "steps"], body=body), N("Neg", ["y"], ["z"])]  # fmt: skip
    return whole(nodes, {"x": (F, [3, 5]), "bound": (F, [])}, {"z": (F, [3, 5]), "steps": (WHOLE, [])},
                 half=np.float32(0.5), one=1, zero=0)  # fmt: skip


def nested() -> ModelProto:
    """As often as the data say, and in each step as often as that says: a loop in a loop, one of them with a stack."""
    inner = body_of(
        [N("Identity", ["c1"], ["d1"]), N("Add", ["a", "x"], ["b"])],
        {"k1": (WHOLE, []), "c1": (FLAG, []), "a": (F, [4])}, {"d1": (FLAG, []), "b": (F, [4])},
    )  # fmt: skip
    outer = body_of(
        [N("Add", ["k0", "k0"], ["twice"]), N("Max", ["twice", "one"], ["often"]),
         N("Loop", ["often", "", "u"], ["v"], body=inner),
         N("Identity", ["c0"], ["d0"]), N("ReduceSum", ["v"], ["row"], keepdims=0)],
        {"k0": (WHOLE, []), "c0": (FLAG, []), "u": (F, [4])}, {"d0": (FLAG, []), "v": (F, [4]), "row": (F, [])},
    )  # fmt: skip
    return whole([N("Loop", ["n", "", "x"], ["y", "rows"], body=outer)], {"x": (F, [4])},
                 {"y": (F, [4]), "rows": (F, [5])}, n=5, one=1)  # fmt: skip


def branching() -> ModelProto:
    """Two products, of which the data choose one, at every step."""
    then, otherwise = (body_of([N("MatMul", ["v", w], [f"by_{w}"])], {}, {f"by_{w}": (F, [2, WIDTH])})
                       for w in ("w0", "w1"))  # fmt: skip
    body = body_of(
        [N("ReduceSum", ["v"], ["s"], keepdims=0), N("Less", ["zero", "s"], ["high"]),
         N("If", ["high"], ["w"], then_branch=then, else_branch=otherwise), N("Identity", ["on"], ["more"])],
        {"k": (WHOLE, []), "on": (FLAG, []), "v": (F, [2, WIDTH])}, {"more": (FLAG, []), "w": (F, [2, WIDTH])},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {f"w{k}": (rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32) for k in (0, 1)}
    return whole([N("Loop", ["n", "", "x"], ["y"], body=body)], {"x": (F, [2, WIDTH])}, {"y": (F, [2, WIDTH])}, n=6,
                 zero=np.float32(0), **weights)  # fmt: skip


def caching() -> ModelProto:
    """A row written into a large table at every step, which is read behind that; the data end it."""
    body = body_of(
        [N("Equal", ["places", "k"], ["here"]), N("Where", ["here", "h", "table"], ["next"]),
         N("ReduceMean", ["next", "first"], ["mean"], keepdims=0), N("Sub", ["h", "mean"], ["g"]),
         N("ReduceSum", ["g"], ["s"], keepdims=0), N("Less", ["bound", "s"], ["more"])],
        {"k": (WHOLE, []), "on": (FLAG, []), "h": (F, [WIDTH]), "table": (F, [ROWS, WIDTH])},
        {"more": (FLAG, []), "g": (F, [WIDTH]), "next": (F, [ROWS, WIDTH])},
    )  # fmt: skip
    return whole([N("Loop", ["limit", "", "x", "t"], ["y", "u"], body=body)],
                 {"x": (F, [WIDTH]), "t": (F, [ROWS, WIDTH]), "bound": (F, []), "limit": (WHOLE, [])},
                 {"y": (F, [WIDTH]), "u": (F, [ROWS, WIDTH])}, places=np.arange(ROWS).reshape(ROWS, 1),
                 first=[0])  # fmt: skip


RNG = np.random.default_rng(1)
TABLE = RNG.random((ROWS, WIDTH)).astype(np.float32)
CASES: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "halving": (halving, [(np.ones((3, 5), np.float32), np.float32(b)) for b in (100, 10, 0.1)]),
    "nested": (nested, [(np.array([1, 2, 3, 4], np.float32),)]),
    "branching": (branching, [(s * RNG.standard_normal((2, WIDTH)).astype(np.float32),) for s in (1, -1)]),
    "caching": (caching, [(TABLE[0] * 9, TABLE, np.float32(b), np.int64(n)) for b, n in ((1, 40), (250, 40), (1, 3))]),
}  # fmt: skip


def constants_of(program: Program) -> Iterator[tuple[str, np.ndarray]]:
    """Those of bodies too."""
    yield from ((t.name, a) for t, a in program.constants.items())
    for compute in program.computes:
        for branch in compute.branches if isinstance(compute, Region) else ():
            yield from constants_of(branch)


def by_reference(model: ModelProto, inputs: tuple[Any, ...]) -> list[np.ndarray]:
    names = [i.name for i in model.graph.input]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(zip(names, map(np.asarray, inputs), strict=True))))


def by_loops(artifact: Artifact, given: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What the Loops give, read back from their text."""
    loops, linked, plan = artifact.loops, artifact.program, artifact.plan
    assert loops is not None and linked is not None and plan is not None
    constants = {}
    layouts = dict(plan.layouts)
    for tensor, array in linked.constants.items():
        layout = layouts.get(tensor.name) or Layout.natural(tensor.rank)
        constants[tensor.name] = layout.pack(np.asarray(array).reshape(tuple(map(int, tensor.shape))))
    tensors = {**constants, **{n: np.array(a) for n, a in given.items()}}
    text = loops_text(loops)
    again = parse_loops(text)
    assert loops_text(again) == text
    run_loops(again, tensors, instructions=MEANINGS)
    return [tensors[t.name].reshape(tuple(map(int, t.shape))) for t in linked.outputs]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_every_form_gives_the_same(name: str, kernel_cache: Path) -> None:
    model, calls = CASES[name][0](), CASES[name][1]
    program = lower(load(model, {}), regions=True)
    assert any(isinstance(c, Region) for c in program.computes)
    text = program_text(program)
    assert program_text(parse_program(text, dict(constants_of(program)))) == text
    artifact = build(load(model, {}), CPU, Options(cache_dir=kernel_cache, stop_after="source"))
    fast = [tilewright.compile(model, options=Options(cache_dir=kernel_cache, threads=n)) for n in (1, 2)]
    assert all(isinstance(f, tilewright.Model) for f in fast)
    for inputs in calls:
        expected = by_reference(model, inputs)
        given = {t.name: np.asarray(a) for t, a in zip(program.inputs, inputs, strict=True)}
        ways = [list(evaluated(program, given).values()), by_loops(artifact, given), *(f(*inputs) for f in fast)]
        for found in ways:
            for got, right in zip(found, expected, strict=True):
                np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_rows_are_written_where_they_are() -> None:
    (region,) = (c for c in update_in_place(lower(load(caching(), {}), regions=True)).computes if isinstance(c, Region))
    assert [type(c) for c in region.branches[0].computes].count(Scatter) == 1
    ordered = cut(update_in_place(lower(load(caching(), {}), regions=True)))
    (repeat,) = (item for item in ordered.items if isinstance(item, RegionLoop))
    kinds = [type(item) for item in repeat.body.items]
    assert kinds == [Straight, Update, Straight]
    assert len(repeat.in_place) == 1  # the table; all else that is carried has two places in turn


def test_a_loop_is_explained_profiled_and_saved(kernel_cache: Path, tmp_path: Path) -> None:
    fast = tilewright.compile(branching(), options=Options(cache_dir=kernel_cache, threads=1))
    x = np.ones((2, WIDTH), np.float32)
    told = fast.explain()
    assert "in every step of Loop node 'y'" in told and "where true, in If node 'w'" in told
    profile = fast.profile(x, repeat=2)
    assert len(profile.calls) == len(fast.calls)
    (expected,) = fast(x)
    fast.save(tmp_path / "saved")
    np.testing.assert_array_equal(tilewright.load(tmp_path / "saved")(x)[0], expected)


def test_cheap_branches_are_computed_both(kernel_cache: Path) -> None:
    then, otherwise = (body_of([N(op, ["x"], [op])], {}, {op: (F, [3])}) for op in ("Neg", "Abs"))
    model = whole([N("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)], {"x": (F, [3]), "c": (FLAG, [])},
                  {"y": (F, [3])})  # fmt: skip
    assert not any(isinstance(c, Region) for c in lower(load(model, {}), regions=True).computes)
