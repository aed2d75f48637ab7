"""Finds weights that are unpacked from bytes along a packet, for the instruction that does eight of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, axes_of, cast, const, is_op, loads, var, walk
from tilewright.tile_graph.algebra.propagate import extent_of

UNPACK, UNPACKED = "unpack8", 8  # the instruction, and elements that it takes
PLACES = 16  # of the sum whose codes of 4 bits lie in eight bytes, lower halves first
_COPIES = (4, 8, 16)  # bytes that are copied at a time, without a thread waiting for them
PARTS = (64, 128, 256)  # places of the sum that products of packed weights may take at a time
_LARGEST_ZERO = 512


@dataclass(frozen=True)
class Unpacking:
    """half((float((byte >> shift) & mask) - zero) · scale) at neighbours along an axis."""

    whole: Expr
    byte: Load
    scalars: tuple[Expr, Expr, Expr, Expr]  # shift, mask, zero, scale


@dataclass(frozen=True)
class Packed:
    """An operand half((code - zero) · scale) with codes of 4 bits, whose parameters change every `block` places."""

    codes: Load
    zero: Expr
    scale: Expr
    block: int
    blocks: int

    def parts(self) -> tuple[int, ...]:
        """Places of the sum, none being left over, of which all parameters can be copied, a column at a time."""
        sizes = [n.dtype.bytes for n in loads(self.zero, self.scale)]
        return tuple(p for p in PARTS if self.block * self.blocks % p == 0
                     and all(p // self.block * size in _COPIES for size in sizes))  # fmt: skip


def packed_side(value: Expr, reduction: Sequence[Axis]) -> Packed | None:
    """An operand of a product as codes that are walked block by block, in sixteens, halves and eights."""
    if len(reduction) != 4:
        return None
    blocks, sixteen, half, near = reduction
    found = _unpacking(value, near)
    if found is None or half.extent != 2 or near.extent != UNPACKED or found.byte.indices[-1] is not var(near):
        return None
    shift, mask, zero, scale = found.scalars
    if not isinstance(mask, Const) or mask.value != 15 or shift is not cast(var(half) * 4, dtypes.int32):
        return None
    every = all(blocks in axes_of(*n.indices) for n in loads(zero, scale))
    if not every or isinstance(scale, Const) or {sixteen, half} & set(axes_of(zero, scale)):
        return None
    made = Packed(found.byte, zero, scale, PLACES * extent_of(sixteen.extent), extent_of(blocks.extent))
    return made if made.parts() else None


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
