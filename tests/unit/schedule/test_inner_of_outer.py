"""A kernel whose tile is kept in the outer cache, tiled again at the cache of a core: matrices softmaxed over columns,
which takes all rows of each, and then over rows, which takes a few at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from onnx import ModelProto

from tests.cpu_stages import error, evaluated, lowered, model_of, random_inputs
from tests.unit.schedule.test_inner_tiles import inner, outwards, parts_of, with_near
from tests.unit.schedule.test_outer_tiles import program_of, with_caches
from tilewright.backend.traffic import traffic_of
from tilewright.compiler.pipeline import build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.ir.meaning.traffic import count_traffic
from tilewright.options import Options
from tilewright.report.explain import explain_text
from tilewright.schedule.planner import make_plan, plan_seconds
from tilewright.schedule.price import priced
from tilewright.target import Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.meaning.interpret_tree import interpret_tree
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.traffic.held import held_bytes, inner_bytes, plan_nests

DESKTOP = machine("avx2_desktop")
SMALL = with_near(with_caches(DESKTOP, 1 << 15, 1 << 19), 1 << 12)
ODD = (41, 101, 131)  # of two matrices a tile the last has one; rows come in parts that do not fill 101


def both_ways(matrices: int, rows: int, columns: int) -> ModelProto:
    shape = matrices, rows, columns
    steps = [("Softmax", ["x"], "p", {"axis": 1}), ("Softmax", ["p"], "y", {"axis": 2})]
    return model_of(steps, {"x": shape}, {"y": shape})


def planned(shape: tuple[int, int, int] = ODD, target: Target = SMALL) -> tuple[Program, Plan]:
    program = program_of(both_ways(*shape))
    return program, make_plan(program, target)


@pytest.mark.parametrize(("shape", "target"), [((32, 384, 384), DESKTOP), (ODD, SMALL)])
def test_rows_stay_in_the_cache_of_a_core_and_matrices_in_the_outer_one(
    shape: tuple[int, int, int], target: Target
) -> None:
    program, plan = planned(shape, target)
    check_plan(plan, program, target)
    (kernel,) = plan.kernels
    (tile,) = inner(plan)
    assert (kernel.level, tile.level) == ("L3", "L2")
    assert [leaf.tensor for leaf in tile.leaves] == ["p", "y_max", "y_exp", "y_sum", "y"]  # no part sums all rows again
    assert {h.tensor for h in tile.holds} == {"p", "y_max", "y_exp", "y_sum"}
    assert {h.tensor for h in kernel.holds} == {"p_max", "p_exp", "p_sum"}
    before = make_plan(program, target, whole=False)
    assert not inner(before)
    assert plan_seconds(plan, program) < 0.9 * plan_seconds(before, program)
    assert target.local.capacity // 2 < kernel.estimate.footprint < before.kernels[0].estimate.footprint


def test_bytes_are_those_of_a_part_and_of_a_tile() -> None:
    """Some rows of 131 columns of two matrices, twice; two matrices, and the maxima of their columns."""
    program, plan = planned()
    (kernel,) = plan.kernels
    nests = plan_nests(kernel, all_computes(program))
    ((name, rows),) = inner(plan)[0].sizes
    assert name == "t1" and 101 % rows
    (near,) = inner_bytes(kernel, nests).values()
    assert 2 * 2 * rows * 131 * 4 <= near <= SMALL.local.capacity // 2
    assert kernel.estimate.footprint == 2 * (101 * 131 + 131) * 4
    assert held_bytes(kernel, nests) >= kernel.estimate.footprint


def test_a_plan_put_back_is_told_the_same_time() -> None:
    program, plan = planned()
    again = priced(program, Plan.from_json(plan.to_json()), SMALL)
    assert plan_seconds(again, program) == pytest.approx(plan_seconds(plan, program), abs=2e-9)


def test_what_several_parts_read_is_read_again() -> None:
    """The sum over all rows of both matrices put into the parts: each reads all of them, from the outer cache."""
    program, plan = planned()
    (kernel,) = plan.kernels
    (tile,) = inner(plan)
    *before, total = kernel.body[: kernel.body.index(tile)]
    moved = next(h for h in kernel.holds if h.tensor == "p_sum")
    worse = replace(kernel, body=(*before, replace(tile, body=(total, *tile.body), holds=(moved, *tile.holds))),
                    holds=tuple(h for h in kernel.holds if h is not moved))  # fmt: skip
    repeated = plan.with_kernels({kernel.name: worse})
    check_plan(repeated, program, SMALL)
    assert SMALL.shared_cache is not None
    read = (parts_of(kernel) - 1) * 2 * 101 * 131 * 4 / SMALL.shared_cache.bandwidth
    turns = -(-kernel.tiles // SMALL.units)
    more = plan_seconds(priced(program, repeated, SMALL), program) - plan_seconds(plan, program)
    assert more > 0.9 * turns * read


def test_levels_that_do_not_hold_it_refuse_it() -> None:
    program, plan = planned()
    with pytest.raises(InternalError, match="bytes at L2"):
        check_plan(plan, program, with_caches(SMALL, 1 << 13, 1 << 19))
    with pytest.raises(InternalError, match="bytes at L3"):
        check_plan(plan, program, with_caches(SMALL, 1 << 15, 1 << 16))
    with pytest.raises(InternalError, match="levels go inwards"):
        check_plan(outwards(plan), program, SMALL)


def test_answers_stay(tmp_path: Path) -> None:
    program, plan = planned()
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs)["y"]
    made = lowered(program, plan=plan, target=SMALL)
    assert error(made.natively(inputs, tmp_path)["y"], wanted) < 1e-5
    found, _ = interpret_tree(program, plan, inputs)
    assert error(found["y"], wanted) < 1e-5


def test_traffic_is_what_the_loops_move() -> None:
    program, plan = planned()
    counted = count_traffic(lowered(program, plan=plan, target=SMALL).loops)
    (traffic,) = traffic_of(program, plan, SMALL).values()
    for memory, (loaded, stored) in traffic.memories.items():
        assert loaded == pytest.approx(counted.loaded_by[memory], rel=0.02)
        assert stored == pytest.approx(counted.stored_by[memory], rel=0.02)


def test_explain_tells_the_levels_of_each_edge() -> None:
    text = explain_text(build(load(both_ways(*ODD), {}), SMALL, Options(stop_after="loops")), width=400)
    words = " ".join(text.split())
    assert "y_exp to y_sum: at L2 " in words and "p_exp to p: at L3 " in words
