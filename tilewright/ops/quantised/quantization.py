"""Linear quantisation: floats to small integers and back, by tensor, axis or block."""

from __future__ import annotations

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, cast, const, maximum, minimum, op
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.maps.storage import decoded, encoded, integer_limits, is_small_integer
from tilewright.ops.reductions.contraction import matrix_product, widened
from tilewright.ops.registry import operator
from tilewright.ops.windows.convolution import convolved, per_output


def _parameter(b: Builder, node: Node, x: Tensor, parameter: Tensor, i: tuple[Expr, ...]) -> Expr:
    """Scale or zero point at an element of `x`: one for all, one an index of the axis, or one a block of it."""
    if parameter.rank == 0 or dims(parameter) == (1,):
        return b.read(parameter, (0,) * parameter.rank)
    axis = b.axis(node.attributes.get("axis", 1), x.rank)
    if parameter.rank == 1:
        return b.read(parameter, (i[axis],))
    block = int(node.attributes.get("block_size", 0)) or -(-dims(x)[axis] // dims(parameter)[axis])
    return b.read(parameter, (*i[:axis], i[axis] // block, *i[axis + 1 :]))


@operator("QuantizeLinear", since=10)
def quantize_linear(b: Builder, node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    target = zero.dtype if zero is not None else dtypes.by_onnx(node.attributes.get("output_dtype", 0) or 2)
    if target is None:
        raise b.unsupported("its output type is not supported; use integers or float8")
    saturate = bool(node.attributes.get("saturate", 1))
    is_integer = target.is_int or is_small_integer(target)

    def element(*i: Expr) -> Expr:
        factor = cast(decoded(b, _parameter(b, node, x, scale, i)), dtypes.float32)
        value = cast(b.read(x, i), dtypes.float32) / factor
        if not is_integer:  # floats have no zero point but zero
            return encoded(value, target, saturate)
        value = op("round", value)
        if zero is not None:
            value = value + cast(decoded(b, _parameter(b, node, x, zero, i)), dtypes.float32)
        low, high = (const(n, value.dtype) for n in integer_limits(target))
        inside = minimum(maximum(value, low), high)
        return encoded(inside, target) if target.is_storage else cast(inside, target)

    return b.map("", dims(x), element)


@operator("DequantizeLinear", since=10)
def dequantize_linear(b: Builder, node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    number = node.attributes.get("output_dtype", 0)
    target = dtypes.by_onnx(number) if number else scale.dtype
    if target is None or target.is_storage:
        raise b.unsupported("its output type is not supported; use a float of 16 bits or more")

    def element(*i: Expr) -> Expr:
        factor = decoded(b, _parameter(b, node, x, scale, i))
        wide = dtypes.accumulator(factor.dtype)
        value = decoded(b, b.read(x, i))
        if not value.dtype.is_float:
            value = cast(value, dtypes.int32)
            if zero is not None:
                value = value - cast(decoded(b, _parameter(b, node, x, zero, i)), dtypes.int32)
        return cast(cast(value, wide) * cast(factor, wide), target)

    return b.widened_map(x, "", element)


@operator("QLinearMatMul", since=10)
def qlinear_matmul(
    b: Builder,
    node: Node,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    out_scale: Tensor,
    out_zero: Tensor,
) -> Tensor:
    left, right = widened(b, "left", x, x_zero, row=True), widened(b, "right", y, y_zero, row=False)
    total = matrix_product(b, "sum", left, right)

    def at(parameter: Tensor, i: tuple[Expr, ...], row: bool) -> Expr:
        own = parameter.rank == 1 and total.rank > 1 and dims(parameter)[0] > 1
        return cast(b.read(parameter, (i[-2] if row else i[-1],) if own else i), dtypes.float32)

    def element(*i: Expr) -> Expr:
        scale = at(x_scale, i, True) * at(y_scale, i, False) / at(out_scale, i, True)
        return _saturated(cast(b.read(total, i), dtypes.float32) * scale, at(out_zero, i, True), out_zero)

    return b.map("", dims(total), element)


@operator("QLinearConv", since=10)
def qlinear_conv(
    b: Builder,
    node: Node,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    out_scale: Tensor,
    out_zero: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    total = convolved(b, "sum", node, widened(b, "x", x, x_zero, row=True), per_output(b, "w", w, w_zero))

    def element(*i: Expr) -> Expr:
        value = b.read(total, i)
        value = value if bias is None else value + b.read(bias, i[1:2])
        scale = b.read(x_scale, i) * b.read(w_scale, i[1:2]) / b.read(out_scale, i)
        return _saturated(cast(value, dtypes.float32) * scale, cast(b.read(out_zero, i), dtypes.float32), out_zero)

    return b.map("", dims(total), element)


def _saturated(value: Expr, zero: Expr, target: Tensor) -> Expr:
    """Rounded to the integers of `target`, values beyond them brought to the nearest."""
    info = np.iinfo(target.dtype.numpy)
    low, high = const(info.min, value.dtype), const(info.max, value.dtype)
    return cast(minimum(maximum(op("round", value) + zero, low), high), target.dtype)
