"""How constants lie in memory for who reads them: along the axis that neighbouring threads walk where threads sum up by
themselves, along the sum where tensor cores do.

    y[c, i, j] += x[c, i + r, j + s] * w[c, r, s]          with threads along c reads w as    w[r, s, c]
    y[o, i, j] += x[c, i + r, j + s] * w[o, c, r, s]       summed along c innermost reads w as    w[o, r, s, c]

Weights of depthwise and grouped convolutions would be read a few bytes from every line otherwise, and those of windows
element by element. Products whose lines of weights run along an axis of the result bring whole lines as well.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.backend.gpu.matrix.plan import lie_along_sum, may_turn, sides_of_leaf
from tilewright.backend.gpu.threads.plan import reused
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.expr import Load, axes_of
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.tile_graph.algebra.context import NestContext, packed_axis, stride
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf


def constant_layouts(nest: Nest, leaf: Leaf, context: NestContext) -> dict[Tensor, Layout]:
    if nest.monoid is None or leaf.vector is None:
        return {}
    if leaf.instruction in FORMS:
        return _along_the_sum(nest, leaf, context)
    if leaf.instruction is not None or reused(nest, {a: extent_of(a.extent) for a in nest.axes}):
        return {}
    vector = nest.named(leaf.vector)
    found: dict[Tensor, Layout] = {}
    for node in nest.element_loads:
        axis, rank = packed_axis(node, vector), node.source.rank
        if axis is None or axis == rank - 1 or not context.packable(node.source):
            continue
        others = sorted((d for d in range(rank) if d != axis), key=lambda d, n=node: _depth(n, d, nest, leaf))  # type: ignore[misc]
        found[node.source] = Layout.permuted((*others, axis))
    return found


def _depth(node: Load, dimension: int, nest: Nest, leaf: Leaf) -> int:
    """How far inside the leaf walks a dimension of what it reads; before everything where it does not."""
    place = {nest.named(name): number for number, name in enumerate(leaf.order)}
    return max((place.get(a, -1) for a in axes_of(node.indices[dimension])), default=-1)


def _along_the_sum(nest: Nest, leaf: Leaf, context: NestContext) -> dict[Tensor, Layout]:
    """Weights whose lines run along neither the end of the sum nor, where tensor cores take those, an axis of their own
    at its end."""
    sides = sides_of_leaf(nest, leaf)
    own = [side.axes[-1] for side in (sides.rows, sides.columns)]
    lines = {nest.named(leaf.order[-1]), *(() if lie_along_sum(leaf) else own)}
    bare = replace(context, constants=frozenset(), staged=frozenset())
    found: dict[Tensor, Layout] = {}
    for node in nest.element_loads:
        if node.source not in context.constants or not context.packable(node.source):
            continue
        if any(stride(node, a, bare) == 1 for a in lines):
            continue  # as it is
        if not may_turn(node):
            continue
        order = sorted(range(node.source.rank), key=lambda d, n=node: _depth(n, d, nest, leaf))  # type: ignore[misc]
        found[node.source] = Layout.permuted(tuple(order))
    return found
