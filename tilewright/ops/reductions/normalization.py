"""Normalisations: mean, centred values and variance as separate computes; batch normalisation as scale and shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, cast, const, le, load, lt, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims, one_of
from tilewright.ops.maps.elementwise import power
from tilewright.ops.movement.shape import reshaped
from tilewright.ops.reductions.reduction import reduce_over
from tilewright.ops.registry import operator


def normalized(
    b: Builder,
    x: Tensor,
    axes: Sequence[int],
    epsilon: float,
    finish: Callable[[Expr, tuple[Expr, ...]], Expr],
    centre: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """finish((x - mean) / sqrt(variance + epsilon), indices), with the mean and the inverse deviation."""
    wide = dtypes.accumulator(x.dtype)
    scale = one_of(prod(dims(x)[a] for a in axes))
    mean: Tensor | None = None
    centred = x
    if centre:
        total = reduce_over(b, "sum", x, axes, True, "add", lambda v, *at: cast(v, wide))
        mean = b.map("mean", dims(total), lambda *i: b.read(total, i) * scale)
        centre_of = mean
        centred = b.map("centred", dims(x), lambda *i: b.wide(x, i) - b.read(centre_of, i))
    squares = reduce_over(b, "squares", centred, axes, True, "add", lambda v, *at: cast(v, wide) * cast(v, wide))
    inverse = b.map("inverse", dims(squares), lambda *i: op("rsqrt", b.read(squares, i) * scale + epsilon))
    result = b.map("", dims(x), lambda *i: finish(b.wide(centred, i) * b.read(inverse, i), i))
    return result, mean, inverse


@operator("LayerNormalization")
def layer_normalization(
    b: Builder, node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    first = b.axis(node.attributes.get("axis", -1), x.rank)

    def finish(value: Expr, i: tuple[Expr, ...]) -> Expr:
        value = value * b.wide(scale, i)
        return cast(value if bias is None else value + b.wide(bias, i), x.dtype)

    epsilon = float(node.attributes.get("epsilon", 1e-5))
    return normalized(b, x, range(first, x.rank), epsilon, finish)


@operator("RMSNormalization", "SimplifiedLayerNormalization")
def rms_normalization(b: Builder, node: Node, x: Tensor, scale: Tensor) -> Tensor:
    first = b.axis(node.attributes.get("axis", -1), x.rank)
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    finish = lambda value, i: cast(value * b.wide(scale, i), x.dtype)  # noqa: E731
    return normalized(b, x, range(first, x.rank), epsilon, finish, centre=False)[0]


@operator("InstanceNormalization")
def instance_normalization(b: Builder, node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    epsilon = float(node.attributes.get("epsilon", 1e-5))

    def finish(value: Expr, i: tuple[Expr, ...]) -> Expr:
        return cast(value * b.wide(scale, i[1:2]) + b.wide(bias, i[1:2]), x.dtype)

    return normalized(b, x, range(2, x.rank), epsilon, finish)[0]


@operator("GroupNormalization", since=18)
def group_normalization(b: Builder, node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = int(node.attributes["num_groups"])
    channels = dims(x)[1]
    if channels % groups:
        raise b.invalid(f"{channels} channels do not divide into {groups} groups")
    split = (dims(x)[0], groups, channels // groups, *dims(x)[2:])
    grouped = reshaped(b, "groups", x, split)
    per_group = dims(scale)[0] == groups and channels != groups

    def finish(value: Expr, i: tuple[Expr, ...]) -> Expr:
        at = i[1] if per_group else i[1] * (channels // groups) + i[2]
        return cast(value * b.wide(scale, (at,)) + b.wide(bias, (at,)), x.dtype)

    epsilon = float(node.attributes.get("epsilon", 1e-5))
    result = normalized(b, grouped, range(2, grouped.rank), epsilon, finish)[0]
    return reshaped(b, "joined", result, dims(x))


@operator("MeanVarianceNormalization")
def mean_variance_normalization(b: Builder, node: Node, x: Tensor) -> Tensor:
    axes = sorted(b.axis(a, x.rank) for a in node.attributes.get("axes", (0, 2, 3)))
    return normalized(b, x, axes, 1e-9, lambda value, i: cast(value, x.dtype))[0]


@operator("BatchNormalization")
def batch_normalization(
    b: Builder, node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, ...]:
    if x.rank < 1:
        raise b.invalid("its input has no axes")
    channels = dims(x)[1] if x.rank > 1 else 1
    for name, given in (("scale", scale), ("B", bias), ("mean", mean), ("var", variance)):
        if dims(given) != (channels,):
            raise b.invalid(f"its input '{name}' has the shape {list(dims(given))}; {[channels]} is needed")
    if node.attributes.get("training_mode", 0):
        return _trained(b, node, x, scale, bias, mean, variance)
    if any(node.outputs[1:]):
        raise b.unsupported("the further outputs of old operator sets are for training; export the model for inference")
    return (_scaled(b, node, x, scale, bias, mean, variance),)


def _trained(
    b: Builder, node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """By the statistics of the batch itself; gives the running ones too."""
    axes = [a for a in range(x.rank) if a != 1]
    count, wide = prod(dims(x)[a] for a in axes), dtypes.accumulator(x.dtype)
    momentum = float(node.attributes.get("momentum", 0.9))
    total = reduce_over(b, "sum", x, axes, False, "add", lambda v, *at: cast(v, wide))
    own_mean = b.map("batch_mean", dims(total), lambda *i: b.read(total, i) * one_of(count))
    squares = reduce_over(b, "squares", x, axes, False, "add",
                          lambda v, *at: power(cast(v, wide) - load(own_mean, at[1:2]), 2))  # fmt: skip
    own_variance = b.map("batch_variance", dims(total), lambda *i: b.read(squares, i) * one_of(count))

    def running(hint: str, old: Tensor, new: Tensor) -> Tensor:
        return b.map(hint, dims(old), lambda c: cast(
            b.wide(old, (c,)) * momentum + b.read(new, (c,)) * (1 - momentum), old.dtype))  # fmt: skip

    result = _scaled(b, node, x, scale, bias, own_mean, own_variance)
    return result, running("running_mean", mean, own_mean), running("running_variance", variance, own_variance)


def _scaled(b: Builder, node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    factor = b.map("scale", dims(scale), lambda c: b.wide(scale, (c,)) * op("rsqrt", b.wide(variance, (c,)) + epsilon))
    shift = b.map("shift", dims(scale), lambda c: b.wide(bias, (c,)) - b.wide(mean, (c,)) * b.read(factor, (c,)))
    return b.map("", dims(x), lambda *i: cast(b.wide(x, i) * b.read(factor, i[1:2]) + b.read(shift, i[1:2]), x.dtype))


@operator("LpNormalization")
def lp_normalization(b: Builder, node: Node, x: Tensor) -> Tensor:
    axis = b.axis(node.attributes.get("axis", -1), x.rank)
    p = int(node.attributes.get("p", 2))
    wide = dtypes.accumulator(x.dtype)
    total = reduce_over(b, "total", x, [axis], True, "add", lambda v, *at: power(op("abs", cast(v, wide)), float(p)))

    def element(*i: Expr) -> Expr:
        length = power(b.read(total, i), 1.0 / p)
        # a row of zeros stays a row of zeros
        return cast(select(op("eq", length, 0), const(0, wide), b.wide(x, i) / length), x.dtype)

    return b.map("", dims(x), element)


@operator("LRN")
def local_response_normalization(b: Builder, node: Node, x: Tensor) -> Tensor:
    size = int(node.attributes["size"])
    alpha, beta = float(node.attributes.get("alpha", 1e-4)), float(node.attributes.get("beta", 0.75))
    bias = float(node.attributes.get("bias", 1.0))
    wide = dtypes.accumulator(x.dtype)
    before = (size - 1) // 2

    def square(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        channel = i[1] + r[0] - before
        value = cast(load(x, (i[0], channel, *i[2:])), wide)
        inside = op("and", le(0, channel), lt(channel, dims(x)[1]))
        return select(inside, value * value, const(0, wide))

    total = b.reduce("squares", dims(x), (size,), square, "add")
    return b.map(
        "",
        dims(x),
        lambda *i: cast(b.wide(x, i) / power(b.read(total, i) * (alpha / size) + bias, beta), x.dtype),
    )
