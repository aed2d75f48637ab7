"""What a kernel keeps for itself in the memory of its result.

    e[i, j] = exp(x[i, j] - m[i]);  s[i] = sum of e[i, j];  y[i, j] = e[i, j] / s[i]

While tiles of e are computed, those of y are nowhere yet, and each element of y is computed from the element of e in
the same place, which nobody reads afterwards. So e may lie where y will: a cache then has one tile less to hold, and
the lines of y come near while there is much to compute, not all at once when results are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, loads, var
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.parts import boxes_at
from tilewright.tile_graph.algebra.propagate import Range
from tilewright.tile_graph.plan.form import Hold, Leaf, Tile, TileAxis


def in_results(kernel: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout]) -> Tile:
    """A kernel that keeps in the memory of its result what it may, and nothing else, where caches lie between."""
    found = kept_in_results(kernel, nests, layout)
    holds = tuple(replace(h, within=found.get(h.tensor)) for h in kernel.holds)
    return kernel if holds == kernel.holds else replace(kernel, holds=holds)


def kept_in_results(kernel: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout]) -> dict[str, str]:
    """By tensors that a kernel may keep so: the result that each lies in. Of one result only one of them."""
    if not all(isinstance(n, Leaf) and n.part == "whole" for n in kernel.body):
        return {}  # boxes are those of several parts of a tile
    root = nests[-1]
    if not _is_map(root) or root.tensor.name in kernel.held or not layout(root.tensor).is_natural:
        return {}
    axes = {a.name: a for a in kernel.axes}
    parts = {name: _part(axes[name], size) for name, size in kernel.sizes}
    boxes, limits = boxes_at([nests], parts, axes)
    if limits:
        return {}
    for hold in kernel.holds:
        made = next((n for n in nests if n.tensor.name == hold.tensor), None)
        if made is None or not _is_plain(hold) or not _is_map(made) or boxes[made] != boxes[root]:
            continue
        tensor, result = made.tensor, root.tensor
        if (tensor.shape, tensor.dtype, layout(tensor)) != (result.shape, result.dtype, layout(result)):
            continue
        reads = [n for n in loads(*root.values) if n.source is tensor]
        if reads and all(n.indices == root.place for n in reads):
            return {tensor.name: result.name}
    return {}


def _part(axis: TileAxis, size: int) -> Range:
    """Any of the parts of an axis."""
    number = Axis(axis.name, -(-axis.extent // size))
    return Range(simplify(var(number) * size), size, axis.extent)


def _is_plain(hold: Hold) -> bool:
    return hold.mode == "store" and hold.fill is None and hold.stages == 1 and hold.layout is None


def _is_map(nest: Nest) -> bool:
    """Whether each element is computed from others alone, in one go."""
    return nest.monoid is None and len(nest.stores) == 1 and not nest.unswitched and not nest.accumulated
