"""Plans of a task: the planner's own, those that it would choose for machines that lean another way, kernels taken
apart or walked otherwise, and variants of single kernels as tuning makes them, near the top and at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.judge.decisions import differences
from bench.judge.programs import Form
from tilewright.backend import backend_for
from tilewright.backend.cpu.kernel.variants import CpuVariants, run_another_way
from tilewright.backend.protocol import Choice
from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan
from tilewright.target import Target
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune.groups import KernelGroup, find_groups, with_choices
from tilewright.tune.parts import bare
from tilewright.tune.records import RecordPair
from tilewright.tune.structures import structures

_STRUCTURES = 5  # plans that differ in more than variants of kernels, at most


@dataclass(frozen=True)
class Tried:
    """A Plan of one of a task's forms, and the pairs it makes with plans before it or after it."""

    form: int
    plan: Plan
    pairs: tuple[RecordPair, ...] = ()


def plans_of(forms: Sequence[Form], target: Target, count: int, rng: np.random.Generator, task: str) -> list[Tried]:
    """Up to so many plans, the planner's own first."""
    own = [_sound(_planned(form.program, target), form.program, target) for form in forms]
    if own[0] is None:
        return []
    found = [Tried(number, plan) for number, plan in enumerate(own) if plan is not None]
    program = forms[0].program
    known = {tried.plan for tried in found if tried.form == 0}
    others = _different(map(bare, structures(program, own[0], target)), known)
    for plan in _first(others, program, target, _STRUCTURES):
        found.append(Tried(0, plan))
    variants = _different(_kernel_variants(program, own[0], target, count, rng), known)
    for plan in _first(variants, program, target, count - len(found)):
        found.append(Tried(0, plan))
    return with_pairs(found[:count], forms, task)


def with_pairs(found: Sequence[Tried], forms: Sequence[Form], task: str) -> list[Tried]:
    """Each plan beside the earliest before it that differs from it in one decision."""
    pairs: list[list[RecordPair]] = [[] for _ in found]
    for later, tried in enumerate(found):
        for earlier in range(later):
            decision = _one_decision(found[earlier], tried, forms)
            if decision is not None:
                pair = RecordPair(f"{task} #{later}", decision)
                pairs[earlier].append(pair)
                pairs[later].append(pair)
                break
    return [replace(tried, pairs=tuple(some)) for tried, some in zip(found, pairs, strict=True)]


def _one_decision(one: Tried, other: Tried, forms: Sequence[Form]) -> str | None:
    if one.form == other.form:
        found = differences(one.plan, other.plan)
        return next(iter(found)) if len(found) == 1 else None
    # the plans that are the planner's own of two forms come first, one each
    form = forms[other.form]
    return form.decision if form.beside == one.form and other.form != 0 else None


def _planned(program: Program, target: Target) -> Plan | None:
    try:
        return bare(make_plan(program, target))
    except InternalError:
        return None  # a mistake of the planner's: others find it


def _kernel_variants(
    program: Program, own: Plan, target: Target, count: int, rng: np.random.Generator
) -> Iterator[Plan | None]:
    """One kernel of the plan run another way, kernels in turn."""
    groups = find_groups(program, own, target)
    ways = [iter(_ways(group, target, count, rng)) for group in groups]
    left = list(zip(groups, ways, strict=True))
    while left:
        for group, some in list(left):
            tile = next(some, None)
            if tile is None:
                left.remove((group, some))
            else:
                yield _changed(program, own, group, tile)


def _changed(program: Program, own: Plan, group: KernelGroup, tile: Tile) -> Plan | None:
    try:
        return bare(with_choices(program, own, [(group, tile)]))
    except (InternalError, KeyError, ValueError):
        return None


def _ways(group: KernelGroup, target: Target, count: int, rng: np.random.Generator) -> list[Tile]:
    """Kernels in which one decision changed, those predicted best, and random ones, mixed."""
    variants = group.variants[0]
    if not isinstance(variants, CpuVariants):
        near = variants.best(4 * count)
        drawn = [near[i] for i in rng.permutation(len(near))]
        return _mixed(near[:count], drawn)
    kernel = variants.kernel
    choices = variants.choices()
    leaves = [choices[i] for i in rng.permutation(len(choices))[:count]]
    streamed = kernel.stream is not None
    same = Choice(kernel.cut, 0.0, 0, 0, level=kernel.level)
    nests, layout = variants.nests, variants.context.layout
    others = [some for some in leaves if some != kernel.leaves]
    one = [kernel.with_leaves({leaf.tensor: leaf for leaf in some}) if streamed or _has_inner(kernel)
           else run_another_way(kernel, some, same, nests, layout) for some in others]  # fmt: skip
    tiles = [] if streamed else variants.tiled(kernel.leaves)
    cut = [tiles[i] for i in rng.permutation(len(tiles))[:count]]
    return _mixed(one, tiles[:3] + cut, variants.best(max(2, count // 3)), variants.random(max(2, count // 3), rng))


def _has_inner(kernel: Tile) -> bool:
    return any(isinstance(n, Tile) and n.sizes for n in kernel.body)


def _mixed(*lists: Sequence[Tile]) -> list[Tile]:
    longest = max(map(len, lists), default=0)
    return [some[i] for i in range(longest) for some in lists if i < len(some)]


def _different(plans: Iterator[Plan | None], known: set[Plan]) -> Iterator[Plan]:
    for plan in plans:
        if plan is not None and plan not in known:
            known.add(plan)
            yield plan


def _first(plans: Iterator[Plan], program: Program, target: Target, count: int) -> Iterator[Plan]:
    made = 0
    for plan in plans:
        if made >= count:
            return
        if _sound(plan, program, target) is not None:
            made += 1
            yield plan


def _sound(plan: Plan | None, program: Program, target: Target) -> Plan | None:
    """The plan where its grammar holds and it can be lowered."""
    if plan is None:
        return None
    try:
        check_plan(plan, program, target)
        loops = lower_program(program, plan, backend_for(target).lower_kernel)
        backend_for(target).check_limits(loops, target)
    except InternalError:
        return None
    return plan
