"""The order of a nest's loops, and what is written out or read by whole vectors inside the innermost."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.backend.cpu.constants import WHOLE_WINDOW, WRITTEN_WINDOW
from tilewright.backend.cpu.vector.vector_cost import BY_LANE
from tilewright.ir.forms.expr import Axis, is_op, var, walk
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, stride
from tilewright.tile_graph.algebra.nest import Nest, moves
from tilewright.tile_graph.algebra.propagate import extent_of


def output_order(nest: Nest, vector: Axis | None, rows: Sequence[Axis], context: NestContext) -> list[Axis]:
    """Plain axes outermost; then vector blocks, then row blocks: a panel of the vector operand stays near."""
    plain = [a for a in nest.axes if a is not vector and a not in rows]
    inner = [*([vector] if vector in nest.axes else []), *rows]
    if not is_contraction(nest):
        layout = context.layout(nest.tensor)
        position = {part.axis: i for i, part in reversed(list(enumerate(layout.order)))}
        return sorted(nest.axes, key=lambda a: (a in rows, position.get(nest.axes.index(a), 0)))
    return [*plain, *inner]


def reduction_order(nest: Nest, context: NestContext) -> list[Axis]:
    """The axis whose neighbours lie closest in storage innermost; constants are packed to follow any order."""
    operands = [n for n in nest.element_loads if not context.packable(n.source)] or nest.element_loads

    def distance(axis: Axis) -> float:
        steps = [stride(n, axis, context) for n in operands]
        moving = [abs(s) for s in steps if s]
        return min(moving, default=1 << 30) if None not in steps else 1 << 20

    return sorted(nest.reduce_axes, key=lambda a: -distance(a))


def unrolled(nest: Nest, reduction: Sequence[Axis], vector: Axis | None) -> list[Axis]:
    """A short innermost window is written out: neighbouring outputs then share its reads in registers."""
    if not reduction or vector is None or vector in nest.reduce_axes:
        return []
    last = reduction[-1]
    if not is_contraction(nest):
        return _short_windows(reduction)
    if extent_of(last.extent) > 5 or extent_of(last.extent) == 1:
        return []
    return [last]


def _short_windows(reduction: Sequence[Axis]) -> list[Axis]:
    """The innermost axes of a pooling window, as many as are short together."""
    found: list[Axis] = []
    steps = 1
    for axis in reversed(reduction):
        extent = extent_of(axis.extent)
        steps *= extent
        if extent > WRITTEN_WINDOW or (found and steps > WHOLE_WINDOW):
            break
        found.append(axis)
    return found


def reads_rows(nest: Nest, vector: Axis | None, reduction: Sequence[Axis], context: NestContext) -> bool:
    """Whether the operand broadcast over the vector is contiguous along the innermost reduction, where that helps."""
    if not context.target.lane_multiply or vector is None or vector not in nest.axes or not reduction:
        return False
    if not is_contraction(nest) or nest.elements[0].dtype.name not in BY_LANE:
        return False
    steps = extent_of(reduction[-1].extent)
    if steps < 8 and steps != context.target.lanes(4):  # whole vectors, or enough of them
        return False
    return any(not moves(n, vector) and stride(n, reduction[-1], context) == 1 for n in nest.element_loads)


def is_merged(nest: Nest, axis: Axis) -> bool:
    """Whether a reduction axis stands for several, read at axis // n and axis % n: neighbours along rows overlap."""
    return any(is_op(n, "mod") and n.args[0] is var(axis) for r in nest.element_loads for n in walk(*r.indices))
