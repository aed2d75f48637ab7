"""Conversions between element types."""

from __future__ import annotations

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Expr, cast, op
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.maps.storage import decoded, encoded, whole_number
from tilewright.ops.outside import outside
from tilewright.ops.registry import operator

_ROUNDINGS = ("up", "down", "nearest")


def convert(b: Builder, x: Expr, dtype: DType, saturate: bool = True, round_mode: str = "up") -> Expr:
    """ONNX's Cast of one value: to bool means non-zero."""
    if x.dtype is dtype:
        return x
    number = decoded(b, x)
    if dtype.is_storage:
        return encoded(number, dtype, saturate, round_mode)
    if dtype is dtypes.bool_ and number.dtype is not dtypes.bool_:
        return op("ne", number, 0)
    if number.dtype.is_float and dtype.is_int:
        return whole_number(number, dtype)
    return cast(number, dtype)


def _converted(b: Builder, node: Node, x: Tensor, dtype: DType) -> Tensor:
    if dtype is x.dtype:
        return x
    saturate = bool(node.attributes.get("saturate", 1))
    round_mode = node.attributes.get("round_mode", "up")
    if round_mode not in _ROUNDINGS:
        raise b.invalid(f"round_mode '{round_mode}' is not known; it is {', '.join(_ROUNDINGS)}")

    def element(*i: Expr) -> Expr:
        return convert(b, b.read(x, i), dtype, saturate, round_mode)

    return b.widened_map(x, "", element) if dtype.is_float else b.map("", dims(x), element)


_STRING = 8  # ONNX's number of that element type


@operator("Cast")
def cast_(b: Builder, node: Node, x: Tensor) -> Tensor:
    number = node.attributes.get("to")
    dtype = dtypes.by_onnx(number) if isinstance(number, int) else None
    if number == _STRING:
        raise outside(b.origin, "its result holds strings")
    if dtype is None:
        raise b.unsupported(f"casting to ONNX type {number} is not supported; keep to floats, integers and bool")
    return _converted(b, node, x, dtype)


@operator("CastLike", since=15)
def cast_like(b: Builder, node: Node, x: Tensor, like: Tensor) -> Tensor:
    return _converted(b, node, x, like.dtype)
