"""TopK: every step finds the next element in order, so that k of n take k * n comparisons; where a network sorts all of
them with fewer, it does."""

from __future__ import annotations

from math import prod

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bits import bitcast
from tilewright.ir.forms.compute import Scan
from tilewright.ir.forms.expr import Axis, Expr, cast, const, eq, load, lt, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, clamp, dims
from tilewright.ops.reductions.reduction import reduced_shape
from tilewright.ops.registry import operator
from tilewright.ops.sorting.bitonic import order, sorts

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
    rest, extent = reduced_shape(x, [axis], False), dims(x)[axis]
    if sorts(b, prod(dims(x)) * count, prod(rest), extent):
        places = _sorted(b, x, axis, largest)
        indices = b.map("indices", shape, lambda *i: cast(
            load(places, (*i[:axis], *i[axis + 1 :], i[axis])), dtypes.int64))  # fmt: skip
    else:
        if prod(dims(x)) * count > MOST_COMPARISONS:
            raise b.unsupported(f"it would take {prod(dims(x)) * count} comparisons; {MOST_COMPARISONS} are supported")
        places = _taken_in_order(b, x, axis, count, largest)
        indices = b.map("indices", shape, lambda *i: cast(
            load(places, (i[axis], *i[:axis], *i[axis + 1 :])), dtypes.int64))  # fmt: skip

    def element(*i: Expr) -> Expr:
        return load(x, (*i[:axis], clamp(load(indices, i), dims(x)[axis]), *i[axis + 1 :]))

    return b.map("", shape, element), indices


def ordered(x: Expr) -> Expr:
    """An integer that compares as `x` does, of 32 bits where they are enough; NaN is the largest."""
    if x.dtype.is_float:
        real = cast(x, dtypes.float32) if x.dtype.bits < 32 else x
        whole = dtypes.int32 if real.dtype.bits == 32 else dtypes.int64
        bits = select(eq(real, 0), const(0, whole), bitcast(real, whole))  # both zeros are one number
        # of negative numbers the other bits count backwards
        return op("bitxor", bits, op("bitand", op("shr", bits, whole.bits - 1), whole.limits[1]))
    if x.dtype.bits < 32:
        return cast(x, dtypes.int32)
    whole = dtypes.int32 if x.dtype.bits == 32 else dtypes.int64
    return op("bitxor", bitcast(x, whole), whole.limits[0]) if x.dtype.kind == "u" else x


def _taken_in_order(b: Builder, x: Tensor, axis: int, count: int, largest: bool) -> Tensor:
    """The places of elements in order: each step of a Scan finds the largest key behind the one before, then its place.

    Two plain reductions fill the lanes of vectors where one of pairs would not.
    """
    rest, extent = reduced_shape(x, [axis], False), dims(x)[axis]

    def key(*i: Expr) -> Expr:
        found = ordered(b.read(x, i))
        return found if largest else op("bitxor", found, -1)

    keys = b.map("keys", dims(x), key)
    step, whole = Axis("t", count), keys.dtype
    last, at = b.tensor("last", rest, whole), b.tensor("last_place", rest, dtypes.int32)

    def candidate(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> tuple[Expr, Expr]:
        return load(keys, (*i[:axis], r[0], *i[axis:])), cast(r[0], dtypes.int32)

    def behind(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        value, place = candidate(i, r)
        equal = op("and", eq(value, load(last, i)), lt(load(at, i), place))
        return select(op("or", lt(value, load(last, i)), equal), value, const(whole.limits[0], whole))

    best = b.reduce_compute("next", rest, (extent,), behind, "max")
    # of keys equal to the last one those behind its place are left, of smaller ones all
    start = b.map_compute("from", rest, lambda *i: select(
        lt(load(best.outputs[0], i), load(last, i)), const(-1, dtypes.int32), load(at, i)))  # fmt: skip

    def place_of(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        value, place = candidate(i, r)
        found = op("and", eq(value, load(best.outputs[0], i)), lt(load(start.output, i), place))
        return select(found, place, const(dtypes.int32.limits[1], dtypes.int32))

    place = b.reduce_compute("next_place", rest, (extent,), place_of, "min")
    initial = (b.filled(rest, whole.limits[1], whole, "start"), b.filled(rest, -1, dtypes.int32, "start_place"))
    places = b.tensor("in_order", (count, *rest), dtypes.int32)
    following = (best.outputs[0], place.outputs[0])
    b.emit(Scan(step, initial, (last, at), (best, start, place), following, (None, None), ((following[1], places),),
                origin=b.origin))  # fmt: skip
    return places


def _sorted(b: Builder, x: Tensor, axis: int, largest: bool) -> Tensor:
    """The places of all elements in order, along the last axis."""
    rest, extent = reduced_shape(x, [axis], False), dims(x)[axis]

    def key(*i: Expr) -> Expr:
        found = ordered(b.read(x, (*i[:axis], i[-1], *i[axis:-1])))
        return op("bitxor", found, -1) if largest else found

    keys = b.map("keys", (*rest, extent), key)
    return order(b, "by_key", rest, extent, lambda *i: load(keys, i), keys.dtype)
