"""Program to Plan: maps fused at register level, nests planned, neighbours connected, kernels put in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tilewright.errors import InternalError, UnsupportedError
from tilewright.ir.compute import Compute, Map, Program, Reduce, Scan, reads
from tilewright.ir.tensor import Layout, Tensor
from tilewright.schedule.ahead import asked_ahead
from tilewright.schedule.apart import views_apart
from tilewright.schedule.connect import Connector, Group, microseconds
from tilewright.schedule.context import NestContext
from tilewright.schedule.fuse import Fused, fuse_registers
from tilewright.schedule.gpu import finish_gpu
from tilewright.schedule.idle import idle_step
from tilewright.schedule.memo import Memo
from tilewright.schedule.nest import Nest, build_nest
from tilewright.schedule.panels import constant_layouts
from tilewright.schedule.plan import EdgePlan, KernelPlan, NestPlan, Plan
from tilewright.schedule.propagate import extent_of
from tilewright.schedule.select import select_plan
from tilewright.schedule.signature import signature
from tilewright.schedule.steps import (
    StepKernel,
    asked_early,
    is_walked_to_and_fro,
    kept_near,
    read_by_steps,
    step_seconds,
)
from tilewright.schedule.tile import Choice
from tilewright.target import Target

_JUST_BEFORE = 2  # kernels before a Scan that may bring its weights near: not more than what they bring stays
_UNHURRIED = 4  # times as long as the tile level takes to fill: so slowly nothing else is disturbed

_Item = TypeVar("_Item")


@dataclass
class _Part:
    """Computes planned together: the model's own, or the body of one Scan."""

    computes: list[Compute]
    kept: frozenset[Tensor]
    scan: Scan | None = None


def make_plan(
    program: Program, target: Target, schedule: str = "connected", streaming: str = "auto", memo: Memo | None = None
) -> Plan:
    """`none`: every compute its own kernel; `register`: maps fused; `connected`: tiles shared at every level.

    `memo` is what planning found out about nests before, for the same target.
    """
    layouts = dict(program.layouts)
    context = NestContext(target, lambda t: layouts.get(t) or Layout.natural(t.rank), program.constants,
                          frozenset(program.staged), memo or Memo(), stepped=read_by_steps(program))  # fmt: skip
    parts = _parts(program)
    planned: list[tuple[_Part, Fused, list[Nest], dict[Nest, NestPlan]]] = []
    for part in parts:
        apart = context.staged | views_apart(part.computes, context)
        fused = fuse_registers(part.computes, part.kept, target, apart) if schedule != "none" else Fused()
        nests = _nests(part, fused)
        plans: dict[Nest, NestPlan] = {}
        for nest in sorted(nests, key=lambda n: n.tensor in context.staged):  # copies last: readers choose their order
            plans[nest] = _plan_once(nest, context)
            layouts.update(constant_layouts(nest, plans[nest], context))
        planned.append((part, fused, nests, plans))
    kernels: list[tuple[KernelPlan, set[str], set[str]]] = []
    for part, fused, nests, plans in planned:
        connector = Connector(context, plans, part.kept, streaming=streaming, repeated=part.scan is not None)
        groups = connector.connect(nests, joining=schedule == "connected")
        made = [_kernel(group, part, fused, plans, connector, target) for group in groups]
        if part.scan is not None:
            stored = [connector.stored(g.nests) for g in groups]
            repeated = _repeated([plan for plan, _, _ in made], groups, stored, part.scan, context)
            steps = [StepKernel(g.nests, p.nests, kept, choice_of(g))
                     for p, g, kept in zip(repeated, groups, stored, strict=True)]  # fmt: skip
            keeps = kept_near(steps, context)
            made = [(replace(plan, keeps=keeps), writes, needs)
                    for plan, (_, writes, needs) in zip(repeated, made, strict=True)]  # fmt: skip
        kernels.extend(made)
    ordered = _warming(_in_order(program, parts, kernels), target)
    names = [replace(k, name=f"k{i}") for i, k in enumerate(ordered)]
    shown = tuple(sorted((t.name, layout) for t, layout in layouts.items() if not layout.is_natural))
    return Plan(target.name, schedule, tuple(names), shown)


def _plan_once(nest: Nest, context: NestContext) -> NestPlan:
    """The plan of a nest; nests that differ in names alone share the work."""
    known = context.memo.plans
    key = signature([nest], lambda t: (t in context.constants, t in context.staged, context.layout(t)))
    if key not in known:
        known[key] = select_plan(nest, context)
    return replace(known[key], tensor=nest.tensor.name, core=nest.core, epilogue=nest.epilogue)


