"""How constants lie in memory for threads that sum up by themselves: along the axis that neighbouring threads walk.

    y[c, i, j] += x[c, i + r, j + s] * w[c, r, s]    with threads along c reads w as    w[r, s, c]

Weights of depthwise and grouped convolutions would be read a few bytes from every line otherwise. Products that go
through shared memory or tensor cores bring whole lines whichever way they run.
"""

from __future__ import annotations

from tilewright.backend.gpu.threads.plan import reused
from tilewright.ir.forms.expr import axes_of
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.tile_graph.algebra.context import NestContext, packed_axis
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf


def constant_layouts(nest: Nest, leaf: Leaf, context: NestContext) -> dict[Tensor, Layout]:
    if nest.monoid is None or leaf.vector is None or leaf.instruction is not None:
        return {}
    if reused(nest, {a: extent_of(a.extent) for a in nest.axes}):
        return {}
    vector = nest.named(leaf.vector)
    depth = {nest.named(name): place for place, name in enumerate(leaf.order)}
    found: dict[Tensor, Layout] = {}
    for node in nest.element_loads:
        axis, rank = packed_axis(node, vector), node.source.rank
        if axis is None or axis == rank - 1 or not context.packable(node.source):
            continue
        indices = node.indices
        others = sorted((d for d in range(rank) if d != axis),
                        key=lambda d: max((depth.get(a, -1) for a in axes_of(indices[d])), default=-1))  # fmt: skip
        found[node.source] = Layout.permuted((*others, axis))
    return found
