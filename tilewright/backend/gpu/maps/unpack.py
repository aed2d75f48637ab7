"""Finds weights that are unpacked from bytes along a packet, for the instruction that does eight of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, axes_of, cast, const, is_op, loads, var, walk
from tilewright.tile_graph.algebra.propagate import extent_of

UNPACK, UNPACKED = "unpack8", 8  # the instruction, and elements that it takes
PLACES = 16  # of the sum whose codes of 4 bits lie in eight bytes, lower halves first
PARTS = (128, 256, 512)  # places of the sum that products of packed weights may take at a time
FETCHED = 4 * PLACES  # that four lanes of a warp, which share a column, fetch at a time
_WALKED = {4: 3, 8: 1}  # axes of a block of the sum, by bits of a code
_WORD = 4  # bytes that are copied at the least, without a thread waiting for them
_LARGEST_ZERO = 512


@dataclass(frozen=True)
class Unpacking:
    """half((float((byte >> shift) & mask) - zero) · scale) at neighbours along an axis."""

    whole: Expr
    byte: Load
    scalars: tuple[Expr, Expr, Expr, Expr]  # shift, mask, zero, scale


@dataclass(frozen=True)
class Packed:
    """An operand half((code - zero) · scale) with codes of so many bits, whose parameters change every `block` places,
    if at all."""

    bits: int
    codes: Load
    zero: Expr
    scale: Expr
    block: int
    length: int

    def parameters(self) -> list[Load]:
        """Zero points and scales that are read."""
        return [n for n in dict.fromkeys(loads(self.zero, self.scale)) if isinstance(n, Load)]

    def parts(self) -> tuple[int, ...]:
        """Places of the sum, none being left over, whose parameters are whole words of a column."""
        sizes = [n.dtype.bytes for n in self.parameters()] if self.block < self.length else []
        return tuple(p for p in PARTS if self.length % p == 0 and (not sizes or p % self.block == 0)
                     and all(p // self.block * size % _WORD == 0 for size in sizes))  # fmt: skip


def packed_side(value: Expr, reduction: Sequence[Axis]) -> Packed | None:
    """An operand of a product as codes that are walked block by block: in sixteens, halves and eights those of 4 bits,
    which two share a byte."""
    found = _unpacking(value, reduction[-1])
    if found is None or found.byte.indices[-1] is not var(reduction[-1]):
        return None
    shift, mask, zero, scale = found.scalars
    bits = 4 if isinstance(mask, Const) and mask.value == 15 else 8
    outer, inner = reduction[: -_WALKED[bits]], reduction[-_WALKED[bits] :]
    if len(outer) > 1 or len(inner) < _WALKED[bits]:
        return None
    if bits == 4:
        _, half, near = inner
        if half.extent != 2 or near.extent != UNPACKED or shift is not cast(var(half) * 4, dtypes.int32):
            return None
    numbers = loads(zero, scale)
    if any(set(outer) != set(axes_of(*n.indices)) & set(reduction) for n in numbers):
        return None
    block = prod(extent_of(a.extent) for a in inner)
    made = Packed(bits, found.byte, zero, scale, block, block * prod(extent_of(a.extent) for a in outer))
    return made if block % PLACES == 0 and made.parts() else None


def unpackings(value: Expr, lane: Axis) -> list[Unpacking]:
    """What of a value the instruction computes along an axis, to the same bits."""
    return [found for node in walk(value) if (found := _unpacking(node, lane)) is not None]


def _unpacking(node: Expr, lane: Axis) -> Unpacking | None:
    if not is_op(node, "cast") or node.dtype is not dtypes.float16:
        return None
    whole = node.args[0]
    zero: Expr = const(0.0, dtypes.float32)
    scale: Expr = const(1.0, dtypes.float32)
    if is_op(whole, "mul"):
        whole, scale = whole.args
    elif not is_op(whole, "sub"):  # a plain conversion
        return None
    if is_op(whole, "sub"):
        whole, zero = whole.args
    if not is_op(whole, "cast") or whole.dtype is not dtypes.float32 or lane in axes_of(zero, scale):
        return None
    # scales are multiplied as halves, and zero points taken off exactly
    if not _is_half(scale) or not _is_small_integer(zero):
        return None
    code = whole.args[0]
    shift: Expr = const(0, dtypes.int32)
    mask: Expr = const(255, dtypes.int32)
    if is_op(code, "bitand") and isinstance(code.args[1], Const) and is_op(code.args[0], "shr"):
        mask = code.args[1]
        code, shift = code.args[0].args
    byte = code.args[0] if is_op(code, "cast") and code.dtype is dtypes.int32 else code
    if not isinstance(byte, Load) or byte.dtype is not dtypes.uint8 or lane in axes_of(shift):
        return None
    return Unpacking(node, byte, (shift, mask, zero, scale))


def _is_half(scale: Expr) -> bool:
    if isinstance(scale, Const):
        return scale.value == 1.0
    return is_op(scale, "cast") and scale.args[0].dtype is dtypes.float16


def _is_small_integer(zero: Expr) -> bool:
    if isinstance(zero, Const):
        return float(zero.value).is_integer() and abs(zero.value) <= _LARGEST_ZERO
    return is_op(zero, "cast") and zero.args[0].dtype in (dtypes.int8, dtypes.uint8)
