"""Zeros for the places that fill up the last panel of a tensor: whole vectors are read there.

No such lane is stored by whoever reads it, so that anything might stand there. But memory is used again and again, and
what one tensor leaves behind is to another any pattern of bits: on x86 a product with a number too small to be normal
takes 150 cycles instead of 4.
"""

from __future__ import annotations

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Const, const, le, var
from tilewright.ir.forms.loops import For, ForKind, If, Memory, Stmt, Store
from tilewright.ir.forms.tensor import Layout
from tilewright.lower.access import Access, Place
from tilewright.lower.nesting import serial, walked
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, extent_of


def filled_up(nest: Nest, box: Box, access: Access, lanes: int) -> tuple[Stmt, ...]:
    """What the tile that stores the end of an axis stores beyond it."""
    result: list[Stmt] = []
    for tensor in nest.stores:
        for place in access.write[tensor]:
            if place.buffer.memory is Memory.GLOBAL and not place.prefix:
                for number, axis in enumerate(nest.axes):
                    end = filled_extent(place.layout, number, extent_of(axis.extent))
                    result.extend(_beyond(nest, box, place, number, end, lanes))
    return tuple(result)


def filled_extent(layout: Layout, axis: int, extent: int) -> int:
    """The extent of an axis with all that fills it up."""
    step = next(part.step for part in layout.order if part.axis == axis and part.size is None)
    return -(-extent // step) * step


def _beyond(nest: Nest, box: Box, place: Place, number: int, end: int, lanes: int) -> tuple[Stmt, ...]:
    axis, part = nest.axes[number], box[number]
    extent = extent_of(axis.extent)
    if end == extent:
        return ()
    ranges = dict(zip(nest.axes, box, strict=True))
    loops, env = walked([a for a in nest.axes if a is not axis], ranges)
    body: list[Stmt] = []
    for start in range(extent, end, lanes):
        lane = Axis("beyond", min(lanes, end - start))
        place_of = {**env, axis: const(start) if lane.extent == 1 else start + var(lane)}
        index = place.indices(tuple(simplify(place_of[a]) for a in nest.axes))
        zero = (Store(place.buffer, index, const(0, place.buffer.dtype)),)
        body.extend(zero if lane.extent == 1 else (For(lane, ForKind.VECTOR, zero),))
    around = serial(loops, body)
    holds_end = simplify(le(extent, part.low + int(part.size)))
    return around if isinstance(holds_end, Const) and holds_end.value else (If(holds_end, around),)
