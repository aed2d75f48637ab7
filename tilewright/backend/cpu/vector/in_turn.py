"""How many vectors sums have side by side in a kernel: those whose results are computed a few at a time, since what
follows them is long and one copy of it serves all accumulators; and those along a stream, which fill its blocks."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilewright.backend.cpu.constants import LONG_EPILOGUE
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest, data_cost
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm


def in_turn(nest: Nest, leaf: Leaf, target: Target) -> Leaf:
    """The leaf with as many vectors at a time as run side by side best, where there are several such."""
    if nest.monoid is None or nest.unswitched or leaf.instruction is not None or leaf.vector is None:
        return leaf
    vectors = prod(size for _, size in leaf.register) // leaf.lanes
    if leaf.vector[0] == "r" or vectors < 2 * target.calls_together or data_cost(*nest.values) < LONG_EPILOGUE:
        return leaf
    return leaf.with_options(VectorForm, in_turn=target.calls_together)


def in_blocks(nest: Nest, leaf: Leaf, block: int, stream: Stream) -> Leaf:
    """The leaf of a reduction along a stream with as many vectors as fill its blocks: what they leave over of every
    block would be reduced element by element."""
    axis = stream.reducers.get(nest)
    if axis is None or leaf.vector != nest.axis_names()[axis] or leaf.instruction is not None:
        return leaf
    width = dict(leaf.register).get(leaf.vector, leaf.lanes)
    filling = [n for n in range(leaf.lanes, width + 1, leaf.lanes) if block % n == 0]
    if not filling or filling[-1] == width:
        return leaf
    return replace(leaf, register=tuple((a, filling[-1] if a == leaf.vector else n) for a, n in leaf.register))
