"""Weights of few bits that stay so in memory: a product of one row unpacks them on its way to the multiply.

    y[i, n] += x[i, k] · half((code[n, k] - zero[n, k // b]) · scale[n, k // b])

Codes are read off what the Program computes from constants, whatever way and in how many steps it unpacks them, and
packed anew: of 16 places along the sum eight lie in the lower halves of eight bytes and eight in the upper ones. The
sum is walked by blocks b, sixteens, halves and places, so that every read is along an axis, and eight neighbours are a
packet of every operand. Every weight is rounded as the Program says, so results are those of the weights written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewright.ir.analysis.products import factors
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    Var,
    axes_of,
    cast,
    const,
    is_op,
    load,
    loads,
    op,
    replace_nodes,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import fold, foldable, without_dead
from tilewright.transform.storage import names_of, unique_name

_NARROW = (dtypes.float16, dtypes.bfloat16)
# Rows that share what is unpacked, on tensor cores. On an H200 4096 x 11008 of 4 bits takes 13 us with 16 rows, 18 with
# 32 and 34 with 64, where weights written out in 16 bits take 30 in either case.
_MOST_ROWS = 32
_WORD, _PARTS = 4, (128, 256, 512)  # bytes that copies bring at the least, and places of the sum that come at a time
_LEAST_WEIGHTS = 1 << 12
_HALF, _SIXTEEN = 8, 16
_ZEROS = (dtypes.uint8, dtypes.int8)  # of zero points that are taken off on the way to tensor cores
_RANGES = ((4, 0), (4, -8), (8, 0), (8, -128))  # bits of a code, and the least one


@dataclass(frozen=True)
class _Weights:
    """half((code - zero) · scale) at (column, place): the code an integer, the others by block of the sum."""

    code: Expr
    zero: Expr
    scale: Expr
    block: int


@dataclass(frozen=True)
class _Product:
    """A sum of x · w, where w is unpacked from constants."""

    compute: Reduce
    x: Expr
    read: Load
    made: Map
    column: Axis
    place: Axis


def in_one_step(program: Program) -> Program:
    """The Program with what is computed from integers among the constants, map by map, computed by one map each."""
    made: dict[Tensor, Map] = {}
    computes: list[Compute] = []
    for compute in program.computes:
        sources = reads(compute)
        known = isinstance(compute, Map) and sources and all(t in program.constants or t in made for t in sources)
        if isinstance(compute, Map) and known and any(t in made or t.dtype.is_int for t in sources):
            compute = made[compute.output] = replace(compute, value=_through(compute.value, made))
        computes.append(compute)
    return without_dead(replace(program, computes=tuple(computes))) if len(made) > 1 else program


def _through(value: Expr, made: Mapping[Tensor, Map]) -> Expr:
    """A value that reads what maps are made of in place of them."""
    now: dict[Expr, Expr] = {}
    for read in loads(value):
        source = made.get(read.source) if isinstance(read.source, Tensor) else None
        if source is not None:
            now[read] = substitute(source.value, dict(zip(source.axes, read.indices, strict=True)))
    return simplify(replace_nodes(value, now)) if now else value


def keep_packed(program: Program) -> Program:
    """The Program with such products on weights as they lie packed."""
    change = _Change(program)
    computes = [made for compute in program.computes for made in change.written(compute)]
    if not change.changed:
        return program
    return without_dead(replace(program, computes=tuple(computes), constants=change.constants))


class _Change:
    def __init__(self, program: Program) -> None:
        self.maps = {c.output: c for c in program.computes if isinstance(c, Map)}
        self.constants = dict(program.constants)
        self.taken = names_of(program)
        self.changed = False

    def written(self, compute: Compute) -> list[Compute]:
        product = self._product(compute)
        weights = None if product is None else self._weights(product)
        if product is None or weights is None:
            return [compute]
        codes = self._evaluated(weights.code, (product.column, product.place), dtypes.int32)
        found = next(((bits, low) for bits, low in _RANGES
                      if low <= int(codes.min()) and int(codes.max()) < low + (1 << bits)), None)  # fmt: skip
        width = _SIXTEEN if found is not None and found[0] == 4 else _HALF
        if found is None or weights.block % width or not self._suits(product, weights, *found):
            return [compute]
        self.changed = True
        return [self._on_codes(product, weights, codes - found[1], *found)]

    # --- what is there

    def _product(self, compute: Compute) -> _Product | None:
        if not isinstance(compute, Reduce) or compute.monoid.operator != "add" or len(compute.elements) != 1:
            return None
        parts = factors(compute.elements[0], compute.axes, compute.reduce_axes)
        if len(parts) != 2 or len(compute.reduce_axes) != 1 or not all(f.reductions for f in parts):
            return None
        for one, other in (parts, parts[::-1]):
            read = other.value.args[0] if is_op(other.value, "cast") else None
            if not isinstance(read, Load) or read.dtype not in _NARROW or other.value.dtype is not dtypes.float32:
                continue
            made = self.maps.get(read.source)
            if made is None or not is_op(one.value, "cast") or one.value.args[0].dtype is not read.dtype:
                continue
            places = [i.axis for i in read.indices if isinstance(i, Var)]
            if len(places) != 2 or set(other.outputs) | set(other.reductions) != set(places):
                continue
            (place,), (column,) = other.reductions, other.outputs
            rows = prod(static(a.extent) or _MOST_ROWS + 1 for a in compute.axes if a is not column)
            size = (static(place.extent) or 0) * (static(column.extent) or 0)
            if rows <= _MOST_ROWS and size >= _LEAST_WEIGHTS and column not in one.outputs:
                return _Product(compute, one.value, read, made, column, place)
        return None

    def _weights(self, product: _Product) -> _Weights | None:
        """The form of an operand, where it is of constants alone."""
        here = dict(zip(product.made.axes, product.read.indices, strict=True))
        value = substitute(product.made.value, here)
        for tensor in {n.source for n in loads(value)}:
            if not isinstance(tensor, Tensor) or not self._known(tensor):
                return None
        rounded, value = value, _wide(value)
        if not self._equal(rounded, cast(value, rounded.dtype), product):
            return None
        scale: Expr = const(1.0, dtypes.float32)
        if is_op(value, "mul"):
            value, scale = sorted(value.args, key=lambda x: not _is_whole(x))
        code, zero = _less_zero(value)
        if not code.dtype.is_int or any(not n.dtype.is_int for n in loads(code)) or product.place not in axes_of(code):
            return None
        return _by_block(code, zero, scale, product.place)

    def _equal(self, rounded: Expr, once: Expr, product: _Product) -> bool:
        """Whether weights that the Program rounds at every step are the same rounded once, at the end."""
        if rounded is once:
            return True
        axes = (product.column, product.place)
        one, other = (self._evaluated(value, axes, dtypes.float32) for value in (rounded, once))
        return np.array_equal(one, other)

    def _known(self, tensor: Tensor) -> bool:
        """Whether a tensor is a constant, or folds to one as what only moves constants does."""
        if tensor in self.constants:
            return True
        made = self.maps.get(tensor)
        if made is None or not all(t in self.constants for t in reads(made)) or not foldable(made, self.constants):
            return False
        self.constants.update(fold(made, self.constants))
        return True

    def _suits(self, product: _Product, weights: _Weights, bits: int, low: int) -> bool:
        """Whether there is a way to unpack as many rows: one by threads, more on tensor cores."""
        rows = prod(static(a.extent) or 1 for a in product.compute.axes if a is not product.column)
        depth = static(product.place.extent) or 0
        if rows == 1:
            return True
        halves = [product.read.dtype, *(n.dtype for n in loads(weights.scale))]
        if any(dtype is not dtypes.float16 for dtype in halves) or weights.block % _SIXTEEN:
            return False
        less = weights.zero - const(float(low), dtypes.float32)
        zeros = self._evaluated(less, (product.column, product.place), dtypes.float32)
        if isinstance(weights.scale, Const) and weights.scale.value != 1.0:
            return False
        if not any(np.array_equal(_converted(zeros, d), zeros) for d in _ZEROS):
            return False
        # of a part of the sum scales, two bytes each, and zero points, one byte each, are words
        part = weights.block * (_WORD // (2 if isinstance(weights.zero, Const) else 1)) if weights.block < depth else 1
        return any(size % part == 0 and depth % size == 0 for size in _PARTS)

    # --- what is written

    def _evaluated(self, value: Expr, axes: Sequence[Axis], dtype: DType) -> np.ndarray:
        own = {a: Axis(a.name, a.extent) for a in axes}
        moved = substitute(cast(value, dtype), {a: var(b) for a, b in own.items()})
        made = Map(Tensor("evaluated", tuple(a.extent for a in axes), dtype), tuple(own.values()), moved)
        return fold(made, self.constants)[made.output]

    def _kept(self, hint: str, product: _Product, array: np.ndarray, dtype: DType) -> Tensor:
        tensor = Tensor(unique_name(f"{product.read.source.name}_{hint}", self.taken), array.shape, dtype)
        self.constants[tensor] = np.ascontiguousarray(array)
        return tensor

    def _parameter(
        self, hint: str, product: _Product, value: Expr, blocks: Axis | None, narrow: Sequence[DType]
    ) -> Expr:
        """A scale or zero point by column and block, in the fewest bits that hold it."""
        if isinstance(value, Const):
            return value
        axes = (product.column,) if blocks is None else (product.column, blocks)
        exact = self._evaluated(value, axes, dtypes.float32)
        fits = (d for d in narrow if np.array_equal(_converted(exact, d), exact))
        dtype = next(fits, dtypes.float32)
        kept = self._kept(hint, product, exact.astype(dtype.numpy), dtype)
        return cast(load(kept, [var(a) for a in axes]), dtypes.float32)

    def _on_codes(self, product: _Product, weights: _Weights, codes: np.ndarray, bits: int, low: int) -> Reduce:
        compute, column = product.compute, product.column
        depth = static(product.place.extent) or 0
        blocks = Axis("block", depth // weights.block) if weights.block < depth else None
        walked: tuple[Axis, ...]
        first: Expr = var(blocks) * weights.block if blocks is not None else const(0)
        zero, scale = (simplify(substitute(x, {product.place: first})) for x in (weights.zero, weights.scale))
        zero = self._parameter("zeros", product, simplify(zero - const(low, dtypes.float32)), blocks, _ZEROS)
        scale = self._parameter("scales", product, scale, blocks, (dtypes.float16,))
        at = [var(column), *(() if blocks is None else (var(blocks),))]
        shape = [codes.shape[0], *(() if blocks is None else (depth // weights.block,))]
        packed = codes.astype(np.uint8)
        if bits == 4:
            walked = (Axis("sixteen", weights.block // _SIXTEEN), Axis("half", 2), Axis("near", _HALF))
            sixteen, half, near = map(var, walked)
            halves = packed.reshape(*shape, -1, 2, _HALF)
            kept = self._kept("codes", product, halves[..., 0, :] | halves[..., 1, :] << 4, dtypes.uint8)
            byte = cast(load(kept, (*at, sixteen, near)), dtypes.int32)
            code = op("bitand", op("shr", byte, cast(half * 4, dtypes.int32)), const(15, dtypes.int32))
            place = first + sixteen * _SIXTEEN + half * _HALF + near
        else:
            walked = (Axis("near", weights.block),)
            kept = self._kept("codes", product, packed.reshape(*shape, -1), dtypes.uint8)
            code, place = cast(load(kept, (*at, var(walked[0]))), dtypes.int32), first + var(walked[0])
        narrow = product.read.dtype
        weight = cast((cast(code, dtypes.float32) - zero) * scale, narrow)
        x = simplify(substitute(product.x, {product.place: simplify(place)}))
        outer = () if blocks is None else (blocks,)
        return replace(compute, reduce_axes=(*outer, *walked), elements=(op("mul", x, cast(weight, dtypes.float32)),))


def _wide(value: Expr) -> Expr:
    """What is computed in 16 bits in float32: differences and products, their operands as they are."""
    if is_op(value, "cast") and (value.args[0].dtype is dtypes.float32 or value.args[0].dtype.is_int):
        return cast(value.args[0], dtypes.float32)
    if (is_op(value, "mul") or is_op(value, "sub")) and value.dtype in _NARROW:
        assert isinstance(value, Op)
        return op(value.op.name, *map(_wide, value.args))
    return cast(value, dtypes.float32)


def _converted(array: np.ndarray, dtype: DType) -> np.ndarray:
    """To another type and back."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype.numpy).astype(np.float32)


