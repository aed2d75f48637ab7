"""Steps that tiles walk by themselves: along which axes that is possible; a Plan that says more is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.errors import InternalError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program, Reduce, Scan, plain_monoid
from tilewright.ir.forms.expr import Axis, Expr, load, maximum, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.algebra.nest import build_nest
from tilewright.tile_graph.algebra.own_state import own_axes
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.meaning.interpret_tree import interpret_tree

F32 = dtypes.float32
STEPS, ROWS, COLUMNS = 6, 40, 64
T = Axis("t", STEPS)
X = Tensor("x", (STEPS, ROWS, COLUMNS), F32)
START, BEFORE, NEXT = (Tensor(name, (ROWS, COLUMNS), F32) for name in ("start", "before", "next"))


def axes() -> tuple[Axis, Axis]:
    return Axis("i", ROWS), Axis("j", COLUMNS)


def at_its_own_place() -> Map:
    i, j = axes()
    return Map(NEXT, (i, j), load(BEFORE, (var(i), var(j))) * 0.5 + load(X, (var(T), var(i), var(j))))


def beside_the_next_row() -> Map:
    i, j = axes()
    above: Expr = load(BEFORE, (maximum(var(i) - 1, 0), var(j)))
    return Map(NEXT, (i, j), load(BEFORE, (var(i), var(j))) - above + load(X, (var(T), var(i), var(j))))


def summed_columns() -> Reduce:
    i, j = axes()
    r = Axis("r", COLUMNS)
    value = load(BEFORE, (var(i), var(r))) * load(X, (var(T), var(i), var(j)))
    return Reduce((NEXT,), (i, j), (r,), (value,), plain_monoid("max", F32))


STEP = {"own": at_its_own_place, "rows": beside_the_next_row, "columns": summed_columns}


def scan_of(name: str) -> Scan:
    stacked = Tensor("y", (STEPS, ROWS, COLUMNS), F32)
    return Scan(T, (START,), (BEFORE,), (STEP[name](),), (NEXT,), (None,), ((NEXT, stacked),))


@pytest.mark.parametrize(("name", "wanted"), [("own", {"o0", "o1"}), ("rows", {"o1"}), ("columns", {"o0"})])
def test_axes_along_which_nobody_waits(name: str, wanted: set[str]) -> None:
    scan = scan_of(name)
    assert own_axes([build_nest(c, [], {}) for c in scan.body], scan) == wanted


@pytest.mark.parametrize("name", STEP)
def test_a_core_walks_all_steps_of_its_own_part(name: str) -> None:
    scan, target = scan_of(name), machine("neoverse_n1")
    program = Program((X, START), scan.outputs, (scan,), {})
    plan = make_plan(program, target)
    check_plan(plan, program, target)
    (kernel,) = plan.kernels
    assert any(getattr(n, "over", "") == "steps" for n in kernel.walk()), "a call a step"
    rng = np.random.default_rng(1)
    given = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in program.inputs}
    np.testing.assert_allclose(interpret_tree(program, plan, given)[0]["y"], evaluate(program, given)["y"], rtol=1e-6)


def test_tiles_that_read_each_other_s_parts_have_to_meet() -> None:
    target = machine("neoverse_n1")
    own, rows = (Program((X, START), scan.outputs, (scan,), {}) for scan in map(scan_of, ("own", "rows")))
    plan = make_plan(own, target)
    (kernel,) = plan.kernels
    assert [b.axis for a in kernel.axes if a.name in dict(kernel.sizes) for b in a.binds] == ["o0"]
    with pytest.raises(InternalError, match="end without a barrier"):
        check_plan(plan, rows, target)


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids", "h200"])
def test_steps_that_hand_nothing_on_are_calls(name: str) -> None:
    """There is no state whose last place the kernel could begin with."""
    i, j = axes()
    twice = Map(NEXT, (i, j), load(X, (var(T), var(i), var(j))) * 2.0)
    scan = Scan(T, (), (), (twice,), (), (), ((NEXT, Tensor("y", (STEPS, ROWS, COLUMNS), F32)),))
    program, target = Program((X,), scan.outputs, (scan,), {}), machine(name)
    plan = make_plan(program, target)
    check_plan(plan, program, target)
    assert not any(getattr(n, "over", "") == "steps" for k in plan.kernels for n in k.walk())
    x = np.ones(X.shape, np.float32)
    assert (interpret_tree(program, plan, {"x": x})[0]["y"] == 2).all()
