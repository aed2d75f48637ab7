"""Vectors of weights that come from the tile level: how many steps early a sum asks for them, and how many steps of it
are written out in a turn of its loop.

A panel of weights that is more than the first cache holds comes from the tile level for every block of rows. Where a
vector is a line, every read of it misses, and hardware runs too short a way ahead of a step of a dozen cycles: on a
Skylake server a product whose panels lie in L2 reaches 92% of the multiply-add rate, asked for early 95%. The hints
take room of the front end, which two steps in a turn give back: their counters, and hints for the next panel. That
counts twice where another thread shares the core. Four steps in a turn were slower again.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.backend.cpu.constants import SOON_EARLY, SOON_TOGETHER
from tilewright.backend.cpu.leaf.vectorise import facts_of
from tilewright.backend.cpu.vector.micro import blocks_along
from tilewright.ir.forms.expr import Axis, Load
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, packed_axis
from tilewright.tile_graph.algebra.nest import Nest, period
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm


def weights_in_panels(nest: Nest, plan: Leaf, context: NestContext) -> Load | None:
    """The packed weights of a register tile of rows and vectors, a line for each vector; None where there are none."""
    if context.cached is not None or plan.instruction is not None or not context.prefetches:
        return None
    if not is_contraction(nest) or plan.vector is None or plan.vector[0] != "o" or len(plan.register) != 2:
        return None
    options = plan.options(VectorForm)
    if plan.part != "whole" or options.row_lanes > 1 or plan.alternate or plan.order[-1] in options.unroll:
        return None
    vector = nest.named(plan.vector)
    if period(nest, vector) is not None or context.target.vector_bytes < context.target.nearest.transaction:
        return None
    read = [n for n in nest.element_loads if n.source in context.constants and packed_axis(n, vector) is not None]
    return read[0] if len(read) == 1 and read[0].source.rank >= 2 else None


def prefetch_before(nest: Nest, plan: Leaf, tile: Mapping[Axis, Size], context: NestContext) -> tuple[int, int]:
    """Steps before it multiplies a vector of its panel that a sum asks for it (0: never), and steps in a turn."""
    read = weights_in_panels(nest, plan, context)
    facts = facts_of(nest, plan, context)
    if read is None or facts.row is None or facts.vector is None:
        return 0, 1
    register, names = dict(plan.register), nest.axis_names()
    width, rows = register[names[facts.vector]], register[names[facts.row]]
    passes = dict(plan.options(VectorForm).cut)
    steps = {a: passes.get(names[a], extent_of(a.extent)) for a in nest.reduce_axes if a in read.axes}
    panel = width * read.source.dtype.bytes
    for count in steps.values():
        panel *= count
    if panel <= context.target.nearest.capacity or int(blocks_along(facts, facts.row, tile)[0]) <= rows:
        return 0, 1  # it stays near, or comes once
    innermost = steps.get(nest.named(plan.order[-1]), 1)
    return SOON_EARLY, 1 if innermost % SOON_TOGETHER else SOON_TOGETHER
