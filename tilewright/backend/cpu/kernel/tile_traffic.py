"""What the bytes of a tile take: those it reads and stores beyond the tile level, and the intermediates it keeps there.

Bytes of a nest on its part of a tile are worked out once for all groups that cut such a nest alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.backend.cpu.kernel.residency import first_seconds, residence, stays
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Size, reads_box
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.traffic.moving import accessed, looked_up, shared_seconds, transactions
from tilewright.tile_graph.traffic.touch import chosen

Numbers = np.ndarray[Any, np.dtype[Any]]


def scratch_seconds(
    nests: Sequence[Nest], boxes: Mapping[Nest, Box], context: NestContext, stored: frozenset[Tensor],
    repeats: Mapping[Nest, Size], stream: Stream | None, turns: Size, held: Size,
) -> Size:  # fmt: skip
    """Writing and reading intermediate tiles, at the speed of the cache they fit; a stream carries its states along
    in every turn."""
    nearest, level = context.target.nearest, context.target.local
    fits = held <= nearest.capacity // 2
    known = context.memo.tiles.boxes
    read: Size = 0
    written: Size = 0
    for nest in nests:
        carried = stream is not None and nest in stream.reducers
        if nest.tensor in stored and not carried:
            continue
        size = known.elements(boxes[nest]) * nest.tensor.dtype.bytes
        if carried:
            follows = stream is not None and nest in stream.factors  # what it was corrected by is read, too
            read = read + (2 if follows else 1) * size * turns
            written = written + size * turns
        else:
            size = size * repeats[nest] if nest in repeats else size
            read, written = read + size, written + size
    if isinstance(read, int) and not read:
        return 0.0
    return np.where(fits, read / nearest.bandwidth + written / nearest.writing,
                    read / level.bandwidth + written / level.writing)  # fmt: skip


def outer_scratch_seconds(
    nests: Sequence[Nest], boxes: Mapping[Nest, Box], context: NestContext, stored: frozenset[Tensor],
    repeats: Mapping[Nest, Size],
) -> Size:  # fmt: skip
    """Writing intermediate tiles to the outer cache, and reading them from there for every nest that does."""
    outer = context.target.shared_cache
    assert outer is not None
    seconds: Size = 0.0
    for nest in nests:
        if nest.tensor in stored:
            continue
        readers = sum(any(t in other.reads() for t in nest.stores) for other in nests)
        size = context.memo.tiles.boxes.elements(boxes[nest]) * nest.tensor.dtype.bytes * repeats.get(nest, 1)
        seconds = seconds + size * (readers / outer.bandwidth + 1 / outer.writing)
    return seconds


def _moved(nest: Nest, own: Box, tensor: Tensor, box: Box, context: NestContext) -> Size:
    """Bytes that a nest on its part of a tile reads of a tensor, in whole transactions."""
    points = context.memo.tiles.boxes.elements(box)
    moved = transactions(tensor, box, context, points)
    if tensor not in nest.plain or any(part.size is not None for part in context.layout(tensor).order):
        moved = np.minimum(moved, accessed(nest, tensor, own, context))
    if tensor in nest.tables:
        moved = np.minimum(moved, looked_up(nest, tensor, context.memo.tiles.boxes.elements(own), context))
    return moved


def _stored(tensor: Tensor, box: Box, context: NestContext) -> tuple[Size, Size]:
    """Bytes that a tile writes of a tensor, in whole transactions, and what it loses to neighbours that write the same
    lines."""
    tiles = context.memo.tiles
    key = tiles.boxes.sizes[id(box)], tensor.shape, tensor.dtype.bytes, context.layout(tensor)
    found: tuple[Size, Size] | None = tiles.stored.get(key)
    if found is None:
        points = tiles.boxes.elements(box)
        found = transactions(tensor, box, context, points), shared_seconds(tensor, box, context, points)
        tiles.stored[key] = found
    return found


def _read_seconds(
    tensor: Tensor, moved: Size, waves: Numbers, context: NestContext, is_known: bool
) -> tuple[Size, Size | None]:  # fmt: skip
    """What so many bytes of a tensor that a tile reads take from beyond the tile level, and from there. Both are kept
    where the bytes are numbers that are `known`, and stay what they are."""
    known = context.memo.tiles.read
    key = id(moved), id(waves), tensor.most_bytes, tensor in context.constants, context.weights_fit
    found: tuple[Size, Size | None] | None = known.get(key) if is_known else None
    if found is not None:
        return found
    by_unit = moved * waves
    kept = stays(tensor, by_unit, context)  # of what a unit reads, from tile to tile
    beyond = moved / residence(tensor, context).bandwidth
    if kept is False:
        found = beyond, None
    else:
        first = first_seconds(tensor, by_unit, waves, context)
        found = chosen(kept, first, beyond), chosen(kept, moved / context.target.local.bandwidth, 0.0)
    if is_known:
        known[key] = found
    return found


def traffic_seconds(
    nests: Sequence[Nest], boxes: Mapping[Nest, Box], context: NestContext, stored: frozenset[Tensor],
    repeats: Mapping[Nest, Size], waves: Numbers, parts: Mapping[Nest, Box] | None = None,
) -> tuple[Size, Size]:  # fmt: skip
    """Seconds that one tile's bytes take from levels beyond its own, in whole transactions, and from near ones. Nests
    that have `parts` are walked in those, and find near what others of them have just read of theirs."""
    far: Size = 0.0
    near: Size = 0.0
    inside = {t for n in nests for t in n.stores}
    seen: dict[Tensor, Size] = {}
    written: dict[Tensor, Size] = {}
    tiles = context.memo.tiles
    walked: set[Tensor] = set()  # that nests in parts have read
    combined: set[Tensor] = set()  # of which no nest alone says how much is read
    counted: set[Tensor] = set()  # near reads that a contraction's own model has in it
    for nest in nests:
        if is_contraction(nest):
            counted.update(n.source for n in nest.element_loads)
        outside = {t for t in nest.reads() if t not in inside}
        own = tiles.boxes.number(nest), id(boxes[nest])
        for tensor, box in reads_box(nest, boxes[nest], {}, outside, tiles.boxes).items():
            key = own, nest.reads().index(tensor), context.layout(tensor)
            moved = tiles.moved.get(key)
            if moved is None:
                moved = tiles.moved[key] = _moved(nest, boxes[nest], tensor, box, context)
            if nest in repeats:
                moved = moved * repeats[nest]
                combined.add(tensor)
            if tensor in seen and not is_contraction(nest):  # again: near only where all of it stayed there
                size = tiles.boxes.elements(box) * tensor.dtype.bytes
                if parts and nest in parts and tensor in walked:
                    (part,) = reads_box(nest, parts[nest], {}, {tensor}, tiles.boxes).values()
                    size = tiles.boxes.elements(part) * tensor.dtype.bytes
                fits = size <= context.target.nearest.capacity // 2
                near = near + np.where(fits, 0.0, moved / context.target.local.bandwidth)
            if tensor in seen:
                combined.add(tensor)
                moved = np.maximum(seen[tensor], moved)
            seen[tensor] = moved
            if parts and nest in parts:
                walked.add(tensor)
        for tensor in nest.stores:
            if tensor in stored:
                written[tensor], lost = _stored(tensor, boxes[nest], context)
                near = near + lost
    for tensor, moved in seen.items():
        if context.cached is not None and tensor in context.cached:
            cached = context.cached[tensor]
            far = far + moved * cached.far * cached.far_byte
            if tensor not in counted:
                near = near + moved * cached.level / context.target.local.bandwidth
            continue
        far_part, near_part = _read_seconds(tensor, moved, waves, context, tensor not in combined)
        far = far + far_part
        if near_part is not None and tensor not in counted:
            near = near + near_part
    for tensor, moved in written.items():
        kept = stays(tensor, moved * waves, context)
        near = near + chosen(kept, moved / context.target.local.writing, 0.0)
        far = far + chosen(kept, 0.0, moved / residence(tensor, context).writing)
    return far, near
