"""Where the bytes of a tensor come from when a kernel reads them, and how long they take from there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.ir.forms.tensor import Tensor
from tilewright.target import MemoryLevel
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Size


def lone_unit_share(tiles: Size, context: NestContext) -> Size:
    """Of the time that bytes take from the outer cache with all units busy what they take while the others rest."""
    outer = context.target.beyond_local
    return np.where(tiles > 1, 1.0, outer.bandwidth / max(outer.alone, outer.bandwidth))


def stays(tensor: Tensor, moved: Size, context: NestContext) -> Size:
    """Whether what one unit reads of a tensor fits half the tile level, so many bytes with what it reads again: tiles
    after the first find it there."""
    size = tensor.most_bytes
    room = context.target.local.capacity // 2
    return size <= room if tensor in context.constants else np.minimum(moved, size) <= room


def first_seconds(tensor: Tensor, moved: Size, waves: Size, context: NestContext) -> Size:
    """What the first reads of a tensor add to each tile, of so many bytes that a unit reads in all its tiles, where
    later ones find it at the tile level: other weights of the model have thrown a constant out since it was last read,
    and part of an activation is in another unit's cache."""
    target, size = context.target, tensor.most_bytes
    if tensor in context.constants:
        if context.weights <= target.local.capacity // 2:
            return 0.0
        byte = 1 / residence(tensor, context).bandwidth
    else:
        byte = target.foreign * (target.units - 1) / target.units / target.beyond_local.bandwidth
    return np.minimum(moved, size) / waves * byte


def farthest_hold(nests: Sequence[Nest], context: NestContext, stored: frozenset[Tensor]) -> MemoryLevel:
    """The level farthest away at which a kernel may keep intermediates. A part of them in the outer cache saves what
    does not fit that cache as a whole the way to main memory and back; what does fit gains nothing."""
    target = context.target
    if target.shared_cache is None or not context.tiles_outer:
        return target.local
    far = any(t.most_bytes > target.shared_room for n in nests for t in n.stores if t not in stored)
    return target.shared_cache if far else target.local


def byte_seconds(tensor: Tensor, context: NestContext) -> float:
    """How long a byte of a tensor takes at least, on the average of those that one run need not read."""
    if context.cached is None or tensor not in context.cached:
        return 1 / residence(tensor, context).bandwidth
    cached, target = context.cached[tensor], context.target
    nearest, level = target.nearest.bandwidth, target.local.bandwidth
    return (cached.near / nearest + cached.level / level + cached.far * cached.far_byte) * cached.read


def residence(tensor: Tensor, context: NestContext) -> MemoryLevel:
    """The nearest level that still has a tensor when the next tile wants it: it fits half of what it is given, and a
    constant does so with all others, since they are read between two uses of it."""
    target = context.target
    is_weight = tensor in context.constants
    size = context.weights if is_weight else tensor.most_bytes
    if size <= target.local.capacity // 2:
        return target.local
    return target.shared_cache if target.shared_cache is not None and size <= target.shared_room else target.main
