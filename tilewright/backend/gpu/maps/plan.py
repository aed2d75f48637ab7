"""Plans packets of maps and reductions on a GPU: neighbours that a thread moves together, and packets at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from tilewright.backend.gpu.maps.packets import certain_loads, chosen_places, packet_width
from tilewright.intrinsics.gpu_matrix import ROW_BYTES
from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, axes_of, load, loads, substitute, var
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext, offset_of
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, Size, extent_of, whole
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import ThreadForm

_MOST_AT_ONCE = 8
_MOST_REPEATED = 4  # places along an axis for which a thread reads once
_MOST_SUMMED = 8  # neighbours that a thread adds one behind the other
_MOST_WRITTEN_OUT = 2048  # operations of a thread's packets one behind the other in the text


def with_packets(leaf: Leaf, nest: Nest, context: NestContext) -> Leaf:
    """The leaf with as many lanes as memory hands over in one packet, where most of what it touches lies so."""
    split = leaf.options(ThreadForm).split
    if leaf.vector is None:
        return leaf
    axis = nest.named(leaf.vector)
    if nest.monoid is not None:
        shared = split > 1 and leaf.vector[0] == "r"
        return replace(leaf, lanes=_lanes_of_reduction(nest, axis, split, context)) if shared else leaf
    lanes = _lanes(nest, axis, context)
    flat = _flat_lanes(leaf, nest, context)
    repeated = _repeated(nest, axis)
    if flat > lanes:
        leaf, lanes, repeated = leaf.with_options(ThreadForm, flat=True), flat, {}
    # what is read again and again along an axis comes from a cache
    wide = {a for a in nest.axes if extent_of(a.extent) > 1}
    fetched = sum(lanes * n.dtype.bytes for n in nest.value_loads if wide.issubset(axes_of(*n.indices)))
    most = min(
        _MOST_AT_ONCE,
        context.target.under_way // max(fetched, lanes),
        _MOST_WRITTEN_OUT // (lanes * max(1, nest.value_cost) * prod(repeated.values())),
    )
    register = tuple((nest.axis_names()[a], n) for a, n in repeated.items())
    return replace(leaf, lanes=lanes, register=register).with_options(ThreadForm, at_once=max(1, most))


def _repeated(nest: Nest, vector: Axis) -> dict[Axis, int]:
    """A short axis that moves nothing a map reads, as that of a number's parts: a thread stores all along it of what
    it read and computed once."""
    read = axes_of(*(i for n in nest.value_loads for i in n.indices)) if nest.value_loads else []
    found = [a for a in nest.axes if a is not vector and a not in read and 1 < extent_of(a.extent) <= _MOST_REPEATED]
    return {a: extent_of(a.extent) for a in found[:1] if read}


@lru_cache(maxsize=1 << 12)
def placed_values(values: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Values as kernels compute them, with conditions that choose where one tensor is read."""
    return tuple(map(chosen_places, values))


def busy_threads(target: Target) -> int:
    """Of the whole device: with fewer packets are made smaller."""
    return target.units * target.schedulers * target.warp


