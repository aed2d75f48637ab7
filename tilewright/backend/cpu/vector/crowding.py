"""What it costs that the streams of a block written out meet on the same sets of the first cache.

A line is thrown out between one vector of it and the next, so that each vector moves its whole line once more: what is
read from the tile level, what is written from there and back.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

from tilewright.ir.analysis.simplify import Linear
from tilewright.ir.forms.expr import Expr, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest

Offset = Callable[[Tensor, tuple[Expr, ...]], Linear]  # where in storage something lies at indices of a tensor


def crowded_seconds(nest: Nest, reads: int, target: Target, offset: Offset) -> float:
    """What a vector of a map's block that is written out, and makes so many reads, loses at all its positions."""
    level = target.local
    positions = prod(nest.unswitched.values())
    seconds = 0.0
    if _is_crowded(_written_apart(nest, offset), positions, target):
        seconds += positions * (1 / level.bandwidth + 1 / level.writing)
    if _is_crowded(_read_apart(nest, offset), reads, target):
        seconds += reads / level.bandwidth
    return seconds * max(0, target.nearest.transaction - target.vector_bytes)


def _is_crowded(apart: int, streams: int, target: Target) -> bool:
    return apart >= target.nearest.transaction and streams > target.lines_held(apart)


def _written_apart(nest: Nest, offset: Offset) -> int:
    """Bytes between the nearest streams a block writes."""
    place = offset(nest.tensor, nest.place)
    return min(place.terms.get(var(a), 0) for a in nest.unswitched) * nest.tensor.dtype.bytes


def _read_apart(nest: Nest, offset: Offset) -> int:
    """Bytes between the nearest streams of one tensor that a block reads; 0 where it reads one."""
    places: dict[Tensor, set[int]] = {}
    for node in nest.value_loads:
        places.setdefault(node.source, set()).add(offset(node.source, node.indices).constant)
    source, starts = max(places.items(), key=lambda item: len(item[1]))
    return min((b - a for a, b in pairwise(sorted(starts))), default=0) * source.dtype.bytes
