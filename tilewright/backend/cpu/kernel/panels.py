"""How constants lie in memory for the plan that reads them: panels a register tile wide, or rows of dot products."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.ir.forms.expr import Axis, Load, axes_of
from tilewright.ir.forms.tensor import Layout, StorageAxis, Tensor
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, packed_axis
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf


def constant_layouts(nest: Nest, plan: Leaf, context: NestContext) -> dict[Tensor, Layout]:
    """Panels for constants read along the vector axis: (outer, other axes in loop order, one register tile wide)."""
    if plan.instruction is not None:
        from tilewright.backend.cpu.leaf.instructions import instruction_layouts

        return instruction_layouts(nest, plan, context)
    if plan.vector is None or not is_contraction(nest):
        return {}
    vector = nest.named(plan.vector)
    if vector not in nest.axes:
        return _rows_layouts(nest, vector, context)
    register = dict(plan.register)
    names = nest.axis_names()
    width = register.get(plan.vector, plan.lanes)
    order = [nest.named(a) for a in plan.order]
    found: dict[Tensor, Layout] = {}
    for node, axis in _packable(nest, vector, context):
        tensor = node.source

        def depth(dim: int, node: Load = node) -> int:
            axes = [a for a in axes_of(node.indices[dim]) if a in order]
            if any(register.get(names[a], 0) >= extent_of(a.extent) > 1 for a in axes):
                return len(order)  # written out inside every loop: next to the vector, so that one run is read
            return max((order.index(a) for a in axes), default=-1)

        others = sorted((d for d in range(tensor.rank) if d != axis), key=depth)
        # padded to whole vectors: the last one is read whole
        run = min(width, -(-extent_of(tensor.shape[axis]) // plan.lanes) * plan.lanes)
        around = [d for d in others if -1 < depth(d) <= order.index(vector)]  # loops around the panels: batches, groups
        inside = [d for d in others if d not in around]
        panel = [StorageAxis(axis, run), *(StorageAxis(d) for d in inside), StorageAxis(axis, 1, run)]
        parts = [*(StorageAxis(d) for d in around), *panel]
        if run == extent_of(tensor.shape[axis]):
            parts = [*(StorageAxis(d) for d in others), StorageAxis(axis)]
        found[tensor] = Layout(tuple(parts))
    return found


def _rows_layouts(nest: Nest, vector: Axis, context: NestContext) -> dict[Tensor, Layout]:
    """Constants of dot products: the reduction that fills the vector innermost."""
    found: dict[Tensor, Layout] = {}
    for node, axis in _packable(nest, vector, context):
        rank = node.source.rank
        if axis != rank - 1:
            found[node.source] = Layout.permuted((*(d for d in range(rank) if d != axis), axis))
    return found


def _packable(nest: Nest, vector: Axis, context: NestContext) -> Iterator[tuple[Load, int]]:
    """Reads of constants that may be packed along the vector axis, each with the axis of its own that runs there."""
    for node in nest.element_loads:
        axis = packed_axis(node, vector)
        if axis is not None and node.source.rank > 1 and context.packable(node.source):
            yield node, axis
