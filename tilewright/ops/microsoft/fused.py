"""Contributed operators (com.microsoft) of optimised float models: fused products, activations and norms."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, cast, const, eq, load, maximum, minimum, op
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims, expect, wrapped
from tilewright.ops.maps.elementwise import activation, elementwise, erf_gelu, through_wide
from tilewright.ops.movement.shape import reshaped, trilu
from tilewright.ops.reductions.contraction import gemm, matrix_product, same_type
from tilewright.ops.reductions.normalization import normalized
from tilewright.ops.reductions.softmax import softmax_over
from tilewright.ops.registry import operator
from tilewright.ops.windows.convolution import conv
from tilewright.ops.windows.pooling import max_pool
from tilewright.ops.windows.sampling import grid_sample

DOMAIN = "com.microsoft"

operator("GridSample", domain=DOMAIN)(grid_sample)  # as ONNX took them over
operator("Trilu", domain=DOMAIN, constants=(1,))(trilu)


@operator("QuickGelu", domain=DOMAIN)
def quick_gelu(b: Builder, node: Node, x: Tensor) -> Tensor:
    alpha = float(node.attributes.get("alpha", 1.702))
    return elementwise(b, through_wide(lambda v: v * op("sigmoid", v * alpha)), x)


@operator("BiasGelu", domain=DOMAIN)
def bias_gelu(b: Builder, node: Node, x: Tensor, bias: Tensor) -> Tensor:
    return elementwise(b, through_wide(lambda v, w: erf_gelu(v + w)), x, bias)


@operator("BiasAdd", domain=DOMAIN)
def bias_add(b: Builder, node: Node, x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    return elementwise(b, lambda v, w, s: v + w + s, x, bias, skip)


@operator("BiasSplitGelu", domain=DOMAIN)
def bias_split_gelu(b: Builder, node: Node, x: Tensor, bias: Tensor) -> Tensor:
    half = dims(x)[-1] // 2
    expect(b, "bias", bias, dims(x)[-1:])

    def element(*i: Expr) -> Expr:
        def at(shift: int) -> Expr:
            return b.wide(x, (*i[:-1], i[-1] + shift)) + b.wide(bias, (i[-1] + shift,))

        return cast(at(0) * erf_gelu(at(half)), x.dtype)

    return b.map("", (*dims(x)[:-1], half), element)


@operator("BiasSoftmax", domain=DOMAIN)
def bias_softmax(b: Builder, node: Node, x: Tensor, bias: Tensor) -> Tensor:
    axis = b.axis(node.attributes.get("axis", 1), x.rank)
    if node.attributes.get("is_inner_broadcast", 0) and bias.rank < x.rank:
        raise b.unsupported(f"a bias {list(dims(bias))} inside {list(dims(x))} is not supported; give it all axes")
    total = elementwise(b, lambda v, w: v + w, x, bias)
    return softmax_over(b, total, range(axis, x.rank), logarithm=False)


# products


@operator("FusedMatMul", "TransposeMatMul", domain=DOMAIN)
def fused_matmul(b: Builder, node: Node, x: Tensor, y: Tensor) -> Tensor:
    same_type(b, x, y)
    if node.attributes.get("transBatchA", 0) or node.attributes.get("transBatchB", 0):
        raise b.unsupported("transBatchA and transBatchB are not supported; transpose by an operator of its own")
    alpha = float(node.attributes.get("alpha", 1.0))

    def transposed(t: Tensor, name: str) -> Tensor:
        if not node.attributes.get(name, 0) or t.rank < 2:
            return t
        shape = (*dims(t)[:-2], dims(t)[-1], dims(t)[-2])
        return b.map(name, shape, lambda *i: load(t, (*i[:-2], i[-1], i[-2])))

    total = matrix_product(b, "product", transposed(x, "transA"), transposed(y, "transB"))
    return b.map("", dims(total), lambda *i: cast(b.read(total, i) * alpha, x.dtype))


def _activated(b: Builder, node: Node, x: Tensor, parameters: list[float]) -> Tensor:
    """An activation by its name; Clip has its limits as parameters."""
    name = node.attributes.get("activation", "")
    if not name:
        return x
    function: Callable[[Expr], Expr] | None
    if name == "Clip":
        low, high = parameters
        function = lambda v: minimum(maximum(v, low), high)  # noqa: E731
    elif name == "HardSwish":
        function = lambda v: v * maximum(minimum(v * (1 / 6) + 0.5, 1), 0)  # noqa: E731
    else:
        function = activation(name, dict(zip(("alpha", "beta"), parameters, strict=False)))
    if function is None:
        raise b.unsupported(f"activation '{name}' is not known")
    return elementwise(b, through_wide(function), x)


@operator("FusedGemm", domain=DOMAIN)
def fused_gemm(b: Builder, node: Node, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    given = [node.attributes[n] for n in ("activation_alpha", "activation_beta") if n in node.attributes]
    return _activated(b, node, gemm(b, node, x, y, bias), [float(v) for v in given])


@operator("FusedConv", domain=DOMAIN)
def fused_conv(
    b: Builder, node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
) -> Tensor:
    result = conv(b, node, x, weight, bias)
    if added is not None:
        result = elementwise(b, lambda v, w: v + w, result, added)
    return _activated(b, node, result, [float(v) for v in node.attributes.get("activation_params", ())])


@operator("NhwcMaxPool", domain=DOMAIN)
def nhwc_max_pool(b: Builder, node: Node, x: Tensor) -> Tensor:
    """Channels last; pooled as if they were first, which changes no element."""
    first = b.map("channels_first", (dims(x)[0], dims(x)[-1], *dims(x)[1:-1]), lambda *i: load(x, (i[0], *i[2:], i[1])))
    pooled = max_pool(b, node, first)
    assert isinstance(pooled, Tensor)
    shape = (dims(pooled)[0], *dims(pooled)[2:], dims(pooled)[1])
    return b.map("", shape, lambda *i: load(pooled, (i[0], i[-1], *i[1:-1])))


@operator("MatMulNBits", domain=DOMAIN)
def matmul_n_bits(
    b: Builder,
    node: Node,
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    columns, depth = int(node.attributes["N"]), int(node.attributes["K"])
    bits, block = int(node.attributes.get("bits", 4)), int(node.attributes["block_size"])
    if groups is not None or node.attributes.get("weight_prepacked", 0):
        raise b.unsupported("weights by g_idx or in the layout of another runtime are not supported")
    if bits not in (2, 4, 8) or block < 8 // bits or dims(x)[-1] != depth:
        raise b.invalid(f"{bits} bits in blocks of {block} of {depth} inputs do not fit {list(dims(x))}")
    blocks, each = -(-depth // block), 8 // bits
    if prod(dims(packed)) != columns * blocks * (block // each) or packed.dtype is not dtypes.uint8:
        raise b.invalid(f"weights {packed!r} are not {columns} x {blocks} blocks of {block // each} bytes")
    codes = reshaped(b, "codes", packed, (columns, blocks * (block // each)))
    factors = reshaped(b, "factors", scales, (columns, blocks))
    wide = dtypes.accumulator(x.dtype)

    def unpacked(codes: Tensor, row: Expr, place: Expr) -> Expr:
        byte = cast(load(codes, (row, place // each)), dtypes.int32)
        if bits == 8:
            return byte
        return op("bitand", op("shr", byte, cast((place % each) * bits, dtypes.int32)), (1 << bits) - 1)

    if zeros is not None:
        packs = zeros.dtype is dtypes.uint8
        zeros = reshaped(b, "zeros", zeros, (columns, -(-blocks // each) if packs else blocks))

    def weight(row: Expr, k: Expr) -> Expr:
        value = cast(unpacked(codes, row, k), wide)
        if zeros is None:
            value = value - float(1 << (bits - 1))
        elif zeros.dtype is dtypes.uint8:
            value = value - cast(unpacked(zeros, row, k // block), wide)
        else:
            value = value - cast(load(zeros, (row, k // block)), wide)
        return value * cast(load(factors, (row, k // block)), wide)

    expect(b, "bias", bias, (columns,))
    shape = (columns, depth)
    matrix = b.widened_map(codes, "weights", lambda row, k: cast(weight(row, k), x.dtype), shape)

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        return cast(load(x, (*i[:-1], r[0])), wide) * cast(load(matrix, (i[-1], r[0])), wide)

    total = b.reduce("product", (*dims(x)[:-1], columns), (depth,), element, "add")
    if bias is None:
        return b.cast("", total, x.dtype)
    return b.map("", dims(total), lambda *i: cast(b.read(total, i) + b.wide(bias, i[-1:]), x.dtype))


# norms


def _skip_norm(
    b: Builder, node: Node, given: list[Tensor], gamma: Tensor, beta: Tensor | None, centre: bool
) -> tuple[Tensor | None, ...]:
    x = given[0]
    expect(b, "gamma", gamma, dims(x)[-1:])
    expect(b, "beta", beta, dims(x)[-1:])
    for other in given[1:]:
        if b.broadcast(x, other) != dims(x):
            raise b.invalid(f"{list(dims(other))} cannot be added to {list(dims(x))}")

    def added(*i: Expr) -> Expr:
        total = b.wide(x, i)
        for t in given[1:]:
            total = total + b.wide(t, i)
        return cast(total, x.dtype)

    total = b.map("sum", dims(x), added)

    def finish(value: Expr, i: tuple[Expr, ...]) -> Expr:
        value = value * b.wide(gamma, i[-1:])
        return cast(value if beta is None else value + b.wide(beta, i[-1:]), x.dtype)

    epsilon = float(node.attributes.get("epsilon", 1e-12 if centre else 1e-5))
    result, mean, inverse = normalized(b, total, [x.rank - 1], epsilon, finish, centre)
    return result, mean, inverse, total


@operator("SkipLayerNormalization", domain=DOMAIN)
def skip_layer_normalization(
    b: Builder,
    node: Node,
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    return _skip_norm(b, node, [t for t in (x, skip, bias) if t is not None], gamma, beta, centre=True)


@operator("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_simplified_layer_normalization(
    b: Builder, node: Node, x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    return _skip_norm(b, node, [t for t in (x, skip, bias) if t is not None], gamma, None, centre=False)


@operator("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalization(
    b: Builder,
    node: Node,
    words: Tensor,
    segments: Tensor | None,
    word_table: Tensor,
    position_table: Tensor,
    segment_table: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    shape = (*dims(words), dims(word_table)[1])
    hidden = shape[-1:]
    for name, table in (("position_embedding", position_table), ("segment_embedding", segment_table)):
        expect(b, name, table, *(() if table is None else ((dims(table)[0], *hidden),)))
    expect(b, "gamma", gamma, hidden)
    expect(b, "beta", beta, hidden)
    expect(b, "segment_ids", segments, dims(words))
    expect(b, "mask", mask, dims(words))
    expect(b, "position_ids", positions, dims(words), (1, *dims(words)[1:]))

    def element(n: Expr, s: Expr, c: Expr) -> Expr:
        def row(table: Tensor, indices: Tensor) -> Expr:
            at = (n if dims(indices)[0] > 1 else const(0), s)
            return cast(load(table, (wrapped(b, indices, at, dims(table)[0]), c)), wide)

        wide = dtypes.accumulator(word_table.dtype)
        total = row(word_table, words)
        total = total + (b.wide(position_table, (s, c)) if positions is None else row(position_table, positions))
        if segments is not None and segment_table is not None:
            total = total + row(segment_table, segments)
        return cast(total, word_table.dtype)

    if positions is None and dims(position_table)[0] < shape[1]:
        raise b.invalid(f"{shape[1]} words have no places in a table of {dims(position_table)[0]}")
    total = b.map("sum", shape, element)

    def finish(value: Expr, i: tuple[Expr, ...]) -> Expr:
        return cast(value * b.wide(gamma, i[-1:]) + b.wide(beta, i[-1:]), total.dtype)

    result = normalized(b, total, [2], float(node.attributes.get("epsilon", 1e-12)), finish)[0]
    index: Tensor | None
    if mask is None:
        index = b.map("mask_index", dims(words)[:1], lambda n: const(0, dtypes.int32))
    else:
        ones = mask
        index = b.reduce("mask_index", dims(words)[:1], dims(words)[1:], lambda i, r: cast(
            eq(load(ones, (i[0], r[0])), 1), dtypes.int32), "add")  # fmt: skip
    return result, index, total
