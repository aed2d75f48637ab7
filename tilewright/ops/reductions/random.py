"""Random numbers: a hash of the seed and an element's place, so that a model gives the same ones at every call.

ONNX leaves the generator open. Without a seed a node takes one of its own name.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Expr, cast, const, le, lt, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, Shape, dims
from tilewright.ops.reductions.reduction import first_extreme
from tilewright.ops.registry import operator

_ROUNDS = ((16, 0x21F0AAAD), (15, 0xD35A2D97))  # of a bijection of 32 bits that scatters neighbours well


def _seed(b: Builder, node: Node) -> int:
    given = node.attributes.get("seed")
    if given is None:
        return zlib.crc32("\0".join((node.name, *node.outputs)).encode())
    return zlib.crc32(np.float32(given).tobytes())


def _hashed(flat: Expr, seed: int) -> Expr:
    """32 bits of an element's place in its tensor."""
    x = op("bitxor", cast(flat, dtypes.uint32), const(seed, dtypes.uint32))
    for shift, factor in _ROUNDS:
        x = op("bitxor", x, op("shr", x, shift)) * const(factor, dtypes.uint32)
    return op("bitxor", x, op("shr", x, 15))


def uniform(b: Builder, node: Node, shape: Shape, i: tuple[Expr, ...], stream: int = 0) -> Expr:
    """A float32 in [0, 1) for an element of a tensor of this shape; streams do not depend on each other."""
    flat: Expr = const(0)
    for extent, index in zip(shape, i, strict=True):
        flat = flat * extent + index
    seed = (_seed(b, node) + stream * 0x9E3779B9) & 0xFFFFFFFF
    # the upper 24 bits are what a float holds exactly
    return cast(op("shr", _hashed(flat, seed), 8), dtypes.float32) * 2.0**-24


def _normal(b: Builder, node: Node, shape: Shape, i: tuple[Expr, ...]) -> Expr:
    """Box and Muller: a radius of one uniform number, an angle of another."""
    radius = op("sqrt", op("log", 1 - uniform(b, node, shape, i)) * -2.0)
    return radius * op("cos", uniform(b, node, shape, i, 1) * (2 * math.pi))


def _drawn(b: Builder, node: Node, shape: Shape, dtype: DType) -> Tensor:
    if not dtype.is_float:
        raise b.unsupported(f"random numbers of type {dtype.name} are not supported; use a float")
    if "Normal" in node.op:
        mean, scale = float(node.attributes.get("mean", 0.0)), float(node.attributes.get("scale", 1.0))
        return b.map("", shape, lambda *i: cast(_normal(b, node, shape, i) * scale + mean, dtype))
    low, high = float(node.attributes.get("low", 0.0)), float(node.attributes.get("high", 1.0))
    return b.map("", shape, lambda *i: cast(uniform(b, node, shape, i) * (high - low) + low, dtype))


def _dtype(b: Builder, node: Node, default: DType) -> DType:
    number = node.attributes.get("dtype")
    found = dtypes.by_onnx(number) if number is not None else default
    if found is None:
        raise b.unsupported(f"its dtype {number} is not supported")
    return found


@operator("RandomUniform", "RandomNormal")
def random(b: Builder, node: Node) -> Tensor:
    shape = b.checked_shape(node.attributes["shape"])
    return _drawn(b, node, shape, _dtype(b, node, dtypes.float32))


@operator("RandomUniformLike", "RandomNormalLike")
def random_like(b: Builder, node: Node, x: Tensor) -> Tensor:
    return _drawn(b, node, dims(x), _dtype(b, node, x.dtype if x.dtype.is_float else dtypes.float32))


@operator("Bernoulli", since=15)
def bernoulli(b: Builder, node: Node, x: Tensor) -> Tensor:
    dtype = _dtype(b, node, x.dtype)

    def element(*i: Expr) -> Expr:
        return cast(lt(uniform(b, node, dims(x), i), cast(b.read(x, i), dtypes.float32)), dtype)

    return b.map("", dims(x), element)


@operator("Multinomial", since=7)
def multinomial(b: Builder, node: Node, x: Tensor) -> Tensor:
    """Classes by their log-probabilities: the largest of them with Gumbel noise added."""
    count = int(node.attributes.get("sample_size", 1))
    dtype = _dtype(b, node, dtypes.int32)
    if x.rank != 2 or dtype not in (dtypes.int32, dtypes.int64):
        raise b.invalid(f"it draws of {list(dims(x))} as {dtype.name}; 2 axes and int32 or int64 are needed")
    shape = (dims(x)[0], count, dims(x)[1])

    def noisy(n: Expr, s: Expr, c: Expr) -> Expr:
        noise = op("log", 1 - uniform(b, node, shape, (n, s, c)))
        return cast(b.read(x, (n, c)), dtypes.float32) - op("log", -noise)

    drawn = first_extreme(b, "drawn", b.map("noisy", shape, noisy), 2, keep=False)
    return b.map("", dims(drawn), lambda *i: cast(b.read(drawn, i), dtype))


@operator("Dropout")
def dropout(
    b: Builder, node: Node, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Everything passes at inference; in training mode some elements are dropped and the others grow."""
    wants_mask = len(node.outputs) > 1 and bool(node.outputs[1])
    if training is None or (b.value(training) is not None and not b.known(training, "training_mode").any()):
        return (x, b.map("mask", dims(x), lambda *i: const(True, dtypes.bool_))) if wants_mask else x
    wide = dtypes.accumulator(x.dtype)

    def one(tensor: Tensor) -> Expr:
        return b.read(tensor, (0,) * tensor.rank)

    def share() -> Expr:
        return const(0.5, dtypes.float32) if ratio is None else cast(one(ratio), dtypes.float32)

    def kept(*i: Expr) -> Expr:
        return op("or", op("not", one(training)), le(share(), uniform(b, node, dims(x), i)))

    def element(*i: Expr) -> Expr:
        grown = b.wide(x, i) / cast(1 - share(), wide)
        value = select(one(training), grown, b.wide(x, i))
        return cast(select(kept(*i), value, const(0, wide)), x.dtype)

    result = b.map("", dims(x), element)
    return (result, b.map("mask", dims(x), kept)) if wants_mask else result
