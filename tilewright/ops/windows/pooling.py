"""Pooling: windows and whole images reduced by maximum, mean or a norm."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Monoid, neutral
from tilewright.ir.forms.expr import Expr, all_of, cast, const, load, lt, op, select, state
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, Shape, dims, one_of
from tilewright.ops.maps.elementwise import power
from tilewright.ops.reductions.reduction import exceeds_first
from tilewright.ops.registry import operator
from tilewright.ops.windows.geometry import SlidingAxis, windows


def _pooled(
    b: Builder, hint: str, x: Tensor, shape: list[SlidingAxis], operator: str, term: Callable[[Expr], Expr]
) -> Tensor:
    """`term` of every tap, reduced; taps outside the image count as the neutral element."""

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        places = [w.place(o, k) for w, o, k in zip(shape, i[2:], r, strict=True)]
        conditions = [c for w, p in zip(shape, places, strict=True) for c in w.inside(p)]
        value = term(load(x, (*i[:2], *places)))
        return select(all_of(conditions), value, neutral(operator, value.dtype)) if conditions else value

    return b.reduce(hint, _out(x, shape), [w.kernel for w in shape], element, operator)


def _out(x: Tensor, shape: list[SlidingAxis]) -> Shape:
    return (*dims(x)[:2], *(w.out for w in shape))


def _windows(b: Builder, node: Node, x: Tensor) -> list[SlidingAxis]:
    """The windows of a pooling node, none of which may lie in the padding alone."""
    if x.rank < 3:
        raise b.invalid(f"cannot pool shape {list(dims(x))}: it has no spatial axes")
    shape = windows(b, node, dims(x)[2:], node.attributes["kernel_shape"])
    for w in shape:
        span = (w.kernel - 1) * w.dilation + 1
        if max(w.begin, w.end) >= span:
            raise b.invalid(f"pads {w.begin} and {w.end} hold whole windows of {span}; pads have to be less")
    return shape


def _wide(x: Expr) -> Expr:
    return cast(x, dtypes.accumulator(x.dtype))


@operator("MaxPool")
def max_pool(b: Builder, node: Node, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    shape = _windows(b, node, x)
    if len(node.outputs) < 2 or not node.outputs[1]:
        return _pooled(b, "", x, shape, "max", lambda v: v)
    return _max_pool_places(b, node, x, shape)


def _max_pool_places(b: Builder, node: Node, x: Tensor, shape: list[SlidingAxis]) -> tuple[Tensor, Tensor]:
    """Maxima and where they were: a reduction of (value, place) pairs, the first place winning ties."""
    dtype = x.dtype
    av, bv = state("a0", dtype), state("b0", dtype)
    ai, bi = state("a1", dtypes.int64), state("b1", dtypes.int64)
    takes = exceeds_first(av, bv, lt(bi, ai))
    last = const(np.iinfo(np.int64).max)
    combine = (select(takes, bv, av), select(takes, bi, ai))
    monoid = Monoid((av, ai), (bv, bi), (neutral("max", dtype), last), combine, (av, ai))
    column_major = bool(node.attributes.get("storage_order", 0))

    def elements(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> tuple[Expr, ...]:
        places = [w.place(o, k) for w, o, k in zip(shape, i[2:], r, strict=True)]
        conditions = [c for w, p in zip(shape, places, strict=True) for c in w.inside(p)]
        pairs = list(zip(shape, places, strict=True))
        flat: Expr = i[0] * dims(x)[1] + i[1]
        flat = flat * prod(w.size for w in shape)
        stride = 1
        for w, place in pairs if column_major else reversed(pairs):
            flat = flat + place * stride
            stride *= w.size
        value: Expr = load(x, (*i[:2], *places))
        if conditions:
            inside = all_of(conditions)
            value, flat = select(inside, value, neutral("max", dtype)), select(inside, flat, last)
        return value, flat

    values, indices = b.reduce_tuple(("", "indices"), _out(x, shape), [w.kernel for w in shape], elements, monoid)
    return values, indices


@operator("AveragePool")
def average_pool(b: Builder, node: Node, x: Tensor) -> Tensor:
    shape = _windows(b, node, x)
    total = _pooled(b, "sum", x, shape, "add", _wide)
    padded = bool(node.attributes.get("count_include_pad", 0))
    counts = np.ones((), np.int64)
    for w in shape:
        counts = np.multiply.outer(counts, [w.taps(o, padded) for o in range(w.out)])
    if counts.min() == counts.max():
        factor = 1.0 / float(counts.flat[0])
        return b.map("", dims(total), lambda *i: cast(b.read(total, i) * factor, x.dtype))
    scale = b.constant((1.0 / counts).astype(total.dtype.numpy), "scale")
    return b.map("", dims(total), lambda *i: cast(b.read(total, i) * b.read(scale, i[2:]), x.dtype))


@operator("LpPool")
def lp_pool(b: Builder, node: Node, x: Tensor) -> Tensor:
    shape = _windows(b, node, x)
    return _norm(b, x, float(node.attributes.get("p", 2)), shape)


@operator("GlobalLpPool")
def global_lp_pool(b: Builder, node: Node, x: Tensor) -> Tensor:
    return _norm(b, x, float(node.attributes.get("p", 2)), _whole(x))


def _norm(b: Builder, x: Tensor, p: float, shape: list[SlidingAxis]) -> Tensor:
    total = _pooled(b, "sum", x, shape, "add", lambda v: power(op("abs", _wide(v)), p))
    return b.map("", dims(total), lambda *i: cast(power(b.read(total, i), 1 / p), x.dtype))


def _whole(x: Tensor) -> list[SlidingAxis]:
    return [SlidingAxis(n, n, 1, 1, 0, 0, 1) for n in dims(x)[2:]]


def _over_image(b: Builder, hint: str, x: Tensor, operator: str, term: Callable[[Expr], Expr]) -> Tensor:
    out = (*dims(x)[:2], *(1 for _ in dims(x)[2:]))
    return b.reduce(hint, out, dims(x)[2:], lambda i, r: term(load(x, (*i[:2], *r))), operator)


@operator("GlobalAveragePool")
def global_average_pool(b: Builder, node: Node, x: Tensor) -> Tensor:
    total = _over_image(b, "sum", x, "add", _wide)
    factor = one_of(prod(dims(x)[2:]))
    return b.map("", dims(total), lambda *i: cast(b.read(total, i) * factor, x.dtype))


@operator("GlobalMaxPool")
def global_max_pool(b: Builder, node: Node, x: Tensor) -> Tensor:
    return _over_image(b, "", x, "max", lambda v: v)
