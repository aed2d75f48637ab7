"""ATen's reductions, running sums and sorts as operators of the Graph: one row a name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.frontend.pytorch.emitter import Emitted, Emitter, Number, Results, floating, row
from tilewright.ir.forms import dtypes

Axes = int | Sequence[int] | None


def _axes(x: Emitted, dims: Axes) -> list[int]:
    if dims is None or (not isinstance(dims, int) and not dims):
        return list(range(x.rank))
    return sorted(x.axis(d) for d in ([dims] if isinstance(dims, int) else dims))


def _reduced(m: Emitter, op: str, x: str, axes: Sequence[int], keep: bool) -> str:
    return m.new(op, x, axes=list(axes), keepdims=int(keep)) if axes else x


def _reducing(name: str, op: str) -> None:
    @row(name)
    def reduce(m: Emitter, out: Emitted, x: Emitted, dims: Axes = None, keepdim: bool = False, **_: Any) -> Results:
        return _reduced(m, op, m.typed(x, out.dtype), _axes(x, dims), keepdim)


for _name, _op in {"sum": "Sum", "mean": "Mean", "amax": "Max", "amin": "Min", "logsumexp": "LogSumExp"}.items():
    _reducing(f"aten.{_name}", f"Reduce{_op}")


@row("aten.prod")
def prod_(m: Emitter, out: Emitted, x: Emitted, dim: Axes = None, keepdim: bool = False, **_: Any) -> Results:
    return _reduced(m, "ReduceProd", m.typed(x, out.dtype), _axes(x, dim), keepdim)


@row("aten.histc")
def histc(m: Emitter, out: Emitted, x: Emitted, bins: int = 100, low: Number = 0, high: Number = 0,
          **named: Number) -> Results:  # fmt: skip
    """How many elements fall into each of equal parts of a range; the last part has the range's end too."""
    low, high = named.get("min", low), named.get("max", high)
    if low == high:
        raise m.refuse("a range that the data decide is not supported; give min and max")
    flat = m.reshape(x.name, (prod(x.shape), 1))
    place = m.new("Div", m.new("Mul", m.new("Sub", flat, m.number(low, x.dtype)), m.number(bins, x.dtype)),
                  m.number(high - low, x.dtype))  # fmt: skip
    at_end = m.new("Equal", flat, m.number(high, x.dtype))
    part = m.new("Where", at_end, m.number(bins - 1, x.dtype), m.new("Floor", place))
    is_there = m.new("Equal", part, np.arange(bins).astype(x.dtype.numpy)[None])
    return m.new("ReduceSum", m.cast(is_there, out.dtype), axes=[0], keepdims=0)


def _flags(name: str, op: str) -> None:
    """Flags as numbers: 1 where any, or all, are set."""

    @row(name)
    def reduce(m: Emitter, out: Emitted, x: Emitted, dims: Axes = None, keepdim: bool = False) -> Results:
        flags = m.cast(m.typed(x, dtypes.bool_), dtypes.int32)
        return m.cast(_reduced(m, op, flags, _axes(x, dims), keepdim), out.dtype)


_flags("aten.any", "ReduceMax")
_flags("aten.all", "ReduceMin")


def _extreme(name: str, op: str, place: str) -> None:
    @row(f"aten.{name}.default")
    def whole(m: Emitter, out: Emitted, x: Emitted) -> Results:
        return _reduced(m, op, x.name, range(x.rank), False)

    @row(f"aten.{name}.dim")
    def along(m: Emitter, out: tuple[Emitted, Emitted], x: Emitted, dim: int, keepdim: bool = False) -> Results:
        if x.rank == 0:
            return x.name, m.number(0, dtypes.int64)
        axis = x.axis(dim)
        value = _reduced(m, op, x.name, [axis], keepdim)
        return value, m.new(place, x, axis=axis, keepdims=int(keepdim))

    @row(f"aten.arg{name}")
    def position(m: Emitter, out: Emitted, x: Emitted, dim: int | None = None, keepdim: bool = False) -> Results:
        if x.rank == 0:
            return m.number(0, dtypes.int64)
        if dim is None:
            return m.reshape(m.new(place, m.reshape(x.name, (-1,)), axis=0, keepdims=0), out.shape)
        return m.new(place, x, axis=x.axis(dim), keepdims=int(keepdim))


_extreme("max", "ReduceMax", "ArgMax")
_extreme("min", "ReduceMin", "ArgMin")


