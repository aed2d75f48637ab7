"""What a vector along an axis of a nest costs: how wide it is, and how what it reads and stores lies along it."""

from __future__ import annotations

from tilewright.backend.cpu.constants import EVERY_OTHER, TRANSPOSED_VECTOR
from tilewright.backend.cpu.maps.transposes import transposed_axis
from tilewright.ir.forms.expr import Axis, axes_of, is_op, var, walk
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, stride, walked_on
from tilewright.tile_graph.algebra.nest import Nest, period
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.runs import reach

BY_LANE = ("float32", "int32")  # what sums are kept in, and what a lane can be multiplied in


def widest_bytes(nest: Nest) -> int:
    """Bytes of the widest element that a lane holds: what is stored narrow may be computed wide."""
    stored = max(t.dtype.bytes for t in nest.stores)
    if nest.monoid is not None and len(nest.monoid.left) > 1:
        return max(4, *(s.dtype.bytes for s in nest.monoid.left))  # the result is converted once, at the end
    if stored >= 4:
        return stored
    return 4 if any(n.dtype.name in BY_LANE for n in walk(*nest.elements, *nest.values)) else stored


def fit_lanes(lanes: int, extent: int) -> int:
    """The narrowest vector that holds the extent, or the widest there is."""
    while lanes > 1 and lanes // 2 >= extent:
        lanes //= 2
    return lanes


def span(nest: Nest, axis: Axis, context: NestContext) -> int:
    """How far blocks along an axis may reach: a group, or all of it and of what follows it in one run."""
    group = period(nest, axis)
    if group is not None or not is_contraction(nest):
        return group or extent_of(axis.extent)
    return reach(axis, walked_on(nest, axis, None, context).get(axis, ()))


def vector_cost(nest: Nest, axis: Axis, context: NestContext) -> float | None:
    """Instructions for one vector's worth of elements, relative to a perfect vector."""
    extent = span(nest, axis, context)
    lanes = fit_lanes(context.target.lanes(widest_bytes(nest)), extent)
    if lanes == 1:
        return None
    reducing = axis in nest.reduce_axes
    if reducing and (nest.monoid is None or len(nest.monoid.left) > 4):
        return None
    steps = 1
    for r in nest.reduce_axes:
        steps *= max(1, extent_of(r.extent))
    wide = context.target.lanes(widest_bytes(nest))
    cost = 0.5
    transposed = transposed_from(nest, axis, context)
    for node in nest.sample:
        step = stride(node, axis, context)
        across = transposed is not None and step not in (0, 1) and stride(node, transposed, context) == 1
        near = TRANSPOSED_VECTOR if across else EVERY_OTHER if step == 2 else 2.0 * lanes
        cost += 0.25 if step == 0 else 1.0 if step == 1 else min(near, 2.0 * lanes)
    if not reducing and nest.monoid is not None and _is_checked(nest, axis):
        cost += 2.0 * lanes  # every lane checks and reads for itself
    store = context.offset(nest.tensor, nest.place)
    if reducing:
        cost += 2.5 * lanes * lanes / steps  # folding the lanes at the end, once an output
    else:
        step = store.terms.get(var(axis), 0)
        cost += (0.5 if step == 1 else 1.0 * lanes) / steps
        for node in nest.value_loads if nest.elements else ():
            if node.source not in nest.accumulated:
                found = stride(node, axis, context)
                cost += (0.2 if found in (0, 1) else 1.0 * lanes) / steps
    return cost * -(-extent // lanes) / (extent / lanes) * (wide / lanes)


def transposed_from(nest: Nest, vector: Axis | None, context: NestContext) -> Axis | None:
    """The axis that blocks of a map are transposed from, on the way to the vector axis its result is stored along."""
    if vector is None or vector not in nest.axes:
        return None
    store = context.offset(nest.tensor, nest.place)
    if store.terms.get(var(vector)) != 1:
        return None
    lanes = fit_lanes(context.target.lanes(widest_bytes(nest)), extent_of(vector.extent))
    return transposed_axis(nest, vector, lanes, lambda node, axis: stride(node, axis, context))


def _is_checked(nest: Nest, axis: Axis) -> bool:
    """Whether a sum over more than a window reads elements under conditions that differ along the axis.

    A window alone is written out where it is short, and most of its conditions are then decided.
    """
    checks = [n.args[0] for n in walk(*nest.elements) if is_op(n, "select")]
    beyond = any(extent_of(r.extent) > 1 and r not in axes_of(*checks) for r in nest.reduce_axes)
    return beyond and axis in axes_of(*checks)
