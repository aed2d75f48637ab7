"""ATen's layers as operators of the Graph: products, convolutions, normalisations, pools, attention. One row a name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.frontend.pytorch.emitter import Emitted, Emitter, Number, Results, row
from tilewright.ir.forms import dtypes

Sizes = int | Sequence[int]

# products


@row("aten.mm", "aten.bmm", "aten.matmul")
def matmul(m: Emitter, out: Emitted, x: Emitted, y: Emitted, **_: Any) -> Results:
    return m.new("MatMul", x, y)


@row("aten.addmm")
def addmm(
    m: Emitter, out: Emitted, bias: Emitted, x: Emitted, y: Emitted, beta: Number = 1, alpha: Number = 1
) -> Results:
    return m.new("Gemm", x, y, bias, alpha=float(alpha), beta=float(beta))


@row("aten.linear")
def linear(m: Emitter, out: Emitted, x: Emitted, weight: Emitted, bias: Emitted | None = None) -> Results:
    if x.rank == 2 and weight.rank == 2:
        return m.new("Gemm", x, weight, bias, transB=1)
    product = m.new("MatMul", x, m.transposed(weight.name, range(weight.rank - 1, -1, -1)))
    return product if bias is None else m.new("Add", product, bias)


@row("aten._weight_int8pack_mm")
def int8_weights(m: Emitter, out: Emitted, x: Emitted, weight: Emitted, scales: Emitted) -> Results:
    """Rows times weights of 8 bits, each column with a scale of its own."""
    product = m.new("Gemm", x, m.typed(weight, out.dtype), transB=1)
    return m.new("Mul", product, m.typed(scales, out.dtype))


@row("aten._grouped_mm", "transformers.grouped_mm_fallback")
def grouped_mm(m: Emitter, out: Emitted, x: Emitted, weights: Emitted, ends: Emitted | None = None,
               bias: Emitted | None = None, out_dtype: Any = None, **named: Emitted) -> Results:  # fmt: skip
    """Rows that lie expert by expert, each times its own expert's weight; `ends` are where the experts' rows end, and
    rows behind the last are zeros."""
    ends = named.get("offs", ends)
    if x.rank != 2 or weights.rank != 3 or ends is None or bias is not None:
        raise m.refuse("only rows times one weight an expert are supported")
    rows, (experts, depth, width) = x.shape[0], weights.shape
    last = Emitted(m.typed(ends, dtypes.int64), dtypes.int64, ends.shape)
    number = np.arange(rows, dtype=np.int64)[:, None]
    is_behind = m.new("GreaterOrEqual", number, last)  # of each row, the experts that end before it
    if rows <= experts:  # a matrix a row is less than all of them
        of_row = m.new("ReduceSum", m.cast(is_behind, dtypes.int64), axes=[1], keepdims=0)
        chosen = m.new("Gather", weights, m.new("Min", of_row, m.number(experts - 1, dtypes.int64)), axis=0)
        product = m.reshape(m.new("MatMul", m.reshape(x.name, (rows, 1, depth)), chosen), (rows, width))
        is_any = m.new("Less", m.reshape(of_row, (rows, 1)), m.number(experts, dtypes.int64))
        return m.new("Where", is_any, product, m.number(0, x.dtype))
    starts = m.new("Concat", m.integers([0]), m.sliced(last.name, 0, 0, experts - 1), axis=0)
    is_own = m.new("And", m.new("GreaterOrEqual", number, starts), m.new("Not", is_behind))
    spread = m.new(
        "Where", m.reshape(is_own, (rows, experts, 1)), m.reshape(x.name, (rows, 1, depth)), m.number(0, x.dtype)
    )
    return m.new(
        "MatMul", m.reshape(spread, (rows, experts * depth)), m.reshape(weights.name, (experts * depth, width))
    )


# convolutions


def _spatial(value: Sizes, rank: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * rank if len(given) == 1 else given


@row("aten.convolution", "aten._convolution")
def convolution(m: Emitter, out: Emitted, x: Emitted, weight: Emitted, bias: Emitted | None, stride: Sizes,
                padding: Sizes, dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int,
                *_: bool) -> Results:  # fmt: skip
    rank = weight.rank - 2
    pads = _spatial(padding, rank)
    attributes: dict[str, Any] = {"strides": _spatial(stride, rank), "dilations": _spatial(dilation, rank),
                                  "pads": pads * 2, "group": groups}  # fmt: skip
    if transposed:
        return m.new("ConvTranspose", x, weight, bias, output_padding=_spatial(output_padding, rank), **attributes)
    return m.new("Conv", x, weight, bias, **attributes)


# normalisations


def _affine(m: Emitter, x: Emitted, scale: Emitted | None, bias: Emitted | None, count: int) -> tuple[str, str]:
    one = m.filled((count,), 1, x.dtype) if scale is None else m.typed(scale, x.dtype)
    zero = m.filled((count,), 0, x.dtype) if bias is None else m.typed(bias, x.dtype)
    return one, zero


@row("aten._native_batch_norm_legit_no_training")
def batch_norm(m: Emitter, out: tuple[Emitted, ...], x: Emitted, scale: Emitted | None, bias: Emitted | None,
               mean: Emitted, variance: Emitted, momentum: float, epsilon: float) -> Results:  # fmt: skip
    one, zero = _affine(m, x, scale, bias, x.shape[1])
    found = m.new("BatchNormalization", x, one, zero, mean, variance, epsilon=epsilon)
    return found, None, None


@row("aten._native_batch_norm_legit", "aten.native_batch_norm", "aten._native_batch_norm_legit_functional")
def batch_norm_by_mode(m: Emitter, out: tuple[Emitted, ...], x: Emitted, scale: Emitted | None, bias: Emitted | None,
                       mean: Emitted, variance: Emitted, training: bool, momentum: float,
                       epsilon: float) -> Results:  # fmt: skip
    if training:
        raise m.refuse("batch normalisation in training mode changes its statistics; call module.eval() first")
    return *batch_norm(m, out, x, scale, bias, mean, variance, momentum, epsilon), mean.name, variance.name


@row("aten._native_batch_norm_legit.no_stats")
def batch_norm_of_batch(m: Emitter, out: tuple[Emitted, ...], x: Emitted, scale: Emitted | None, bias: Emitted | None,
                        training: bool, momentum: float, epsilon: float) -> Results:  # fmt: skip
    """Statistics of the batch itself; instance normalisation is written as this over images as channels."""
    one, zero = _affine(m, x, scale, bias, x.shape[1])
    if x.shape[0] == 1 and x.rank > 2:
        return m.new("InstanceNormalization", x, one, zero, epsilon=epsilon), None, None
    swapped = m.transposed(x.name, [1, 0, *range(2, x.rank)])
    whole = m.reshape(swapped, (1, x.shape[1], -1))
    found = m.reshape(m.new("InstanceNormalization", whole, one, zero, epsilon=epsilon),
                      (x.shape[1], x.shape[0], *x.shape[2:]))  # fmt: skip
    return m.transposed(found, [1, 0, *range(2, x.rank)]), None, None


@row("aten.native_layer_norm")
def layer_norm(m: Emitter, out: tuple[Emitted, ...], x: Emitted, shape: Sequence[int], scale: Emitted | None,
               bias: Emitted | None, epsilon: float) -> Results:  # fmt: skip
    one = m.filled(shape, 1, x.dtype) if scale is None else scale.name
    return m.several("LayerNormalization", 3, x, one, bias, axis=x.rank - len(shape), epsilon=epsilon)


@row("aten.native_group_norm")
def group_norm(m: Emitter, out: tuple[Emitted, ...], x: Emitted, scale: Emitted | None, bias: Emitted | None,
               batch: int, channels: int, positions: int, groups: int, epsilon: float) -> Results:  # fmt: skip
    one, zero = _affine(m, x, scale, bias, channels)
    found = m.new("GroupNormalization", x, one, zero, num_groups=groups, epsilon=epsilon)
    return found, None, None


@row("aten.rms_norm", "aten._fused_rms_norm")
def rms_norm(m: Emitter, out: Emitted | tuple[Emitted, ...], x: Emitted, shape: Sequence[int],
             scale: Emitted | None = None, epsilon: float | None = None) -> Results:  # fmt: skip
    least = float(np.finfo(x.dtype.numpy).eps) if epsilon is None else epsilon
    one = m.filled(shape, 1, x.dtype) if scale is None else scale.name
    found = m.new("RMSNormalization", x, one, axis=x.rank - len(shape), epsilon=least)
    return found if isinstance(out, Emitted) else (found, None)


# pools


def _batched(m: Emitter, x: Emitted, rank: int) -> tuple[str, bool]:
    """An image without a batch axis gets one."""
    return (m.reshape(x.name, (1, *x.shape)), True) if x.rank == rank + 1 else (x.name, False)


def _window(rank: int, kernel: Sizes, stride: Sizes | None, padding: Sizes, ceil: bool) -> dict[str, Any]:
    steps = kernel if stride is None or (not isinstance(stride, int) and not stride) else stride
    return {"kernel_shape": _spatial(kernel, rank), "strides": _spatial(steps, rank),
            "pads": _spatial(padding, rank) * 2, "ceil_mode": int(ceil)}  # fmt: skip


def _pooling(rank: int) -> None:
    @row(f"aten.max_pool{rank}d", f"aten.max_pool{rank}d_with_indices")
    def max_pool(m: Emitter, out: Emitted | tuple[Emitted, ...], x: Emitted, kernel: Sizes, stride: Sizes | None = None,
                 padding: Sizes = 0, dilation: Sizes = 1, ceil: bool = False) -> Results:  # fmt: skip
        window = {**_window(rank, kernel, stride, padding, ceil), "dilations": _spatial(dilation, rank)}
        image, added = _batched(m, x, rank)
        result = out if isinstance(out, Emitted) else out[0]
        found = m.new("MaxPool", image, **window)
        found = m.reshape(found, result.shape) if added else found
        return found if isinstance(out, Emitted) else (found, None)

    @row(f"aten.avg_pool{rank}d")
    def avg_pool(m: Emitter, out: Emitted, x: Emitted, kernel: Sizes, stride: Sizes | None = None, padding: Sizes = 0,
                 ceil: bool = False, padded: bool = True, divisor: int | None = None) -> Results:  # fmt: skip
        if divisor is not None and ceil:
            raise m.refuse("divisor_override with ceil_mode is not supported")
        image, added = _batched(m, x, rank)
        counts = padded or divisor is not None
        found = m.new(
            "AveragePool", image, count_include_pad=int(counts), **_window(rank, kernel, stride, padding, ceil)
        )
        if divisor is not None:
            found = m.new("Mul", found, m.number(prod(_spatial(kernel, rank)) / divisor, x.dtype))
        return m.reshape(found, out.shape) if added else found

    @row(f"aten.adaptive_avg_pool{rank}d", f"aten._adaptive_avg_pool{rank}d")
    def adaptive_avg_pool(m: Emitter, out: Emitted, x: Emitted, sizes: Sizes) -> Results:
        image, added = _batched(m, x, rank)
        given, wanted = x.shape[-rank:], out.shape[-rank:]
        if all(n == 1 for n in wanted):
            found = m.new("GlobalAveragePool", image)
        elif all(n % w == 0 for n, w in zip(given, wanted, strict=True)):
            steps = [n // w for n, w in zip(given, wanted, strict=True)]
            found = m.new("AveragePool", image, kernel_shape=steps, strides=steps)
        else:
            found = _averaged(m, image, given, wanted, x)
        return m.reshape(found, out.shape) if added else found

    @row(f"aten.adaptive_max_pool{rank}d")
    def adaptive_max_pool(m: Emitter, out: tuple[Emitted, ...], x: Emitted, sizes: Sizes) -> Results:
        given, wanted = x.shape[-rank:], out[0].shape[-rank:]
        if any(n % w for n, w in zip(given, wanted, strict=True)):
            raise m.refuse(f"windows of different sizes, {list(given)} to {list(wanted)}, are not supported")
        image, added = _batched(m, x, rank)
        steps = [n // w for n, w in zip(given, wanted, strict=True)]
        found = m.new("MaxPool", image, kernel_shape=steps, strides=steps)
        return (m.reshape(found, out[0].shape) if added else found), None


for _rank in (1, 2, 3):
    _pooling(_rank)


def _averaged(m: Emitter, x: str, given: Sequence[int], wanted: Sequence[int], like: Emitted) -> str:
    """Windows of different sizes: axis by axis a product with the matrix of their weights."""
    rank = len(given) + 2
    for axis, (n, w) in enumerate(zip(given, wanted, strict=True), start=2):
        weights = np.zeros((n, w))
        for k in range(w):
            first, stop = k * n // w, -(-(k + 1) * n // w)
            weights[first:stop, k] = 1 / (stop - first)
        order = [a for a in range(rank) if a != axis] + [axis]
        product = m.new("MatMul", m.transposed(x, order), weights.astype(like.dtype.numpy))
        x = m.transposed(product, [order.index(a) for a in range(rank)])
    return x


# other sizes


def _resized(m: Emitter, out: Emitted, x: Emitted, scales: Sequence[float | None] | None, **attributes: Any) -> str:
    """By the scales where the module names them: coordinates follow those, not the sizes that were rounded down."""
    rank = x.rank - 2
    named = [s for s in (scales or ()) if s is not None]
    corners = attributes.get("coordinate_transformation_mode") == "align_corners"
    factors = None if corners or len(named) != rank else np.asarray([1.0, 1.0, *named], np.float32)
    exact = factors is not None and all(
        math.floor(n * float(s)) == o for n, s, o in zip(x.shape, factors, out.shape, strict=True)
    )
    if exact:
        return m.new("Resize", x, None, factors, **attributes)
    return m.new("Resize", x, None, None, m.integers(out.shape), **attributes)


def _scales(arguments: Sequence[Any]) -> list[float | None]:
    """The scales of an overload: a list of its own, or one argument an axis."""
    found: list[float | None] = []
    for argument in arguments:
        found += [argument] if argument is None or isinstance(argument, int | float) else list(argument)
    return found


def _upsampling(names: Sequence[str], corners: bool, **attributes: Any) -> None:
    @row(*names)
    def upsample(m: Emitter, out: Emitted, x: Emitted, size: Sequence[int] | None, *others: Any) -> Results:
        flag, scales = (others[0], others[1:]) if corners else (False, others)
        chosen = {"coordinate_transformation_mode": "align_corners"} if flag else {}
        return _resized(m, out, x, _scales(scales), **{**attributes, **chosen})


_upsampling([f"aten.upsample_nearest{n}d" for n in (1, 2, 3)], False, mode="nearest",
            coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
_upsampling([f"aten._upsample_nearest_exact{n}d" for n in (1, 2, 3)], False, mode="nearest",
            coordinate_transformation_mode="half_pixel", nearest_mode="round_prefer_ceil")  # fmt: skip
_upsampling(["aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d"], True, mode="linear")
_upsampling(["aten.upsample_bicubic2d"], True, mode="cubic", cubic_coeff_a=-0.75)
_upsampling(["aten._upsample_bilinear2d_aa"], True, mode="linear", antialias=1, exclude_outside=1)
_upsampling(["aten._upsample_bicubic2d_aa"], True, mode="cubic", cubic_coeff_a=-0.5, antialias=1, exclude_outside=1)


@row("aten.grid_sampler_2d", "aten.grid_sampler_3d", "aten.grid_sampler")
def grid_sampler(
    m: Emitter, out: Emitted, x: Emitted, grid: Emitted, mode: int, padding: int, corners: bool
) -> Results:
    modes, paddings = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")
    if mode == 2:
        raise m.refuse("cubic interpolation is not supported")
    return m.new("GridSample", x, grid, mode=modes[mode], padding_mode=paddings[padding], align_corners=int(corners))


# attention

# What a closed place scores: finite, so that a row of nothing else has a softmax.
_LOWEST = {"float16": -65504.0, "bfloat16": -3e38, "float32": -3e38, "float64": -1e308}


@row("aten.scaled_dot_product_attention")
def attention(m: Emitter, out: Emitted, q: Emitted, k: Emitted, v: Emitted, mask: Emitted | None = None,
              dropout: float = 0.0,
              causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Results:  # fmt: skip
    if dropout:
        raise m.refuse("dropout in training mode draws random numbers; call module.eval() first")
    return _attended(m, out, q, k, v, mask, causal, scale)


@row("aten._scaled_dot_product_flash_attention_for_cpu")
def flash_attention(m: Emitter, out: tuple[Emitted, ...], q: Emitted, k: Emitted, v: Emitted, dropout: float = 0.0,
                    causal: bool = False, *, attn_mask: Emitted | None = None,
                    scale: float | None = None) -> Results:  # fmt: skip
    if dropout:
        raise m.refuse("dropout in training mode draws random numbers; call module.eval() first")
    return _attended(m, out[0], q, k, v, attn_mask, causal, scale), None


def _attended(m: Emitter, out: Emitted, q: Emitted, k: Emitted, v: Emitted, mask: Emitted | None, causal: bool,
              scale: float | None) -> str:  # fmt: skip
    """softmax(scale q k^T + mask) v; a row that the mask closes altogether is zero, as in PyTorch."""
    rank, (rows, columns) = q.rank, (q.shape[-2], k.shape[-2])
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    grouped = rank > 2 and q.shape[-3] != k.shape[-3] and k.shape[-3] > 1
    query, keys, values = q.name, k.name, v.name
    if grouped:  # several heads of queries for one of keys: an axis of their own, over which the keys are broadcast
        heads, each = k.shape[-3], q.shape[-3] // k.shape[-3]
        query = m.reshape(query, (*q.shape[:-3], heads, each, *q.shape[-2:]))
        keys, values = (m.reshape(x.name, (*x.shape[:-2], 1, *x.shape[-2:])) for x in (k, v))
        rank += 1
    swapped = m.transposed(keys, [*range(rank - 2), rank - 1, rank - 2])
    scores = m.new("MatMul", m.new("Mul", query, m.number(factor, q.dtype)), swapped)
    opened: str | None = None
    if causal:
        allowed = np.tri(rows, columns, dtype=np.bool_)
        scores = m.new("Where", allowed, scores, m.number(-math.inf, q.dtype))
    if mask is not None:
        name = mask.name
        if grouped and mask.rank > 2:
            split = (1, 1) if mask.shape[-3] == 1 else (heads, each)
            name = m.reshape(name, (*mask.shape[:-3], *split, *mask.shape[-2:]))
        if mask.dtype is dtypes.bool_:
            flags = m.cast(name, dtypes.int32)
            opened = m.cast(m.new("ReduceMax", flags, axes=[-1], keepdims=1), dtypes.bool_)
            scores = m.new("Where", name, scores, m.number(_LOWEST[q.dtype.name], q.dtype))
        else:
            highest = m.new("ReduceMax", m.cast(name, dtypes.float32), axes=[-1], keepdims=1)
            opened = m.new("Greater", highest, m.number(-math.inf, dtypes.float32))
            scores = m.new("Add", scores, m.typed(Emitted(name, mask.dtype, ()), q.dtype))
    found = m.new("MatMul", m.new("Softmax", scores, axis=-1), values)
    if opened is not None:
        found = m.new("Where", opened, found, m.number(0, q.dtype))
    return m.reshape(found, out.shape) if grouped else found
