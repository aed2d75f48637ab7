"""Contributed operators (com.microsoft) of quantised models: 8-bit arithmetic between scales and zero points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute
from tilewright.ir.forms.expr import Expr, cast, const, eq, load, lt, maximum, minimum, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims, expect, wrapped
from tilewright.ops.maps.storage import decoded
from tilewright.ops.microsoft.fused import DOMAIN
from tilewright.ops.movement.shape import concatenated
from tilewright.ops.quantised.quantization import dequantize_linear, quantize_linear
from tilewright.ops.reductions.contraction import matrix_product, widened
from tilewright.ops.reductions.reduction import reduce_over
from tilewright.ops.reductions.softmax import softmax_over
from tilewright.ops.registry import operator
from tilewright.ops.steps.recurrent import lstm
from tilewright.ops.windows.pooling import average_pool

operator("QuantizeLinear", domain=DOMAIN)(quantize_linear)
operator("DequantizeLinear", domain=DOMAIN)(dequantize_linear)


@dataclass(frozen=True)
class Scale:
    """How integers of a tensor are numbers: one scale and zero point for all of them."""

    factor: Tensor
    zero: Tensor | None
    dtype: dtypes.DType

    def real(self, b: Builder, value: Expr) -> Expr:
        whole = cast(value, dtypes.int32)
        if self.zero is not None:
            whole = whole - cast(_one(b, self.zero), dtypes.int32)
        return cast(whole, dtypes.float32) * _one(b, self.factor)

    def whole(self, b: Builder, value: Expr) -> Expr:
        rounded = op("round", value / _one(b, self.factor))
        if self.zero is not None:
            rounded = rounded + cast(_one(b, self.zero), dtypes.float32)
        low, high = (const(n, dtypes.float32) for n in self.dtype.limits)
        return cast(minimum(maximum(rounded, low), high), self.dtype)


def _one(b: Builder, parameter: Tensor) -> Expr:
    if prod(dims(parameter)) != 1:
        raise b.unsupported(f"a scale or zero point of shape {list(dims(parameter))} is not supported; give one number")
    return b.read(parameter, (0,) * parameter.rank)


def _scale(b: Builder, factor: Tensor, zero: Tensor | None, dtype: dtypes.DType) -> Scale:
    if not dtype.is_int or dtype.bits > 16:
        raise b.invalid(f"{dtype.name} is no quantised type")
    return Scale(factor, zero, dtype)


@operator("QLinearAdd", "QLinearMul", domain=DOMAIN)
def qlinear_binary(
    b: Builder,
    node: Node,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor | None,
    out_scale: Tensor,
    out_zero: Tensor | None = None,
) -> Tensor:
    left, right = _scale(b, x_scale, x_zero, x.dtype), _scale(b, y_scale, y_zero, y.dtype)
    out = _scale(b, out_scale, out_zero, x.dtype)
    combine = "add" if node.op == "QLinearAdd" else "mul"

    def element(*i: Expr) -> Expr:
        return out.whole(b, op(combine, left.real(b, b.read(x, i)), right.real(b, b.read(y, i))))

    return b.map("", b.broadcast(x, y), element)


def _through_table(node: Node) -> Callable[[Expr], Expr]:
    if node.op == "QLinearSigmoid":
        return lambda v: op("sigmoid", v)
    alpha = float(node.attributes.get("alpha", 0.01))
    return lambda v: select(lt(v, 0), v * alpha, v)


@operator("QLinearLeakyRelu", "QLinearSigmoid", domain=DOMAIN)
def qlinear_activation(
    b: Builder,
    node: Node,
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    out_scale: Tensor,
    out_zero: Tensor | None = None,
) -> Tensor:
    given, out = _scale(b, scale, zero, x.dtype), _scale(b, out_scale, out_zero, x.dtype)
    function = _through_table(node)
    return b.map("", dims(x), lambda *i: out.whole(b, function(given.real(b, b.read(x, i)))))


def _requantised(b: Builder, x: Tensor, out: Scale) -> Tensor:
    return b.map("", dims(x), lambda *i: out.whole(b, b.read(x, i)))


@operator("QLinearSoftmax", domain=DOMAIN)
def qlinear_softmax(
    b: Builder, node: Node, x: Tensor, scale: Tensor, zero: Tensor | None, out_scale: Tensor, out_zero: Tensor
) -> Tensor:
    given, out = _scale(b, scale, zero, x.dtype), _scale(b, out_scale, out_zero, x.dtype)
    old = int(node.attributes.get("opset", 13)) < 13
    axis = b.axis(node.attributes.get("axis", 1 if old else -1), x.rank)
    real = b.map("real", dims(x), lambda *i: given.real(b, b.read(x, i)))
    return _requantised(b, softmax_over(b, real, range(axis, x.rank) if old else [axis], logarithm=False), out)


@operator("QLinearGlobalAveragePool", domain=DOMAIN)
def qlinear_global_average_pool(
    b: Builder, node: Node, x: Tensor, scale: Tensor, zero: Tensor, out_scale: Tensor, out_zero: Tensor
) -> Tensor:
    given, out = _scale(b, scale, zero, x.dtype), _scale(b, out_scale, out_zero, x.dtype)
    axes = list(range(1, x.rank - 1)) if node.attributes.get("channels_last", 0) else list(range(2, x.rank))
    count = prod(dims(x)[a] for a in axes)
    total = reduce_over(b, "sum", x, axes, True, "add", lambda v, *at: cast(v, dtypes.int32))

    def element(*i: Expr) -> Expr:
        whole = b.read(total, i) - cast(_one(b, zero), dtypes.int32) * count
        return out.whole(b, cast(whole, dtypes.float32) * (_one(b, given.factor) * (1 / count)))

    return b.map("", dims(total), element)


@operator("QLinearAveragePool", domain=DOMAIN)
def qlinear_average_pool(
    b: Builder,
    node: Node,
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    out_scale: Tensor,
    out_zero: Tensor | None = None,
) -> Tensor:
    if node.attributes.get("channels_last", 0):
        raise b.unsupported("channels_last is not supported here; transpose by an operator of its own")
    given, out = _scale(b, scale, zero, x.dtype), _scale(b, out_scale, out_zero, x.dtype)
    real = b.map("real", dims(x), lambda *i: given.real(b, b.read(x, i)))
    return _requantised(b, average_pool(b, node, real), out)


@operator("QLinearConcat", domain=DOMAIN)
def qlinear_concat(b: Builder, node: Node, out_scale: Tensor, out_zero: Tensor, *given: Tensor) -> Tensor:
    if not given or len(given) % 3:
        raise b.invalid("it needs a tensor, a scale and a zero point for every part")
    out = _scale(b, out_scale, out_zero, out_zero.dtype)
    parts = []
    for k in range(0, len(given), 3):
        scale = _scale(b, given[k + 1], given[k + 2], given[k].dtype)
        parts.append(
            b.map(f"part{k // 3}", dims(given[k]),
                  lambda *i, x=given[k], s=scale: out.whole(b, s.real(b, b.read(x, i))))
        )  # fmt: skip
    return concatenated(b, "", tuple(parts), b.axis(node.attributes["axis"], parts[0].rank))


# products


def _column(b: Builder, parameter: Tensor, i: tuple[Expr, ...]) -> Expr:
    """A scale for all, or one a column."""
    return _one(b, parameter) if prod(dims(parameter)) == 1 else b.read(parameter, i[-1:])


@operator("MatMulIntegerToFloat", domain=DOMAIN)
def matmul_integer_to_float(
    b: Builder,
    node: Node,
    x: Tensor,
    y: Tensor,
    x_scale: Tensor,
    y_scale: Tensor,
    x_zero: Tensor | None = None,
    y_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    left, right = widened(b, "left", x, x_zero, row=True), widened(b, "right", y, y_zero, row=False)
    total = matrix_product(b, "sum", left, right)
    for name, given in (("a_scale", x_scale), ("b_scale", y_scale), ("bias", bias)):
        expect(b, name, given, (), (1,), dims(y)[-1:])

    def element(*i: Expr) -> Expr:
        value = cast(b.read(total, i), dtypes.float32) * (_column(b, x_scale, i) * _column(b, y_scale, i))
        return value if bias is None else value + b.read(bias, i[-1:])

    return b.map("", dims(total), element)


@operator("DynamicQuantizeMatMul", domain=DOMAIN)
def dynamic_quantize_matmul(
    b: Builder,
    node: Node,
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    codes, x_scale, x_zero = dynamically_quantized(b, x)
    return matmul_integer_to_float(b, node, codes, y, x_scale, scale, x_zero, zero, bias)


def dynamically_quantized(b: Builder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor in 8 bits between its least and largest element, zero always among them; with scale and zero point."""
    axes = list(range(x.rank))
    least = reduce_over(b, "least", x, axes, False, "min", lambda v, *at: v)
    most = reduce_over(b, "most", x, axes, False, "max", lambda v, *at: v)
    top = float(dtypes.uint8.limits[1])
    scale = b.map("x_scale", (), lambda: (maximum(load(most, ()), 0) - minimum(load(least, ()), 0)) * (1 / top))

    def zero_point() -> Expr:
        place = op("round", (0.0 - minimum(load(least, ()), 0)) / load(scale, ()))
        # of zeros alone any scale will do
        place = select(eq(load(scale, ()), 0), const(0, dtypes.float32), place)
        return cast(minimum(maximum(place, 0), top), dtypes.uint8)

    zero = b.map("x_zero", (), zero_point)

    def element(*i: Expr) -> Expr:
        value = select(eq(load(scale, ()), 0), const(0, dtypes.float32), b.read(x, i) / load(scale, ()))
        value = op("round", value) + cast(load(zero, ()), dtypes.float32)
        return cast(minimum(maximum(value, 0), top), dtypes.uint8)

    return b.map("codes", dims(x), element), scale, zero


