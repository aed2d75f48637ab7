"""TopK: every step finds the next element in order, so that k of n take k * n comparisons."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.ir import dtypes
from tilewright.ir.compute import Monoid, Reduce, Scan, Sort, neutral
from tilewright.ir.expr import Axis, Expr, cast, const, le, load, lt, op, select, state, var
from tilewright.ir.graph import Node
from tilewright.ir.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.reduction import exceeds_first, reduced_shape
from tilewright.ops.registry import operator

MOST_COMPARISONS = 1 << 33  # some seconds


@operator("TopK", since=1)
def top_k_by_attribute(b: Builder, node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    return _top_k(b, node, x, int(node.attributes["k"]))


@operator("TopK", since=10, constants=(1,))
def top_k(b: Builder, node: Node, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return _top_k(b, node, x, b.integers(count, "K")[0])


def _top_k(b: Builder, node: Node, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    axis = b.axis(node.attributes.get("axis", -1), x.rank)
    if not 0 <= count <= dims(x)[axis]:
        raise b.invalid(f"takes {count} of an axis of {dims(x)[axis]}")
    largest = bool(node.attributes.get("largest", 1))
    shape = (*dims(x)[:axis], count, *dims(x)[axis + 1 :])
    if prod(shape) == 0:
        empty = b.map("", shape, lambda *i: const(0, x.dtype))
        return empty, b.map("indices", shape, lambda *i: const(0))
    if prod(dims(x)) * count > MOST_COMPARISONS:
        return _sorted(b, x, axis, largest, shape)
    values, places = _taken_in_order(b, x, axis, count, largest)

    def placed(t: Tensor, hint: str, dtype: dtypes.DType) -> Tensor:
        return b.map(hint, shape, lambda *i: cast(load(t, (i[axis], *i[:axis], *i[axis + 1 :])), dtype))

    return placed(values, "", x.dtype), placed(places, "indices", dtypes.int64)


def _taken_in_order(b: Builder, x: Tensor, axis: int, count: int, largest: bool) -> tuple[Tensor, Tensor]:
    """A Scan whose step takes the most extreme element behind the one before it; of equal ones the first."""
    rest = reduced_shape(x, [axis], False)
    step = Axis("t", count)
    last, at = b.tensor("last", rest, x.dtype), b.tensor("last_place", rest, dtypes.int32)
    av, bv = state("a0", x.dtype), state("b0", x.dtype)
    ai, bi = state("a1", dtypes.int32), state("b1", dtypes.int32)
    takes = exceeds_first(av, bv, lt(bi, ai), largest)
    nowhere = const(np.iinfo(np.int32).max, dtypes.int32)
    start = (neutral("max" if largest else "min", x.dtype), nowhere)
    monoid = Monoid((av, ai), (bv, bi), start, (select(takes, bv, av), select(takes, bi, ai)), (av, ai))
    axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(rest))
    over = Axis("r0", dims(x)[axis])
    i = tuple(map(var, axes))
    value, place = load(x, (*i[:axis], var(over), *i[axis:])), cast(var(over), dtypes.int32)
    before = exceeds_first(load(last, i), value, le(place, load(at, i)), largest)
    waits = op("or", lt(load(at, i), 0), op("not", before))
    elements = (select(waits, value, start[0]), select(waits, place, nowhere))
    found = b.tensor("next", rest, x.dtype), b.tensor("next_place", rest, dtypes.int32)
    body = Reduce(found, axes, (over,), elements, monoid, b.origin)
    initial = (
        b.constant(np.zeros(rest, x.dtype.numpy), "start"),
        b.constant(np.full(rest, -1, np.int32), "start_place"),
    )
    stacked = tuple(b.tensor(f"in_order{k}", (count, *rest), t.dtype) for k, t in enumerate(found))
    kept = tuple(zip(found, stacked, strict=True))
    b.emit(Scan(step, initial, (last, at), (body,), found, (None, None), kept, origin=b.origin))
    return stacked[0], stacked[1]


def _sorted(b: Builder, x: Tensor, axis: int, largest: bool, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(dims(x)))
    value: Expr = load(x, [var(a) for a in axes])
    values, indices = b.tensor("", shape, x.dtype), b.tensor("indices", shape, dtypes.int64)
    b.emit(Sort((values, indices), axes, axes[axis], value, (value, var(axes[axis])), largest, b.origin))
    return values, indices
