"""Reductions over axes and positions of extremes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Monoid, neutral
from tilewright.ir.forms.expr import Expr, cast, const, eq, le, load, lt, op, select, state
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, Shape, dims, distinct_axes, one_of
from tilewright.ops.maps.elementwise import divide
from tilewright.ops.registry import operator

Finish = Callable[[Expr, int], Expr]  # the result of a reduction from its total and the number of elements


def reduced_shape(x: Tensor, axes: Sequence[int], keep: bool) -> Shape:
    if keep:
        return tuple(1 if a in axes else n for a, n in enumerate(dims(x)))
    return tuple(n for a, n in enumerate(dims(x)) if a not in axes)


def spread(x: Tensor, axes: Sequence[int], keep: bool, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Indices into `x` from those of the result and of the reduced axes (in order of `axes`)."""
    kept = iter(i)
    result = []
    for a in range(x.rank):
        if a in axes:
            if keep:
                next(kept)
            result.append(r[list(axes).index(a)])
        else:
            result.append(next(kept))
    return tuple(result)


def reduce_over(
    b: Builder, hint: str, x: Tensor, axes: Sequence[int], keep: bool, operator: str, term: Callable[..., Expr]
) -> Tensor:
    """`term(value, *indices)` reduced over axes of `x`."""

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        at = spread(x, axes, keep, i, r)
        return term(load(x, at), *at)

    return b.reduce(hint, reduced_shape(x, axes, keep), [dims(x)[a] for a in axes], element, operator)


def _wide(x: Expr, *_: Expr) -> Expr:
    return cast(x, dtypes.accumulator(x.dtype))


def _square(x: Expr, *_: Expr) -> Expr:
    return _wide(x) * _wide(x)


def _size(x: Expr, *_: Expr) -> Expr:
    return _wide(x) if x.dtype.kind == "u" else op("abs", _wide(x))


def _keep_value(x: Expr, *_: Expr) -> Expr:
    return x


def _mean(total: Expr, count: int) -> Expr:
    if total.dtype.is_float:
        return total * one_of(count)
    return divide(total, const(count, total.dtype))


def _real(name: str) -> Finish:
    """A real function of the total, in float64 where the tensor holds integers."""

    def finish(total: Expr, count: int) -> Expr:
        return op(name, total if total.dtype.is_float else cast(total, dtypes.float64))

    return finish


_REDUCTIONS: dict[str, tuple[str, Callable[..., Expr], Finish | None]] = {
    "ReduceSum": ("add", _wide, None),
    "ReduceProd": ("mul", _wide, None),
    "ReduceMax": ("max", _keep_value, None),
    "ReduceMin": ("min", _keep_value, None),
    "ReduceSumSquare": ("add", _square, None),
    "ReduceL1": ("add", _size, None),
    "ReduceL2": ("add", _square, _real("sqrt")),
    "ReduceLogSum": ("add", _wide, _real("log")),
    "ReduceMean": ("add", _wide, _mean),
}


def _axes(b: Builder, node: Node, x: Tensor, given: Tensor | None) -> list[int] | None:
    """The axes to reduce, sorted; None where the node is a no-op."""
    listed = node.attributes.get("axes") if given is None else b.integers(given, "axes")
    if listed is None or len(listed) == 0:
        return None if node.attributes.get("noop_with_empty_axes", 0) else list(range(x.rank))
    return sorted(distinct_axes(b, listed, x.rank))


@operator(*_REDUCTIONS, constants=(1,))
def reduction(b: Builder, node: Node, x: Tensor, given: Tensor | None = None) -> Tensor:
    combine, term, finish = _REDUCTIONS[node.op]
    axes = _axes(b, node, x, given)
    count = prod(dims(x)[a] for a in axes or ())

    def finished(total: Expr) -> Expr:
        return cast(total if finish is None else finish(total, count), x.dtype)

    if axes is None:
        if finish is None and term in (_wide, _keep_value):
            return x
        return b.map("", dims(x), lambda *i: finished(term(b.read(x, i))))
    last = finish is None and (combine in ("max", "min") or dtypes.accumulator(x.dtype) is x.dtype)
    keep = bool(node.attributes.get("keepdims", 1))
    total = reduce_over(b, "" if last else "total", x, axes, keep, combine, term)
    return total if last else b.map("", dims(total), lambda *i: finished(b.read(total, i)))


