"""A Program with Regions as parts in order: straight ones that are planned by themselves, updates in place, loops and
branches around further parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.ir.forms.compute import Compute, Program, Region, Scatter, reads
from tilewright.ir.forms.tensor import Tensor


@dataclass(frozen=True, eq=False)
class Straight:
    """Computes without control flow."""

    program: Program


@dataclass(frozen=True, eq=False)
class Update:
    """Some elements written into a tensor: where it is, if nobody reads it as it was any more, else into a copy."""

    scatter: Scatter
    in_place: bool


@dataclass(frozen=True, eq=False)
class RegionLoop:
    """A loop: what a step does, and the places of what it carries that steps update where it is."""

    region: Region
    body: Ordered
    in_place: frozenset[int]


@dataclass(frozen=True, eq=False)
class RegionBranches:
    """Two branches, of which one runs."""

    region: Region
    branches: tuple[Ordered, Ordered]


Item = Straight | Update | RegionLoop | RegionBranches


@dataclass(frozen=True, eq=False)
class Ordered:
    """The parts of a Program, or of the body of a Region, in order."""

    program: Program
    items: tuple[Item, ...]


def has_regions(program: Program) -> bool:
    return any(isinstance(c, Region | Scatter) for c in program.computes)


def straight_parts(sequence: Ordered) -> Iterator[Straight]:
    """All of them, inner ones too, in order."""
    for item in sequence.items:
        if isinstance(item, Straight):
            yield item
        elif isinstance(item, RegionLoop):
            yield from straight_parts(item.body)
        elif isinstance(item, RegionBranches):
            for branch in item.branches:
                yield from straight_parts(branch)


def cut(program: Program, carried: int = 0) -> Ordered:
    """The Program in as few parts as there may be, each compute as early as it can be. Its first inputs, `carried` of
    them, take its outputs in the next step."""
    moments = _moments(program.computes)
    free = _overwritten(program, moments, carried)
    items: list[Item] = []
    for moment in sorted(set(moments.values())):
        now = [c for c in program.computes if moments[c] == moment]
        first = now[0]
        if isinstance(first, Region) and first.kind == "loop":
            body = cut(first.branches[0], len(first.outputs))
            items.append(RegionLoop(first, body, frozenset(_in_place(body))))
        elif isinstance(first, Region):
            then, otherwise = first.branches
            items.append(RegionBranches(first, (cut(then), cut(otherwise))))
        elif isinstance(first, Scatter):
            items.append(Update(first, first in free))
        else:
            items.append(Straight(_part(program, now)))
    return Ordered(program, tuple(items))


def _moments(computes: Sequence[Compute]) -> dict[Compute, int]:
    """When each runs: Regions and Scatters one by one at odd moments, all others together at even ones."""
    ready: dict[Tensor, int] = {}  # the earliest even moment at which a tensor can be read
    moments: dict[Compute, int] = {}
    special = 0
    for compute in computes:
        if isinstance(compute, Region | Scatter):
            moments[compute] = 2 * special + 1
            special += 1
        else:
            moments[compute] = max((ready.get(t, 0) for t in reads(compute)), default=0)
        at = moments[compute]
        ready.update(dict.fromkeys(compute.outputs, at + at % 2))
    return moments


def _overwritten(program: Program, moments: Mapping[Compute, int], carried: int) -> set[Scatter]:
    """Scatters that write where their tensor is: what they change is made here, or handed on from step to step by them
    alone, and nobody reads it as it was any more."""
    makers = program.producers()
    last: dict[Tensor, int] = {}
    for compute in program.computes:
        for tensor in reads(compute):
            last[tensor] = max(last.get(tensor, 0), moments[compute])
    found: set[Scatter] = set()
    for compute in program.computes:
        if not isinstance(compute, Scatter) or compute.initial in program.outputs:
            continue
        is_last = last[compute.initial] == moments[compute]
        if is_last and compute.initial in makers:
            found.add(compute)
    for state, following in zip(program.inputs[:carried], program.outputs, strict=False):
        chain = _chain(makers, following, state)
        if chain and last[state] == moments[chain[-1]] and found.issuperset(chain[:-1]):
            found.add(chain[-1])
    return found


def _chain(makers: Mapping[Tensor, Compute], following: Tensor, state: Tensor) -> list[Scatter]:
    """The Scatters that make a state's next value of it, the last one first; none where there is more to it."""
    chain: list[Scatter] = []
    tensor = following
    while tensor is not state:
        maker = makers.get(tensor)
        if not isinstance(maker, Scatter):
            return []
        chain.append(maker)
        tensor = maker.initial
    return chain


def _in_place(body: Ordered) -> Iterator[int]:
    """States whose next value is where the old one was."""
    free = {item.scatter for item in body.items if isinstance(item, Update) and item.in_place}
    makers = body.program.producers()
    for place, (state, following) in enumerate(zip(body.program.inputs, body.program.outputs, strict=False)):
        chain = _chain(makers, following, state)
        if chain and free.issuperset(chain):
            yield place


def _part(program: Program, computes: Sequence[Compute]) -> Program:
    """Some computes of a Program, with what the others read of them as outputs."""
    own = set(computes)
    made = {t: None for c in computes for t in c.outputs}
    read = dict.fromkeys(t for c in computes for t in reads(c))
    wanted = {t for c in program.computes if c not in own for t in reads(c)} | set(program.outputs)
    return Program(
        inputs=tuple(t for t in read if t not in made and t not in program.constants),
        outputs=tuple(t for t in made if t in wanted),
        computes=tuple(computes),
        constants={t: a for t, a in program.constants.items() if t in read},
    )
