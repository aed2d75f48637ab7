"""Convolutions of any number of spatial axes as sums of products with explicit in-range conditions."""

from __future__ import annotations

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, all_of, cast, const, load, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.reductions.contraction import product, same_type, widened
from tilewright.ops.registry import operator
from tilewright.ops.windows.geometry import SlidingAxis, geometry, windows
from tilewright.ops.windows.transposed import transposed


@operator("Conv")
def conv(b: Builder, node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    same_type(b, x, weight)
    narrow = dtypes.accumulator(x.dtype) is not x.dtype
    total = convolved(b, "sum" if narrow or bias is not None else "", node, x, weight)
    return _finished(b, total, bias, x)


def _finished(b: Builder, total: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if bias is None:
        return b.cast("", total, x.dtype)
    return b.map("", dims(total), lambda *i: cast(b.read(total, i) + b.wide(bias, i[1:2]), x.dtype))


def convolved(b: Builder, hint: str, node: Node, x: Tensor, weight: Tensor) -> Tensor:
    """The sum alone, axes (n, co, spatial...), in the accumulator type."""
    if x.rank < 3 or weight.rank != x.rank:
        raise b.invalid(f"cannot convolve shape {list(dims(x))} with weights {list(dims(weight))}")
    group = int(node.attributes.get("group", 1))
    outputs, inner = dims(weight)[:2]
    if group < 1 or inner * group != dims(x)[1] or outputs % group:
        raise b.invalid(f"{dims(x)[1]} channels in {group} groups do not fit weights {list(dims(weight))}")
    _check_kernel(b, node, weight)
    shape = windows(b, node, dims(x)[2:], dims(weight)[2:])
    per_group = outputs // group

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        places = [w.place(o, k) for w, o, k in zip(shape, i[2:], r[1:], strict=True)]
        if group == 1:
            channel = r[0]
        elif inner == 1 and per_group == 1:
            channel = i[1]
        else:
            channel = (i[1] // per_group) * inner + r[0]
        return product(_read(x, i[0], channel, places, shape), load(weight, (i[1], *r)))

    out = (dims(x)[0], outputs, *(w.out for w in shape))
    return b.reduce(hint, out, (inner, *(w.kernel for w in shape)), element, "add")


def _check_kernel(b: Builder, node: Node, weight: Tensor) -> None:
    kernel = tuple(node.attributes.get("kernel_shape", dims(weight)[2:]))
    if kernel != dims(weight)[2:]:
        raise b.invalid(f"kernel_shape {list(kernel)} is not that of its weights {list(dims(weight))}")


def _read(x: Tensor, image: Expr, channel: Expr, places: list[Expr], shape: list[SlidingAxis]) -> Expr:
    conditions = [c for w, p in zip(shape, places, strict=True) for c in w.inside(p)]
    value = load(x, (image, channel, *places))
    return select(all_of(conditions), value, const(0, x.dtype)) if conditions else value


@operator("ConvInteger", since=10)
def conv_integer(
    b: Builder, node: Node, x: Tensor, weight: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    return convolved(b, "", node, widened(b, "x", x, x_zero, row=True), per_output(b, "w", weight, w_zero))


def per_output(b: Builder, hint: str, weight: Tensor, zero: Tensor | None) -> Tensor:
    """8-bit weights as int32, less a zero point that may differ by output channel."""
    if zero is None or zero.rank == 0 or dims(zero)[0] == 1:
        return widened(b, hint, weight, zero, row=True)
    return b.widened_map(
        weight, hint, lambda *i: cast(b.read(weight, i), dtypes.int32) - cast(b.read(zero, i[:1]), dtypes.int32)
    )


@operator("ConvTranspose")
def conv_transpose(b: Builder, node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    same_type(b, x, weight)
    group = int(node.attributes.get("group", 1))
    channels = dims(weight)[0]
    if x.rank < 3 or weight.rank != x.rank or group < 1 or channels != dims(x)[1] or channels % group:
        raise b.invalid(f"{dims(x)[1]} channels in {group} groups do not fit weights {list(dims(weight))}")
    _check_kernel(b, node, weight)
    shape = _transposed_windows(b, node, dims(x)[2:], dims(weight)[2:])
    narrow = dtypes.accumulator(x.dtype) is not x.dtype
    total = transposed(b, "sum" if narrow or bias is not None else "", x, weight, shape, group)
    return _finished(b, total, bias, x)


def _transposed_windows(b: Builder, node: Node, sizes: tuple[int, ...], kernel: tuple[int, ...]) -> list[SlidingAxis]:
    rank = len(sizes)
    strides, dilations, pads = geometry(b, node, rank)
    extra = [int(v) for v in node.attributes.get("output_padding", [0] * rank)]
    if len(extra) != rank or any(v < 0 for v in extra):
        raise b.invalid(f"output_padding {extra} has to be a number of 0 or more for each of {rank} spatial axes")
    wanted = node.attributes.get("output_shape")
    automatic = node.attributes.get("auto_pad", "NOTSET")
    result = []
    for axis in range(rank):
        stride, dilation = int(strides[axis]), int(dilations[axis])
        full = (sizes[axis] - 1) * stride + (kernel[axis] - 1) * dilation + 1 + int(extra[axis])
        begin, end = int(pads[axis]), int(pads[axis + rank])
        if wanted is not None or automatic in ("SAME_UPPER", "SAME_LOWER"):
            out = int(wanted[len(wanted) - rank + axis]) if wanted is not None else sizes[axis] * stride
            total = max(full - out, 0)
            begin = total // 2 if automatic == "SAME_UPPER" else total - total // 2
        else:
            out = full - begin - end
        if out < 0:
            raise b.invalid(f"pads {begin} and {end} take away more than the {full} places of axis {axis}")
        result.append(SlidingAxis(sizes[axis], kernel[axis], stride, dilation, begin, end, out))
    return result
