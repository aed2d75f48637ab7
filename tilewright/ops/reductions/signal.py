"""Signals: Fourier transforms as products with a matrix of constants, frames of a signal, and mel filters."""

from __future__ import annotations

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Expr, cast, load
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.registry import operator

MOST_FACTORS = 1 << 26  # elements of the matrix of a transform


def transform(
    b: Builder, extent: int, length: int, parts: int, inverse: bool, onesided: bool, dtype: DType
) -> np.ndarray:
    """The factors of [element, part of it (real, imaginary), frequency, part of that].

    They are what the transform gives for each element alone being one.
    """
    if extent < 1 or length < 1 or parts not in (1, 2):
        raise b.invalid(f"it transforms {extent} elements of {parts} parts to {length}; there is no such transform")
    bins = length // 2 + 1 if onesided and not inverse else length
    if extent * bins * 4 > MOST_FACTORS:
        raise b.unsupported(f"a transform of {extent} elements to {bins} takes {extent * bins * 4} factors; "
                            f"{MOST_FACTORS} are supported")  # fmt: skip
    results = []
    for unit in (1.0, 1.0j)[:parts]:
        units = np.eye(extent) * unit
        if inverse and onesided:
            results.append(np.fft.irfft(units, n=length, axis=-1)[..., None])
            continue
        found = np.fft.ifft(units, n=length, axis=-1) if inverse else np.fft.fft(units, n=length, axis=-1)
        results.append(np.stack([found.real, found.imag], -1)[:, :bins])
    return np.stack(results, 1).astype(dtype.numpy)


@operator("DFT", since=17, constants=(1,))
def dft_by_attribute(b: Builder, node: Node, x: Tensor, length: Tensor | None = None) -> Tensor:
    return _dft(b, node, x, length, node.attributes.get("axis", 1))


@operator("DFT", since=20, constants=(1, 2))
def dft(b: Builder, node: Node, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor:
    return _dft(b, node, x, length, -2 if axis is None else b.integers(axis, "axis")[0])


def _dft(b: Builder, node: Node, x: Tensor, length: Tensor | None, given_axis: int) -> Tensor:
    axis = b.axis(given_axis, x.rank)
    if axis == x.rank - 1:
        raise b.invalid("the last axis holds real and imaginary parts and cannot be transformed")
    inverse, onesided = bool(node.attributes.get("inverse", 0)), bool(node.attributes.get("onesided", 0))
    extent = dims(x)[axis]
    default = 2 * (extent - 1) if inverse and onesided else extent
    size = default if length is None else b.integers(length, "dft_length")[0]
    wide = dtypes.accumulator(x.dtype)
    factors = b.constant(transform(b, extent, size, dims(x)[-1], inverse, onesided, wide), "factors")
    shape = (*dims(x)[:axis], dims(factors)[2], *dims(x)[axis + 1 : -1], dims(factors)[3])

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        value = load(x, (*i[:axis], r[0], *i[axis + 1 : -1], r[1]))
        return cast(value, wide) * load(factors, (r[0], r[1], i[axis], i[-1]))

    total = b.reduce("" if wide is x.dtype else "sum", shape, (extent, dims(x)[-1]), element, "add")
    return b.cast("", total, x.dtype)


@operator("STFT", since=17, constants=(1, 3))
def stft(
    b: Builder, node: Node, x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None
) -> Tensor:
    if x.rank not in (2, 3):
        raise b.invalid(f"signal {list(dims(x))} has to have 3 axes: batch, time, parts; or 2, where it is real")
    batch, time, parts = dims(x) if x.rank == 3 else (*dims(x), 1)
    hop = b.integers(step, "frame_step")[0]
    whole = time if window is None else dims(window)[0]
    size = whole if length is None else b.integers(length, "frame_length")[0]
    if hop < 1 or not 1 <= size <= time:
        raise b.invalid(f"frames of {size} every {hop} do not fit a signal of {time}")
    if window is not None and dims(window) != (size,):
        raise b.invalid(f"a window of {list(dims(window))} does not fit frames of {size}")
    wide = dtypes.accumulator(x.dtype)
    factors = b.constant(
        transform(b, size, size, parts, False, bool(node.attributes.get("onesided", 1)), wide), "factors"
    )
    if window is not None:
        plain = factors
        factors = b.map("windowed", dims(plain), lambda n, c, k, o: load(plain, (n, c, k, o)) * b.wide(window, (n,)))
    matrix = factors

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        value = load(x, (i[0], i[1] * hop + r[0], r[1])[: x.rank])
        return cast(value, wide) * load(matrix, (r[0], r[1], i[2], i[3]))

    shape = (batch, 1 + (time - size) // hop, dims(factors)[2], 2)
    total = b.reduce("" if wide is x.dtype else "sum", shape, (size, parts), element, "add")
    return b.cast("", total, x.dtype)


@operator("MelWeightMatrix", since=17, constants=(0, 1, 2, 3, 4))
def mel_weight_matrix(
    b: Builder, node: Node, bins: Tensor, length: Tensor, rate: Tensor, lower: Tensor, upper: Tensor
) -> Tensor:
    """Triangles over the frequencies of a transform, spaced evenly in mel."""
    count, size, samples = (b.integers(t, n)[0] for t, n in ((bins, "num_mel_bins"), (length, "dft_length"),
                                                            (rate, "sample_rate")))  # fmt: skip
    low = float(b.known(lower, "lower_edge_hertz").reshape(()))
    high = float(b.known(upper, "upper_edge_hertz").reshape(()))
    number = node.attributes.get("output_datatype", dtypes.float32.onnx)
    dtype = dtypes.by_onnx(number)
    if dtype is None or dtype.is_storage:
        raise b.unsupported(f"output_datatype {number} is not supported; use a number of 8 bits or more")
    if count < 1 or size < 1 or samples < 1:
        raise b.invalid(f"{count} bins of a transform of {size} at {samples} samples; each has to be 1 or more")
    if (size // 2 + 1) * count > MOST_FACTORS:
        raise b.unsupported(f"{count} bins of {size // 2 + 1} frequencies are more than the {MOST_FACTORS} supported")
    first, last = (2595 * np.log1p(edge / 700) / np.log(10) for edge in (low, high))
    mel = np.arange(count + 2) * ((last - first) / (count + 2)) + first
    edges = (((size + 1) * 700 * np.expm1(mel / 2595 * np.log(10))) // samples).astype(np.int64)
    frequency = np.arange(size // 2 + 1)[:, None]
    left, centre, right = edges[None, :-2], edges[None, 1:-1], edges[None, 2:]
    with np.errstate(divide="ignore", invalid="ignore"):
        rising, falling = (frequency - left) / (centre - left), (right - frequency) / (right - centre)
    weights = np.where((frequency >= left) & (frequency <= centre) & (left < centre), rising, 0.0)
    weights = np.where((frequency == centre) & (left == centre), 1.0, weights)
    weights = np.where((frequency >= centre) & (frequency < right), falling, weights)
    return b.constant(weights.astype(dtype.numpy), "")
