"""Tiles of the outer cache: intermediates that no tile of a core's own cache holds, and that are more than the outer
one as a whole, live there part by part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import error, evaluated, lowered, model_of, random_inputs
from tilewright import ops
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.schedule.planner import make_plan, plan_seconds
from tilewright.schedule.price import priced
from tilewright.target import MemoryLevel, Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.transform.clean.fold import fold_constants

DESKTOP = machine("avx2_desktop")


def softmax(rows: int, columns: int) -> ModelProto:
    """Over columns: a tile is at least a vector of them, as long as the matrix is high."""
    return model_of([("Softmax", ["x"], "y", {"axis": 0})], {"x": (rows, columns)}, {"y": (rows, columns)})


def followed_product(rows: int, columns: int) -> ModelProto:
    """The same of a product."""
    weight = (np.random.default_rng(1).standard_normal((24, columns)) / 5).astype(np.float32)
    steps = [("MatMul", ["x", "w"], "p", {}), ("Softmax", ["p"], "y", {"axis": 0})]
    return model_of(steps, {"x": (rows, 24)}, {"y": (rows, columns)}, {"w": weight})


def centred(rows: int, columns: int) -> ModelProto:
    """Columns without their mean, by the mean of their squares."""
    steps = [
        ("ReduceMean", ["x"], "mean", {"axes": [0]}), ("Sub", ["x", "mean"], "c", {}), ("Exp", ["c"], "e", {}),
        ("Mul", ["e", "e"], "s", {}), ("ReduceMean", ["s"], "v", {"axes": [0]}), ("Div", ["e", "v"], "y", {}),
    ]  # fmt: skip
    return model_of(steps, {"x": (rows, columns)}, {"y": (rows, columns)})


def program_of(model: ModelProto) -> Program:
    return fold_constants(ops.lower(load(model)))


def with_caches(target: Target, own: int, outer: int) -> Target:
    """The machine with so much of a cache of each core, and of the one that they share for each core."""

    def level(old: MemoryLevel) -> MemoryLevel:
        sizes = {target.local.name: own, "" if target.shared_cache is None else target.shared_cache.name: outer}
        return replace(old, capacity=sizes.get(old.name, old.capacity))

    return replace(target, levels=tuple(map(level, target.levels)))


def outer_kernels(plan: Plan, target: Target) -> list[str]:
    assert target.shared_cache is not None
    return [k.name for k in plan.kernels if k.level == target.shared_cache.name]


def test_what_fits_neither_cache_is_tiled_in_the_outer_one() -> None:
    program = program_of(softmax(20_000, 300))
    plan = make_plan(program, DESKTOP)
    check_plan(plan, program, DESKTOP)
    assert len(plan.kernels) == 1 and outer_kernels(plan, DESKTOP)
    (kernel,) = plan.kernels
    assert DESKTOP.shared_cache is not None
    assert DESKTOP.local.capacity // 2 < kernel.estimate.footprint <= DESKTOP.shared_cache.capacity // 2
    levels = tuple(x for x in DESKTOP.levels if x is not DESKTOP.shared_cache)
    apart = make_plan(program, replace(DESKTOP, levels=levels))
    assert len(apart.kernels) > 1  # there is no such level


def test_what_fits_the_outer_cache_whole_is_not() -> None:
    program = program_of(softmax(20_000, 100))
    assert not outer_kernels(make_plan(program, DESKTOP), DESKTOP)


def test_plans_put_back_are_told_the_same_time() -> None:
    program = program_of(softmax(20_000, 300))
    plan = make_plan(program, DESKTOP)
    assert plan_seconds(priced(program, Plan.from_json(plan.to_json()), DESKTOP), program) == pytest.approx(
        plan_seconds(plan, program)
    )


def test_a_level_that_does_not_hold_it_is_refused() -> None:
    program = program_of(softmax(1999, 512))
    plan = make_plan(program, SMALL)
    (kernel,) = plan.kernels
    nearer = plan.with_kernels({kernel.name: replace(kernel, level=SMALL.local.name)})
    with pytest.raises(InternalError, match="bytes at L2"):
        check_plan(nearer, program, SMALL)


SMALL = with_caches(DESKTOP, 1 << 15, 1 << 19)


OFTEN = [softmax(1501, 389), followed_product(1501, 389), centred(1501, 389)]
SELDOM = [softmax(1999, 512), followed_product(1999, 512), centred(1999, 512)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", [*OFTEN, *(pytest.param(model, marks=pytest.mark.slow) for model in SELDOM)])
def test_answers_stay(model: ModelProto, tmp_path: Path) -> None:
    program = program_of(model)
    made = lowered(program, target=SMALL)
    check_plan(made.plan, program, SMALL)
    assert outer_kernels(made.plan, SMALL)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)
    found = made.natively(inputs, tmp_path)
    assert all(error(found[name], wanted[name]) < 1e-5 for name in wanted)