def predicted_seconds(program: Program, target: Target, schedule: str, memo: Memo | None = None) -> float:
    """The time all kernels of a Program are predicted to take, one after the other, those of a Scan at every step."""
    steps = {c.outputs[0].name: extent_of(c.axis.extent) for c in program.computes if isinstance(c, Scan)}
    plan = make_plan(program, target, schedule, memo=memo)
    return sum(k.predicted_seconds * (steps[k.scan] if k.scan is not None else 1) for k in plan.kernels)


def _parts(program: Program) -> list[_Part]:
    outer = [c for c in program.computes if isinstance(c, Map | Reduce)]
    scans = [c for c in program.computes if isinstance(c, Scan)]
    for compute in program.computes:
        if not isinstance(compute, Map | Reduce | Scan):
            kind = type(compute).__name__
            raise UnsupportedError(f"{compute.origin or compute.outputs[0].name}: {kind} is not compiled yet; "
                                   "cut the model before it, or express it by other operators")  # fmt: skip
    # copies stay in memory: made anew for every tile, or streamed, they would cost more than they save
    kept = {*program.outputs, *program.staged}
    for scan in scans:
        kept.update(reads(scan))
    parts = [_Part(list(outer), frozenset(kept))]
    for scan in scans:
        for inner in scan.body:
            if not isinstance(inner, Map | Reduce):
                raise UnsupportedError(f"{scan.origin}: a {type(inner).__name__} inside a Scan is not compiled yet")
        stays = frozenset({*scan.following, *(body for body, _ in scan.stacked)})
        parts.append(_Part(list(scan.body), stays, scan))
    return parts


def _nests(part: _Part, fused: Fused) -> list[Nest]:
    riding = {m.output for chain in fused.epilogues.values() for m in chain}
    nests = []
    for compute in part.computes:
        if isinstance(compute, Map) and (compute.output in riding or compute.output in fused.inlined):
            continue
        chain = fused.epilogues.get(compute.outputs[0], []) if isinstance(compute, Reduce) else []
        nests.append(build_nest(compute, chain, fused.inlined))
    return _topological(nests)


def _topological(nests: Sequence[Nest]) -> list[Nest]:
    """An epilogue may read what is computed after its core: order by what is really read."""
    producer = {t: n for n in nests for t in n.stores}
    return _needs_first(nests, lambda nest: [producer[t] for t in nest.reads() if t in producer])


def _needs_first(items: Iterable[_Item], needs: Callable[[_Item], Sequence[_Item]]) -> list[_Item]:
    """The items in the order given, but each after what it needs."""
    done: dict[_Item, None] = {}
    for start in items:
        stack: list[tuple[_Item, bool]] = [(start, False)]
        while stack:
            item, ready = stack.pop()
            if item in done:
                continue
            if ready:
                done[item] = None
                continue
            stack.append((item, True))
            stack.extend((other, False) for other in needs(item) if other not in done)
    return list(done)


def _kernel(
    group: Group, part: _Part, fused: Fused, plans: Mapping[Nest, NestPlan], connector: Connector, target: Target
) -> tuple[KernelPlan, set[str], set[str]]:
    stored = connector.stored(group.nests)
    nest_plans = tuple(
        replace(plans[n], level="DRAM" if any(t in stored for t in n.stores) else target.tile_level.name)
        for n in group.nests
    )
    if part.scan is None and choice_of(group).stream is None:
        root, sizes = group.nests[-1], dict(choice_of(group).tile)
        tile = {a: sizes.get(f"o{i}", extent_of(a.extent)) for i, a in enumerate(root.axes)}
        ahead = int(asked_ahead(root, plans[root], tile, connector.context))
        nest_plans = (*nest_plans[:-1], replace(nest_plans[-1], ahead=ahead))
    edges = [
        EdgePlan(t.name, target.tile_level.name, "store") for n in group.nests[:-1] for t in n.stores if t not in stored
    ]
    if choice_of(group).stream is not None:
        edges = [replace(e, mode="stream") for e in edges]
    used = _inlined_by(group.nests, part, fused)
    edges += [EdgePlan(name, "registers", "recompute") for name in used]
    choice = choice_of(group)
    inside = {t for n in group.nests for t in n.stores}
    plan = KernelPlan(
        "", (group.nests[-1].tensor.name,), choice.tile, nest_plans, tuple(edges),
        scan=part.scan.outputs[0].name if part.scan else None, predicted_seconds=round(choice.seconds, 9),
        traffic=(("DRAM", choice.traffic),), footprint=choice.footprint, tiles=choice.tiles,
        stream=choice.stream, reason=_reason(group, connector),
    )  # fmt: skip
    if target.kind == "gpu":
        plan = finish_gpu(plan, group.nests)
    return plan, {t.name for t in stored}, {t.name for n in group.nests for t in n.reads() if t not in inside}


