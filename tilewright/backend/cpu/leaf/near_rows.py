"""How many rows of a sum stay in the first cache while all panels of weights of a tile pass by.

With blocks of rows inside a panel, all rows of the tile are read again for every panel: from the next cache, where they
are more than the first one holds. Taken in parts that stay there they come once, and panels once a part. A panel is one
run of memory, which hardware foresees better than rows. On a Neoverse N1 products of rows of 128 elements that lie
apart from each other take 14% less, of contiguous ones 2%.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.backend.cpu.constants import NEAR_AGAIN, NEAR_ROOM
from tilewright.backend.cpu.leaf.vectorise import facts_of
from tilewright.backend.cpu.vector.micro import blocks_along, lines_of
from tilewright.ir.forms.expr import Axis
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm


def may_keep_rows(nest: Nest, plan: Leaf, context: NestContext) -> bool:
    """Whether a nest is a sum in panels, its blocks of rows inside."""
    if plan.instruction is not None or plan.alternate or plan.part != "whole" or len(plan.register) != 2:
        return False
    if context.cached is not None or not context.prefetches or plan.options(VectorForm).cut or not is_contraction(nest):
        return False
    outputs = [a for a in plan.order if a[0] == "o"]
    return outputs[-2:-1] == [plan.vector] and outputs[-1] in dict(plan.register)


def near_rows(nest: Nest, plan: Leaf, tile: Mapping[Axis, Size], context: NestContext) -> int:
    """Rows of a part, whole register tiles; 0 where all of them stay near, or no fewer bytes would move."""
    facts = facts_of(nest, plan, context)
    if not may_keep_rows(nest, plan, context) or facts.row is None or facts.vector is None:
        return 0
    if facts.vector in facts.runs or any(o.by_row and o.by_vector for o in facts.operands):
        return 0
    register = {nest.named(a): n for a, n in plan.register}
    width, block = register[facts.vector], register[facts.row]
    height, columns = int(blocks_along(facts, facts.row, tile)[0]), int(blocks_along(facts, facts.vector, tile)[0])
    if columns <= width or height <= block:
        return 0
    line = context.target.nearest.transaction
    inside: dict[Axis, Size] = dict.fromkeys(nest.axes, 1) | {a: extent_of(a.extent) for a in nest.reduce_axes}
    rows = inside | {a: tile[a] for a in (facts.row, *facts.runs.get(facts.row, ()))}
    each = float(sum(lines_of(o, rows, line) for o in facts.operands if o.by_row)) / height
    panel, panels = (
        float(sum(lines_of(o, inside | {facts.vector: n}, line) for o in facts.operands if not o.by_row))
        for n in (width, columns)
    )
    capacity = context.target.nearest.capacity
    if not each or each * height + panel <= capacity or panels > NEAR_AGAIN * context.target.local.capacity:
        return 0
    most = int((NEAR_ROOM * capacity - panel) / each)
    apart = [o.row_bytes for o in facts.operands if o.by_row and o.row_bytes > each]
    most = min(most, *map(context.target.lines_held, apart)) if apart else most
    blocks = most // block
    if blocks * block < width:  # panels would bring more bytes than rows did
        return 0
    all_blocks = height // block
    parts = -(-all_blocks // blocks)
    return -(-all_blocks // parts) * block if parts > 1 else 0