def _moments(m: Emitter, x: Emitted, dims: Axes, correction: Number | None, keep: bool) -> tuple[str, str]:
    """Variance and mean over axes."""
    axes = _axes(x, dims)
    count = prod(x.shape[a] for a in axes)
    mean = _reduced(m, "ReduceMean", x.name, axes, True)
    centred = m.new("Sub", x, mean)
    total = _reduced(m, "ReduceSum", m.new("Mul", centred, centred), axes, keep)
    rest = count - (1 if correction is None else correction)
    variance = m.new("Mul", total, m.number(1 / rest if rest > 0 else math.inf, x.dtype))
    shape = [n for a, n in enumerate(x.shape) if a not in axes]
    return variance, mean if keep else m.reshape(mean, shape)


@row("aten.var.correction")
def var(m: Emitter, out: Emitted, x: Emitted, dims: Axes = None, *, correction: Number | None = None,
        keepdim: bool = False) -> Results:  # fmt: skip
    return _moments(m, x, dims, correction, keepdim)[0]


@row("aten.var_mean.correction")
def var_mean(m: Emitter, out: tuple[Emitted, Emitted], x: Emitted, dims: Axes = None, *,
             correction: Number | None = None, keepdim: bool = False) -> Results:  # fmt: skip
    return _moments(m, x, dims, correction, keepdim)


@row("aten.linalg_vector_norm")
def vector_norm(m: Emitter, out: Emitted, x: Emitted, order: Number = 2, dims: Axes = None, keepdim: bool = False,
                **_: Any) -> Results:  # fmt: skip
    axes, value = _axes(x, dims), m.typed(x, out.dtype)
    if not axes:
        return m.new("Abs", value)
    if order in (1, 2):
        return _reduced(m, f"ReduceL{int(order)}", value, axes, keepdim)
    size = m.new("Abs", value)
    if math.isinf(order):
        return _reduced(m, "ReduceMax" if order > 0 else "ReduceMin", size, axes, keepdim)
    if order == 0:
        there = m.cast(m.cast(value, dtypes.bool_), out.dtype)
        return _reduced(m, "ReduceSum", there, axes, keepdim)
    total = _reduced(m, "ReduceSum", m.new("Pow", size, m.number(order, out.dtype)), axes, keepdim)
    return m.new("Pow", total, m.number(1 / order, out.dtype))


def _running(name: str, op: str) -> None:
    @row(name)
    def run(m: Emitter, out: Emitted, x: Emitted, dim: int, **_: Any) -> Results:
        value = m.typed(x, out.dtype)
        return m.new(op, value, m.integers([x.axis(dim)])) if x.rank else value


_running("aten.cumsum", "CumSum")
_running("aten.cumprod", "CumProd")


@row("aten._softmax", "aten.softmax")
def softmax(m: Emitter, out: Emitted, x: Emitted, dim: int, *_: Any, **__: Any) -> Results:
    return _normalised(m, "Softmax", out, x, dim)


@row("aten._log_softmax", "aten.log_softmax")
def log_softmax(m: Emitter, out: Emitted, x: Emitted, dim: int, *_: Any, **__: Any) -> Results:
    return _normalised(m, "LogSoftmax", out, x, dim)


def _normalised(m: Emitter, op: str, out: Emitted, x: Emitted, dim: int) -> str:
    value = m.typed(x, floating(out.dtype))
    if x.rank == 0:
        return m.reshape(m.new(op, m.reshape(value, (1,)), axis=0), ())
    return m.new(op, value, axis=x.axis(dim))


@row("aten.topk")
def topk(m: Emitter, out: tuple[Emitted, Emitted], x: Emitted, count: int, dim: int = -1, largest: bool = True,
         sorted_: bool = True) -> Results:  # fmt: skip
    if x.rank == 0:
        return x.name, m.number(0, dtypes.int64)
    return m.several("TopK", 2, x, m.integers([count]), axis=x.axis(dim), largest=int(largest))


@row("aten.sort.default")
def sort(m: Emitter, out: tuple[Emitted, Emitted], x: Emitted, dim: int = -1, descending: bool = False) -> Results:
    return topk(m, out, x, x.shape[dim] if x.rank else 1, dim, descending)


@row("aten.sort.stable")
def sort_stably(m: Emitter, out: tuple[Emitted, Emitted], x: Emitted, *, stable: bool | None = None, dim: int = -1,
                descending: bool = False) -> Results:  # fmt: skip
    return sort(m, out, x, dim, descending)
