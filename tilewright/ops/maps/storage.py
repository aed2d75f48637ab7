"""What the bits of storage types mean (float8, float4, int4, int2): to numbers and back, as expressions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bits import bitcast
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Expr, cast, const, eq, load, lt, minimum, op, select
from tilewright.ops.builder import Builder

_INTEGERS = {dtypes.int4: (4, True), dtypes.uint4: (4, False), dtypes.int2: (2, True), dtypes.uint2: (2, False)}


@dataclass(frozen=True)
class _Format:
    """A small float: a sign, an exponent and `mantissa` bits; `most` is the code of its largest number."""

    mantissa: int
    bias: int
    most: int
    beyond: int  # the code of what is larger than the largest, where nothing saturates
    nan: int
    sign: int = 0x80
    has_negative_zero: bool = True


_FORMATS = {
    dtypes.float8e4m3fn: _Format(3, 7, 0x7E, 0x7F, 0x7F),
    dtypes.float8e5m2: _Format(2, 15, 0x7B, 0x7C, 0x7E),
    # one zero and one NaN, which stands where minus zero would be
    dtypes.float8e4m3fnuz: _Format(3, 8, 0x7F, 0x80, 0x80, has_negative_zero=False),
    dtypes.float8e5m2fnuz: _Format(2, 16, 0x7F, 0x80, 0x80, has_negative_zero=False),
    dtypes.float4e2m1: _Format(1, 1, 0x7, 0x7, 0x8, sign=0x8),  # neither infinity nor NaN: what is beyond saturates
}
_E8M0_NAN, _E8M0_MOST = 0xFF, 0xFE


def is_small_integer(dtype: DType) -> bool:
    return dtype in _INTEGERS


def integer_limits(dtype: DType) -> tuple[int, int]:
    """The lowest and highest number of an integer type, storage types included."""
    if dtype not in _INTEGERS:
        return dtype.limits
    bits, signed = _INTEGERS[dtype]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def decoded(b: Builder, x: Expr) -> Expr:
    """A value of a storage type as a number: int32 of integers, float32 of floats. Others are handed on."""
    if not x.dtype.is_storage:
        return x
    code = bitcast(x, dtypes.uint8)
    if x.dtype in _INTEGERS:
        bits, signed = _INTEGERS[x.dtype]
        low = op("bitand", cast(code, dtypes.int32), (1 << bits) - 1)
        half = 1 << (bits - 1)
        return op("bitxor", low, half) - half if signed else low
    codes = np.arange(256, dtype=np.uint8)
    meaning = (codes & 15 if x.dtype is dtypes.float4e2m1 else codes).view(x.dtype.numpy).astype(np.float32)
    return load(b.constant(meaning, f"{x.dtype.name}_numbers"), (cast(code, dtypes.index),))


def encoded(value: Expr, dtype: DType, saturate: bool = True, round_mode: str = "up") -> Expr:
    """A number as a value of a storage type: floats rounded to the nearest, halves to even."""
    if dtype in _INTEGERS:
        bits, _ = _INTEGERS[dtype]
        whole = _low_bits(value) if value.dtype.is_float else cast(value, dtypes.int32)
        return _as(op("bitand", whole, (1 << bits) - 1), dtype)
    real = cast(value, dtypes.float32)
    if dtype is dtypes.float8e8m0:
        return _as(_e8m0(real, saturate, round_mode), dtype)
    return _as(_small_float(real, _FORMATS[dtype], saturate), dtype)


def _as(code: Expr, dtype: DType) -> Expr:
    return bitcast(cast(code, dtypes.uint8), dtype)


def _small_float(x: Expr, f: _Format, saturate: bool) -> Expr:
    """The code as int32: normal numbers by rounding the bits of float32, those below by scaling to integers."""
    dropped = 23 - f.mantissa
    bits = bitcast(x, dtypes.int32)
    size = op("bitand", bits, 0x7FFFFFFF)
    odd = op("bitand", op("shr", size, dropped), 1)
    normal = op("shr", size + odd + ((1 << (dropped - 1)) - 1), dropped) - ((127 - f.bias) << f.mantissa)
    # taken out of the way of the conversion where they are not small
    below = lt(size, const((128 - f.bias) << 23, dtypes.int32))
    small = select(below, bitcast(size, dtypes.float32), const(0, dtypes.float32))
    scaled = cast(op("round", small * 2.0 ** (f.bias - 1 + f.mantissa)), dtypes.int32)
    code = select(below, scaled, normal)
    beyond = const(f.most if saturate else f.beyond, dtypes.int32)
    code = select(lt(f.most, code), beyond, code)
    negative = lt(bits, 0)
    if not f.has_negative_zero:
        negative = op("and", negative, op("and", op("ne", code, 0), op("ne", code, f.nan)))
    signed = select(negative, op("bitor", code, f.sign), code)
    return select(lt(0x7F800000, size), const(f.nan, dtypes.int32), signed)


def _e8m0(x: Expr, saturate: bool, round_mode: str) -> Expr:
    """The exponent alone, rounded as asked."""
    bits = bitcast(x, dtypes.int32)
    exponent = op("bitand", op("shr", bits, 23), 0xFF)
    fraction = op("bitand", bits, 0x7FFFFF)
    rounded: Expr = exponent
    if round_mode == "up":
        rounded = exponent + select(lt(0, fraction), const(1, dtypes.int32), const(0, dtypes.int32))
    elif round_mode == "nearest":
        half = const(0x400000, dtypes.int32)
        # the number above zero's exponent is no power of two: there the half itself is not carried
        up = op("or", lt(half, fraction), op("and", eq(fraction, half), lt(0, exponent)))
        rounded = exponent + select(up, const(1, dtypes.int32), const(0, dtypes.int32))
    if saturate:
        rounded = minimum(rounded, _E8M0_MOST)
    return select(eq(exponent, 0xFF), const(_E8M0_NAN, dtypes.int32), rounded)


def whole_number(x: Expr, dtype: DType) -> Expr:
    """A float as an integer: truncated, out of range the nearest there is, 0 for NaN. Types of 8 and 16 bits keep
    the low bits of the 32-bit number, 0 where there is none."""
    if dtype.bits < 32:
        return cast(_low_bits(x), dtype)
    low, high = dtype.limits
    ceiling = float(high) + 1  # a power of two, so that every float type has it
    number = cast(x, dtypes.float32) if x.dtype.bits < 32 else x
    kind = np.dtype(np.float64) if number.dtype is dtypes.float64 else np.dtype(np.float32)
    last = float(np.nextafter(kind.type(ceiling), kind.type(0)))
    number = select(eq(number, number), number, const(0, number.dtype))
    inside = minimum(op("max", number, const(float(low), number.dtype)), const(last, number.dtype))
    return select(lt(number, const(ceiling, number.dtype)), cast(inside, dtype), const(high, dtype))


def _low_bits(x: Expr) -> Expr:
    """A float as a number of 32 bits of which the low ones are kept: 0 where it is too large, infinite or NaN."""
    number = cast(x, dtypes.float32) if x.dtype.bits < 32 else x
    beyond = const(2.0**31, number.dtype)
    inside = lt(op("abs", number), beyond)
    return cast(select(inside, number, const(0, number.dtype)), dtypes.int32)
