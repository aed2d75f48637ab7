"""A product of float32 numbers as three of parts with fewer digits: which part of each factor a term reads.

    x y = (x1 + x2) (y1 + y2), nearly x2 y1 + x1 y2 + x1 y1      with x1 the first 11 bits of x and x2 those behind them

A tensor of such parts has them as its first dimension, and the terms are an axis of the sum: small ones come first.
What is infinite has a finite first part, so that no term multiplies infinity by a zero that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Expr, Load, cast, const, lt, op, select, var

PARTS, TERMS = 2, 3
_LARGEST = float(np.uint32(0x7F7FE000).view(np.float32))  # of tf32


def part_of_first(term: Axis) -> Expr:
    """1, 0, 0: the second part in the first term."""
    return simplify((TERMS - 1 - var(term)) // 2)


def part_of_second(term: Axis) -> Expr:
    """0, 1, 0: the second part in the second term."""
    return simplify(var(term) % 2)


def terms_of(axis: Axis, reads: Sequence[Load]) -> bool:
    """Whether an axis of a sum walks the terms of a product whose factors are read so."""
    if axis.extent != TERMS:
        return False
    first = {simplify(n.indices[0]) for n in reads if n.dtype is dtypes.tf32 and n.indices}
    return {part_of_first(axis), part_of_second(axis)} <= first


def part(value: Expr, number: Expr) -> Expr:
    """A part of a float32, as tf32: the first, or what is left behind it. Of an infinite number the first is 1 with its
    sign, and the second infinite: their products with any other number's parts have the sign of the whole."""
    clamped = op("max", op("min", value, const(_LARGEST, dtypes.float32)), const(-_LARGEST, dtypes.float32))
    first = cast(select(op("isinf", value), op("sign", value), clamped), dtypes.tf32)
    rest = cast(value - cast(first, dtypes.float32), dtypes.tf32)
    return select(lt(number, 1), first, rest)
