"""Program to Plan: maps fused at register level, nests planned, neighbours connected, kernels put in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar

from tilewright.backend import backend_for
from tilewright.backend.protocol import Backend, Choice, StepKernel, StepPlan
from tilewright.errors import InternalError, UnsupportedError
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, reads
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.schedule.connect import Connector, Group, microseconds, readers_of
from tilewright.schedule.constants import ALIKE_WORTH, MOST_REFINED
from tilewright.schedule.fuse import Fused, fuse_registers
from tilewright.schedule.group_cost import GroupCost
from tilewright.schedule.inner_tiles import inner_reason, tiled_again
from tilewright.schedule.launches import Unit, share_launches
from tilewright.schedule.replan import Replanned, Replanner, packed_alone
from tilewright.schedule.tree import in_tree, kernel_tile, with_steps_inside
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.idle import read_by_steps
from tilewright.tile_graph.algebra.in_results import in_results
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.algebra.nest import Nest, build_nest, without_ends
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.plan.form import Estimate, Hold, Leaf, Plan, Tile

_Item = TypeVar("_Item")
Layouts = dict[Tensor, Layout]


@dataclass
class PlannedPart:
    """Computes planned together: the model's own, or the body of one Scan."""

    computes: list[Compute]
    kept: frozenset[Tensor]
    scan: Scan | None = None
    behind: Mapping[Tensor, frozenset[Tensor]] = field(default_factory=dict)  # by what a Scan gives: what it waits for


def make_plan(
    program: Program, target: Target, schedule: str = "connected", streaming: str = "auto", memo: Memo | None = None,
    whole: bool = True, plain: frozenset[str] = frozenset(), hurried: bool = False,
    dear: Mapping[str, float] | None = None, packed: Mapping[str, Layout] | None = None,
) -> Plan:  # fmt: skip
    """`none`: every compute its own kernel; `register`: maps fused; `connected`: tiles shared at every level.

    `memo` is what planning found out about nests before, for the same target. Of a `whole` model chosen
    kernels are refined once more and may share launches; plans that are only compared with each other stay as found.
    Kernels that would store what `plain` names are those of one nest each instead. `hurried`: without ways to be
    compared for little, and without hints, which are text. `dear` is what it is worth not to store some tensors, in
    seconds, beyond what is predicted. `packed` is how constants lie, by name, in a plan that shares them with this one:
    they lie so here too, where that is predicted to cost little.
    """
    backend = backend_for(target)
    program = _without_ends(program) if backend.ends_loops else program
    memo = memo or Memo()
    layouts = {t: memo.layout(layout) for t, layout in program.layouts.items()}
    context = NestContext(target, lambda t: layouts.get(t) or Layout.natural(t.rank), program.constants,
                          frozenset(program.staged), memo, stepped=read_by_steps(program),
                          prefetches=not hurried, hurried=hurried)  # fmt: skip
    planned: list[tuple[PlannedPart, Fused, list[Nest], dict[Nest, Leaf]]] = []
    own: dict[Nest, Sequence[Tensor]] = {}
    for part in parts_of(program):
        apart = context.staged | backend.separate_views(part.computes, context)
        fused = fuse_registers(part.computes, part.kept, target, apart) if schedule != "none" else Fused()
        nests = _nests(part, fused)
        plans: dict[Nest, Leaf] = {}
        for nest in sorted(nests, key=lambda n: n.tensor in context.staged):  # copies last: readers choose their order
            plans[nest], wanted, shared = _plan_packed(nest, context, backend, packed or {})
            layouts.update({**wanted, **shared})
            own[nest] = tuple(wanted)
        planned.append((part, fused, nests, plans))
    context = replace(context, kinds={})  # layouts are settled
    alone = packed_alone(own, program.constants)
    final = dict(layouts)  # with those of leaves that are planned again for their tiles
    settled = context.with_layouts(lambda t: final.get(t) or Layout.natural(t.rank))
    units: list[Unit] = []
    builders: list[_Builder] = []
    for part, fused, nests, plans in planned:
        kept = kept_in_memory(part, context)
        costs = GroupCost(backend, search_context(part, context), plans, kept, readers_of(nests), streaming,
                          part.scan is not None)  # fmt: skip
        connector = Connector(costs, nests, part.behind, dear or {})
        groups = connector.connect() if schedule == "connected" else connector.separate()
        if plain:
            groups = [part for group in groups for part in _taken_apart(group, plain, connector)]
        refused = connector.refusals(groups) if schedule == "connected" else {}
        again = Replanner(costs, alone).replan(groups, MOST_REFINED if whole else 0)
        final.update(again.layouts)
        groups = tiled_again(again.groups, again.leaves, costs, settled, MOST_REFINED if whole else 0)
        builders.append(_Builder(part, fused, costs, refused, backend, settled, again))
        units.extend(builders[-1].units(groups))
    units = _in_order(units)
    if whole and schedule == "connected" and not plain:
        given = frozenset(t.name for t in program.outputs)
        units = _in_order(share_launches(units, given, builders[0].computed_again, backend, target))
    body = in_tree([unit.tile for unit in units], program, target)
    shown = tuple(sorted((t.name, layout) for t, layout in final.items() if not layout.is_natural))
    return Plan(target.name, schedule, body, shown)


