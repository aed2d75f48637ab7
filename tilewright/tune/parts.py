"""Parts of a model: some of its kernels cut out as a Program with a Plan of its own, and put back another way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program, Scan, all_computes, reads
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.ir.text.text import program_text
from tilewright.schedule.tree import in_tree
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Estimate, Leaf, Plan, Tile
from tilewright.tune.records import digest


def cut_out(
    program: Program, kernels: Sequence[Tile], scans: frozenset[str] = frozenset(),
    beside: frozenset[Tensor] = frozenset(),
) -> Program:  # fmt: skip
    """The computes of some kernels, and Scans of these names, alone: what they read becomes inputs, and what others
    read of them outputs; `beside` is read by kernels that compute some of the same again."""
    names = {name for k in kernels for leaf in k.leaves for name in (leaf.core, *leaf.epilogue, *leaf.composed)}
    computes = all_computes(program)
    wanted = {computes[name] for name in names}
    ordered = tuple(c for c in program.computes if c in wanted or c.outputs[0].name in scans)
    inside = {t for c in ordered for t in c.outputs}
    outer = dict.fromkeys(t for c in ordered for t in reads(c) if t not in inside)
    stored = {leaf.tensor for k in kernels for leaf in k.leaves}
    read = {t for c in program.computes if c not in ordered for t in reads(c)} | set(program.outputs) | beside
    used = {t for c in ordered for t in reads(c)}
    of_scans = {t for c in ordered if isinstance(c, Scan) for t in c.outputs}
    outputs = tuple(t for c in ordered for t in c.outputs
                    if t not in used or (t in read and (t.name in stored or t in of_scans)))  # fmt: skip
    bodies = {t for c in ordered if isinstance(c, Scan) for inner in c.body for t in (*inner.outputs, *reads(inner))}
    present = {*inside, *outer, *bodies}
    return Program(
        tuple(t for t in outer if t not in program.constants), outputs, ordered,
        {t: program.constants[t] for t in outer if t in program.constants},
        {t: layout for t, layout in program.layouts.items() if t in present},
        staged=tuple(t for t in program.staged if t in present),
    )  # fmt: skip


@dataclass(frozen=True)
class TunedPart:
    """Kernels of a model's Plan, by name, as a Program without the values of its weights, and how they are planned."""

    kernels: tuple[str, ...]
    program: Program
    own: Plan

    @cached_property
    def text(self) -> str:
        return program_text(self.program)

    @cached_property
    def task(self) -> str:
        """What is computed and how it is planned: other plans are compared with that one."""
        return digest(self.text + plan_key(self.own))

    @cached_property
    def tensors(self) -> frozenset[str]:
        """What its leaves store."""
        return frozenset(leaf.tensor for kernel in self.own.kernels for leaf in kernel.leaves)


def part_of(program: Program, plan: Plan, kernels: Iterable[str], target: Target) -> TunedPart:
    """Kernels with all that they share a Scan or a launch with."""
    chosen = [unit for unit in units_of(plan) if not set(kernels).isdisjoint(_names(unit))]
    scans = frozenset(unit.scan for unit in chosen if unit.over == "steps" and unit.scan is not None)
    inside = [k for unit in chosen for k in kernels_of(unit)]
    names = {k.name for k in inside}
    beside = _read_by([k for k in plan.kernels if k.name not in names], program)
    alone = cut_out(program, [k for unit in chosen if unit.over != "steps" for k in kernels_of(unit)], scans, beside)
    alone = replace(alone, constants={t: np.broadcast_to(np.zeros((), t.dtype.numpy), a.shape)
                                      for t, a in alone.constants.items()})  # fmt: skip
    return TunedPart(tuple(k.name for k in inside), alone, planned(alone, plan, chosen, target))


def _read_by(kernels: Sequence[Tile], program: Program) -> frozenset[Tensor]:
    computes = all_computes(program)
    inside = {name for k in kernels for leaf in k.leaves for name in (leaf.core, *leaf.epilogue, *leaf.composed)}
    return frozenset(t for name in inside for t in reads(computes[name]))


def planned(program: Program, plan: Plan, units: Sequence[Tile], target: Target) -> Plan:
    """Units of a Plan as one of these computes alone, without what was predicted and said."""
    known = {t.name for t in (*program.tensors(), *program.constants)}
    known |= {t.name for c in all_computes(program).values() for t in (*c.outputs, *reads(c))}
    layouts = tuple((name, layout) for name, layout in plan.layouts if name in known)
    body = in_tree([_loose(unit, target) for unit in units], program, target)
    return bare(Plan(plan.target, plan.schedule, body, layouts))


def units_of(plan: Plan) -> list[Tile]:
    """What is put in order as a whole: kernels, launches that kernels share, and the steps of Scans."""
    found: list[Tile] = []

    def below(tile: Tile) -> None:
        for node in tile.body:
            if not isinstance(node, Tile):
                continue
            if node.is_kernel or node.is_launch or node.over == "steps":
                found.append(node)
            else:
                below(node)

    below(plan.body)
    return found


def kernels_of(unit: Tile) -> list[Tile]:
    """Those that a unit starts."""
    return [unit] if unit.is_kernel else [k for k in unit.body if isinstance(k, Tile)]


def _names(unit: Tile) -> set[str]:
    return {k.name for k in kernels_of(unit)}


def _loose(unit: Tile, target: Target) -> Tile:
    """A unit as it was before it had a place in a tree: what depends on its neighbours is found anew."""
    if unit.is_kernel:
        return unit
    holds = tuple(replace(h, fill="read", issue=None) if h.issue is not None else h for h in unit.holds)
    outer = target.shared_cache.name if target.shared_cache is not None else None
    return replace(unit, holds=holds, level=target.main.name if unit.level == outer else unit.level)


