"""What a leaf takes on its part of a tile: slots of operations, seconds of a contraction, how full registers are."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.backend.cpu.constants import STEP_STALL
from tilewright.backend.cpu.leaf.arithmetic import Arithmetic, leaf_arithmetic
from tilewright.backend.cpu.leaf.instructions import instruction_seconds
from tilewright.backend.cpu.leaf.vectorise import facts_of, runs_of
from tilewright.backend.cpu.vector.contraction_facts import form_of
from tilewright.backend.cpu.vector.micro import core_seconds, dot_seconds, moving_seconds
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis
from tilewright.tile_graph.algebra.context import NestContext, kind_of
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, Size, extent_of, index_size
from tilewright.tile_graph.algebra.rows import Rows
from tilewright.tile_graph.algebra.runs import stretch
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm


def known_seconds(nest: Nest, plan: Leaf, box: Box, context: NestContext) -> Size:
    """`_contraction_seconds`, once for all groups that cut the nest into the same tiles."""
    if context.cached is not None:
        return _contraction_seconds(nest, plan, box, context)
    tiles = context.memo.tiles
    kind = kind_of(nest, context), plan.unnamed
    key = kind, tiles.boxes.sizes[id(box)]
    found = tiles.seconds.get(key)
    if found is None:

        def work(sizes: list[Size]) -> Size:
            parts = zip(box, sizes, strict=True)
            return _contraction_seconds(nest, plan, tuple([Range(p.low, n, p.extent) for p, n in parts]), context)

        rows = tiles.contractions.setdefault(kind, Rows())
        found = tiles.seconds[key] = rows.of([p.size for p in box], [p.extent for p in box], work)
    return found


def _contraction_seconds(nest: Nest, plan: Leaf, box: Box, context: NestContext) -> Size:
    """Arithmetic of a contraction on its box, with what its loops move between the caches below the tile level."""
    if plan.instruction is not None:
        return np.maximum(instruction_seconds(nest, plan, box, context.target), _weight_seconds(nest, box, context))
    facts = facts_of(nest, plan, context)
    tile = {a: r.size for a, r in zip(nest.axes, box, strict=True)}
    if facts.vector is None or facts.vector in nest.reduce_axes:
        return dot_seconds(facts, dict(plan.register), tile)
    form = form_of(plan, facts)
    core = core_seconds(facts, form, tile)
    moving = moving_seconds(facts, form, tile, core)
    if context.cached is None:
        return moving
    return core + (1 - _found_near(nest, context)) * STEP_STALL * (moving - core)


def arithmetic_seconds(nest: Nest, plan: Leaf, box: Box, context: NestContext) -> Size:
    """A map, or a reduction that is no contraction, on its box."""
    known, key = context.memo.facts, ("arithmetic", kind_of(nest, context), plan.unnamed)
    found: Arithmetic | None = known.get(key)
    if found is None:
        found = known[key] = leaf_arithmetic(nest, plan, context)
    own = found.form.nest  # this one, or one that is alike
    register = {own.named(a): n for a, n in plan.register}
    tile = {a: r.size for a, r in zip(own.axes, box, strict=True)}
    vector = found.form.vector
    chains = 1
    if found.busy.along and vector is not None:
        chains = register.get(vector, plan.lanes) // max(1, plan.lanes)
    passes = prod(-(-extent_of(own.named(a).extent) // n) for a, n in plan.options(VectorForm).cut)
    return found.seconds(register, tile, max(1, chains), passes)


def _weight_seconds(nest: Nest, box: Box, context: NestContext) -> Size:
    """What the weights of a step take from the tile level: an instruction's rate knows nothing of them."""
    cached = context.cached or {}
    sizes: dict[Axis, Size] = {a: extent_of(a.extent) for a in nest.reduce_axes}
    sizes.update({a: r.size for a, r in zip(nest.axes, box, strict=True)})
    total: Size = 0.0
    for node in nest.element_loads:
        if node.source not in cached:
            continue
        moved: Size = node.source.dtype.bytes * cached[node.source].level
        for index, extent in zip(node.indices, node.source.shape, strict=True):
            moved = moved * index_size(simplify(index), sizes, extent_of(extent))
        total = total + moved / context.target.local.bandwidth
    return total


def _found_near(nest: Nest, context: NestContext) -> float:
    """The part of a contraction's weights that the step before left in the nearest cache."""
    cached = context.cached or {}
    sizes = {t: t.most_bytes for t in nest.reads() if t in cached}
    return sum(cached[t].near * size for t, size in sizes.items()) / max(1, sum(sizes.values()))


def epilogue_cost(nest: Nest) -> float:
    """Multiply-add slots of what is done with each result of a contraction."""
    return nest.value_cost + 1.0 * len(nest.stores) + 0.5 * len(nest.value_loads)


def register_fill(nest: Nest, plan: Leaf, box: Box, context: NestContext) -> Size:
    """How full the register tiles of a contraction are on a tile of this size."""
    full: Size = 1.0
    names = nest.axis_names()
    register = dict(plan.register)
    runs = runs_of(nest, plan, context) if plan.instruction is None else {}
    tile = {a: part.size for a, part in zip(nest.axes, box, strict=True)}
    for axis in nest.axes:
        size, _ = stretch(axis, runs.get(axis, ()), tile)
        block = register.get(names[axis], 1)
        if block > 1:
            full = full * (size / (-(-size // block) * block))
    return full
