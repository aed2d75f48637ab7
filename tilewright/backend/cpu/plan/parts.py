"""Some nests of a kernel walked in parts of its tile: the boxes they then have, and what passes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.backend.cpu.plan.contraction_facts import PIPES
from tilewright.ir.expr import Axis, Var, axes_of, var
from tilewright.ir.tensor import Tensor
from tilewright.target import MemoryLevel, Target
from tilewright.tile_graph.context import NestContext
from tilewright.tile_graph.moving import footprint
from tilewright.tile_graph.nest import Nest, held_inside
from tilewright.tile_graph.propagate import Box, Range, Size, extent_of, propagate

# Cycles to start a nest on a part. Parts are loops inside the tile, without a call or a counter that units share, so
# this is no hand-out (`tile_cost`): addresses, constants and, of loops too long to be remembered, one branch that is
# mispredicted (11 cycles on a Neoverse N1, 14 to 17 on x86; a Xeon whose branches were all predicted took 5).
_PART_CYCLES = 10


@dataclass(frozen=True)
class Parts:
    """How nests are walked in parts, with an entry a candidate."""

    boxes: Mapping[Nest, Box]  # of the nests that are, what they compute in one
    near: frozenset[Tensor]  # what passes between them alone
    count: Size  # parts of a tile
    held: Size  # bytes that one of them keeps
    seconds: Size  # that this takes to and from the nearer level, in all parts of a tile
    starting: Size


def passed_between(nests: Sequence[Nest], first: int, last: int, stored: frozenset[Tensor]) -> frozenset[Tensor]:
    """What nests of a kernel, one after the other, leave to each other and to no one else."""
    return frozenset(t for n in held_inside(nests, first, last, stored) for t in n.stores)


def parts_of(
    nests: Sequence[Nest], first: int, last: int, level: MemoryLevel, stored: frozenset[Tensor], context: NestContext,
    whole: Mapping[Axis, int], sizes: Mapping[Axis, Size],
) -> Parts | None:  # fmt: skip
    """The nests from `first` up to `last` in parts of these sizes, what passes between them at a nearer level; None
    where parts do not make up what others read of the whole tile."""
    tiles, root = context.memo.tiles, nests[-1]
    known, origins = tiles.boxes, tiles.origins(root)
    near, walked = passed_between(nests, first, last, stored), nests[first:last]

    def boxes_of(along: Mapping[Axis, Size]) -> dict[Nest, Box]:
        box = [Range(var(o), along[a], extent_of(a.extent)) for o, a in zip(origins, root.axes, strict=True)]
        return propagate(nests, known.box(tuple(box)), known=known)

    boxes, around = boxes_of(sizes), boxes_of(whole)
    cut = {o: a for o, a in zip(origins, root.axes, strict=True) if np.any(np.asarray(sizes[a]) < whole[a])}
    for nest in walked:
        if nest is not root and nest.tensor not in near and not _makes_up(boxes[nest], around[nest], cut, sizes, whole):
            return None
    count: Size = 1
    for axis in root.axes:
        count = count * -(-whole[axis] // sizes[axis])
    count = known.size(count)
    passed: Size = 0
    for nest in walked:
        passed = passed + sum(known.elements(boxes[nest]) * t.dtype.bytes * count for t in nest.stores if t in near)
    kept = frozenset(t for n in walked for t in n.stores if t not in near)
    starting = _PART_CYCLES / _cycles_a_second(context.target) * count * len(walked)
    return Parts(
        {n: boxes[n] for n in walked}, near, count, footprint(walked, boxes, kept, None, known=known),
        passed / level.bandwidth + passed / level.writing, starting,
    )  # fmt: skip


def _cycles_a_second(target: Target) -> float:
    """The clock, or where it is not measured what two pipes of multiply-adds make of it."""
    return target.clock or target.fma_rate / (PIPES * target.lanes(4))


def _makes_up(
    part: Box, around: Box, cut: Mapping[Axis, Axis], sizes: Mapping[Axis, Size], whole: Mapping[Axis, int]
) -> bool:
    """Whether what a nest computes in the parts of a tile is what it computes for all of it: each of its dimensions is
    one of those that are cut, or is there whole in every part."""
    for own, all_of_it in zip(part, around, strict=True):
        if isinstance(own.low, Var) and own.low.axis in cut:
            axis = cut[own.low.axis]
            if not np.array_equal(own.size, sizes[axis]) or all_of_it.size != whole[axis]:
                return False
        elif any(o in axes_of(own.low) for o in cut) or np.any(own.size != all_of_it.size):
            return False
    return True
