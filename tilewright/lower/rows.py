"""Neighbouring axes of a map walked as one, where all it touches lies in one run: rows need not fill vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.bounds import static
from tilewright.ir.expr import Axis, Expr, Load, Var, loads, var
from tilewright.ir.simplify import Linear, join_divisions, linear, simplify
from tilewright.lower.access import Access
from tilewright.schedule.nest import Nest
from tilewright.schedule.propagate import Range, extent_of


def run_of_axes(nest: Nest, order: Sequence[Axis], ranges: Mapping[Axis, Range], access: Access) -> tuple[Axis, ...]:
    """The axes at the end of `order` that are one run of all that is read and stored; empty where it is but one."""
    if nest.monoid is not None or nest.written_out or not order:
        return ()
    used = _used_as_numbers(nest.values)
    offsets = [_flat(access.read[n.source].indices(n.indices), access.read[n.source].buffer.shape)
               for n in loads(*nest.values)]  # fmt: skip
    here = tuple(var(a) for a in nest.axes)
    offsets += [_flat(p.indices(here), p.buffer.shape) for t in nest.stores for p in access.write[t]]
    run = [order[-1]]
    for axis in reversed(order[:-1]):
        inner = run[0]
        is_whole = static(ranges[inner].low) == 0 and static(ranges[inner].count) == extent_of(inner.extent)
        if not is_whole or axis in used or inner in used or not all(_follows(o, axis, inner) for o in offsets):
            break
        run.insert(0, axis)
    return tuple(run) if len(run) > 1 else ()


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


def _follows(offset: Linear, axis: Axis, inner: Axis) -> bool:
    if any(not isinstance(t, Var) and (axis in t.axes or inner in t.axes) for t in offset.terms):
        return False
    return offset.terms.get(var(axis), 0) == offset.terms.get(var(inner), 0) * extent_of(inner.extent)


def _flat(indices: Sequence[Expr], shape: Sequence[object]) -> Linear:
    total = Linear({}, 0)
    for index, size in zip(indices, shape, strict=True):
        total = total.scaled(int(size)).plus(linear(simplify(index)))  # type: ignore[call-overload]
    return join_divisions(total)


def _used_as_numbers(values: Sequence[Expr]) -> set[Axis]:
    """Axes that a value uses other than to say what it reads."""
    found: set[Axis] = set()
    stack = list(values)
    while stack:
        node = stack.pop()
        if isinstance(node, Load):
            continue
        if isinstance(node, Var):
            found.add(node.axis)
        stack.extend(node.args)
    return found