def _without_ends(program: Program) -> Program:
    """As kernels run it whose loops end with what there is to reduce."""

    def told(compute: Compute) -> Compute:
        if not isinstance(compute, Reduce):
            return compute
        return replace(compute, elements=tuple(without_ends(e, compute.reduce_axes) for e in compute.elements))

    return replace(program, computes=tuple(map(told, program.computes)))


def _taken_apart(group: Group, plain: frozenset[str], connector: Connector) -> list[Group]:
    """The nests of a group one by one, where one of them gives what is named."""
    if plain.isdisjoint(n.tensor.name for n in group.nests):
        return [group]
    return [connector.group([nest]) for nest in group.nests]


def kept_in_memory(part: PlannedPart, context: NestContext) -> frozenset[Tensor]:
    """What no tile may hold alone: what is read elsewhere, and copies in panels, which are filled up in memory."""
    return part.kept | {t for t in context.staged if any(axis.size is not None for axis in context.layout(t).order)}


def search_context(part: PlannedPart, context: NestContext) -> NestContext:
    """What is known around the nests of a part while they are connected."""
    return context if part.scan is None else replace(context, tiles_outer=False)


def _plan_once(nest: Nest, context: NestContext, backend: Backend) -> Leaf:
    """The plan of a nest; nests that differ in names alone share the work."""
    known = context.memo.plans
    computed = signature([nest], lambda t: (t in context.constants, t in context.staged, context.layout(t)))
    key = (computed, context.weights_fit)
    if key not in known:
        known[key] = backend.plan_leaf(nest, context)
    return known[key].renamed(nest.tensor.name, nest.core, nest.epilogue)


def _plan_packed(
    nest: Nest, context: NestContext, backend: Backend, packed: Mapping[str, Layout]
) -> tuple[Leaf, Layouts, Layouts]:
    """The plan of a nest, the constants that lie as it wants them, and those that lie as is given."""

    def planned(around: NestContext) -> tuple[Leaf, Layouts]:
        leaf = _plan_once(nest, around, backend)
        wanted = backend.constant_layouts(nest, leaf, around)
        return leaf, {t: context.memo.layout(layout) for t, layout in wanted.items()}

    leaf, wanted = planned(context)
    given = {
        t: context.memo.layout(packed[t.name]) for t in nest.reads()
        if t in context.constants and t.name in packed and context.packable(t) and packed[t.name].fits(t)
    }  # fmt: skip
    if all(wanted.get(t) == layout for t, layout in given.items()):
        return leaf, wanted, {}

    def seconds(leaf: Leaf, layouts: Layouts) -> float:
        around = context.with_layouts(lambda t: layouts.get(t) or context.layout(t))
        choice = backend.choose_tile([nest], [leaf], around, frozenset(nest.stores), {})
        return inf if choice is None else choice.seconds

    other, beside = planned(context.with_layouts(lambda t: given.get(t) or context.layout(t)))
    if seconds(other, {**beside, **given}) <= ALIKE_WORTH * seconds(leaf, wanted):
        return other, beside, given
    return leaf, wanted, {}


def predicted_seconds(program: Program, target: Target, schedule: str, memo: Memo | None = None) -> float:
    """The time all kernels of a Program are predicted to take, one after the other, those of a Scan at every step."""
    return plan_seconds(make_plan(program, target, schedule, memo=memo, whole=False), program)


def plan_seconds(plan: Plan, program: Program) -> float:
    """The time a Plan of a Program is predicted to take."""
    steps = _steps_of_scans(program)
    return sum(
        launch.estimate.seconds * (steps[around.scan or ""] if around is not None else 1)
        for launch, around in plan.calls()
    )


def kernel_seconds(plan: Plan, program: Program) -> dict[str, float]:
    """By name, the time that a kernel is predicted to take in a run, in all steps of a Scan."""
    steps = _steps_of_scans(program)
    return {kernel.name: kernel.estimate.seconds * (steps[around.scan or ""] if around is not None else 1)
            for kernel, around in plan.launches()}  # fmt: skip


def _steps_of_scans(program: Program) -> dict[str, int]:
    return {c.outputs[0].name: extent_of(c.axis.extent) for c in program.computes if isinstance(c, Scan)}


