"""What comes from beyond the tile level: how much of the next panel of weights every step of a sum asks for, and how
many rows early a map, a window over every channel by itself or a sum of rows asks for what it reads.

Few rows make little of a panel: reading it takes a good part of the time they compute, all of it while the first rows
wait and none while the others do. Asked for a little at a time, while the panel before is multiplied, it hides behind
the arithmetic. Hardware foresees a run within a page of memory; a panel is many.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import numpy as np

from tilewright.backend.cpu.constants import AHEAD_STEPS, AHEAD_WORTH
from tilewright.backend.cpu.leaf.vectorise import facts_of
from tilewright.backend.cpu.vector.micro import blocks_along
from tilewright.ir.forms.expr import Axis, Load
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, packed_axis
from tilewright.tile_graph.algebra.nest import Nest, is_window, period
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm


def panel_read(nest: Nest, plan: Leaf, context: NestContext) -> Load | None:
    """The weights that a nest reads panel after panel, all rows of its tile inside; None where it does not."""
    if context.cached is not None or plan.instruction is not None or not context.prefetches:
        return None
    if not is_contraction(nest) or plan.vector is None or plan.vector[0] != "o" or len(plan.register) != 2:
        return None
    vector = nest.named(plan.vector)
    outputs = [a for a in plan.order if a[0] == "o"]
    if outputs[-1] == plan.vector or outputs[-1] not in dict(plan.register) or period(nest, vector) is not None:
        return None
    if plan.order[-1] in plan.options(VectorForm).unroll:
        return None  # what is written out has no steps
    read = [n for n in nest.element_loads if n.source in context.constants and packed_axis(n, vector) is not None]
    if len(read) != 1 or read[0].source.rank < 2 or context.weights <= context.target.local.capacity:
        return None
    return read[0]


def prefetch_distance(nest: Nest, plan: Leaf, tile: Mapping[Axis, Size], context: NestContext) -> Size:
    """Elements of the next panel to ask for in every step of the sum, so that all blocks of rows together ask for all
    of it; 0 where it does not pay."""
    read = panel_read(nest, plan, context)
    if read is None:
        return 0
    facts = facts_of(nest, plan, context)
    if facts.row is None or facts.vector is None:
        return 0
    register = dict(plan.register)
    names = nest.axis_names()
    width, rows = register[names[facts.vector]], register[names[facts.row]]
    height, times = blocks_along(facts, facts.row, tile)
    columns, groups = blocks_along(facts, facts.vector, tile)
    # the same panels come again in the turns of other loops, and are near by then
    again: Size = prod((tile[a] for a in facts.plain if a not in read.axes), start=times * groups)
    for axis in nest.axes:  # and so in the tiles of the same columns that follow the first
        again = again * (1 if axis in read.axes else -(-extent_of(axis.extent) // (tile[axis] * context.target.units)))
    blocks = height // rows
    target = context.target
    far = target.beyond_local.bandwidth
    share = facts.nest.tensor.dtype.bytes * target.fma_rate / (far * np.maximum(height, 1))
    pays = (blocks > 1) & (blocks <= width) & (columns > width) & (again == 1) & (share >= AHEAD_WORTH)
    return np.where(pays, -(-width // np.maximum(blocks, 1)), 0)


def rows_ahead(nest: Nest, plan: Leaf, context: NestContext, near: Collection[Tensor]) -> int:
    """How many rows before it reads them a map or a window asks for them, or a sum of rows: one and some, where some of
    what it reads is neither `near` nor small enough to have stayed in the tile level."""
    if all(t.most_bytes <= context.target.local.capacity for t in nest.reads() if t not in near):
        return 0
    return 1 if nest.monoid is None or _is_window_in_blocks(nest, plan) else AHEAD_STEPS


def walks_rows(nest: Nest, plan: Leaf, context: NestContext) -> bool:
    """Whether a nest is a map in loops along a vector, such a window, or sums of rows side by side in a vector, on a
    processor that loses rows that take turns."""
    if not context.prefetches or context.cached is not None or context.target.stream_cost == 0:
        return False
    if plan.vector is None or plan.instruction is not None:
        return False
    if nest.monoid is None or _is_window_in_blocks(nest, plan):
        return True
    return _adds_rows(plan) and all(t not in context.constants for t in nest.reads())


def _is_window_in_blocks(nest: Nest, plan: Leaf) -> bool:
    in_blocks = len(plan.register) == 2 and plan.vector is not None and plan.part == "whole"
    return in_blocks and not plan.options(VectorForm).cut and is_window(nest, nest.named(plan.vector or ""))


def _adds_rows(plan: Leaf) -> bool:
    """Whether lanes of a vector are results, and a loop goes over what is added to them; no rows share what they read,
    as they do in a product."""
    inner = [a for a in plan.order if a[0] == "r"]
    options = plan.options(VectorForm)
    is_loop = bool(inner) and inner[-1] not in options.unroll and options.row_lanes == 1 and len(plan.register) == 1
    return is_loop and plan.vector is not None and plan.vector[0] == "o" and plan.part == "whole"


def prefetched_seconds(nest: Nest, plan: Leaf, tile: Mapping[Axis, Size], context: NestContext) -> Size:
    """What reading the weights that a tile asks for early takes, of those that the tile level does not keep."""
    read = panel_read(nest, plan, context)
    if read is None:
        return 0.0
    source = read.source
    size = source.most_bytes
    part: Size = prod((tile[a] / extent_of(a.extent) for a in nest.axes if a in read.axes), start=size)
    far = context.target.beyond_local.bandwidth
    return np.where(prefetch_distance(nest, plan, tile, context) > 0, part / far, 0.0)
