"""Steps of a recurrence inside one GPU kernel: chosen where launches cost more, weights kept, the same results."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from tests.cpu_stages import random_inputs
from tests.stages.test_ten_things import emulated
from tests.trees import close, loops_agree
from tests.unit.transform.test_wavefront import folded, rewritten, stacked
from tilewright.ir.forms.compute import Program
from tilewright.ir.meaning.interpret import evaluate
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Tile, UnitBarrier
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.tile_graph.plan.text import plan_text
from tilewright.transform.layout.choose import choose_layouts

H200 = machine("h200")
# a launch takes as long as many barriers
DEAR = replace(H200, kernel_cost=5e-5, barriers=(("grid", dict(H200.barriers)["grid"]),))


def recurrence(kind: str, **given: int) -> Program:
    return choose_layouts(rewritten(folded(stacked(kind, 2, inputs=5, **given))), DEAR)


def walking(program: Program, target: Target = DEAR) -> list[Tile]:
    """Kernels that walk steps themselves."""
    plan = make_plan(program, target)
    check_plan(plan, program, target)
    return [k for k in plan.kernels if any(isinstance(n, Tile) and n.over == "steps" for n in k.walk())]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_blocks_stay_for_all_steps_where_launches_are_dear(kind: str) -> None:
    program = recurrence(kind, hidden=24, steps=9)
    (kernel,) = walking(program)
    assert kernel.tiles <= DEAR.units
    kept = [t for t in program.constants if t.name in {h.tensor for h in kernel.holds if h.fill == "copy"}]
    assert sum(t.shape[-2:] == (24, 24) for t in kept) >= 2  # from the layer below, and from the step before
    (steps,) = (n for n in kernel.walk() if isinstance(n, Tile) and n.over == "steps")
    assert [n for n in steps.body if isinstance(n, UnitBarrier)] == [steps.body[-1]]
    assert walking(program, replace(DEAR, barriers=())) == []  # nobody says what a barrier costs


def test_a_launch_a_step_where_launches_are_cheap() -> None:
    assert walking(recurrence("LSTM", hidden=24, steps=9), H200) == []


def test_weights_beyond_shared_memory_stay_where_they_are() -> None:
    levels = tuple(replace(x, capacity=20 << 10) if x is DEAR.local else x for x in DEAR.levels)
    (kernel,) = walking(recurrence("LSTM", hidden=96, steps=9), replace(DEAR, levels=levels))
    assert kernel.estimate.footprint <= 20 << 10


@pytest.mark.parametrize(("kind", "hidden"), [("LSTM", 10), ("GRU", 7)])
def test_steps_inside_a_kernel_agree(kind: str, hidden: int, tmp_path: Path) -> None:
    program = recurrence(kind, hidden=hidden, steps=6)
    plan = make_plan(program, DEAR)
    assert "barrier of all blocks" in plan_text(plan)
    loops = loops_agree(program, plan, DEAR)
    close(emulated(program, plan, loops, tmp_path), evaluate(program, random_inputs(program)))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "hidden"), [("LSTM", 40), ("GRU", 40), ("LSTM", 34)])
def test_a_warp_takes_several_outputs_where_there_are_more_than_warps(kind: str, hidden: int, tmp_path: Path) -> None:
    few = replace(DEAR, units=4, max_threads=256)
    program = recurrence(kind, hidden=hidden, steps=5)
    plan = make_plan(program, few)
    (kernel,) = walking(program, few)
    wide = [leaf for leaf in kernel.leaves if leaf.options(ThreadForm).split == few.warp and leaf.register]
    assert wide and all(prod(n for _, n in leaf.register) in (2, 4, 8) for leaf in wide)
    close(emulated(program, plan, loops_agree(program, plan, few), tmp_path), evaluate(program, random_inputs(program)))
