"""What steps of a Scan need not wait for: counters are numbers of the step, tensors of which each step writes the part
that is its own are stacked, and sums that depend on no step before are taken for all steps at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, reads
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    all_of,
    const,
    is_op,
    load,
    loads,
    lt,
    rewrite,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.transform.recurrence.updates import places_written

_KEPT = 1 << 26  # bytes of one sum for all steps that are kept at most


def without_counters(program: Program) -> Program:
    """The Program with Scans that carry less; those that carry as much as before are the same."""
    constants = program.constants
    changed = False
    computes: list[Compute] = []
    for compute in program.computes:
        if isinstance(compute, Scan) and not compute.reverse and all(isinstance(c, Map | Reduce) for c in compute.body):
            scan, behind = _counters(compute, constants)
            scan, more = _stacked(scan, constants)
            scan, ahead = _at_once(scan)
            computes += [*ahead, scan, *behind, *more]
            changed |= scan is not compute
        else:
            computes.append(compute)
    return replace(program, computes=tuple(computes)) if changed else program


def _counters(scan: Scan, constants: Mapping[Tensor, np.ndarray]) -> tuple[Scan, list[Compute]]:
    """Whole numbers that every step adds the same to, as functions of the step."""
    makers = {c.output: c for c in scan.body if isinstance(c, Map)}
    told: dict[Tensor, Expr] = {}
    behind: list[Compute] = []
    for initial, carry, following, final in zip(scan.initial, scan.carry, scan.following, scan.finals, strict=True):
        added = _added(carry, makers.get(following))
        begin = constants.get(initial)
        if added is None or begin is None or begin.size != 1:
            continue
        first = const(int(begin.reshape(())[()]), carry.dtype)
        told[carry] = first + added * var(scan.axis)
        if final is not None:
            steps = static(scan.axis.extent) or 0
            last = const(int(begin.reshape(())[()]) + int(added.value) * steps, carry.dtype)
            behind.append(Map(final, (), last, scan.origin))
    carried = [k for k, c in enumerate(scan.carry) if c not in told]
    body = []
    for compute in scan.body:
        known = _told(compute, told)
        body.append(known)
        if isinstance(known, Map) and not known.axes and not loads(known.value):
            told[known.output] = known.value  # of the step alone: those who read it know it too
    if not told:
        return scan, []
    return _carrying(scan, body, carried), behind


def _added(carry: Tensor, maker: Map | None) -> Const | None:
    """What a step adds to a whole number."""
    if maker is None or carry.rank or carry.dtype is not var(Axis("i", 1)).dtype or not is_op(maker.value, "add"):
        return None
    one, other = maker.value.args
    if one is load(carry, ()) and isinstance(other, Const):
        return other
    return one if other is load(carry, ()) and isinstance(one, Const) else None


def _told(compute: Compute, told: Mapping[Tensor, Expr]) -> Compute:
    """A compute of the body with what is known of the step in the place of carried numbers."""

    def known(root: Expr) -> Expr:
        return simplify(rewrite(root, lambda n: told.get(n.source) if isinstance(n, Load) else None))

    if isinstance(compute, Map):
        return replace(compute, value=known(compute.value))
    assert isinstance(compute, Reduce)
    return replace(compute, elements=tuple(map(known, compute.elements)))


def _carrying(scan: Scan, body: Sequence[Compute], places: Sequence[int]) -> Scan:
    """The Scan with some of what it carries, and of its body what that needs."""

    def some(items: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(items[k] for k in places)

    following = some(scan.following)
    wanted = {*following, *(t for t, _ in scan.stacked)}
    alive: list[Compute] = []
    for compute in reversed(body):
        if not wanted.isdisjoint(compute.outputs):
            alive.append(compute)
            wanted.update(reads(compute))
    return replace(scan, initial=some(scan.initial), carry=some(scan.carry), following=following,
                   finals=tuple(scan.finals[k] for k in places), body=tuple(reversed(alive)))  # fmt: skip


@dataclass(frozen=True)
class _Written:
    """A part of a state that each step writes at its own place, and that nothing reads in the loop."""

    rows: Map
    axis: int
    first: int  # the place of the first step


def _stacked(scan: Scan, constants: Mapping[Tensor, np.ndarray]) -> tuple[Scan, list[Compute]]:
    found: dict[int, _Written] = {}
    for place, (carry, following) in enumerate(zip(scan.carry, scan.following, strict=True)):
        written = _written(scan, carry, following, constants)
        if written is not None:
            found[place] = written
    if not found:
        return scan, []
    body: list[Compute] = [c for c in scan.body if not any(scan.following[k] in c.outputs for k in found)]
    stacked = list(scan.stacked)
    behind: list[Compute] = []
    for place, written in found.items():
        body.append(written.rows)
        final = scan.finals[place]
        if final is None:
            continue
        if written.axis == 0 and scan.axis.extent == final.shape[0]:
            stacked.append((written.rows.output, final))  # every row is of some step
            continue
        stack = Tensor(f"{final.name}_stack", (scan.axis.extent, *written.rows.output.shape), final.dtype)
        stacked.append((written.rows.output, stack))
        behind.append(_spread(final, scan.initial[place], stack, written, scan.origin))
    left = [k for k in range(len(scan.carry)) if k not in found]
    return _carrying(replace(scan, stacked=tuple(stacked)), body, left), behind


def _written(scan: Scan, carry: Tensor, following: Tensor, constants: Mapping[Tensor, np.ndarray]) -> _Written | None:
    maker = next((c for c in scan.body if following in c.outputs), None)
    if not isinstance(maker, Map) or any(carry in reads(c) for c in scan.body if c is not maker):
        return None
    if any(following in reads(c) for c in scan.body) or any(t is following for t, _ in scan.stacked):
        return None
    makers = {c.output: c for c in scan.body if isinstance(c, Map)}
    places = places_written(maker, carry, makers, constants, inside=True)
    if places is None or len(places) != 1:
        return None
    ((axis, at),) = places.items()
    first = simplify(at - var(scan.axis))
    steps, extent = static(scan.axis.extent), static(axis.extent)
    if not isinstance(first, Const) or steps is None or extent is None:
        return None
    if not 0 <= int(first.value) <= extent - steps:
        return None
    left = tuple(a for a in maker.axes if a is not axis)
    rows = Tensor(f"{following.name}_rows", tuple(a.extent for a in left), following.dtype)
    return _Written(Map(rows, left, maker.value.args[1], maker.origin), maker.axes.index(axis), int(first.value))


def _spread(final: Tensor, initial: Tensor, stack: Tensor, written: _Written, origin: str) -> Map:
    """The state behind the loop: what the steps wrote, and what it was before where they wrote nothing."""
    axes = tuple(Axis(f"i{k}", extent) for k, extent in enumerate(final.shape))
    at: list[Expr] = [var(a) for a in axes]
    step = at[written.axis] - written.first if written.first else at[written.axis]
    rest = [i for k, i in enumerate(at) if k != written.axis]
    steps, extent = static(stack.shape[0]) or 0, static(final.shape[written.axis]) or 0
    if steps == extent:
        return Map(final, axes, load(stack, (step, *rest)), origin)
    is_written = lt(step, steps) if written.first == 0 else all_of((lt(-1, step), lt(step, steps)))
    clamped = simplify(select(is_written, step, const(0)))
    value = select(is_written, load(stack, (clamped, *rest)), load(initial, at))
    return Map(final, axes, value, origin)




def _at_once(scan: Scan) -> tuple[Scan, list[Compute]]:
    """Sums that need nothing of an earlier step, with what they are made of, for all steps in front of the Scan."""
    handed_on = {*scan.following, *(t for t, _ in scan.stacked)}
    varying = set(scan.carry)
    free: list[Map | Reduce] = []
    for compute in scan.body:
        assert isinstance(compute, Map | Reduce)
        if varying.isdisjoint(reads(compute)) and handed_on.isdisjoint(compute.outputs):
            free.append(compute)
        else:
            varying.update(compute.outputs)
    wanted: set[Tensor] = set()
    chosen: list[Map | Reduce] = []
    for compute in reversed(free):
        if (isinstance(compute, Reduce) and _fits(scan, compute)) or not wanted.isdisjoint(compute.outputs):
            wanted.update(reads(compute))
            chosen.append(compute)
    if not chosen:
        return scan, []
    steps = scan.axis.extent
    all_steps = {t: Tensor(f"{t.name}_steps", (steps, *t.shape), t.dtype) for c in chosen for t in c.outputs}
    ahead = [_of_all_steps(c, scan.axis, all_steps) for c in reversed(chosen)]
    kept = tuple(_reading(c, all_steps, var(scan.axis)) for c in scan.body if c not in chosen)
    return _carrying(scan, kept, range(len(scan.carry))), ahead


def _fits(scan: Scan, compute: Reduce) -> bool:
    """Whether what a sum gives for all steps is not too much to keep."""
    size = sum(prod(static(e) or 0 for e in t.shape) * t.dtype.bytes for t in compute.outputs)
    return (static(scan.axis.extent) or 0) * size <= _KEPT


def _of_all_steps(compute: Map | Reduce, step: Axis, all_steps: Mapping[Tensor, Tensor]) -> Compute:
    """A compute of a body for every step, the step as its first axis."""
    own = Axis("s", step.extent)
    read = _reading(compute, all_steps, var(own))

    def moved(root: Expr) -> Expr:
        return substitute(root, {step: var(own)})

    if isinstance(read, Map):
        return replace(read, output=all_steps[read.output], axes=(own, *read.axes), value=moved(read.value))
    return replace(read, outputs=tuple(all_steps[t] for t in read.outputs), axes=(own, *read.axes),
                   elements=tuple(map(moved, read.elements)))  # fmt: skip


def _reading(compute: Compute, all_steps: Mapping[Tensor, Tensor], step: Expr) -> Map | Reduce:
    """A compute that reads what was made for all steps at its own."""
    assert isinstance(compute, Map | Reduce)

    def at_step(root: Expr) -> Expr:
        return rewrite(root, lambda n: load(all_steps[n.source], (step, *n.args))
                       if isinstance(n, Load) and n.source in all_steps else None)  # fmt: skip

    if isinstance(compute, Map):
        return replace(compute, value=at_step(compute.value))
    return replace(compute, elements=tuple(map(at_step, compute.elements)))
