"""Conditions of a padded window: what a whole block needs, and which ways through it are ever taken."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu_stages import Step, error, evaluated, lowered, model_of, programs, random_inputs
from tilewright.backend.cpu.maps.guards import is_covered
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, all_of, axes_of, le, load, lt, symbol, var
from tilewright.ir.forms.loops import If, Stmt, statements
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import machine
from tilewright.transform.layout.choose import choose_layouts

BLOCK, TAP, ROW = Axis("block", 4), Axis("tap", 3), Axis("row", 10)
PLACE = var(BLOCK) * 10 + var(ROW) + var(TAP) - 1
INSIDE = all_of([le(0, PLACE), lt(PLACE, 40)])
FIRST, LAST = var(BLOCK) * 10 + var(TAP) - 1, var(BLOCK) * 10 + var(TAP) + 8
WHOLE = all_of([le(0, FIRST), lt(LAST, 40)])


def test_all_rows_but_one_cover_a_window_of_three() -> None:
    but_first = all_of([le(0, FIRST + 1), lt(LAST, 40)])
    but_last = all_of([le(0, FIRST), lt(LAST - 1, 40)])
    assert is_covered(INSIDE, [WHOLE, but_first, but_last])
    assert not is_covered(INSIDE, [WHOLE, but_last])
    assert not is_covered(INSIDE, [WHOLE])


def test_what_is_not_known_before_it_runs_is_not_covered() -> None:
    length = symbol("n", 1, 40)
    assert not is_covered(lt(PLACE, length), [lt(PLACE, length)])
    lengths = Tensor("lengths", (4,), dtypes.index)
    read = lt(PLACE, load(lengths, (var(BLOCK),)))
    assert not is_covered(read, [read])
    assert not is_covered(lt(PLACE, 40), [lt(var(Axis("far", 1 << 20)) + PLACE, 40)])


def convolution(taps: int, pad: int, width: int) -> tuple[list[Stmt], float]:
    """The checked sums of single rows in its loops, and the error of their answer."""
    rng = np.random.default_rng(2)
    shapes = {"v": (16, 16, 1, 1), "w": (16, 16, taps, taps)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    # what another one gives has its channels innermost
    steps: list[Step] = [("Conv", ["x", "v"], "a", {}), ("Conv", ["a", "w"], "y", {"pads": [pad] * 4})]
    model = model_of(steps, {"x": (1, 16, 8, width)}, {"y": (1, 16, 8, width)}, weights)
    target = machine("emerald_rapids")
    program = choose_layouts(programs(model)["fold"], target)
    made = lowered(program, "register", target=target)
    given = random_inputs(program)
    found = [s for kernel in made.loops.kernels for s in checked_rows(kernel.body)]
    return found, error(made.on_loops(given)["y"], evaluated(program, given)["y"])


def checked_rows(body: tuple[Stmt, ...]) -> list[Stmt]:
    """Conditions that differ between the rows of a block: each row asks for itself."""
    found = [s for s in statements(body) if isinstance(s, If)]
    return [s for s in found if any(a.name.endswith("_u") for a in axes_of(s.condition))]


@pytest.mark.parametrize(("taps", "pad", "are_single"), [(3, 1, False), (5, 2, True)])
def test_rows_ask_for_themselves_where_a_window_needs_it(taps: int, pad: int, are_single: bool) -> None:
    found, wrong = convolution(taps, pad, 20)
    assert bool(found) is are_single
    assert wrong < 1e-5
