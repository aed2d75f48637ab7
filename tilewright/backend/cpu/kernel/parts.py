"""Some nests of a kernel walked in parts of its tile: the boxes they then have, and what passes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.backend.cpu.constants import PART_CYCLES
from tilewright.ir.forms.expr import Axis, Var, axes_of, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import MemoryLevel
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.nest import Nest, held_inside
from tilewright.tile_graph.algebra.propagate import Box, Range, Size, extent_of, propagate, reads_box
from tilewright.tile_graph.traffic.moving import footprint


@dataclass(frozen=True)
class TileParts:
    """How nests are walked in parts, with an entry a candidate."""

    boxes: Mapping[Nest, Box]  # of the nests that are, what they compute in one
    near: frozenset[Tensor]  # what passes between them alone
    filling: Size  # whether they make up what others read of the whole tile
    times: Mapping[Nest, Size]  # that each of them computes as much as that, the last part less
    held: Size  # bytes that one of them keeps
    seconds: Size  # that this takes to and from the nearer level, in all parts of a tile
    again: tuple[Size, Size]  # seconds of what several parts read, after the first: from beyond the tile level, from it
    starting: Size


def passed_between(nests: Sequence[Nest], first: int, last: int, stored: frozenset[Tensor]) -> frozenset[Tensor]:
    """What nests of a kernel, one after the other, leave to each other and to no one else."""
    return frozenset(t for n in held_inside(nests, first, last, stored) for t in n.stores)


def boxes_of(nests: Sequence[Nest], context: NestContext, sizes: Mapping[Axis, Size]) -> dict[Nest, Box]:
    """What nests compute for a part of these sizes of the last one's result."""
    tiles, root = context.memo.tiles, nests[-1]
    box = [Range(var(o), sizes[a], extent_of(a.extent)) for o, a in zip(tiles.origins(root), root.axes, strict=True)]
    return propagate(nests, tiles.boxes.box(tuple(box)), known=tiles.boxes)


def parts_in(whole: Mapping[Axis, int], sizes: Mapping[Axis, Size]) -> Size:
    """Parts of these sizes in a tile, the last along an axis perhaps less than whole."""
    count: Size = 1
    for axis, size in sizes.items():
        count = count * -(-whole[axis] // size)
    return count


def parts_of(
    nests: Sequence[Nest], first: int, last: int, level: MemoryLevel, stored: frozenset[Tensor], context: NestContext,
    whole: Mapping[Axis, int], sizes: Mapping[Axis, Size],
) -> TileParts:  # fmt: skip
    """The nests from `first` up to `last` in parts of these sizes, what passes between them at a nearer level."""
    known, root = context.memo.tiles.boxes, nests[-1]
    origins = dict(zip(context.memo.tiles.origins(root), root.axes, strict=True))
    near, walked = passed_between(nests, first, last, stored), nests[first:last]
    boxes, around = boxes_of(nests, context, sizes), boxes_of(nests, context, whole)
    filling: Size = np.True_
    for nest in walked:
        if nest is not root and nest.tensor not in near:
            filling = filling & _make_up(boxes[nest], around[nest], origins, sizes, whole)
    count, filled = parts_in(whole, sizes), _filled(whole, sizes)
    times: dict[Nest, Size] = {}
    passed: Size = 0
    for nest in walked:
        each = known.elements(boxes[nest])
        is_cut = each * count < 2 * known.elements(around[nest])  # else it computes the same in several parts
        times[nest] = known.size(np.where(is_cut, filled, count))
        passed = passed + sum(each * t.dtype.bytes * times[nest] for t in nest.stores if t in near)
    kept = frozenset(t for n in walked for t in n.stores if t not in near)
    starting = PART_CYCLES / (context.target.clock or context.target.fma_clock) * count * len(walked)
    return TileParts(
        {n: boxes[n] for n in walked}, near, filling, times, footprint(walked, boxes, kept, None, known=known),
        passed / level.bandwidth + passed / level.writing,
        _read_again(walked, boxes, around, near, count, filled, context), starting,
    )  # fmt: skip


def _filled(whole: Mapping[Axis, int], sizes: Mapping[Axis, Size]) -> Size:
    """Parts that fill a tile, the last along an axis counted as far as it goes; not so along the innermost axis, where
    vectors lie: what is left over there takes lanes one by one, and is no faster than a whole part."""
    count: Size = 1.0
    innermost = list(sizes)[-1] if sizes else None
    for axis, size in sizes.items():
        count = count * (-(-whole[axis] // size) if axis is innermost else whole[axis] / size)
    return count


def _read_again(
    walked: Sequence[Nest], boxes: Mapping[Nest, Box], around: Mapping[Nest, Box], near: frozenset[Tensor],
    count: Size, filled: Size, context: NestContext,
) -> tuple[Size, Size]:  # fmt: skip
    """Seconds from beyond the tile level, and from it, of what parts read that others of the same tile have read, as a
    sum over rows does of all of them in each. It comes from the nearest cache that half of holds what the tile reads;
    from the first one, and to a contraction from the tile level, it is in the arithmetic."""
    target, known = context.target, context.memo.tiles.boxes
    nearest, level, outer = target.nearest.capacity // 2, target.local.capacity // 2, target.shared_cache
    beyond: Size = 0.0
    close: Size = 0.0
    for nest in walked:
        wanted = {t for t in nest.reads() if t not in near and t not in nest.tables}
        all_of_it = reads_box(nest, around[nest], {}, wanted, known)
        for tensor, part in reads_box(nest, boxes[nest], {}, wanted, known).items():
            once = known.elements(all_of_it[tensor]) * tensor.dtype.bytes
            each = known.elements(part) * tensor.dtype.bytes
            more = np.maximum(0.0, each * count - once * (count / filled))
            is_outer = outer is not None and np.asarray(once <= outer.capacity // 2)
            byte = np.where(is_outer, 1 / (outer or target.main).bandwidth, 1 / target.main.bandwidth)
            beyond = beyond + np.where(once <= level, 0.0, more * byte)
            if not is_contraction(nest):
                close = close + np.where((once > nearest) & (once <= level), more / target.local.bandwidth, 0.0)
    return beyond, close


def _make_up(
    part: Box, around: Box, origins: Mapping[Axis, Axis], sizes: Mapping[Axis, Size], whole: Mapping[Axis, int]
) -> Size:
    """Whether what a nest computes in the parts of a tile is what it computes for all of it: each of its dimensions is
    one of those that are cut, or is there whole in every part."""
    result: Size = np.True_
    for own, all_of_it in zip(part, around, strict=True):
        follows = [origins[o] for o in axes_of(own.low) if o in origins]
        is_whole = np.equal(own.size, all_of_it.size)
        for axis in follows:
            is_whole = is_whole & np.equal(sizes[axis], whole[axis])
        if isinstance(own.low, Var) and follows:
            (axis,) = follows
            is_whole = is_whole | (np.equal(own.size, sizes[axis]) & np.equal(all_of_it.size, whole[axis]))
        result = result & is_whole
    return result