def _repeated(
    plans: Sequence[KernelPlan], groups: Sequence[Group], stored: Sequence[frozenset[Tensor]], scan: Scan,
    context: NestContext,
) -> list[KernelPlan]:  # fmt: skip
    """The plans of a Scan's step know that the step before left the caches warm."""
    turned = []
    for plan, group in zip(plans, groups, strict=True):
        walked = [is_walked_to_and_fro(nest, context) for nest in group.nests]
        values = context.constants if context.target.kind == "cpu" and isinstance(context.constants, Mapping) else {}
        idle = [idle_step(nest, scan, values) for nest in group.nests]
        nests = tuple(replace(p, alternate=w, idle=r) for p, w, r in zip(plan.nests, walked, idle, strict=True))
        early = asked_early(group.nests, plan.tile, scan, context)
        turned.append(replace(plan, nests=nests, prefetch=early))
    parts = zip(turned, groups, stored, strict=True)
    times = step_seconds([StepKernel(g.nests, p.nests, kept, choice_of(g)) for p, g, kept in parts], scan, context)
    return [replace(p, predicted_seconds=round(t, 9)) for p, t in zip(turned, times, strict=True)]


def _warming(kernels: list[KernelPlan], target: Target) -> list[KernelPlan]:
    """A kernel that computes for long before a Scan starts brings the Scan's weights near on the way."""
    result = list(kernels)
    unhurried = _UNHURRIED * target.tile_level.capacity / target.main.bandwidth
    for place, kernel in enumerate(kernels):
        if not kernel.keeps:
            continue
        for earlier in range(place - 1, max(-1, place - 1 - _JUST_BEFORE), -1):
            before = result[earlier]
            if before.scan is not None:
                break
            is_sum = any(axis.startswith("r") for axis in before.nests[0].order) and before.stream is None
            # tiles in order and no more than a worker takes at a time: each part goes to the worker that needs it
            fits = before.tiles in (kernel.tiles, 2 * kernel.tiles)
            if is_sum and fits and before.predicted_seconds > unhurried:
                result[earlier] = replace(before, warms=kernel.keeps)
                break
    return result


def _reason(group: Group, connector: Connector) -> str:
    """Why these nests share a kernel, and why the kernel that reads them is another, in the cost model's words."""
    parts = []
    if len(group.nests) > 1:
        alone = [connector.cost([n]) for n in group.nests]
        apart = microseconds(sum(c.seconds for c in alone if c is not None))
        joined = f"{microseconds(choice_of(group).seconds)} us against {apart} us as {len(alone)} kernels"
        parts.append(f"joined: the prediction is {joined}")
    refusal = connector.refused.get(group.nests[-1])
    if refusal is not None:
        parts.append(f"goes no further: {refusal}")
    return "; ".join(parts)


def choice_of(group: Group) -> Choice:
    if group.choice is None:
        raise InternalError(f"no tile of {group.nests[-1].tensor.name} fits")
    return group.choice


def _inlined_by(nests: Sequence[Nest], part: _Part, fused: Fused) -> list[str]:
    """Maps composed into these nests, found by walking back from what their computes read."""
    by_output = {t: c for c in part.computes for t in c.outputs}
    by_name = {t.name: t for t in by_output}
    found: dict[Tensor, None] = {}
    stack = [by_output[by_name[name]] for n in nests for name in (n.core, *n.epilogue)]
    while stack:
        for tensor in reads(stack.pop()):
            if tensor in fused.inlined and tensor not in found:
                found[tensor] = None
                stack.append(fused.inlined[tensor])
    return [t.name for t in found]


def _in_order(
    program: Program, parts: Sequence[_Part], kernels: Sequence[tuple[KernelPlan, set[str], set[str]]]
) -> list[KernelPlan]:
    """Kernels so that each comes after what it reads; those of one Scan stay together."""
    units: list[tuple[list[KernelPlan], set[str], set[str]]] = []
    by_scan: dict[str, tuple[list[KernelPlan], set[str], set[str]]] = {}
    scans = {c.outputs[0].name: c for c in program.computes if isinstance(c, Scan)}
    for plan, writes, needs in kernels:
        if plan.scan is None:
            units.append(([plan], writes, needs))
            continue
        if plan.scan not in by_scan:
            scan = scans[plan.scan]
            by_scan[plan.scan] = ([], {t.name for t in scan.outputs}, {t.name for t in reads(scan)})
            units.append(by_scan[plan.scan])
        by_scan[plan.scan][0].append(plan)
    maker = {name: i for i, (_, writes, _) in enumerate(units) for name in writes}

    def before(unit: int) -> list[int]:
        return [maker[n] for n in sorted(units[unit][2]) if n in maker and maker[n] != unit]

    return [plan for i in _needs_first(range(len(units)), before) for plan in units[i][0]]
