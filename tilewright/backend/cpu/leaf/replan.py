"""A contraction planned again for the shape that a kernel's tile gives it: register tiles, orders of the block loops
and passes that the construction had compared over the whole output, compared for that shape alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.backend.cpu.constants import LEAF_WORTH, MOST_LEAVES
from tilewright.backend.cpu.leaf.vectorise import (
    block_loops,
    dot_order,
    dot_rows,
    facts_of,
    passes_of,
    with_loops,
)
from tilewright.backend.cpu.vector.construct import BuiltLeaf, build_tiles, dot_tiles
from tilewright.backend.cpu.vector.contraction_facts import form_of
from tilewright.ir.forms.expr import Axis
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, kind_of
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm


def other_leaves(nest: Nest, leaf: Leaf, shape: Mapping[Axis, int], context: NestContext) -> list[Leaf]:
    """Leaves with the same vector axis that are predicted to take less time on parts of this shape, best first."""
    if not is_contraction(nest) or leaf.instruction is not None or leaf.vector is None:
        return []
    known = context.memo.suited
    key = kind_of(nest, context), leaf.unnamed, tuple(shape.values())
    if key not in known:
        known[key] = _others(nest, leaf, shape, context)
    return [other.renamed(nest.tensor.name, nest.core, nest.epilogue) for other in known[key]]


def _others(nest: Nest, leaf: Leaf, shape: Mapping[Axis, int], context: NestContext) -> list[Leaf]:
    facts = facts_of(nest, leaf, context)
    inner = tuple(a for a in leaf.order if nest.named(a) in nest.reduce_axes)
    base = replace(leaf, order=inner, register=()).with_options(VectorForm, cut=(), ahead=0)
    register = {nest.named(a): n for a, n in leaf.register}
    if facts.vector in nest.reduce_axes:
        dots = dot_tiles(facts, dot_rows(nest), shape)
        own = next((seconds for seconds, sizes in dots if sizes == register), None)
        tiles = [sizes for seconds, sizes in dots if own is not None and seconds < LEAF_WORTH * own]
        return [with_loops(nest, base, sizes, dot_order(nest, sizes)) for sizes in tiles[:MOST_LEAVES]]
    whole = extent_of(facts.cut_axis.extent) if facts.cut_axis is not None else 1
    form = form_of(leaf, facts)
    found: list[BuiltLeaf] = []
    for built in build_tiles(facts, shape):
        if (built.rows, built.vectors, built.cut or whole) == (form.rows, form.vectors, form.cut) and (
            built.rows == 1 or built.row_inside == form.row_inside
        ):
            limit = LEAF_WORTH * built.seconds
            better = [b for b in found if b.seconds < limit][:MOST_LEAVES]
            return [with_loops(nest, base.with_options(VectorForm, cut=passes_of(facts, b)), *block_loops(facts, b))
                    for b in better]  # fmt: skip
        found.append(built)
    return []  # a leaf that the construction does not build
