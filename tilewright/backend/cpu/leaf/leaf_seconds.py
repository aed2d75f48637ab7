"""What a leaf takes on its part of a tile: slots of operations, seconds of a contraction, how full registers are."""

from __future__ import annotations

from math import log2, prod

import numpy as np

from tilewright.backend.cpu.leaf.arithmetic import Arithmetic, reduction_arithmetic
from tilewright.backend.cpu.leaf.instructions import instruction_seconds
from tilewright.backend.cpu.leaf.vectorise import facts_of, runs_of
from tilewright.backend.cpu.vector.contraction_facts import form_of
from tilewright.backend.cpu.vector.crowding import crowded_seconds
from tilewright.backend.cpu.vector.micro import core_seconds, dot_seconds, moving_seconds
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, is_op, var
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, kind_of, stride
from tilewright.tile_graph.algebra.nest import Nest, block_cost
from tilewright.tile_graph.algebra.propagate import Box, Range, Size, extent_of, index_size
from tilewright.tile_graph.algebra.rows import Rows
from tilewright.tile_graph.algebra.runs import stretch
from tilewright.tile_graph.plan.form import Leaf

_WIDE = 8  # lanes of a vector that is put together through one port of the processor
_STEP_STALL = 0.55  # of what bringing weights from the tile level delays a contraction, in a step


def row_starts(nest: Nest, plan: Leaf, box: Box) -> Size:
    """How often the loop along the vector begins anew on a tile."""
    starts: Size = 1
    for axis, part in zip(nest.axes, box, strict=True):
        if plan.vector is None or axis is not nest.named(plan.vector):
            starts = starts * part.size
    return starts


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
    return core + (1 - _found_near(nest, context)) * _STEP_STALL * (moving - core)


def reduction_seconds(nest: Nest, plan: Leaf, box: Box, context: NestContext) -> Size:
    """A reduction that is no contraction, on its box."""
    known, key = context.memo.facts, ("reduction", kind_of(nest, context), plan.unnamed)
    found: Arithmetic | None = known.get(key)
    if found is None:
        found = known[key] = reduction_arithmetic(nest, plan, context)
    own = found.form.nest  # this one, or one that is alike
    register = {own.named(a): n for a, n in plan.register}
    tile = {a: r.size for a, r in zip(own.axes, box, strict=True)}
    vector = found.form.vector
    chains = 1
    if found.busy.along and vector is not None:
        chains = register.get(vector, plan.lanes) // max(1, plan.lanes)
    passes = prod(-(-extent_of(own.named(a).extent) // n) for a, n in plan.cut)
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


def epilogue_cost(nest: Nest, plan: Leaf, context: NestContext) -> float:
    """Multiply-add slots of what is done with each result of a map or a contraction."""
    slots, key = context.memo.tiles.slots, (kind_of(nest, context), plan.unnamed)
    found = slots.get(key)
    if found is None:
        found = slots[key] = _epilogue_cost(nest, plan, context)
    return found


def _epilogue_cost(nest: Nest, plan: Leaf, context: NestContext) -> float:
    if nest.unswitched:
        known = context.memo.blocks
        if nest.outline.key not in known:
            known[nest.outline.key] = nest.block_counts()
        counts = known[nest.outline.key]
        target = context.target
        lost = crowded_seconds(nest, counts[1], target, context.offset) * target.fma_rate / plan.lanes
        return block_cost(nest, counts, target.vector_registers) + lost / prod(nest.unswitched.values())
    moving = 1.0 * len(nest.stores) + 0.5 * len(nest.value_loads)
    return nest.value_cost + moving + _lane_slots(nest, plan, context)


def _lane_slots(nest: Nest, plan: Leaf, context: NestContext) -> float:
    """What a transpose costs: vectors of a map that only moves elements are read or stored lane by lane, or transposed
    in registers. Of other maps, what they store."""
    if plan.vector is None or nest.monoid is not None:
        return 0.0
    # lanes of wide vectors, put together one by one, cost more than all else that a copy does, padding included
    moved = [_unpadded(v) if plan.lanes >= _WIDE else v for v in nest.values]
    only_moves = all(isinstance(v, Load) for v in moved)
    if len(plan.register) > 1:
        return log2(plan.lanes) if only_moves else 0.0
    vector = nest.named(plan.vector)
    strides = [stride(node, vector, context) for node in nest.value_loads] if only_moves else []
    place = context.offset(nest.tensor, nest.place)
    strides.append(place.terms.get(var(vector), 0))
    apart = sum(step not in (0, 1) for step in strides)
    return apart * plan.lanes * context.target.gathered_reads


def _unpadded(value: Expr) -> Expr:
    """What a copy reads where it does not pad."""
    return value.args[1] if is_op(value, "select") and isinstance(value.args[2], Const) else value


def register_fill(nest: Nest, plan: Leaf, box: Box, context: NestContext) -> Size:
    """How full register tiles are on a tile of this size."""
    full: Size = 1.0
    names = nest.axis_names()
    register = dict(plan.register)
    by_tiles = is_contraction(nest) and plan.instruction is None
    runs = runs_of(nest, plan, context) if by_tiles else {}
    tile = {a: part.size for a, part in zip(nest.axes, box, strict=True)}
    for axis in nest.axes:
        size, _ = stretch(axis, runs.get(axis, ()), tile)
        block = register.get(names[axis], 1)
        if block > 1 and names[axis] == plan.vector and not is_contraction(nest):
            block = plan.lanes  # what is left over runs as whole vectors, then as one that is not full
        if block > 1:
            full = full * (size / (-(-size // block) * block))
    return full
