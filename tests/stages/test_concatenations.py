"""Tensors put together of several that are computed in the same kernel: a tile computes those that it needs any of."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import CPU, Lowered, Step, evaluated, lowered, model_of, programs, random_inputs
from tilewright.ir.forms.loops import If, statements
from tilewright.target import Target, machine

COLUMNS = 81
MACHINES: dict[str, Target] = {
    "emerald_rapids": replace(machine("emerald_rapids"), units=2),
    "avx2_desktop": replace(machine("avx2_desktop"), units=2),
    "neoverse_n1": replace(machine("neoverse_n1"), units=2),
    "here": CPU,
}
# rows of the parts, and the axis along which they lie behind each other
CASES = {"long first": ((300, 70, 5), 0), "long last": ((90, 60, 200), 0), "odd": ((257, 130, 3), 0),
         "beside": ((150, 150), 1)}  # fmt: skip


@cache
def heads(name: str, target: str) -> Lowered:
    """Softmax of the rows of several maps, each of which lies turned, one behind the other."""
    rows, axis = CASES[name]
    steps: list[Step] = []
    for number, _ in enumerate(rows):
        x, t, s, p = (f"{letter}{number}" for letter in "xtsp")
        steps += [("Transpose", [x], t, {"perm": [1, 0]}), ("Sigmoid", [t], s, {}), ("Softmax", [s], p, {"axis": -1})]
    steps.append(("Concat", [f"p{number}" for number, _ in enumerate(rows)], "y", {"axis": axis}))
    shape = (sum(rows), COLUMNS) if axis == 0 else (rows[0], COLUMNS * len(rows))
    model = model_of(steps, {f"x{n}": (COLUMNS, count) for n, count in enumerate(rows)}, {"y": shape})
    return lowered(programs(model, MACHINES[target])["layout"], target=MACHINES[target])


def conditions(made: Lowered) -> int:
    return sum(isinstance(s, If) for k in made.loops.kernels for s in statements(k.body))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", MACHINES)
def test_parts_mean_the_whole(name: str, target: str, kernel_cache: Path) -> None:
    made = heads(name, target)
    inputs = random_inputs(made.program)
    expected = evaluated(made.program, inputs)["y"]
    for found in (made.on_loops(inputs)["y"], made.natively(inputs, kernel_cache)["y"]):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "target"), [("long first", "emerald_rapids"), ("long last", "avx2_desktop")])
def test_tiles_leave_out_what_they_need_nothing_of(name: str, target: str) -> None:
    """A tile behind a part, or before it, does not compute the end of it again."""
    assert conditions(heads(name, target)) > 0
