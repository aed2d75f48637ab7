"""Reading images at coordinates that are data: GridSample, RoiAlign and deformable convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import ceil

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, all_of, cast, const, le, load, lt, maximum, minimum, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, clamp, dims, expect
from tilewright.ops.registry import operator
from tilewright.ops.windows.geometry import windows

Tap = tuple[Expr, Expr]  # a place along one axis, and its weight
_CUBIC = -0.75  # the slope that PyTorch takes for cubic interpolation of images


@operator("GridSample", since=16)
def grid_sample(b: Builder, node: Node, x: Tensor, grid: Tensor) -> Tensor:
    mode = str(node.attributes.get("mode", "linear")).removeprefix("bi")
    padding = node.attributes.get("padding_mode", "zeros")
    corners = bool(node.attributes.get("align_corners", 0))
    if mode not in ("linear", "nearest", "cubic"):
        raise b.unsupported(f"mode '{mode}' is not known; use linear, nearest or cubic")
    if padding not in ("zeros", "border", "reflection"):
        raise b.unsupported(f"padding_mode '{padding}' is not known; use zeros, border or reflection")
    sizes = dims(x)[2:]
    spatial = len(sizes)
    if grid.rank != x.rank or dims(grid)[0] != dims(x)[0] or dims(grid)[-1] != spatial:
        raise b.invalid(f"a grid {list(dims(grid))} does not fit images {list(dims(x))}")

    def element(*i: Expr) -> Expr:
        # the grid's last axis counts from the innermost image axis
        given = [b.wide(grid, (i[0], *i[2:], spatial - 1 - a)) for a in range(spatial)]
        where = [_coordinate(g, n, corners) for g, n in zip(given, sizes, strict=True)]
        if mode == "nearest":
            where = [op("round", w) for w in where]
        if mode != "cubic":  # whose neighbours are brought inside one by one
            where = [_inside(w, n, padding, corners) for w, n in zip(where, sizes, strict=True)]
        if mode == "nearest":
            return _pixel(x, i[:2], [op("round", w) for w in where], padding == "zeros")
        if mode == "linear":
            return cast(_weighted(x, i[:2], [_linear(w) for w in where], padding == "zeros"), x.dtype)
        taps = [
            [(_inside(p, n, padding, corners), weight) for p, weight in _cubic(w)]
            for w, n in zip(where, sizes, strict=True)
        ]
        return cast(_weighted(x, i[:2], taps, padding == "zeros"), x.dtype)

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


def _linear(w: Expr) -> list[Tap]:
    base = op("floor", w)
    return [(base, 1 - (w - base)), (base + 1.0, w - base)]


def _cubic(w: Expr) -> list[Tap]:
    """Four neighbours by Keys' polynomials of the distance."""
    base = op("floor", w)
    t = w - base

    def near(d: Expr) -> Expr:
        return (d * (_CUBIC + 2) - (_CUBIC + 3)) * d * d + 1

    def far(d: Expr) -> Expr:
        return ((d * _CUBIC - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC

    return [(base - 1.0, far(t + 1)), (base, near(t)), (base + 1.0, near(1 - t)), (base + 2.0, far(2 - t))]


def _weighted(x: Tensor, i: Sequence[Expr], taps: Sequence[Sequence[Tap]], zeros: bool) -> Expr:
    """The sum over all combinations of taps of the pixel there, in the type that sums are kept in."""
    wide = dtypes.accumulator(x.dtype)
    total: Expr | None = None
    for chosen in product(*taps):
        term = cast(_pixel(x, i, [place for place, _ in chosen], zeros), wide)
        for _, weight in chosen:
            term = term * cast(weight, wide)
        total = term if total is None else total + term
    assert total is not None
    return total


def _pixel(x: Tensor, i: Sequence[Expr], places: Sequence[Expr], zeros: bool) -> Expr:
    """A pixel; outside the image zero, or the nearest one."""
    sizes = dims(x)[2:]
    at = [clamp(cast(minimum(maximum(p, -1.0), float(n)), dtypes.index), n) for p, n in zip(places, sizes, strict=True)]
    value = load(x, (*i, *at))
    if not zeros:
        return value
    inside = [c for p, n in zip(places, sizes, strict=True) for c in (le(0, p), lt(p, float(n)))]
    return select(all_of(inside), value, const(0, x.dtype))


@operator("RoiAlign", since=10)
def roi_align(b: Builder, node: Node, x: Tensor, rois: Tensor, batches: Tensor) -> Tensor:
    height, width = int(node.attributes.get("output_height", 1)), int(node.attributes.get("output_width", 1))
    out = (height, width)
    ratio, mode = int(node.attributes.get("sampling_ratio", 0)), node.attributes.get("mode", "avg")
    scale = float(node.attributes.get("spatial_scale", 1.0))
    default = "half_pixel" if not node.version or node.version >= 16 else "output_half_pixel"
    half = node.attributes.get("coordinate_transformation_mode", default) == "half_pixel"
    expect(b, "batch_indices", batches, dims(rois)[:1])
    if x.rank != 4 or rois.rank != 2 or dims(rois)[1] != 4 or mode not in ("avg", "max") or min(ratio, *out) < 0:
        raise b.invalid(f"regions {list(dims(rois))} of {list(dims(x))} in mode '{mode}' with sampling_ratio {ratio}")

    def region(n: Expr, axis: int) -> tuple[Expr, Expr]:
        """Where a region begins along an axis, and the size of one of its parts; regions are x1, y1, x2, y2."""
        first, last = (b.wide(rois, (n, k)) * scale - (0.5 if half else 0.0) for k in (1 - axis, 3 - axis))
        size = last - first
        return first, (size if half else maximum(size, 1.0)) * (1 / out[axis])

    counts, taps = _samples(b, rois, ratio, out, scale, half)

    def place(n: Expr, axis: int, part: Expr, tap: Expr) -> tuple[Expr, Expr]:
        first, size = region(n, axis)
        count = counts(n, axis)
        step = (cast(tap, first.dtype) + 0.5) * size / count
        return first + cast(part, first.dtype) * size + step, lt(cast(tap, first.dtype), count)

    def corners(w: Expr, size: int) -> list[Tap]:
        inside = maximum(w, 0.0)
        base = minimum(op("floor", inside), float(size - 1))
        share = select(lt(base, float(size - 1)), inside - base, const(0, w.dtype))
        return [(base, 1 - share), (minimum(base + 1.0, float(size - 1)), share)]

    wide = dtypes.accumulator(x.dtype)

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        n, c = i[:2]
        (y, y_counts), (z, z_counts) = place(n, 0, i[2], r[0]), place(n, 1, i[3], r[1])
        batch = clamp(cast(b.read(batches, (n,)), dtypes.index), dims(x)[0])
        sizes = dims(x)[2:]
        near = all_of(k for w, s in zip((y, z), sizes, strict=True) for k in (le(-1.0, w), le(w, float(s))))
        pairs = [corners(w, s) for w, s in zip((y, z), sizes, strict=True)]
        counted = op("and", y_counts, z_counts)
        if mode == "avg":
            value = _weighted(x, (batch, c), pairs, False)
            return select(op("and", near, counted), value, const(0, wide))
        terms = [_weighted(x, (batch, c), [[p], [q]], False) for p in pairs[0] for q in pairs[1]]
        best = terms[0]
        for term in terms[1:]:
            best = maximum(best, term)
        # a sample outside the image is a zero, one that is not taken is none at all
        return select(counted, select(near, best, const(0, wide)), const(-np.inf, wide))

    shape = (dims(rois)[0], dims(x)[1], height, width)
    total = b.reduce("samples", shape, taps, element, "add" if mode == "avg" else "max")

    def finished(*i: Expr) -> Expr:
        if mode == "max":
            none = op("or", le(counts(i[0], 0), 0), le(counts(i[0], 1), 0))  # of an empty region
            return cast(select(none, const(0, wide), b.read(total, i)), x.dtype)
        count = maximum(counts(i[0], 0) * counts(i[0], 1), 1.0)
        return cast(b.read(total, i) / cast(count, wide), x.dtype)

    return b.map("", shape, finished)


def _samples(
    b: Builder, rois: Tensor, ratio: int, out: tuple[int, int], scale: float, half: bool
) -> tuple[Callable[[Expr, int], Expr], tuple[int, int]]:
    """How many samples a part of a region takes along an axis, and the most of all regions."""
    wide = dtypes.accumulator(rois.dtype)
    if ratio:
        return lambda n, axis: const(ratio, wide), (ratio, ratio)
    known = b.known(rois, "rois")  # whose sizes decide how many samples they take
    given = known.astype(np.float64) * scale
    spans = np.stack([given[:, 3] - given[:, 1], given[:, 2] - given[:, 0]], 1)
    found = np.ceil((spans if half else np.maximum(spans, 1.0)) / out).astype(wide.numpy)
    table = b.constant(found, "counts")
    taps = tuple(max(ceil(float(n)), 1) for n in found.max(0, initial=1))
    return lambda n, axis: load(table, (n, axis)), (taps[0], taps[1])


@operator("DeformConv", since=19)
def deform_conv(
    b: Builder,
    node: Node,
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    if x.rank != 4 or weight.rank != 4:
        raise b.unsupported(f"images {list(dims(x))} are not of two spatial axes; other ranks are not supported")
    groups, shares = int(node.attributes.get("group", 1)), int(node.attributes.get("offset_group", 1))
    channels, count = dims(x)[1], dims(weight)[0]
    kernel = dims(weight)[2:]
    if channels != dims(weight)[1] * groups or count % max(groups, 1) or channels % max(shares, 1):
        raise b.invalid(f"weights {list(dims(weight))} in {groups} groups do not fit {channels} channels")
    shape = windows(b, node, dims(x)[2:], kernel)
    out = tuple(w.out for w in shape)
    wanted = (dims(x)[0], shares * kernel[0] * kernel[1] * 2, *out)
    if dims(offset) != wanted or (mask is not None and dims(mask) != (wanted[0], wanted[1] // 2, *out)):
        raise b.invalid(f"offsets {list(dims(offset))} are not {list(wanted)}, or its mask does not fit them")
    expect(b, "B", bias, (count,))
    wide = dtypes.accumulator(x.dtype)
    inside = dims(weight)[1]

    # sampled once for all filters; the sum over channels and taps is then a contraction
    def sampled(*i: Expr) -> Expr:
        n, c, ky, kx, y, z = i
        tap = (c // (channels // shares)) * (kernel[0] * kernel[1]) + ky * kernel[1] + kx
        where = [
            cast(w.place(o, k), wide) + b.wide(offset, (n, tap * 2 + axis, y, z))
            for axis, (w, o, k) in enumerate(zip(shape, (y, z), (ky, kx), strict=True))
        ]
        value = _weighted(x, (n, c), [_linear(w) for w in where], True)
        return value if mask is None else value * b.wide(mask, (n, tap, y, z))

    samples = b.map("sampled", (dims(x)[0], channels, *kernel, *out), sampled)

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        n, f, y, z = i
        channel = r[0] if groups == 1 else (f // (count // groups)) * inside + r[0]
        return load(samples, (n, channel, r[1], r[2], y, z)) * b.wide(weight, (f, *r))

    total = b.reduce("sum", (dims(x)[0], count, *out), (inside, *kernel), element, "add")
    if bias is None:
        return b.cast("", total, x.dtype)
    return b.map("", dims(total), lambda *i: cast(b.read(total, i) + b.wide(bias, (i[1],)), x.dtype))