def _lanes_of_reduction(nest: Nest, axis: Axis, split: int, context: NestContext) -> int:
    """Neighbours of a reduction that a thread takes at a time, where all threads have something to do."""
    length = prod(extent_of(a.extent) for a in nest.reduce_axes)
    certain = certain_loads(*placed_values(nest.elements))
    widths = [n.dtype.bytes for n in certain if axis in axes_of(*n.indices)]
    lanes = min(_MOST_SUMMED, ROW_BYTES // max(widths, default=1))
    while lanes > 1:
        fills = extent_of(axis.extent) % lanes == 0 and length >= lanes * split
        if fills and any(in_packets_along(n, axis, lanes, context) for n in certain):
            return lanes
        lanes //= 2
    return 1


def _lanes(nest: Nest, axis: Axis, context: NestContext) -> int:
    points = prod(extent_of(a.extent) for a in nest.axes)
    stores = stores_of(nest)
    values = placed_values(nest.values)
    certain = set(certain_loads(*values))
    widths = [n.dtype.bytes for n in (*stores, *certain) if axis in axes_of(*n.indices)]
    # one packet of the widest: of two, neighbouring threads would touch each half of a line, or of the banks
    lanes = ROW_BYTES // max(widths)
    while lanes > 1:
        enough = points >= lanes * busy_threads(context.target) and extent_of(axis.extent) >= lanes
        if enough and all(in_packets_along(n, axis, lanes, context) for n in stores):
            beside, apart = sum(n.dtype.bytes for n in stores), 0
            for node in loads(*values):
                if node in certain and in_packets_along(node, axis, lanes, context):
                    beside += node.dtype.bytes
                elif axis in axes_of(*node.indices):
                    apart += node.dtype.bytes
            if beside > apart:
                return lanes
        lanes //= 2
    return 1


def _flat_lanes(leaf: Leaf, nest: Nest, context: NestContext) -> int:
    """Lanes of packets that run on over the ends of rows: where all that is read and stored lies the same way, row
    behind row, and is as wide."""
    values = placed_values(nest.values)
    read = loads(*values)
    nodes = (*stores_of(nest), *read)
    order = tuple(nest.axis_names()[a] for a in nest.axes)
    offset = Linear({}, 0)
    for axis in nest.axes:
        offset = offset.scaled(extent_of(axis.extent)).plus(linear(var(axis)))
    if (
        leaf.order != order
        or len({n.dtype.bytes for n in nodes}) != 1
        or set(read) != set(certain_loads(*values))
    ):
        return 1
    if any(offset_of(n.source, context.layout(n.source), n.indices) != offset for n in nodes):
        return 1
    lanes = ROW_BYTES // nodes[0].dtype.bytes
    points = prod(extent_of(a.extent) for a in nest.axes)
    if points < lanes * busy_threads(context.target):
        return 1
    # rows of an odd length begin with a packet so seldom that few boxes do: the device would wait for some blocks
    most = extent_of(_first_long(nest).extent) // min(_flat_steps(nest, lanes))
    return lanes if most >= context.target.units else 1


def _first_long(nest: Nest) -> Axis:
    """The axis that boxes of a flat map are cut along."""
    return next(a for a in nest.axes if extent_of(a.extent) > 1)


def _flat_steps(nest: Nest, lanes: int) -> set[int]:
    """Sizes along it at which boxes begin with a packet."""
    axis = _first_long(nest)
    extent = extent_of(axis.extent)
    inner = prod(extent_of(a.extent) for a in nest.axes[nest.axes.index(axis) + 1 :])
    powers = (1 << n for n in range(extent.bit_length()))
    return {extent} | {n for n in powers if n < extent and n * inner % lanes == 0}


def flat_sizes(leaf: Leaf, nest: Nest) -> list[list[int]]:
    """Sizes of boxes along every axis of a flat map: whole rows, so many that a box begins with a packet."""
    first = _first_long(nest)
    sizes = sorted(_flat_steps(nest, leaf.lanes))
    return [sizes if axis is first else [extent_of(axis.extent)] for axis in nest.axes]


def stores_of(nest: Nest) -> list[Load]:
    return [load(t, [var(a) for a in nest.axes]) for t in nest.stores]


def in_packets_along(node: Load, axis: Axis, lanes: int, context: NestContext) -> bool:
    """Whether neighbours along the axis lie beside each other in storage, at multiples of a packet."""
    if axis not in axes_of(*node.indices):
        return False
    place, lane = Axis("place", -(-extent_of(axis.extent) // lanes)), Axis("lane", lanes)
    here: dict[Axis, Expr] = {axis: simplify(var(place) * lanes + var(lane))}
    moved = tuple(simplify(substitute(i, here)) for i in node.indices)
    total = offset_of(node.source, context.layout(node.source), moved)
    width = packet_width(lanes, node.dtype)
    if total.terms.get(var(lane)) != 1 or total.constant % width:
        return False
    return not any(c % width or lane in axes_of(t) for t, c in total.terms.items() if t is not var(lane))


def accesses(nest: Nest, leaf: Leaf, lanes: Size) -> tuple[Size, Size]:
    """Instructions that read what a packet of a map needs, and that write it."""
    stored, read = stores_of(nest), loads(*placed_values(nest.values))
    if leaf.vector is None or leaf.lanes == 1:
        return len(read), len(stored)
    axis = nest.named(leaf.vector)

    def moves(nodes: Sequence[Load]) -> Size:
        total: Size = 0
        for node in nodes:
            is_moved = axis in axes_of(*node.indices)
            total = total + (np.maximum(1, lanes * node.dtype.bytes // ROW_BYTES) if is_moved else 1)
        return total

    return moves(read), moves(stored)


def fit_lanes(leaf: Leaf, nest: Nest, sizes: Mapping[Axis, Size]) -> Size:
    """The lanes on boxes of these sizes (numbers or arrays), which begin at multiples of their size."""
    if leaf.lanes == 1 or leaf.vector is None or leaf.instruction is not None or leaf.vector[0] == "r":
        return leaf.lanes if leaf.instruction is None else 1
    if leaf.options(ThreadForm).flat:
        return leaf.lanes
    axis = nest.named(leaf.vector)
    size = sizes[axis]
    return np.where(size >= extent_of(axis.extent), leaf.lanes, np.gcd(size, leaf.lanes))


def fitted(
    leaf: Leaf, nest: Nest, box: Box, reduce_box: Mapping[Axis, Range], steps: Mapping[str, int], threads: int
) -> Leaf:
    """The leaf on its box: packets that begin inside others would not be aligned, and nothing is gained by more at once
    than a thread has. `steps` are what the origins of boxes are multiples of."""
    options = leaf.options(ThreadForm)
    if leaf.vector is None or options.step:
        return leaf
    axis = nest.named(leaf.vector)
    lanes = leaf.lanes
    if nest.monoid is not None and axis in nest.axes:
        part = dict(zip(nest.axes, box, strict=True))[axis]
        while lanes > 1 and not (_begins_at_multiples(part, lanes, steps) and int(part.size) % lanes == 0):
            lanes //= 2
        if any(a in reduce_box for a in nest.reduce_axes):  # in parts, each of its own length
            lanes = 1
        return replace(leaf, lanes=lanes, register=leaf.register if lanes > 1 else ())
    if nest.monoid is not None:
        parts = {a: reduce_box.get(a, whole(extent_of(a.extent))) for a in nest.reduce_axes}
        length = prod(int(r.size) for r in parts.values())
        while lanes > 1 and not (_ends_with_packets(parts[axis], lanes) and length >= lanes * options.split):
            lanes //= 2
        return replace(leaf, lanes=lanes)
    if options.flat:
        return _fitted_flat(leaf, nest, box, steps, threads)
    part = dict(zip(nest.axes, box, strict=True))[axis]
    while lanes > 1 and not _begins_at_multiples(part, lanes, steps):
        lanes //= 2
    names, ranges = nest.axis_names(), dict(zip(nest.axes, box, strict=True))
    register = tuple((a, n) for a, n in leaf.register if static(ranges[nest.named(a)].count) == n)
    each = {**dict(register), names[axis]: lanes}
    count = prod(-(-int(r.size) // each.get(names[a], 1)) for a, r in ranges.items())
    rounds = -(-count // threads)
    return _in_turns(replace(leaf, lanes=lanes, register=register), rounds)


def _fitted_flat(leaf: Leaf, nest: Nest, box: Box, steps: Mapping[str, int], threads: int) -> Leaf:
    sizes = [int(r.size) for r in box]
    extents = [extent_of(a.extent) for a in nest.axes]
    cut = next((i for i, n in enumerate(sizes) if n > 1), 0)
    inner = prod(extents[cut + 1 :])
    scaled = {name: step * inner for name, step in steps.items()}
    begins = sizes[cut] >= extents[cut] or _begins_at_multiples(box[cut], leaf.lanes, scaled)
    if sizes[cut + 1 :] != extents[cut + 1 :] or not begins:
        return replace(leaf, lanes=1).with_options(ThreadForm, flat=False, at_once=1)
    return _in_turns(leaf, -(-prod(sizes) // (leaf.lanes * threads)))


def _in_turns(leaf: Leaf, rounds: int) -> Leaf:
    """As many packets at once as make turns alike."""
    turns = -(-rounds // leaf.options(ThreadForm).at_once)
    return leaf.with_options(ThreadForm, at_once=max(1, -(-rounds // max(1, turns))))


def _ends_with_packets(part: Range, lanes: int) -> bool:
    return static(part.count) == int(part.size) and int(part.size) % lanes == 0


def _begins_at_multiples(part: Range, lanes: int, steps: Mapping[str, int]) -> bool:
    low = linear(part.low)
    if low.constant % lanes:
        return False
    for term, factor in low.terms.items():
        step = steps.get(term.axis.name, 1) if isinstance(term, Var) else 1
        if factor * step % lanes:
            return False
    return True
