"""Plans windows that slide over every channel by itself on lane-wise dot products, and says what they cost."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.backend.cpu.constants import (
    WINDOW_FILL,
    WINDOW_MOST_ROWS,
    WINDOW_OVERHEAD,
    WINDOW_SPARE,
    WINDOW_WITHOUT,
)
from tilewright.backend.cpu.depthwise.window import CHANNELS, splits_well, window_of
from tilewright.intrinsics.cpu import WINDOW_DOTS, Dot
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext, stride
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import WindowForm


def plan_window(nest: Nest, context: NestContext) -> Leaf | None:
    """The plan of a window on the target's dot product; None where there is none for it."""
    found = window_of(nest)
    if found is None or nest.monoid is None or nest.initial:
        return None
    dot = next((d for d in _available(context.target) if d.instruction(found.a.dtype.name, found.b.dtype.name)), None)
    if dot is None or nest.monoid.identity[0].dtype.name != dot.accumulator:
        return None
    if stride(found.a, found.channel, context) != 1 or found.b.source not in context.constants:
        return None
    own = context.layout(found.b.source)
    if not own.is_natural and own != found.layout(dot):
        return None
    names = nest.axis_names()
    vectors = CHANNELS // dot.lanes
    rows = max(1, min(WINDOW_MOST_ROWS, (context.target.vector_registers - WINDOW_SPARE) // (3 * vectors)))
    plain = [a for a in nest.axes if a not in (found.channel, found.row)]
    order = (*plain, found.channel, found.row, *found.terms, found.along, found.inner)
    return Leaf(
        tensor=nest.tensor.name, core=nest.core, epilogue=nest.epilogue,
        vector=names[found.channel], lanes=dot.lanes,
        register=((names[found.row], min(rows, extent_of(found.row.extent))), (names[found.channel], CHANNELS)),
        order=tuple(names[a] for a in order), form=WindowForm(dot.name),
    )  # fmt: skip


def _available(target: Target) -> list[Dot]:
    fit = [d for d in WINDOW_DOTS.values() if d.architecture == target.architecture]
    return [
        d for d in fit
        if d.lanes * 4 == target.vector_bytes and all(f in target.features for f in d.features)
    ]  # fmt: skip


def window_seconds(nest: Nest, plan: Leaf, box: Box, target: Target) -> Size:
    """Interleaving every position of every row, then the dot products; a block of channels counts as a whole one."""
    found = window_of(nest)
    assert found is not None
    dot = WINDOW_DOTS[plan.options(WindowForm).instruction]
    cycle = 2 * target.lanes(4) / target.fma_rate
    outputs: Size = 1
    positions: Size = 1
    slow: Size = 1
    for axis, extent in zip(nest.axes, box, strict=True):
        size = extent.size
        if axis is found.channel:
            size = -(-extent.size // CHANNELS) * CHANNELS
            slow = np.where(splits_well(extent.size, extent.extent), 1.0, WINDOW_WITHOUT)
        outputs = outputs * size
        along = extent.size * found.step + extent_of(found.along.extent) - found.step
        positions = positions * (along if axis is found.row else size)
    groups = found.groups(dot)
    steps = prod(extent_of(a.extent) for a in (found.along, *found.terms)) * groups
    dots = outputs / dot.lanes * steps
    return slow * WINDOW_OVERHEAD * cycle / 2 * (dots + positions / CHANNELS * groups * WINDOW_FILL)


def window_layouts(nest: Nest, plan: Leaf, context: NestContext) -> dict[Tensor, Layout]:
    """How the weights are packed for the plan."""
    found = window_of(nest)
    if found is None or not context.layout(found.b.source).is_natural:
        return {}
    return {found.b.source: found.layout(WINDOW_DOTS[plan.options(WindowForm).instruction])}