@operator("ReduceLogSumExp", constants=(1,))
def reduce_log_sum_exp(b: Builder, node: Node, x: Tensor, given: Tensor | None = None) -> Tensor:
    axes = _axes(b, node, x, given)
    if axes is None:
        return x
    keep = bool(node.attributes.get("keepdims", 1))
    wide = dtypes.accumulator(x.dtype) if x.dtype.is_float else dtypes.float64
    top = reduce_over(b, "max", x, axes, True, "max", lambda v, *at: cast(v, wide))
    # an empty or all-minus-infinity row has no maximum to subtract
    shift = b.map("shift", dims(top), lambda *i: _finite(b.read(top, i)))
    total = reduce_over(b, "sum", x, axes, keep, "add", lambda v, *at: op("exp", cast(v, wide) - b.read(shift, at)))

    def element(*i: Expr) -> Expr:
        at = i if keep else spread(x, axes, False, i, tuple(const(0) for _ in axes))
        return cast(op("log", b.read(total, i)) + b.read(shift, at), x.dtype)

    return b.map("", dims(total), element)


def _finite(x: Expr) -> Expr:
    return select(op("isinf", x), const(0, x.dtype), x)


def exceeds_first(a: Expr, b: Expr, in_ties: Expr, largest: bool = True) -> Expr:
    """Whether b is the more extreme of two values, NaN being more extreme than all numbers, as in NumPy."""

    def beyond(one: Expr, other: Expr) -> Expr:
        if not one.dtype.is_float:
            return lt(other, one) if largest else lt(one, other)
        inside = le(one, other) if largest else le(other, one)
        return op("and", op("not", inside), eq(other, other))

    return op("or", beyond(b, a), op("and", op("not", beyond(a, b)), in_ties))


@operator("ArgMax", "ArgMin")
def arg_extreme(b: Builder, node: Node, x: Tensor) -> Tensor:
    axis = b.axis(node.attributes.get("axis", 0), x.rank)
    keep = bool(node.attributes.get("keepdims", 1))
    last = bool(node.attributes.get("select_last_index", 0))
    return first_extreme(b, "", x, axis, keep, node.op == "ArgMax", last)


def first_extreme(
    b: Builder, hint: str, x: Tensor, axis: int, keep: bool, largest: bool = True, last: bool = False
) -> Tensor:
    """Places of extremes along an axis; of equal ones the first, or the last."""
    av, bv = state("a0", x.dtype), state("b0", x.dtype)
    # places as wide as the values mostly are, so that both fill the same lanes
    ai, bi = state("a1", dtypes.int32), state("b1", dtypes.int32)
    if dims(x)[axis] == 0:
        raise b.invalid("an axis without elements has no extreme one")
    takes = exceeds_first(av, bv, lt(ai, bi) if last else lt(bi, ai), largest)
    # the neutral pair loses every tie, so that a row of infinities still gives a place in it
    nowhere = const(-1 if last else np.iinfo(np.int32).max, dtypes.int32)
    start = (neutral("max" if largest else "min", x.dtype), nowhere)
    combine = (select(takes, bv, av), select(takes, bi, ai))
    monoid = Monoid((av, ai), (bv, bi), start, combine, (cast(ai, dtypes.int64),))

    def elements(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return load(x, spread(x, [axis], keep, i, r)), cast(r[0], dtypes.int32)

    return b.reduce_tuple((hint,), reduced_shape(x, [axis], keep), (dims(x)[axis],), elements, monoid)[0]