def parts_of(program: Program) -> list[PlannedPart]:
    outer = [c for c in program.computes if isinstance(c, Map | Reduce)]
    scans = [c for c in program.computes if isinstance(c, Scan)]
    for compute in program.computes:
        if not isinstance(compute, Map | Reduce | Scan):
            kind = type(compute).__name__
            raise UnsupportedError(f"{compute.origin or compute.outputs[0].name}: {kind} is not compiled yet; "
                                   "cut the model before it, or express it by other operators")  # fmt: skip
    kept = set(program.outputs)
    for scan in scans:
        kept.update(reads(scan))
    parts = [PlannedPart(list(outer), frozenset(kept), behind=_behind(scans))]
    for scan in scans:
        for inner in scan.body:
            if not isinstance(inner, Map | Reduce):
                raise UnsupportedError(f"{scan.origin}: a {type(inner).__name__} inside a Scan is not compiled yet")
        stays = frozenset({*scan.following, *(body for body, _ in scan.stacked)})
        parts.append(PlannedPart(list(scan.body), stays, scan))
    return parts


def _behind(scans: Sequence[Scan]) -> dict[Tensor, frozenset[Tensor]]:
    """By each tensor that Scans give, all that they read, also through each other: those who plan the other computes do
    not see the Scans between them."""
    found: dict[Tensor, frozenset[Tensor]] = {}
    for scan in scans:
        taken = reads(scan)
        whole = frozenset(taken).union(*(found[t] for t in taken if t in found))
        found.update(dict.fromkeys(scan.outputs, whole))
    return found


def _nests(part: PlannedPart, fused: Fused) -> list[Nest]:
    riding = {m.output for chain in fused.epilogues.values() for m in chain}
    nests = []
    for compute in part.computes:
        if isinstance(compute, Map) and (compute.output in riding or compute.output in fused.inlined):
            continue
        chain = fused.epilogues.get(compute.outputs[0], []) if isinstance(compute, Reduce) else []
        nests.append(build_nest(compute, chain, fused.inlined))
    return _topological(nests, part.behind)


def _topological(nests: Sequence[Nest], behind: Mapping[Tensor, frozenset[Tensor]]) -> list[Nest]:
    """An epilogue may read what is computed after its core: order by what is really read."""
    producer = {t: n for n in nests for t in n.stores}
    place = {n: k for k, n in enumerate(nests)}

    def needs(nest: Nest) -> list[Nest]:
        found = [producer[t] for t in nest.reads() if t in producer]
        through = {producer[s] for t in nest.reads() for s in behind.get(t, ()) if s in producer}
        return [*found, *sorted(through.difference(found), key=lambda n: place[n])]

    return _needs_first(nests, needs)


def _needs_first(items: Iterable[_Item], needs: Callable[[_Item], Sequence[_Item]]) -> list[_Item]:
    """The items in the order given, but each after what it needs."""
    done: dict[_Item, None] = {}
    waiting: set[_Item] = set()
    for start in items:
        stack: list[tuple[_Item, bool]] = [(start, False)]
        while stack:
            item, ready = stack.pop()
            if item in done:
                continue
            if ready:
                done[item] = None
                continue
            if item in waiting:
                raise InternalError(f"{item} waits for itself")
            waiting.add(item)
            stack.append((item, True))
            stack.extend((other, False) for other in needs(item) if other not in done)
    return list(done)


