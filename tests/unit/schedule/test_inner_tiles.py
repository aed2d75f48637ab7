"""Two tile levels in one kernel: nests that follow each other are tiled again inside the kernel's tile, so that what
passes between them stays nearer than the rest."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import error, evaluated, lowered, model_of, random_inputs
from tests.stages.test_search_oracle import graph
from tilewright import ops
from tilewright.backend.cpu.kernel import inner as cpu_inner
from tilewright.backend.cpu.kernel.variants import variants_of
from tilewright.backend.traffic import traffic_of
from tilewright.compiler.pipeline import build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.ir.meaning.traffic import count_traffic
from tilewright.options import Options
from tilewright.report.explain import explain_text
from tilewright.schedule import inner_tiles
from tilewright.schedule.planner import make_plan, plan_seconds
from tilewright.schedule.price import priced
from tilewright.target import Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.meaning.interpret_tree import interpret_tree
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.plan.text import plan_text
from tilewright.tile_graph.traffic.held import inner_bytes, plan_nests
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts

DESKTOP = machine("avx2_desktop")


def attended(windows: int = 16, heads: int = 6, tokens: int = 49, width: int = 32) -> ModelProto:
    """A softmax of stored scores and the product that reads it, as attention in windows has them."""
    scores, values = (windows, heads, tokens, tokens), (windows, heads, tokens, width)
    steps = [("Softmax", ["x"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "y", {})]
    return model_of(steps, {"x": scores, "v": values}, {"y": values})


def program_of(model: ModelProto, target: Target) -> Program:
    return choose_layouts(fold_constants(ops.lower(load(model, {}))), target)


def inner(plan: Plan) -> list[Tile]:
    """Tiles inside those of kernels, at another level."""
    return [t for k in plan.kernels for t in k.body if isinstance(t, Tile) and t.level != k.level and t.sizes]


def outwards(plan: Plan) -> Plan:
    """The plan of one kernel with its level and that of the tile inside it exchanged."""
    (kernel,), (tile,) = plan.kernels, inner(plan)
    body = tuple(replace(n, level=kernel.level) if n is tile else n for n in kernel.body)
    return plan.with_kernels({kernel.name: replace(kernel, level=tile.level, body=body)})


def parts_of(kernel: Tile) -> int:
    """How many parts the tile inside a kernel's has."""
    (tile,) = (t for t in kernel.body if isinstance(t, Tile))
    whole = {a.name: dict(kernel.sizes).get(a.name, a.extent) for a in kernel.axes}
    return prod(-(-whole[name] // size) for name, size in tile.sizes)


def planned(target: Target = DESKTOP) -> tuple[Program, Plan]:
    program = program_of(attended(), target)
    return program, make_plan(program, target)


def with_near(target: Target, capacity: int) -> Target:
    levels = tuple(replace(x, capacity=capacity) if x is target.nearest else x for x in target.levels)
    return replace(target, levels=levels)


def test_softmax_stays_next_to_the_core_and_its_product_in_the_tile() -> None:
    program, plan = planned()
    check_plan(plan, program, DESKTOP)
    (kernel,) = plan.kernels
    (tile,) = inner(plan)
    assert kernel.level == "L2" and tile.level == "L1"
    assert {h.tensor for h in tile.holds} == {"p_max", "p_exp", "p_sum"}
    assert {h.tensor for h in kernel.holds} == {"p"}  # the product reads it after the parts
    assert [leaf.tensor for leaf in tile.leaves] == ["p_max", "p_exp", "p_sum", "p"]
    assert "tiled again at L1" in kernel.estimate.reason


def test_it_is_predicted_to_be_faster_and_told_so_again() -> None:
    program, plan = planned()
    before = make_plan(program, DESKTOP, whole=False)
    assert plan_seconds(plan, program) < 0.997 * plan_seconds(before, program)
    again = priced(program, Plan.from_json(plan.to_json()), DESKTOP)
    assert plan_seconds(again, program) == pytest.approx(plan_seconds(plan, program), abs=2e-9)
    (kernel,) = plan.kernels
    flat = replace(kernel, body=kernel.leaves, holds=(*kernel.holds, *inner(plan)[0].holds))
    one = priced(program, plan.with_kernels({kernel.name: flat}), DESKTOP)
    assert plan_seconds(one, program) == pytest.approx(plan_seconds(before, program), abs=2e-9)


@pytest.mark.parametrize("capacity", [1 << 13, 1 << 15, 1 << 16, 1 << 20])
def test_parts_fit_any_first_cache(capacity: int) -> None:
    """Parts take half of it; where the whole tile fits there is none."""
    target = with_near(DESKTOP, capacity)
    program, plan = planned(target)
    check_plan(plan, program, target)
    (kernel,) = plan.kernels
    if kernel.estimate.footprint <= capacity // 2:
        assert not inner(plan)
    near = inner_bytes(kernel, plan_nests(kernel, all_computes(program)))
    assert bool(near) == bool(inner(plan))
    assert all(held <= capacity // 2 for held in near.values())


def test_where_it_is_chosen() -> None:
    """Tiles of the product are larger than each of these machines' first cache; how much that costs differs."""
    gains = {}
    for name in ("avx2_desktop", "emerald_rapids", "neoverse_n1"):
        target = machine(name)
        program = program_of(attended(8, 4, 128, 32), target)
        plan, before = make_plan(program, target), make_plan(program, target, whole=False)
        assert len(inner(plan)) == 1
        gains[name] = plan_seconds(before, program) / plan_seconds(plan, program)
    assert gains["emerald_rapids"] > 1.015 and gains["avx2_desktop"] > 1.005 and gains["neoverse_n1"] > 1.003


def test_a_level_that_is_renamed_changes_nothing() -> None:
    levels = tuple(replace(x, name="near" if x is DESKTOP.nearest else x.name) for x in DESKTOP.levels)
    renamed = replace(DESKTOP, levels=levels)
    _, plan = planned(renamed)
    assert plan_text(plan).replace("near tile", "L1 tile").replace("at near", "at L1") == plan_text(planned()[1])


@pytest.mark.parametrize("clock", [0.0, 4e9, 4e8])
def test_starting_a_part_takes_cycles(clock: float) -> None:
    """Eight tiles, one a core, with four nests in their parts, ten cycles each; a clock that is not measured is what
    the rate of multiply-adds makes of it."""
    target = replace(DESKTOP, clock=clock)
    program, plan = planned()
    (kernel,) = plan.kernels
    assert kernel.tiles == DESKTOP.units and len(inner(plan)[0].leaves) == 4
    found, fast = (plan_seconds(priced(program, plan, t), program) for t in (target, replace(DESKTOP, clock=4e12)))
    assert found - fast == pytest.approx(parts_of(kernel) * 4 * 10 / (clock or 4e9), abs=2e-9)


def test_tiles_that_do_not_fit_are_refused() -> None:
    program, plan = planned()
    small = with_near(DESKTOP, 4 << 10)
    with pytest.raises(InternalError, match="bytes at L1"):
        check_plan(plan, program, small)
    with pytest.raises(InternalError, match="levels go inwards"):
        check_plan(outwards(plan), program, DESKTOP)


def test_answers_stay(tmp_path: Path) -> None:
    program, plan = planned()
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs)["y"]
    assert error(lowered(program, plan=plan, target=DESKTOP).natively(inputs, tmp_path)["y"], wanted) < 1e-5


def test_tree_and_traffic_agree() -> None:
    """A small one: the interpreter of trees, and bytes counted from the Loops beside those predicted."""
    program = program_of(attended(4, 6, 49, 16), DESKTOP)
    plan = make_plan(program, DESKTOP)
    assert inner(plan)
    inputs = random_inputs(program)
    found, _ = interpret_tree(program, plan, inputs)
    assert error(found["y"], evaluated(program, inputs)["y"]) < 1e-5
    counted = count_traffic(lowered(program, plan=plan, target=DESKTOP).loops)
    (traffic,) = traffic_of(program, plan, DESKTOP).values()
    for memory, (loaded, stored) in traffic.memories.items():
        assert loaded == pytest.approx(counted.loaded_by[memory], rel=0.02)
        assert stored == pytest.approx(counted.stored_by[memory], rel=0.02)


def test_other_ways_to_run_it_are_kernels_of_one_tile() -> None:
    """What tuning measures: parts of the tile inside would not fill other tiles."""
    program, plan = planned()
    (kernel,) = plan.kernels
    nests = plan_nests(kernel, all_computes(program))
    variants = variants_of(kernel, nests, program, plan, DESKTOP)
    found = [*variants.best(4), *variants.random(4, np.random.default_rng(0))]
    assert len(found) > 4
    for other in (*found, *(variants.like(k, variants) for k in found)):
        changed = plan.with_kernels({kernel.name: other})
        assert not inner(changed)
        check_plan(changed, program, DESKTOP)
    assert variants.like(kernel, variants).body == kernel.body


def test_explain_tells_the_levels_of_each_edge() -> None:
    text = " ".join(explain_text(build(load(attended(), {}), DESKTOP, Options(stop_after="loops")), width=400).split())
    assert "p_exp to p_sum: at L1 " in text
    assert "p to y: at L2 " in text and "not at L1 " in text


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", [0, 2, 8, 10, 16, 22])
def test_whatever_is_tiled_again_gives_the_same(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of products, sums and maps on a machine whose first cache is small, tiled again whatever it takes, also
    where every part computes the same sums."""
    monkeypatch.setattr(cpu_inner, "TWICE", 1 << 30)
    monkeypatch.setattr(inner_tiles, "INNER_WORTH", 10.0)
    monkeypatch.setattr(inner_tiles, "LEAST_GAIN", -1.0)
    target = with_near(machine("neoverse_n1"), 1 << 12)
    program = program_of(graph(seed), target)
    plan = make_plan(program, target)
    check_plan(plan, program, target)
    assert inner(plan)
    inputs = random_inputs(program)
    found = lowered(program, plan=plan, target=target).natively(inputs, tmp_path)
    for name, wanted in evaluated(program, inputs).items():
        assert error(found[name], wanted) < 5e-5
    np.testing.assert_equal(Plan.from_json(plan.to_json()), plan)
