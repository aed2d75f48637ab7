"""Reinterpretation: a value's bits as those of another type."""

from __future__ import annotations

from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Expr, _make_op
from tilewright.ir.forms.scalar import OPS


def bitcast(value: Expr, dtype: DType) -> Expr:
    """The bits of a value as those of another type of the same width."""
    if value.dtype is dtype:
        return value
    if value.dtype.bits != dtype.bits:
        raise TypeError(f"the bits of {value.dtype.name} are not as many as those of {dtype.name}")
    return _make_op(OPS["bitcast"], (value,), dtype)
