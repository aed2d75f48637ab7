"""The size of a kernel's text: what is used twice is written once, and no loop outgrows the instruction cache."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import Step, evaluated, lowered, model_of, programs, random_inputs
from tests.cross import cross_compile
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.dtypes import float32, int64
from tilewright.ir.forms.expr import Axis, op, var
from tilewright.ir.forms.expr import load as read
from tilewright.ir.forms.loops import Buffer, Memory
from tilewright.options import Options
from tilewright.render.c_long import ExprParts, is_harmless
from tilewright.target import machine, stored_machines
from tilewright.tile_graph.algebra.nest import data_cost

SHAPE = (5, 67)
# what the next value is made of, from the one before: twice, by functions that are twice the value, behind a condition
STEPS: dict[str, list[Step]] = {
    "squares": [("Mul", ["{0}", "{0}"], "{1}m", {}), ("Mul", ["{1}m", "half"], "{1}h", {}),
                ("Sub", ["one", "{1}h"], "{1}", {})],
    "sums of two": [("Abs", ["{0}"], "{1}a", {}), ("Add", ["{0}", "{1}a"], "{1}s", {}),
                    ("Mul", ["{1}s", "half"], "{1}", {})],
    "angles": [("Tanh", ["{0}"], "{1}t", {}), ("Acos", ["{1}t"], "{1}", {})],
    "chosen": [("Greater", ["{0}", "half"], "{1}g", {}), ("Mul", ["{0}", "{0}"], "{1}m", {}),
               ("Sub", ["one", "{1}m"], "{1}s", {}), ("Where", ["{1}g", "{1}s", "{0}"], "{1}", {})],
}  # fmt: skip


def chain(kind: str, count: int, padded: bool = False) -> ModelProto:
    names = ["p" if padded else "x", *(f"y{i}" for i in range(count))]
    steps: list[Step] = [("Pad", ["x", "pads"], "p", {})] if padded else []
    for before, after in pairwise(names):
        for operator, given, out, more in STEPS[kind]:
            steps.append((operator, [n.format(before, after) for n in given], out.format(before, after), more))
    constants = {"half": np.full((), 0.5, np.float32), "one": np.ones((), np.float32)} | (
        {"pads": np.array([1, 2, 0, 3])} if padded else {}
    )
    shape = (SHAPE[0] + 1, SHAPE[1] + 5) if padded else SHAPE
    return model_of(steps, {"x": SHAPE}, {names[-1]: shape}, constants)


def sizes(kind: str, name: str, *counts: int) -> list[int]:
    made = [build(load(chain(kind, n)), machine(name), Options(stop_after="source")) for n in counts]
    return [sum(len(text) for text in artifact.sources.values()) for artifact in made]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["neoverse_n1", pytest.param("emerald_rapids", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", STEPS)
def test_text_grows_with_the_model_and_no_faster(kind: str, name: str) -> None:
    # sixteen squares are one short loop: what comes with every further one is seen beyond; of forty angles several
    # tiles are made, which need not be whole vectors
    short, long = sizes(kind, name, *((32, 64) if kind in ("squares", "angles") else (16, 32)))
    assert long < 3 * short


@pytest.mark.sample(2)
@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", STEPS)
def test_parts_of_long_values_are_right(kind: str, padded: bool, kernel_cache: Path) -> None:
    program = programs(chain(kind, 14, padded))["layout"]
    inputs = random_inputs(program, scale=0.9)
    wanted = evaluated(program, inputs, wide=True)["y13"]
    low = lowered(program)
    np.testing.assert_allclose(low.natively(inputs, kernel_cache)["y13"], wanted, rtol=2e-5, atol=2e-6)


def test_what_a_condition_guards_is_not_computed_before_it() -> None:
    """Unless it reads inside its buffer and divides by nothing that may be zero."""
    i = Axis("i", 9)
    short = Buffer("a", (5,), float32, Memory.GLOBAL)
    outside, inside = read(short, (var(i),)), read(short, (op("mod", var(i), 5),))
    assert not is_harmless(outside * outside) and is_harmless(inside * inside)
    whole = Buffer("n", (9,), int64, Memory.GLOBAL)
    assert not is_harmless(op("floordiv", var(i), read(whole, (var(i),))))
    guarded = op("select", op("lt", var(i), 5), op("neg", outside * outside), outside * 0.5)
    parts = ExprParts(guarded)
    assert parts.computed == {guarded, *_below(guarded.args[0])}
    assert ExprParts(guarded, lambda _: True).computed > parts.computed
    assert ExprParts(outside * outside, around=parts, inside=guarded.args[1]).computed == frozenset()


def _below(root: object) -> set[object]:
    return {root, *(n for a in root.args for n in _below(a))}  # type: ignore[attr-defined]


# --- the instruction cache


def functions(count: int, summed: bool) -> ModelProto:
    """tanh of tanh, behind a product or by itself."""
    before = "s" if summed else "x"
    steps: list[Step] = [("MatMul", ["x", "w"], "s", {})] if summed else []
    for i in range(count):
        steps.append(("Tanh", [before if i == 0 else f"y{i - 1}"], f"y{i}", {}))
    weights = {"w": np.eye(64, dtype=np.float32)} if summed else {}
    return model_of(steps, {"x": (64, 64)}, {f"y{count - 1}": (64, 64)}, weights)


def planned(model: ModelProto, name: str) -> Artifact:
    return build(load(model), machine(name), Options(stop_after="source"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", stored_machines("cpu"))
def test_no_loop_outgrows_the_instruction_cache(name: str, tmp_path: Path) -> None:
    made = planned(functions(120, summed=False), name)
    assert made.plan is not None
    loops = sum(len(k.leaves) for k in made.plan.kernels)
    assert loops > 1
    objects = cross_compile(made.sources, machine(name), tmp_path)
    assert sum(path.stat().st_size for path in objects.values()) < loops * machine(name).instruction_cache


def test_a_larger_instruction_cache_lets_more_be_joined() -> None:
    few, many = (planned(functions(60, summed=False), n).plan for n in ("apple_arm", "emerald_rapids"))
    assert few is not None and many is not None
    assert sum(len(k.leaves) for k in few.kernels) < sum(len(k.leaves) for k in many.kernels)


def test_what_follows_a_sum_is_written_out_for_each_of_its_registers() -> None:
    """So less of it stays with the sum than fits a loop by itself."""
    target = machine("emerald_rapids")
    made = planned(functions(14, summed=True), target.name)
    assert made.plan is not None and made.program is not None
    (nest,) = [n for k in made.plan.kernels for n in k.leaves if n.core == "s"]
    values = [c.value for c in made.program.computes if c.outputs[0].name in nest.epilogue]  # type: ignore[union-attr]
    assert values and data_cost(*values) * 24 <= target.longest_loop < data_cost(*values) * 24 * 14 / len(values)
