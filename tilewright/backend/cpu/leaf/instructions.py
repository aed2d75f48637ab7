"""Chooses a dot-product or matrix instruction of the target for a contraction, its register tile and b's layout.

The choice is the instruction that does most real multiply-adds a second: its rate times how full its rows, columns
and groups are on this nest's extents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tilewright.backend.cpu.amx.cost import is_crowded, pass_of, rows_of_a_register, tile_seconds
from tilewright.backend.cpu.constants import (
    INSTRUCTION_LATENCY,
    INSTRUCTION_OVERHEAD,
    INSTRUCTION_ROWS,
    LEAST_FILL,
    PACKED_LEAST_ROWS,
)
from tilewright.backend.cpu.depthwise.window_plan import plan_window, window_layouts, window_seconds
from tilewright.backend.cpu.dot.contraction import Contraction, block_of, contractions, panel_layout
from tilewright.intrinsics.cpu import DOTS, Dot
from tilewright.ir.forms.expr import Axis, Load, loads
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext, stride
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import DotForm, InstructionForm, LeafForm, TileForm, WindowForm


@dataclass(frozen=True, eq=False)
class _Candidate:
    dot: Dot
    found: Contraction
    inner: Axis
    rows: int
    columns: int  # elements
    rate: float  # useful multiply-adds a second and unit


def instruction_rate(dot: Dot, target: Target) -> float:
    known = target.rate(dot.name) or target.rate(dot.name.removesuffix("_256"))
    return known or dot.speed * target.fma_rate


def instruction_seconds(nest: Nest, plan: Leaf, box: Box, target: Target) -> Size:
    """Multiply-adds of a box at the instruction's rate, left-over rows and columns as long as whole ones."""
    if isinstance(plan.form, WindowForm):
        return window_seconds(nest, plan, box, target)
    dot, found = DOTS[plan.options(InstructionForm).instruction], _meant(nest, plan)
    if isinstance(plan.form, TileForm) and found is not None:
        return tile_seconds(nest, plan, box, dot, found, target, instruction_rate(dot, target))
    points: Size = prod(extent_of(r.extent) for r in nest.reduce_axes)
    rows: Size = 1
    for axis, extent in zip(nest.axes, box, strict=True):
        if found is not None and axis in found.rows:
            rows = rows * extent.size
        elif found is not None and axis is found.column:
            points = points * (-(-extent.size // dot.lanes) * dot.lanes)
        else:
            points = points * extent.size
    return INSTRUCTION_OVERHEAD * points * (-(-rows // dot.rows) * dot.rows) / instruction_rate(dot, target)


def available(target: Target) -> Iterator[Dot]:
    """Instructions the target has, as wide as the vectors that its epilogues use."""
    for dot in DOTS.values():
        fits = dot.lanes * 4 == target.vector_bytes and dot.architecture == target.architecture
        if fits and all(f in target.features for f in dot.features):
            yield dot


def plan_instruction(nest: Nest, context: NestContext) -> Leaf | None:
    """The plan of a contraction on the best instruction for it; None where there is none."""
    best: _Candidate | None = None
    for dot in available(context.target):
        for found in contractions(nest):
            made = _candidate(nest, dot, found, context)
            if made is not None and (best is None or made.rate > best.rate):
                best = made
    if best is None:
        return plan_window(nest, context)
    names = nest.axis_names()
    found = best.found
    register = [(names[found.column], best.columns)]
    if found.rows and best.rows > 1:
        register.insert(0, (names[found.rows[-1]], best.rows))
    order = (*found.plain, found.column, *found.rows, *found.windows(nest, best.inner), best.inner)
    step = _step(nest, best.dot, found, best.inner, best.rows, best.columns, context.target)
    depth = step or extent_of(best.inner.extent)
    form: LeafForm = DotForm(best.dot.name)
    if best.dot.is_tile:
        is_summed = not found.windows(nest, best.inner)
        form = TileForm(best.dot.name, is_summed and is_crowded(found, best.rows, best.columns, depth, context), step)
    return Leaf(
        tensor=nest.tensor.name, core=nest.core, epilogue=nest.epilogue,
        vector=names[found.column], lanes=best.dot.lanes, register=tuple(register),
        order=tuple(names[a] for a in order), form=form,
    )  # fmt: skip


def _step(
    nest: Nest, dot: Dot, found: Contraction, inner: Axis, rows: int, columns: int, target: Target
) -> int:  # fmt: skip
    """Elements of k that tiles sum up at a time; 0: all."""
    if not dot.is_tile or found.windows(nest, inner):
        return 0
    return pass_of(dot, rows, columns, extent_of(inner.extent), target)


def crowding(
    nests: Sequence[Nest], plans: Sequence[Leaf], boxes: Mapping[Nest, Box], target: Target
) -> Size:
    """What a tile of contractions costs more, when its rows do not stay in the tile level."""
    room = target.local.capacity // 2
    factor: Size = 1.0
    for nest, plan in zip(nests, plans, strict=True):
        found = _meant(nest, plan)
        if found is None or isinstance(plan.form, TileForm):  # whose own cost has it
            continue
        sizes = dict(zip(nest.axes, (r.size for r in boxes[nest]), strict=True))
        rows: Size = 1
        for axis in found.rows:
            rows = rows * sizes[axis]
        depth = prod(extent_of(r.extent) for r in nest.reduce_axes)
        held = rows * depth * found.a.dtype.bytes
        factor = factor * np.sqrt(np.maximum(held / room, 1.0))
    return factor


def _meant(nest: Nest, plan: Leaf) -> Contraction | None:
    """The contraction that the plan's instruction runs."""
    if not isinstance(plan.form, DotForm | TileForm) or plan.vector is None:
        return None
    dot, column = DOTS[plan.form.instruction], nest.named(plan.vector)
    return next((c for c in contractions(nest) if c.column is column and dot.instruction(*_types(c))), None)


def instruction_layouts(nest: Nest, plan: Leaf, context: NestContext) -> dict[Tensor, Layout]:
    """How b is packed for the plan's instruction."""
    if isinstance(plan.form, WindowForm):
        return window_layouts(nest, plan, context)
    found = _meant(nest, plan)
    if found is None or not found.is_packable or found.b.source not in context.constants:
        return {}
    if not context.layout(found.b.source).is_natural:
        return {}
    columns = dict(plan.register)[plan.vector or ""]
    dot, inner = DOTS[plan.options(InstructionForm).instruction], nest.named(plan.order[-1])
    step = plan.form.step if isinstance(plan.form, TileForm) else 0
    return {found.b.source: _layout(nest, dot, found, inner, columns, step)}


def _types(found: Contraction) -> tuple[str, str]:
    return found.a.dtype.name, found.b.dtype.name


def _layout(nest: Nest, dot: Dot, found: Contraction, inner: Axis, columns: int, step: int) -> Layout:
    block = block_of(dot, extent_of(inner.extent))
    return panel_layout(found, found.windows(nest, inner), inner, dot, block, columns, step)


def _candidate(nest: Nest, dot: Dot, found: Contraction, context: NestContext) -> _Candidate | None:
    if dot.instruction(*_types(found)) is None or nest.monoid is None:
        return None
    if nest.monoid.identity[0].dtype.name != dot.accumulator:
        return None
    inner = _innermost(nest, found, context)
    if inner is None:
        return None
    extent = extent_of(inner.extent)
    block = block_of(dot, extent)
    fill = extent / (-(-extent // block) * dot.block if dot.is_tile else -(-extent // block) * block)
    if fill < LEAST_FILL:
        return None
    height = prod(extent_of(a.extent) for a in found.rows)
    width = extent_of(found.column.extent)
    if dot.is_tile:
        rows, columns = _tile_shape(-(-height // dot.rows), -(-width // dot.lanes))
        fill *= height / (-(-height // dot.rows) * dot.rows) * width / (-(-width // dot.lanes) * dot.lanes)
        rows, columns = rows * rows_of_a_register(nest, found, inner, context), columns * dot.lanes
    else:
        is_moved = dot.moves(*_types(found))[1] != 0
        rows, columns = _vector_shape(dot, height, width, context.target, is_moved)
        fill *= rows / (rows + is_moved)
    own = context.layout(found.b.source)
    is_ready = found.is_packable and found.b.source in context.constants
    step = _step(nest, dot, found, inner, rows, columns, context.target)
    is_ready = is_ready and (own.is_natural or own == _layout(nest, dot, found, inner, columns, step))
    if not is_ready and height < PACKED_LEAST_ROWS:
        return None
    return _Candidate(dot, found, inner, rows, columns, fill * instruction_rate(dot, context.target))


def _innermost(nest: Nest, found: Contraction, context: NestContext) -> Axis | None:
    """The reduction axis along which a is contiguous."""
    reads: list[Load] = loads(found.a)
    fit = [r for r in nest.reduce_axes if reads and all(stride(n, r, context) == 1 for n in reads)]
    return max(fit, key=lambda r: extent_of(r.extent), default=None)


def _tile_shape(rows: int, columns: int) -> tuple[int, int]:
    """Accumulator tiles along rows and columns: with a tile of each operand a side they fill the eight there are."""
    if rows >= 2 and columns >= 2:
        return 2, 2
    return (min(3, rows), 1) if columns == 1 else (1, min(3, columns))


def _vector_shape(dot: Dot, height: int, width: int, target: Target, is_moved: bool) -> tuple[int, int]:
    by_lane = dot.row_groups > 1
    best: tuple[float, int, int] = (float("inf"), 1, 1)
    for vectors in range(1, 5):
        if vectors > 1 and vectors * dot.lanes > width:
            break
        for rows in range(1, min(height, INSTRUCTION_ROWS) + 1):
            # accumulators, the columns' vectors, and the rows' vectors or one broadcast; a row of ones where rows move
            alive = (rows + is_moved) * vectors + vectors + (rows if by_lane else 1) + is_moved
            if alive > target.vector_registers - 2:
                break
            cost = _tile_cost(height, rows, width, vectors, dot.lanes, by_lane, target.pipes)
            if cost < best[0] * 0.999:
                best = (cost, rows, vectors)
    return best[1], best[2] * dot.lanes


def _tile_cost(height: int, mr: int, width: int, columns: int, lanes: int, by_lane: bool, pipes: int) -> float:
    """Cycles of one step of the reduction over the whole output."""

    def step(rows: int, vectors: int) -> float:
        arithmetic = rows * vectors / pipes
        # vector operands come from farther away than a row's scalars, which stay in L1: they weigh more
        broadcasts = 0.0 if by_lane else rows / pipes
        movement = vectors / pipes + (rows / lanes / pipes if by_lane else broadcasts)
        return max(arithmetic + 0.15 * vectors + 0.1 * broadcasts + 0.5, movement, float(INSTRUCTION_LATENCY))

    full_rows, remainder_rows = divmod(height, mr)
    full_columns, rest = divmod(width, columns * lanes)
    remainder_vectors, singles = divmod(rest, lanes)
    total = 0.0
    for count, rows in ((full_rows, mr), (1, remainder_rows)):
        if not rows or not count:
            continue
        total += count * full_columns * step(rows, columns)
        if remainder_vectors:
            total += count * step(rows, remainder_vectors)
        if singles:
            total += count * step(rows, singles)
    return total