def _is_whole(value: Expr) -> bool:
    """Whether a factor is an integer, less a zero point or not, rather than a scale."""
    while is_op(value, "cast") or is_op(value, "sub"):
        if value.dtype.is_int:
            return True
        value = value.args[0]
    return value.dtype.is_int


def _less_zero(value: Expr) -> tuple[Expr, Expr]:
    """An integer and what is taken off it."""
    zero: Expr = const(0.0, dtypes.float32)
    if is_op(value, "sub"):
        value, zero = value.args
    value = value.args[0] if is_op(value, "cast") else value
    if is_op(value, "sub") and value.dtype.is_int and isinstance(zero, Const) and zero.value == 0:
        value, taken = value.args
        zero = cast(taken, dtypes.float32)
    return value, zero


def _by_block(code: Expr, zero: Expr, scale: Expr, place: Axis) -> _Weights | None:
    """What is the same for some neighbours along the sum reads their number alone; None where something is not."""
    whole = static(place.extent)
    sizes = {int(n.args[1].value) for n in walk(zero, scale) if is_op(n, "floordiv") and n.args[0] is var(place)
             and isinstance(n.args[1], Const)}  # fmt: skip
    block = min(sizes, default=whole or 0)
    if not whole or not block or whole % block or any(size % block for size in sizes):
        return None
    number = Axis("number", whole // block)
    now: dict[Expr, Expr] = {var(place) // size: var(number) // (size // block) for size in sizes}
    if any(place in axes_of(replace_nodes(x, now)) for x in (zero, scale)):
        return None
    return _Weights(code, zero, scale, block)
