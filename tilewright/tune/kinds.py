"""The class of a kernel or of several, by what their largest nest is or what they make together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from tilewright.ir.forms.compute import Compute, factors
from tilewright.ir.forms.expr import Axis, Expr, axes_of, loads
from tilewright.tile_graph.algebra.context import is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of


def work(nests: Iterable[Nest]) -> int:
    """Points of all nests, those of the reductions included."""
    return sum(prod(extent_of(a.extent) for a in (*n.axes, *n.reduce_axes)) for n in nests)


def kind_of(nest: Nest) -> str:
    if nest.monoid is None:
        return "map"
    if not is_contraction(nest):
        return "reduction"
    windows = any(_is_window(i, nest.reduce_axes) for n in loads(*nest.elements) for i in n.indices)
    if not windows:
        return "contraction"
    shared = [a for a in nest.axes if all(a in axes_of(*n.indices) for n in loads(*nest.elements)) and a.extent != 1]
    return "depthwise convolution" if shared else "convolution"


def kind_of_nests(nests: Sequence[Nest], computes: Mapping[str, Compute]) -> str:
    """Of nests that follow each other."""
    products = [n for n in nests if _is_product(n, computes)]
    if len(products) > 1:
        between = nests[nests.index(products[0]) : nests.index(products[-1])]
        is_stream = any(n.monoid is not None and n not in products for n in between)
        return "stream" if is_stream else "chain"
    largest = max(products or nests, key=lambda n: work([n]))
    kind = kind_of(largest) if largest in products or largest.monoid is None else "reduction"
    if kind == "reduction" and _has_window(largest):
        return "window"
    return {"contraction": "product", "depthwise convolution": "depthwise"}.get(kind, kind)


def _is_product(nest: Nest, computes: Mapping[str, Compute]) -> bool:
    """Of two different things: a sum of squares is a reduction."""
    multiplied = factors(computes[nest.core])
    return is_contraction(nest) and len(multiplied) == 2 and multiplied[0] != multiplied[1]


def _has_window(nest: Nest) -> bool:
    return any(_is_window(i, nest.reduce_axes) for n in loads(*nest.elements) for i in n.indices)


def _is_window(index: Expr, reduce_axes: Sequence[Axis]) -> bool:
    axes = set(axes_of(index))
    return len(axes) > 1 and bool(axes & set(reduce_axes))