@dataclass(frozen=True)
class Edit:
    """Kernels in the place of others, and how constants lie for them; a layout of None is the Program's own."""

    out: frozenset[str]  # names of kernels
    into: tuple[Tile, ...]
    layouts: Mapping[str, Layout | None]

    @property
    def is_one_for_one(self) -> bool:
        return len(self.out) == len(self.into) == 1


def edited(program: Program, plan: Plan, target: Target, edits: Sequence[Edit]) -> Plan:
    """The plan with these edits, none of which touches what another does."""
    if all(edit.is_one_for_one for edit in edits):
        return replaced(program, plan, edits)
    gone = {name for edit in edits for name in edit.out}
    kept = [_loose(unit, target) for unit in units_of(plan) if gone.isdisjoint(_names(unit))]
    units = _in_order([*kept, *(tile for edit in edits for tile in edit.into)], program)
    return replace(_packed(program, plan, edits), body=in_tree(units, program, target))


def replaced(program: Program, plan: Plan, edits: Sequence[Edit]) -> Plan:
    """The plan with kernels in the places of others, one for one."""
    kernels = {name: replace(edit.into[0], name=name) for edit in edits for name in edit.out}
    return _packed(program, plan, edits).with_kernels(kernels)


def _packed(program: Program, plan: Plan, edits: Sequence[Edit]) -> Plan:
    own = {t.name: layout for t, layout in program.layouts.items()}
    layouts = dict(plan.layouts)
    for name, layout in (item for edit in edits for item in edit.layouts.items()):
        chosen = own.get(name) if layout is None else layout
        layouts.pop(name, None)
        if chosen is not None and not chosen.is_natural:
            layouts[name] = chosen
    return replace(plan, layouts=tuple(sorted(layouts.items())))


def _in_order(units: Sequence[Tile], program: Program) -> list[Tile]:
    """Each after those that it reads from, otherwise in the order of what the Program computes."""
    place = {t.name: i for i, c in enumerate(program.computes) for t in c.outputs}
    last = [max((place.get(name, 0) for name in writes), default=0) for writes, _ in _ports(units, program)]
    before = feeders_of(units, program)
    done: dict[int, None] = {}
    waiting = sorted(range(len(units)), key=last.__getitem__)
    while waiting:
        ready = next((i for i in waiting if all(feeder in done for feeder in before[i])), None)
        if ready is None:
            raise InternalError("kernels of a plan wait for each other")
        done[ready] = None
        waiting.remove(ready)
    return [units[i] for i in done]


def feeders_of(units: Sequence[Tile], program: Program) -> list[frozenset[int]]:
    """By unit: those that it reads from, by number."""
    ports = _ports(units, program)
    writer = {name: number for number, (writes, _) in enumerate(ports) for name in writes}
    return [frozenset(writer[name] for name in needs if name in writer) - {number}
            for number, (_, needs) in enumerate(ports)]  # fmt: skip


def _ports(units: Sequence[Tile], program: Program) -> list[tuple[set[str], set[str]]]:
    """What each unit writes and needs, by name."""
    computes = all_computes(program)
    scans = {c.outputs[0].name: c for c in program.computes if isinstance(c, Scan)}
    found = []
    for unit in units:
        if unit.over == "steps":
            scan = scans[unit.scan or ""]
            found.append(({t.name for t in scan.outputs}, {t.name for t in reads(scan)}))
            continue
        inside = {name for k in kernels_of(unit) for leaf in k.leaves
                  for name in (leaf.core, *leaf.epilogue, *leaf.composed)}  # fmt: skip
        made = {t.name for name in inside for t in computes[name].outputs}
        stored = [leaf.tensor for k in kernels_of(unit) for leaf in k.leaves
                  if leaf.tensor not in k.held and leaf.part != "copy"]  # fmt: skip
        writes = {t.name for name in stored for t in computes[name].outputs}
        found.append((writes, {t.name for name in inside for t in reads(computes[name])} - made))
    return found


def bare(plan: Plan) -> Plan:
    """The Plan without what was predicted of it and said about it."""
    return replace(plan, body=_bare(plan.body))


def _bare(tile: Tile) -> Tile:
    body = tuple(_bare(n) if isinstance(n, Tile) else n for n in tile.body)
    return replace(tile, body=body, estimate=Estimate())


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan of equal computes by their names."""

    def new(name: str) -> str:
        return names.get(name, name)

    def leaf(one: Leaf) -> Leaf:
        return replace(one, tensor=new(one.tensor), core=new(one.core), epilogue=tuple(map(new, one.epilogue)),
                       composed=tuple(map(new, one.composed)))  # fmt: skip

    def tile(one: Tile) -> Tile:
        body = tuple(tile(n) if isinstance(n, Tile) else leaf(n) if isinstance(n, Leaf) else n for n in one.body)
        axes = tuple(replace(a, binds=tuple(replace(b, tensor=new(b.tensor)) for b in a.binds)) for a in one.axes)
        holds = tuple(replace(h, tensor=new(h.tensor), within=None if h.within is None else new(h.within))
                      for h in one.holds)  # fmt: skip
        return replace(one, body=body, axes=axes, holds=holds, scan=None if one.scan is None else new(one.scan))

    layouts = tuple(sorted((new(name), layout) for name, layout in plan.layouts))
    return replace(plan, body=tile(plan.body), layouts=layouts)


def plan_key(plan: Plan) -> str:
    """Tells plans of one part apart."""
    return digest(json.dumps(json.loads(bare(plan).to_json()), sort_keys=True))
