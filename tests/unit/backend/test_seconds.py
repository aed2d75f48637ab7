"""The one predictor: a level that grows or gets faster never costs, equal trees cost the same, terms add up, and a
batch of sizes is priced as one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tests.traffic_cases import case, machine_of
from tilewright import Options
from tilewright.backend import backend_for
from tilewright.backend.seconds import Priced, price, price_in_turn, works_of
from tilewright.backend.terms import FoundBytes, level_terms, rate
from tilewright.backend.traffic import KernelRun
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.expr import Axis, Expr, var
from tilewright.target import MemoryLevel, Target, machine
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.traffic.touch import touch
from tilewright.tile_graph.traffic.traffic import LeafTrace, Repeat

MACHINES = ("neoverse_n1", "emerald_rapids", "h200")
SEEDS = (3, 13)


@cache
def planned(seed: int, name: str) -> tuple[Program, Plan]:
    made = build(load(case(seed)), machine(name), Options(stop_after="plan", convolution="direct"))
    assert made.program is not None and made.plan is not None
    return made.program, made.plan


def priced(seed: int, name: str, target: Target | None = None) -> Priced:
    return price(*planned(seed, name), target or machine(name))


def better(level: MemoryLevel) -> list[MemoryLevel]:
    faster = replace(level, bandwidth=level.bandwidth * 1.5, write=level.write * 1.5, alone=level.alone * 1.5)
    return [replace(level, capacity=level.capacity * 2), replace(level, capacity=level.capacity * 64), faster]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_level_that_grows_or_gets_faster_never_costs(seed: int, name: str) -> None:
    target = machine(name)
    before = float(priced(seed, name).seconds)
    gained = False
    for place in range(1, len(target.levels)):
        for other in better(target.levels[place]):
            levels = (*target.levels[:place], other, *target.levels[place + 1 :])
            after = float(priced(seed, name, replace(target, levels=levels)).seconds)
            assert after <= before, (place, other)
            gained = gained or after < before
    assert gained


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_no_program_costs_more_by_a_better_level(seed: int) -> None:
    """Caches so small that parts overflow them, and a GPU."""
    for target in (machine_of(seed), machine("h200")):
        made = build(load(case(seed)), target, Options(stop_after="plan", convolution="direct"))
        assert made.program is not None and made.plan is not None
        before = float(price(made.program, made.plan, target).seconds)
        for place in range(1, len(target.levels)):
            for other in better(target.levels[place]):
                levels = (*target.levels[:place], other, *target.levels[place + 1 :])
                assert price(made.program, made.plan, replace(target, levels=levels)).seconds <= before, (place, other)


@pytest.mark.parametrize("name", MACHINES)
def test_equal_trees_cost_the_same(name: str) -> None:
    program, plan = planned(SEEDS[0], name)
    again = Plan.from_json(plan.to_json())
    assert price(program, again, machine(name)).seconds == priced(SEEDS[0], name).seconds


@pytest.mark.parametrize("name", MACHINES)
def test_what_the_search_predicted_is_not_asked(name: str) -> None:
    program, plan = planned(SEEDS[0], name)
    kernels = {k.name: replace(k, estimate=replace(k.estimate, seconds=1.0, busy=1.0)) for k in plan.kernels}
    assert price(program, plan.with_kernels(kernels), machine(name)).seconds == priced(SEEDS[0], name).seconds


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_terms_add_up(seed: int, name: str) -> None:
    found = priced(seed, name)
    assert found.kernels
    for terms in found.kernels.values():
        longest = max(float(terms.compute), *(float(level.seconds) for level in terms.by_level))
        assert terms.compute > 0
        assert longest + terms.waits <= terms.seconds * (1 + 1e-12)
        assert terms.seconds <= (terms.compute + terms.moving + terms.waits) * (1 + 1e-12)
        assert all(level.read >= 0 and level.written >= 0 for level in terms.by_level)


@pytest.mark.parametrize("room, is_more", [(6 << 20, True), (64 << 20, False)])
def test_plans_in_turn_find_what_all_of_them_leave(room: int, is_more: bool) -> None:
    """Two layers with 4 MiB of weights each: the outer cache keeps one of them from run to run, or both."""
    target = machine("emerald_rapids")
    outer = target.shared_cache
    assert outer is not None
    part = replace(outer, capacity=room // outer.shared_by, bandwidth=2 * target.main.bandwidth)
    target = replace(target, levels=tuple(part if level is outer else level for level in target.levels))
    parts = []
    for name in "ab":
        steps = [("MatMul", [f"x{name}", f"w{name}"], f"y{name}", {})]
        constants = {f"w{name}": np.ones((1024, 1024), np.float32)}
        model = model_of(steps, {f"x{name}": (1, 1024)}, {f"y{name}": (1, 1024)}, constants)
        made = build(load(model), target, Options(stop_after="plan"))
        assert made.program is not None and made.plan is not None
        parts.append((made.program, made.plan))
    alone = sum(float(price(*each, target).seconds) for each in parts)
    in_turn = sum(float(each.seconds) for each in price_in_turn(parts, target))
    assert in_turn > 1.2 * alone if is_more else in_turn == pytest.approx(alone, 0.01)


def test_units_that_share_a_level_share_its_rate() -> None:
    level = MemoryLevel("L3", 1 << 20, 64, 10e9, shared_by=8, alone=30e9, write=5e9)
    main = MemoryLevel("DRAM", 1 << 40, 64, 2e9)
    target = replace(machine("emerald_rapids"), units=8, levels=(*machine("emerald_rapids").levels[:3], level, main))
    assert [rate(target, target.levels[3], n) for n in (1, 2, 4, 8)] == [30e9, 30e9, 20e9, 10e9]
    assert rate(target, target.levels[3], 8, writes=True) == 5e9
    terms = level_terms([FoundBytes(), FoundBytes(), FoundBytes(), FoundBytes(80e6), FoundBytes()], target, 8)
    assert float(terms[3].seconds) == pytest.approx(80e6 / 80e9)


def test_what_is_farther_away_is_never_faster() -> None:
    slow = replace(machine("emerald_rapids").levels[3], bandwidth=1e9, alone=1e9)
    base = machine("emerald_rapids")
    target = replace(base, levels=(*base.levels[:3], slow, base.levels[4]))
    assert rate(target, target.levels[3], 1) == rate(target, target.main, 1)


def batch(rows: object, columns: object) -> KernelRun:
    """Tiles of a product of 256 x 256 by 256 that keep a core busy for as long as they have elements."""
    i, j, k = (Axis(name, 256) for name in "ijk")
    places: list[tuple[str, list[list[Expr]], bool, int]] = [
        ("a", [[var(i), var(k)]], False, 0), ("b", [[var(k), var(j)]], False, 0), ("c", [[var(i), var(j)]], True, 1),
    ]  # fmt: skip
    touches = [(touch(name, 4, at, (256, 256), is_store), first) for name, at, is_store, first in places]
    parts = [{i: 1, j: 16, k: 1}, {i: 1, j: 16, k: 256}, {i: rows, j: 16, k: 256}, {i: rows, j: columns, k: 256}]
    trips = [256, rows, columns / 16]  # type: ignore[operator]
    grows = {"j": {j: 256 - columns}, "i": {i: 256 - rows}}  # type: ignore[operator]
    busy = 1e-9 * rows * columns  # type: ignore[operator]
    walk = LeafTrace(parts, trips, touches, grows, {j: 16}, {i: 1, j: 16}, busy=busy)  # type: ignore[arg-type]
    tree = Repeat("i", 256 / rows, [Repeat("j", 256 / columns, [walk])])  # type: ignore[operator]
    tiles = (256 // rows) * (256 // columns)  # type: ignore[operator]
    return KernelRun("k0", tiles, 1, 1, None, "k0", tree, {}, {name: name for name in "abc"})


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids"])
def test_a_batch_of_sizes_is_priced_as_one_by_one(name: str) -> None:
    target = machine(name)
    backend = backend_for(target)
    sizes = [(256, 256), (64, 128), (16, 32), (8, 16)]
    (all_at_once,) = works_of([batch(*(np.array(x) for x in zip(*sizes, strict=True)))], target)
    found = backend.kernel_terms(all_at_once, target)
    for number, (rows, columns) in enumerate(sizes):
        (one,) = works_of([batch(rows, columns)], target)
        alone = float(backend.kernel_terms(one, target).seconds)
        assert np.broadcast_to(found.seconds, 4)[number] == pytest.approx(alone)
    assert len({round(float(x), 12) for x in np.broadcast_to(found.seconds, 4)}) > 1
