"""Resize and Upsample: nearest, linear and cubic, axis by axis with tables of places and weights made here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.ir.forms.expr import Expr, cast, const, load, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import MOST_KNOWN, Builder, dims
from tilewright.ops.registry import operator

_WRITTEN_OUT = 4  # taps up to which the sum is written out; more become a reduction


@dataclass(frozen=True)
class AxisSampling:
    """How one axis is sampled."""

    size: int
    out: int
    scale: float
    start: float = 0.0  # the region of tf_crop_and_resize, as fractions of the axis
    end: float = 1.0


@operator("Upsample", since=7)
def upsample_by_attribute(b: Builder, node: Node, x: Tensor) -> Tensor:
    return _old(b, node, x, [float(s) for s in node.attributes["scales"]])


@operator("Upsample", since=9, constants=(1,))
def upsample(b: Builder, node: Node, x: Tensor, scales: Tensor) -> Tensor:
    return _old(b, node, x, [float(s) for s in b.known(scales, "scales")])


@operator("Resize", since=10, constants=(1,))
def resize_by_scales(b: Builder, node: Node, x: Tensor, scales: Tensor) -> Tensor:
    return _old(b, node, x, [float(s) for s in b.known(scales, "scales")])


def _old(b: Builder, node: Node, x: Tensor, scales: list[float]) -> Tensor:
    """Before operator set 11 coordinates were the output's divided by the scale, and nearest rounded down."""
    axes = [AxisSampling(n, math.floor(n * _scale(b, s)), s) for n, s in zip(dims(x), scales, strict=True)]
    attributes = {
        "mode": node.attributes.get("mode", "nearest"),
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    return _resized(b, attributes, x, dict(enumerate(axes)))


@operator("Resize", since=11, constants=(1, 2, 3))
def resize(
    b: Builder,
    node: Node,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    chosen = [b.axis(a, x.rank) for a in node.attributes.get("axes", range(x.rank))]
    factors = None if scales is None else [float(s) for s in b.known(scales, "scales").ravel()]
    if factors:
        outs = [math.floor(dims(x)[a] * _scale(b, s)) for a, s in zip(chosen, factors, strict=True)]
    elif sizes is not None:
        outs, factors = _sized(node, [dims(x)[a] for a in chosen], b.integers(sizes, "sizes"))
    else:
        raise b.invalid("needs scales or sizes")
    region = [0.0] * len(chosen) + [1.0] * len(chosen)
    if roi is not None and node.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        region = [float(v) for v in b.known(roi, "roi").ravel()]
    axes = {
        a: AxisSampling(dims(x)[a], outs[k], factors[k], region[k], region[k + len(chosen)])
        for k, a in enumerate(chosen)
    }
    return _resized(b, dict(node.attributes), x, axes)


def _scale(b: Builder, scale: float) -> float:
    if not 0 < scale < math.inf:
        raise b.invalid(f"scale {scale} has to be a number more than 0")
    return scale


def _sized(node: Node, given: list[int], wanted: list[int]) -> tuple[list[int], list[float]]:
    """Output sizes and scales, the aspect ratio kept where asked."""
    scales = [w / n for w, n in zip(wanted, given, strict=True)]
    policy = node.attributes.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return wanted, scales
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [math.floor(n * scale + 0.5) for n in given], [scale] * len(given)


def _resized(b: Builder, attributes: dict, x: Tensor, axes: dict[int, AxisSampling]) -> Tensor:
    mode = attributes.get("mode", "nearest")
    if mode not in ("nearest", "linear", "cubic"):
        raise b.unsupported(f"mode '{mode}' is not known; use nearest, linear or cubic")
    fill = float(attributes.get("extrapolation_value", 0.0))
    crop = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    b.checked_shape([axes[a].out if a in axes else n for a, n in enumerate(dims(x))])
    changed = [a for a, s in axes.items() if s.size != s.out or s.scale != 1 or crop]
    result = x
    for axis in changed:
        where = _coordinates(b, attributes, axes[axis])
        hint = "" if axis == changed[-1] and not crop else f"axis{axis}"
        if mode == "nearest":
            result = _picked(b, hint, result, axis, _nearest(attributes, where, axes[axis].size))
        else:
            places, weights = _taps(attributes, mode, where, axes[axis])
            result = _weighted(b, hint, result, axis, places, weights)
    if not crop:
        return result
    outside = {a: _outside(_coordinates(b, attributes, axes[a]), axes[a].size) for a in changed}
    return _filled(b, result, outside, fill)


def _coordinates(b: Builder, attributes: dict, s: AxisSampling) -> np.ndarray:
    """Where every output place lies in the input."""
    mode = attributes.get("coordinate_transformation_mode", "half_pixel")
    if s.out > MOST_KNOWN:
        raise b.unsupported(f"its result would have {s.out} places along an axis; {MOST_KNOWN} are supported")
    at = np.arange(s.out, dtype=np.float64)
    exact = s.scale * s.size  # the output's extent before it was rounded down
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and exact > 1):
        return (at + 0.5) / s.scale - 0.5
    if mode == "pytorch_half_pixel":
        return np.full(s.out, -0.5)
    if mode == "half_pixel_symmetric":
        return s.size / 2 * (1 - s.out / exact) + (at + 0.5) / s.scale - 0.5
    if mode == "align_corners":
        return at * (s.size - 1) / (exact - 1) if exact != 1 else np.zeros(s.out)
    if mode == "asymmetric":
        return at / s.scale
    if mode == "tf_crop_and_resize":
        if s.out > 1:
            return s.start * (s.size - 1) + at * (s.end - s.start) * (s.size - 1) / (s.out - 1)
        return np.full(s.out, 0.5 * (s.start + s.end) * (s.size - 1))
    raise b.unsupported(f"coordinate_transformation_mode '{mode}' is not known")


def _nearest(attributes: dict, where: np.ndarray, size: int) -> np.ndarray:
    rounding: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    return np.clip(rounding[attributes.get("nearest_mode", "round_prefer_floor")](where), 0, size - 1).astype(np.int64)


def _picked(b: Builder, hint: str, x: Tensor, axis: int, places: np.ndarray) -> Tensor:
    shape = (*dims(x)[:axis], len(places), *dims(x)[axis + 1 :])
    index = _index(b, axis, places)
    return b.map(hint, shape, lambda *i: load(x, (*i[:axis], index(i[axis]), *i[axis + 1 :])))


def _index(b: Builder, axis: int, places: np.ndarray) -> Callable[[Expr], Expr]:
    """A table of places as arithmetic where it is a repetition or a stride, else as a constant tensor."""
    at = np.arange(len(places))
    repeats = int(np.count_nonzero(places == places[0])) if len(places) else 1
    if np.array_equal(places, at // repeats):
        return lambda i: i // repeats
    step = int(places[1] - places[0]) if len(places) > 1 else 0
    first = int(places[0]) if len(places) else 0
    if np.array_equal(places, at * step + first):
        return lambda i: i * step + first
    table = b.constant(places, f"places{axis}")
    return lambda i: b.read(table, (i,))


def _taps(attributes: dict, mode: str, where: np.ndarray, s: AxisSampling) -> tuple[np.ndarray, np.ndarray]:
    """Input places and weights of every output place, [out, taps]."""
    shrink = min(s.scale, 1.0) if attributes.get("antialias", 0) else 1.0
    reach = (1 if mode == "linear" else 2) / shrink
    first = math.floor(-reach) + 1
    offsets = np.arange(first, 2 - first)
    base = np.floor(where)
    places = base[:, None] + offsets[None, :]
    distance = np.abs(places - where[:, None]) * shrink
    if mode == "linear":
        weights = np.clip(1 - distance, 0, 1)
    else:
        weights = _cubic(distance, float(attributes.get("cubic_coeff_a", -0.75)))
    if attributes.get("exclude_outside", 0):
        weights = np.where((places < 0) | (places >= s.size), 0, weights)
    weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(places, 0, s.size - 1).astype(np.int64), weights


def _cubic(d: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel at distance d."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _weighted(b: Builder, hint: str, x: Tensor, axis: int, places: np.ndarray, weights: np.ndarray) -> Tensor:
    shape = (*dims(x)[:axis], len(places), *dims(x)[axis + 1 :])
    from_table = b.constant(places, f"places{axis}")
    factor = b.constant(weights.astype(np.float64 if x.dtype.bits == 64 else np.float32), f"weights{axis}")
    wide = factor.dtype

    def term(i: tuple[Expr, ...], tap: Expr | int) -> Expr:
        place = b.read(from_table, (i[axis], tap))
        return cast(load(x, (*i[:axis], place, *i[axis + 1 :])), wide) * b.read(factor, (i[axis], tap))

    taps = places.shape[1]
    if taps > _WRITTEN_OUT:
        total = b.reduce(f"{hint}sum", shape, (taps,), lambda i, r: term(i, r[0]), "add")
        return b.cast(hint, total, x.dtype)

    def element(*i: Expr) -> Expr:
        value = term(i, 0)
        for tap in range(1, taps):
            value = value + term(i, tap)
        return cast(value, x.dtype)

    return b.map(hint, shape, element)


def _outside(where: np.ndarray, size: int) -> np.ndarray:
    return (where < 0) | (where > size - 1)


def _filled(b: Builder, x: Tensor, outside: dict[int, np.ndarray], fill: float) -> Tensor:
    tables = {a: b.constant(flags, f"outside{a}") for a, flags in outside.items() if flags.any()}

    def element(*i: Expr) -> Expr:
        value = b.read(x, i)
        for axis, table in tables.items():
            value = select(b.read(table, (i[axis],)), const(fill, x.dtype), value)
        return value

    return b.map("", dims(x), element)
