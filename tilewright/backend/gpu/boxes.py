"""What one block of a GPU computes of every nest of its kernel, and whether packets of 16 bytes end where that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.ir.analysis.simplify import linear
from tilewright.ir.forms.expr import Axis, Expr, Op, Var, var
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, Size, extent_of, propagate
from tilewright.tile_graph.algebra.streams import Stream


@dataclass(frozen=True)
class Block:
    """What one block computes: the box of every nest, and the parts of reductions that it walks at a time."""

    boxes: Mapping[Nest, Box]
    limits: Mapping[Nest, Mapping[Axis, Range]]
    blocks: int  # of the kernel
    steps: Mapping[str, int]  # what the origins that boxes begin from are multiples of, by their names

    def ranges(self, nest: Nest) -> dict[Axis, Range]:
        """Where the nest is computed, by axis; what is summed over from end to end is not among them."""
        return {**dict(zip(nest.axes, self.boxes[nest], strict=True)), **self.limits.get(nest, {})}


def block_of(nests: Sequence[Nest], tile: Mapping[str, int], stream: Stream | None, block: int) -> Block:
    root = nests[-1]
    ranges = []
    steps = {"block": block}
    count = 1
    for i, axis in enumerate(root.axes):
        extent = extent_of(axis.extent)
        size = min(tile.get(f"o{i}", extent), extent)
        count *= -(-max(1, extent) // max(1, size))
        steps[f"origin_{i}"] = size
        ranges.append(Range(var(Axis(f"origin_{i}", extent)), size, extent))
    limits = {}
    if stream is not None and block < stream.extent:
        limits = stream.reduce_boxes(var(Axis("block", stream.extent)), block)
    return Block(propagate(nests, tuple(ranges), limits), limits, count, steps)


def cuts_packets(part: Range, packet: int, steps: Mapping[str, Size]) -> np.ndarray:
    """Whether packets of neighbours along an axis lie only in part in a part of it; by candidate, where sizes are
    arrays. Origins are multiples of `steps`, by their names, or of nothing that is known."""
    inner = ~is_multiple(part.low, packet, steps) | (part.extent % packet != 0)
    return np.asarray(part.size % packet != 0) | ((part.size < part.extent) & inner)


def filled(part: Range, packet: int) -> Range:
    """The part with its last packet whole, where what lies behind the end of its axis may be read as well."""
    extent = -(-part.extent // packet) * packet
    return Range(part.low, np.where(np.asarray(part.size) >= part.extent, extent, part.size), extent)


def is_multiple(value: Expr, of: int, steps: Mapping[str, Size]) -> np.ndarray:
    """Whether that is known of a place, as above."""
    found = linear(value)
    known = np.array(found.constant % of == 0)
    for term, coefficient in found.terms.items():
        step = steps.get(term.axis.name, 1) if isinstance(term, Var) else 1
        term_known = np.asarray(coefficient * step % of == 0)
        if isinstance(term, Op) and term.op.name in ("min", "max"):
            one, other = term.args
            term_known = term_known | (is_multiple(one, of, steps) & is_multiple(other, of, steps))
        known = known & term_known
    return known
