"""What a contraction on matrix registers costs: products, loads, copies of rows and sums between passes, counted.

Facts of the processors that have them: a product of registers takes a cycle a row, a load of a register one cycle for
two of its lines when they are in the first cache, a store one cycle a line.
"""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.backend.cpu.constants import (
    AMX_BLOCK_CYCLES,
    AMX_COPY_CYCLES,
    AMX_EXPOSED,
    AMX_LEAST_HEIGHT,
    AMX_LINES_A_CYCLE,
    AMX_PLACE_CYCLES,
    AMX_UNEVEN,
    FULL,
)
from tilewright.backend.cpu.dot.contraction import AHEAD, Contraction, block_of
from tilewright.intrinsics.cpu import TILE_BYTES, TILE_ROWS, Dot
from tilewright.ir.forms.expr import Axis, Load
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext, stride
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import TileForm


def rows_of_a_register(nest: Nest, found: Contraction, inner: Axis, context: NestContext) -> int:
    """Rows that one register takes: where rows of an image do not lie behind each other, a part of one that divides
    it."""
    if len(found.rows) < 2 or _is_even(nest, found, inner, context):
        return TILE_ROWS
    width = extent_of(found.rows[-1].extent)
    most = max(n for n in range(1, TILE_ROWS + 1) if width % n == 0)
    return most if most >= min(AMX_LEAST_HEIGHT, width) else TILE_ROWS


def _is_even(nest: Nest, found: Contraction, inner: Axis, context: NestContext) -> bool:
    """Whether all rows walked as one lie an equal distance apart."""
    if found.windows(nest, inner) or found.conditions or not isinstance(found.a, Load):
        return False
    steps = [stride(found.a, axis, context) for axis in found.rows]
    inside = zip(steps, steps[1:], found.rows[1:], strict=False)
    return all(a is not None and b is not None and a == b * extent_of(axis.extent) for a, b, axis in inside)


def pass_of(dot: Dot, rows: int, columns: int, extent: int, target: Target) -> int:
    """Elements of k that one pass over a tile sums up, so that a block of rows stays in the first cache while a panel
    of columns passes; 0: all. Between two uses of a row's line the cache sees the whole panel, the part of the next
    one that is asked for ahead, and the sums of the block before, of this one and of the next."""
    block = block_of(dot, extent)
    steps = -(-extent // block)
    room = target.nearest.capacity - 3 * 4 * rows * columns - AHEAD * columns * TILE_BYTES
    most = max(1, room // ((rows + columns) * TILE_BYTES))
    if steps * 2 <= most * 3:
        return 0
    passes = -(-steps // most)
    return -(-steps // passes) * block


def is_crowded(found: Contraction, rows: int, columns: int, depth: int, context: NestContext) -> bool:
    """Whether the rows of a block, `depth` elements of each, fall so unevenly on the sets of the first cache that they
    are worth a copy: they throw each other out before the next panel of columns wants them."""
    if not isinstance(found.a, Load) or not found.rows or extent_of(found.column.extent) < 2 * columns:
        return False
    apart = stride(found.a, found.rows[-1], context)
    if apart is None or apart == 0:
        return False
    near, size = context.target.nearest, found.a.dtype.bytes
    sets = near.capacity // context.target.near_ways // near.transaction
    lines = -(-depth * size // near.transaction)
    first = np.arange(rows)[:, None] * apart * size // near.transaction
    fallen = np.bincount(((first + np.arange(lines)) % sets).ravel(), minlength=sets)
    return bool(fallen.max() > AMX_UNEVEN * max(1.0, rows * lines / sets))


def tile_seconds(
    nest: Nest, plan: Leaf, box: Box, dot: Dot, found: Contraction, target: Target, rate: float
) -> Size:  # fmt: skip
    """One tile: its steps, each as long as its products, its loads or what it brings from the second cache."""
    sizes = dict(zip(nest.axes, (r.size for r in box), strict=True))
    register = dict(plan.register)
    inner = nest.named(plan.order[-1])
    extent = extent_of(inner.extent)
    block = block_of(dot, extent)
    outer = prod(extent_of(a.extent) for a in found.windows(nest, inner))
    rows: Size = 1
    plain: Size = 1
    for axis in nest.axes:
        if axis in found.rows:
            rows = rows * sizes[axis]
        elif axis is not found.column:
            plain = plain * sizes[axis]
    columns = sizes[found.column]
    height = register.get(nest.axis_names()[found.rows[-1]], 1) if found.rows else 1
    width = register[plan.vector or ""]
    steps = outer * -(-extent // block)
    step = plan.options(TileForm).step
    passes = -(-extent // step) if step else 1
    across, down = -(-columns // width), -(-rows // height)
    registers = -(-columns // dot.lanes)  # of columns, all panels
    cycle = dot.lanes * dot.block / rate
    products = rows * registers * steps
    loads = (rows * across + dot.rows * registers * down) * steps / AMX_LINES_A_CYCLE
    panels = TILE_BYTES * dot.rows * registers * steps / passes  # bytes that pass every block of rows
    sums = 4.0 * rows * columns if passes > 1 else 0.0
    far = np.where(
        panels <= target.nearest.capacity // 3, 0.0, panels * down * passes * _byte_seconds(panels, target)
    )
    far = far + 2 * sums * (passes - 1) * _byte_seconds(panels + sums, target)
    # rows come once a pass, or with every panel where a block of them does not stay; windows lie over each other
    block_bytes = height * TILE_BYTES * steps / passes / (outer if outer > 1 else 1)
    again = across if block_bytes > target.nearest.capacity // 2 else 1
    far = far + rows * TILE_BYTES * steps * again / outer / target.local.bandwidth
    busy = np.maximum(products, loads) * cycle
    starting = AMX_BLOCK_CYCLES * across * down * passes * cycle
    copied = _copied(nest, plan, found, inner, sizes, rows, steps) * cycle
    return plain * (np.maximum(busy, far) + AMX_EXPOSED * np.minimum(busy, far) + starting + copied)


def _byte_seconds(held: Size, target: Target) -> Size:
    """A byte of what is read again after `held` others: from the tile level while that has room for them."""
    level, outer = target.local, target.beyond_local
    return np.where(held <= level.capacity * FULL, 1 / level.bandwidth, 1 / outer.bandwidth)


def _copied(
    nest: Nest, plan: Leaf, found: Contraction, inner: Axis, sizes: dict[Axis, Size], rows: Size, steps: int
) -> Size:
    """Cycles of copies: of every row in every step, or of what windows reach over, once."""
    is_whole = extent_of(inner.extent) * found.a.dtype.bytes % TILE_BYTES == 0
    windows = found.windows(nest, inner)
    if windows and (found.conditions or not is_whole):
        reached = rows * _overlap(found, windows, sizes)
        return reached * (AMX_PLACE_CYCLES + AMX_COPY_CYCLES * steps / prod(extent_of(a.extent) for a in windows))
    if plan.options(TileForm).packs or not is_whole or found.conditions:
        return AMX_COPY_CYCLES * rows * steps
    return 0.0


def _overlap(found: Contraction, windows: tuple[Axis, ...], sizes: dict[Axis, Size]) -> Size:
    """Places that windows reach over for every row: more than one where the tile is small or windows lie apart."""
    whole: Size = 1.0
    for axis, window in zip(reversed(found.rows), reversed(windows), strict=False):
        whole = whole * (sizes[axis] + extent_of(window.extent) - 1) / np.maximum(sizes[axis], 1)
    return whole