@dataclass
class _Builder:
    """Writes the Tiles of one part's kernels."""

    part: PlannedPart
    fused: Fused
    costs: GroupCost
    refused: Mapping[Nest, str]  # by root: why its readers are other kernels
    backend: Backend
    context: NestContext
    again: Replanned
    made: dict[str, Compute] = field(init=False)  # computes of the part by the names of what they give

    def __post_init__(self) -> None:
        self.made = {t.name: c for c in self.part.computes for t in c.outputs}

    def units(self, groups: Sequence[Group]) -> list[Unit]:
        scan = self.part.scan
        if scan is None:
            return [self._unit(group) for group in groups]
        steps = [StepKernel(g.nests, self._leaves(g), self.costs.stored(g.nests), choice_of(g)) for g in groups]
        given, taken = (frozenset(t.name for t in some) for some in (scan.outputs, reads(scan)))
        walked = self.backend.persistent_scan(steps, scan, self.context)
        if walked is not None:
            (group,) = groups
            kernel = self._kernel(Group(group.nests, walked.choice), StepPlan(steps[0].leaves, walked.choice.seconds))
            return [Unit(with_steps_inside(kernel, scan.outputs[0].name, walked), given, taken)]
        planned, keeps = self.backend.plan_steps(steps, scan, self.context)
        kernels = [self._kernel(group, step) for group, step in zip(groups, planned, strict=True)]
        held = tuple(Hold(name, fill="read") for name in keeps)
        level = self.context.target.local.name if keeps else self.context.target.main.name
        tile = Tile(level, over="steps", body=tuple(kernels), holds=held, scan=scan.outputs[0].name)
        return [Unit(tile, given, taken)]

    def _unit(self, group: Group) -> Unit:
        inside = {t for n in group.nests for t in n.stores}
        needs = frozenset(t.name for n in group.nests for t in n.reads() if t not in inside)
        writes = frozenset(t.name for t in self.costs.stored(group.nests))
        return Unit(self._kernel(group, None), writes, needs, group)

    def computed_again(self, feeder: Group, reader: Group) -> Unit | None:
        """The second of two kernels with what it reads of the first computed again; None where it cannot be."""
        nests = list(reader.nests)
        for nest in reversed(feeder.nests):
            if any(t in nest.stores for n in nests for t in n.reads()):
                nests.insert(0, nest)
        stored = self.costs.stored(reader.nests)
        costs = GroupCost(self.backend, self.costs.context, self.costs.plans, stored, {}, "never")
        choice = None if any(costs.plans[n].instruction for n in nests) else costs.cost(nests)
        if choice is None:
            return None
        unit = replace(self, costs=costs, refused={})._unit(Group(nests, choice))
        about = unit.tile.estimate
        reason = f"computes {feeder.nests[-1].tensor.name} again instead of waiting for it; {about.reason}"
        return replace(unit, tile=replace(unit.tile, estimate=replace(about, reason=reason)))

    def _leaves(self, group: Group) -> tuple[Leaf, ...]:
        plans = {**self.costs.plans, **self.again.leaves}
        return tuple(replace(plans[n], composed=tuple(_inlined_by(n, self.made, self.fused))) for n in group.nests)

    def _kernel(self, group: Group, step: StepPlan | None) -> Tile:
        nests, choice = group.nests, choice_of(group)
        stream = self.costs.stream(nests) if choice.block else None
        leaves = self._leaves(group) if step is None else step.leaves
        leaves, lanes = self.backend.finish(nests, leaves, choice, stream, self.context, step is not None)
        seconds = choice.seconds if step is None else step.seconds
        about = Estimate(round(seconds, 9), choice.footprint, self._reason(group),
                         round(choice.busy, 9))  # fmt: skip
        kernel = kernel_tile(
            self.backend.launch, choice.level or self.context.target.local.name, nests, leaves,
            self.costs.stored(nests), stream, choice, lanes, step.prefetched if step else (), about,
        )  # fmt: skip
        if step is None and self.part.scan is None and not self.context.target.copies_tiles:
            kernel = in_results(kernel, nests, self.context.layout)
        return self.backend.bind_units(kernel, nests, leaves, choice, stream, self.context)

    def _reason(self, group: Group) -> str:
        """Why these nests share a kernel, how its leaves differ from those of the nests alone, and why the kernel that
        reads them is another, in the cost model's words."""
        parts = []
        root = group.nests[-1]
        if len(group.nests) > 1:
            alone = [self.costs.cost([n]) for n in group.nests]
            apart = microseconds(sum(c.seconds for c in alone if c is not None))
            joined = f"{microseconds(choice_of(group).seconds)} us against {apart} us as {len(alone)} kernels"
            parts.append(f"joined: the prediction is {joined}")
        if root in self.again.reasons:
            parts.append(self.again.reasons[root])
        if choice_of(group).inner is not None:
            parts.append(inner_reason(group, self.costs))
        if root in self.refused:
            parts.append(f"goes no further: {self.refused[root]}")
        return "; ".join(parts)


def choice_of(group: Group) -> Choice:
    if group.choice is None:
        raise InternalError(f"no tile of {group.nests[-1].tensor.name} fits")
    return group.choice


def _inlined_by(nest: Nest, made: Mapping[str, Compute], fused: Fused) -> list[str]:
    """Maps composed into a nest, found by walking back from what its computes read."""
    found: dict[Tensor, None] = {}
    stack = [made[name] for name in (nest.core, *nest.epilogue)]
    while stack:
        for tensor in reads(stack.pop()):
            if tensor in fused.inlined and tensor not in found:
                found[tensor] = None
                stack.append(fused.inlined[tensor])
    return [t.name for t in found]


def _in_order(units: Sequence[Unit]) -> list[Unit]:
    """Kernels so that each comes after what it reads; those of one Scan stay together."""
    maker = {name: i for i, unit in enumerate(units) for name in unit.writes}

    def before(unit: int) -> list[int]:
        return [maker[n] for n in sorted(units[unit].needs) if n in maker and maker[n] != unit]

    return [units[i] for i in _needs_first(range(len(units)), before)]
