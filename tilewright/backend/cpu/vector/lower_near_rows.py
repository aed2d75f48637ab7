"""Rows of a sum in parts that stay in the first cache: all panels of weights pass by a part before the next one comes.

    for part: for panel: for block of rows in part: ...

Without parts every panel reads all rows of the tile anew, from the next cache, and short rows that lie apart from each
other are not foreseen by hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.expr import Axis, Expr, as_expr, const, eq, maximum, minimum, var
from tilewright.ir.forms.loops import If, Stmt
from tilewright.lower.blocks import BlockRun
from tilewright.lower.nesting import trip_count
from tilewright.tile_graph.algebra.propagate import Range


def part_loop(row: Axis, whole: BlockRun, blocks: int) -> Axis:
    """The loop over parts of so many blocks."""
    parts = maximum(1, (whole.trips + (blocks - 1)) // blocks) if upper(whole.trips) > blocks else const(1)
    return Axis(f"{row.name}_part", trip_count(simplify(parts)))


def blocks_of_part(part: Axis, row: Axis, whole: BlockRun, blocks: int, extent: Range) -> tuple[Axis, Expr]:
    """The loop over the blocks of a part, and where a block begins."""
    first = var(part) * blocks
    loop = Axis(f"{row.name}_block", trip_count(simplify(minimum(blocks, whole.trips - first))))
    return loop, simplify(extent.low + whole.base + (first + var(loop)) * whole.size)


def with_last(part: Axis, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """What is done for the last part alone."""
    return (If(eq(var(part), simplify(as_expr(part.extent) - 1)), tuple(body)),) if body else ()
