"""Neighbouring axes of a map walked as one, where all it touches lies in one run: rows need not fill vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, used_as_numbers, var
from tilewright.lower.access import Access
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Range, extent_of
from tilewright.tile_graph.algebra.runs import axes_around, follows, free_axes


def run_of_axes(nest: Nest, order: Sequence[Axis], ranges: Mapping[Axis, Range], access: Access) -> tuple[Axis, ...]:
    """The axes at the end of `order` that are one run of all that is read and stored; empty where it is but one."""
    if nest.monoid is not None or nest.unswitched or not order:
        return ()
    used = used_as_numbers(nest.values)
    offsets = _offsets(nest, access)
    run = [order[-1]]
    for axis in reversed(order[:-1]):
        inner = run[0]
        is_run = axis not in used and inner not in used and all(follows(o, axis, inner) for o in offsets)
        if not is_run or not _is_whole(ranges[inner], inner):
            break
        run.insert(0, axis)
    return tuple(run) if len(run) > 1 else ()


def run_of_blocks(
    nest: Nest, vector: Axis, register: Mapping[Axis, int], ranges: Mapping[Axis, Range], access: Access
) -> tuple[Axis, ...]:
    """The axes, outermost first, that a contraction's register tiles walk as one; empty where it is but one."""
    for inner in (vector, *(a for a in register if a is not vector)):
        run = [inner]
        free = free_axes(nest, inner, tuple(register))
        for axis in axes_around(inner, free, _offsets(nest, access)) if free else ():
            if not _is_whole(ranges[run[0]], run[0]):
                break
            run.insert(0, axis)
        if len(run) > 1:
            return tuple(run)
    return ()


def places(run: Sequence[Axis], at: Expr) -> dict[Axis, Expr]:
    """Where each axis of a run is at a position along the whole of it."""
    found: dict[Axis, Expr] = {}
    for axis in reversed(run[1:]):
        found[axis] = simplify(at % extent_of(axis.extent))
        at = simplify(at // extent_of(axis.extent))
    found[run[0]] = at
    return found


def range_of(run: Sequence[Axis], ranges: Mapping[Axis, Range]) -> Range:
    inner = 1
    for axis in run[1:]:
        inner *= extent_of(axis.extent)
    first = ranges[run[0]]
    return Range(simplify(first.low * inner), first.size * inner, first.extent * inner)


def _is_whole(part: Range, axis: Axis) -> bool:
    return static(part.low) == 0 and static(part.count) == extent_of(axis.extent)


def _offsets(nest: Nest, access: Access) -> list[Linear]:
    """Where everything lies that a nest reads and stores."""
    read = [(access.read[n.source], n.indices) for n in nest.loads()]
    here = tuple(var(a) for a in nest.axes)
    written = [(p, here) for t in nest.stores for p in access.write[t]]
    return [_flat(place.indices(indices), place.buffer.shape) for place, indices in (*read, *written)]


def _flat(indices: Sequence[Expr], shape: Sequence[object]) -> Linear:
    total = Linear({}, 0)
    for index, size in zip(indices, shape, strict=True):
        total = total.scaled(int(size)).plus(linear(simplify(index)))  # type: ignore[call-overload]
    return join_divisions(total)
