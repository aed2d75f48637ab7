"""What it costs that the streams of a block written out meet on the same sets of the first cache.

A line is thrown out between one vector of it and the next, so that each vector moves its whole line once more: what is
read from the tile level, what is written from there and back.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from tilewright.ir.forms.expr import var
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest


def crowded_slots(nest: Nest, reads: int, context: NestContext) -> float:
    """Multiply-add slots of an element of a map whose blocks are written out and make so many reads."""
    target, level = context.target, context.target.tile_level
    positions = prod(nest.unswitched.values())
    seconds = 0.0
    if _is_crowded(_written_apart(nest, context), positions, target):
        seconds += 1 / level.bandwidth + 1 / level.writing
    if _is_crowded(_read_apart(nest, context), reads, target):
        seconds += reads / positions / level.bandwidth
    again = max(0, target.levels[1].transaction - target.vector_bytes)
    return seconds * again * target.fma_rate / target.lanes(nest.tensor.dtype.bytes)


def _is_crowded(apart: int, streams: int, target: Target) -> bool:
    return apart >= target.levels[1].transaction and streams > target.lines_held(apart)


def _written_apart(nest: Nest, context: NestContext) -> int:
    """Bytes between the nearest streams a block writes."""
    place = context.offset(nest.tensor, nest.place)
    return min(place.terms.get(var(a), 0) for a in nest.unswitched) * nest.tensor.dtype.bytes


def _read_apart(nest: Nest, context: NestContext) -> int:
    """Bytes between the nearest streams of one tensor that a block reads; 0 where it reads one."""
    places: dict[Tensor, set[int]] = {}
    for node in nest.value_loads:
        offset = context.offset(node.source, node.indices)
        places.setdefault(node.source, set()).add(offset.constant)
    source, starts = max(places.items(), key=lambda item: len(item[1]))
    return min((b - a for a, b in pairwise(sorted(starts))), default=0) * source.dtype.bytes
