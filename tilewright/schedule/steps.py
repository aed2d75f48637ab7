"""What a Scan's repeated kernels ask of the caches: reads that are new at every step, and weights walked to and fro."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from tilewright.ir.compute import Scan
from tilewright.ir.expr import Axis, axes_of, var
from tilewright.ir.tensor import Tensor
from tilewright.schedule.nest import Nest
from tilewright.schedule.plan import Sizes
from tilewright.schedule.propagate import Box, Range, box_elements, extent_of, propagate, reads_box
from tilewright.schedule.vectorise import NestContext, is_contraction

_SHARE_OF_L1 = 8  # what is asked for early may push out at most this part of the nearest cache


def new_at_each_step(nests: Sequence[Nest], tile: Sizes, scan: Scan, context: NestContext) -> tuple[str, ...]:
    """Tensors to ask for when a tile starts: indexed by the step, so in no near cache yet, and needed only by a later
    nest, which leaves the first the time to bring them."""
    if context.target.kind != "cpu":
        return ()
    at_once = set(nests[0].reads())
    wanted = {n.source for nest in nests for n in nest.loads() if scan.axis in axes_of(*n.indices)} - at_once
    if not wanted:
        return ()
    boxes = propagate(nests, _any_tile(nests[-1], tile))
    sizes: dict[Tensor, int] = {}
    for nest in nests:
        for tensor, box in reads_box(nest, boxes[nest], {}, wanted).items():
            sizes[tensor] = max(sizes.get(tensor, 0), int(box_elements(box)) * tensor.dtype.bytes)
    room = context.target.levels[1].capacity // _SHARE_OF_L1
    return tuple(sorted(t.name for t, size in sizes.items() if size <= room))


def is_walked_to_and_fro(nest: Nest, context: NestContext) -> bool:
    """A contraction whose weights are more than the nearest cache holds meets, when it turns round at the end of a
    step, the weights it used last."""
    if context.target.kind != "cpu" or not is_contraction(nest):
        return False
    weights = sum(_bytes(t) for t in nest.reads() if t in context.constants)
    return weights > context.target.levels[1].capacity


def _bytes(tensor: Tensor) -> int:
    return prod(extent_of(e) for e in tensor.shape) * tensor.dtype.bytes


def _any_tile(root: Nest, tile: Sizes) -> Box:
    sizes: Mapping[str, int] = dict(tile)
    ranges = []
    for number, axis in enumerate(root.axes):
        extent = extent_of(axis.extent)
        size = min(sizes.get(f"o{number}", extent), extent)
        ranges.append(Range(var(Axis(f"origin_{number}", max(1, extent - size + 1))), size, extent))
    return tuple(ranges)
