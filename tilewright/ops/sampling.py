"""GridSample: reading images at coordinates that are data."""

from __future__ import annotations

from itertools import product

from tilewright.ir import dtypes
from tilewright.ir.expr import Expr, all_of, cast, const, le, load, lt, maximum, minimum, op, select
from tilewright.ir.graph import Node
from tilewright.ir.tensor import Tensor
from tilewright.ops.builder import Builder, clamp, dims
from tilewright.ops.registry import operator


@operator("GridSample", since=16)
def grid_sample(b: Builder, node: Node, x: Tensor, grid: Tensor) -> Tensor:
    mode = str(node.attributes.get("mode", "linear")).replace("bi", "", 1)
    padding = node.attributes.get("padding_mode", "zeros")
    corners = bool(node.attributes.get("align_corners", 0))
    if mode not in ("linear", "nearest"):
        raise b.unsupported(f"mode '{mode}' is not supported; use linear or nearest")
    if padding not in ("zeros", "border", "reflection"):
        raise b.unsupported(f"padding_mode '{padding}' is not known; use zeros, border or reflection")
    sizes = dims(x)[2:]
    spatial = len(sizes)

    def element(*i: Expr) -> Expr:
        # the grid's last axis counts from the innermost image axis
        given = [b.wide(grid, (i[0], *i[2:], spatial - 1 - a)) for a in range(spatial)]
        where = [_coordinate(g, n, corners) for g, n in zip(given, sizes, strict=True)]
        if mode == "nearest":
            where = [op("round", w) for w in where]
        where = [_inside(w, n, padding, corners) for w, n in zip(where, sizes, strict=True)]
        if mode == "nearest":
            return _pixel(x, i, [op("round", w) for w in where], padding)
        base = [op("floor", w) for w in where]
        total: Expr | None = None
        for corner in product((0, 1), repeat=spatial):
            weight: Expr | None = None
            for w, low, high in zip(where, base, corner, strict=True):
                part = w - low if high else 1 - (w - low)
                weight = part if weight is None else weight * part
            pixel = _pixel(x, i, [low + float(c) for low, c in zip(base, corner, strict=True)], padding)
            wide = cast(pixel, dtypes.accumulator(x.dtype))
            term = wide * cast(weight, wide.dtype) if weight is not None else wide
            total = term if total is None else total + term
        assert total is not None
        return cast(total, x.dtype)

    return b.map("", (*dims(x)[:2], *dims(grid)[1:-1]), element)


def _coordinate(g: Expr, size: int, corners: bool) -> Expr:
    """From [-1, 1] to pixels."""
    return (g + 1) * ((size - 1) / 2) if corners else (g + 1) * (size / 2) - 0.5


def _inside(w: Expr, size: int, padding: str, corners: bool) -> Expr:
    if padding == "zeros":
        return w
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
        if span <= 0:
            return w * 0.0
        # a triangle wave of the axis' length
        offset = op("abs", w - low)
        turn = offset - op("floor", offset * (1 / (2 * span))) * (2 * span)
        w = minimum(turn, 2 * span - turn) + low
    return minimum(maximum(w, 0.0), float(size - 1))


def _pixel(x: Tensor, i: tuple[Expr, ...], places: list[Expr], padding: str) -> Expr:
    sizes = dims(x)[2:]
    at = [clamp(cast(p, dtypes.index), n) for p, n in zip(places, sizes, strict=True)]
    value = load(x, (*i[:2], *at))
    if padding != "zeros":
        return value
    inside = [c for p, n in zip(places, sizes, strict=True) for c in (le(0, p), lt(p, float(n)))]
    return select(all_of(inside), value, const(0, x.dtype))