@operator("QGemm", domain=DOMAIN)
def qgemm(
    b: Builder,
    node: Node,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_zero: Tensor | None = None,
) -> Tensor:
    alpha = float(node.attributes.get("alpha", 1.0))

    def transposed(t: Tensor, name: str) -> Tensor:
        return b.map(name, dims(t)[::-1], lambda i, j: load(t, (j, i))) if node.attributes.get(name, 0) else t

    left = widened(b, "left", transposed(x, "transA"), x_zero, row=True)
    right = widened(b, "right", transposed(y, "transB"), y_zero, row=False)
    total = matrix_product(b, "sum", left, right)

    def real(*i: Expr) -> Expr:
        value = b.read(total, i) if bias is None else b.read(total, i) + b.read(bias, i)
        return cast(value, dtypes.float32) * (_column(b, x_scale, i) * _column(b, y_scale, i) * alpha)

    if out_scale is None:
        return b.map("", dims(total), real)
    out = _scale(b, out_scale, out_zero, x.dtype if out_zero is None else out_zero.dtype)
    return b.map("", dims(total), lambda *i: out.whole(b, real(*i)))


@operator("DynamicQuantizeLSTM", domain=DOMAIN)
def dynamic_quantize_lstm(
    b: Builder,
    node: Node,
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    initial_h: Tensor | None,
    initial_c: Tensor | None,
    peephole: Tensor | None,
    w_scale: Tensor,
    w_zero: Tensor,
    r_scale: Tensor,
    r_zero: Tensor,
) -> tuple[Tensor | None, ...]:
    """An LSTM with 8-bit weights, [directions, inputs, gates * hidden]. What is multiplied with them is rounded to 8
    bits of its range: all of the input at once, the hidden state anew at every step."""

    def real(hint: str, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        directions, inputs, gates = dims(w)

        def at(parameter: Tensor, d: Expr, g: Expr) -> Expr:
            if parameter.rank == 2:
                return b.read(parameter, (d, g))
            return b.read(parameter, (d,)) if prod(dims(parameter)) > 1 else _one(b, parameter)

        def element(d: Expr, g: Expr, k: Expr) -> Expr:
            whole = cast(load(w, (d, k, g)), dtypes.int32) - cast(at(zero, d, g), dtypes.int32)
            return cast(whole, x.dtype) * at(scale, d, g)

        return b.map(hint, (directions, gates, inputs), element)

    plain = replace(node, op="LSTM", domain="")
    w, r = real("real_weight", weight, w_scale, w_zero), real("real_recurrence", recurrence, r_scale, r_zero)
    return lstm(b, plain, x, w, r, bias, lengths, initial_h, initial_c, peephole, lambda hint, t: _rounded(b, hint, t))


def _rounded(b: Builder, hint: str, x: Tensor) -> tuple[Compute, ...]:
    """A tensor as 256 numbers stand for it, evenly from its lowest, or 0, to its highest: as DynamicQuantizeLinear."""
    ends = [
        b.reduce_compute(f"{hint}_{name}", (), dims(x), lambda _, r: cast(load(x, r), dtypes.float32), name)
        for name in ("min", "max")
    ]

    def element(*i: Expr) -> Expr:
        low, high = minimum(load(ends[0].outputs[0], ()), 0), maximum(load(ends[1].outputs[0], ()), 0)
        step = (high - low) / 255.0
        step = select(eq(step, 0), const(1, step.dtype), step)
        zero = minimum(maximum(op("round", -low / step), 0.0), 255.0)
        whole = minimum(maximum(op("round", cast(load(x, i), dtypes.float32) / step) + zero, 0.0), 255.0)
        return cast((whole - zero) * step, x.dtype)

    return (*ends, b.map_compute(f"{hint}_rounded", dims(x), element))


@operator("QLinearWhere", domain=DOMAIN)
def qlinear_where(
    b: Builder,
    node: Node,
    condition: Tensor,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    out_scale: Tensor,
    out_zero: Tensor,
) -> Tensor:
    left, right = _scale(b, x_scale, x_zero, x.dtype), _scale(b, y_scale, y_zero, y.dtype)
    out = _scale(b, out_scale, out_zero, x.dtype)

    def element(*i: Expr) -> Expr:
        return out.whole(b, select(b.read(condition, i), left.real(b, b.read(x, i)), right.real(b, b.read(y, i))))

    return b.map("", b.broadcast(condition, x, y), element)


@operator("GatherBlockQuantized", domain=DOMAIN)
def gather_block_quantized(
    b: Builder, node: Node, data: Tensor, indices: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    """Rows of a table whose elements are small integers with a scale for every block of them."""
    axis = b.axis(node.attributes.get("gather_axis", 0), data.rank)
    blocked = b.axis(node.attributes.get("quantize_axis", 1), data.rank)
    bits, block = int(node.attributes.get("bits", 4)), int(node.attributes.get("block_size", 128))
    each = 8 // bits if data.dtype is dtypes.uint8 else 1  # elements of a byte, along the last axis
    if bits not in (2, 4, 8) or block < 1 or scales.rank != data.rank or (each > 1 and axis == data.rank - 1):
        raise b.invalid(f"{bits} bits in blocks of {block} of {data!r} with scales {list(dims(scales))}")
    whole = (*dims(data)[:-1], dims(data)[-1] * each)

    def at(t: Tensor, i: tuple[Expr, ...]) -> Expr:
        """An element of the table or of its zero points, which are packed alike."""
        value = decoded(b, load(t, (*i[:-1], i[-1] // each if each > 1 else i[-1])))
        if each == 1:
            return cast(value, dtypes.int32)
        shift = cast((i[-1] % each) * bits, dtypes.int32)
        return op("bitand", op("shr", cast(value, dtypes.int32), shift), (1 << bits) - 1)

    def element(*i: Expr) -> Expr:
        row = wrapped(b, indices, i[axis : axis + indices.rank], whole[axis])
        place = (*i[:axis], row, *i[axis + indices.rank :])
        group = (*place[:blocked], place[blocked] // block, *place[blocked + 1 :])
        wide = dtypes.accumulator(scales.dtype)
        value = at(data, place)
        if zeros is not None:
            value = value - at(zeros, group)
        elif data.dtype is dtypes.uint8:
            value = value - (1 << (bits - 1))
        return cast(cast(value, wide) * b.wide(scales, group), scales.dtype)

    return b.map("", (*whole[:axis], *dims(indices), *whole[axis + 1 :]), element)
