"""Operators on the bits of integers: logic, shifts and reinterpretation."""

from __future__ import annotations

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bits import bitcast
from tilewright.ir.forms.expr import Expr, const, lt, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.maps.elementwise import elementwise
from tilewright.ops.registry import operator

_LOGIC = {"BitwiseAnd": "bitand", "BitwiseOr": "bitor", "BitwiseXor": "bitxor"}


@operator(*_LOGIC, since=18)
def bitwise(b: Builder, node: Node, x: Tensor, y: Tensor) -> Tensor:
    return elementwise(b, lambda p, q: op(_LOGIC[node.op], p, q), x, y)


@operator("BitwiseNot", since=18)
def bitwise_not(b: Builder, node: Node, x: Tensor) -> Tensor:
    ones = -1 if x.dtype.kind == "i" else x.dtype.limits[1]
    return elementwise(b, lambda v: op("bitxor", v, ones), x)


@operator("BitShift", since=11)
def bit_shift(b: Builder, node: Node, x: Tensor, y: Tensor) -> Tensor:
    direction = node.attributes.get("direction")
    if direction not in ("LEFT", "RIGHT"):
        raise b.invalid(f"direction {direction!r} is not known; it is LEFT or RIGHT")
    name = "shl" if direction == "LEFT" else "shr"

    def element(v: Expr, count: Expr) -> Expr:
        # the processor takes the low bits of a count alone; all bits shifted out leave none, or the sign
        signed = name == "shr" and v.dtype.kind == "i"
        gone = op("shr", v, v.dtype.bits - 1) if signed else const(0, v.dtype)
        inside = lt(count, v.dtype.bits)
        if v.dtype.kind == "i":
            inside = op("and", inside, op("le", 0, count))
        return select(inside, op(name, v, count), gone)

    return elementwise(b, element, x, y)


@operator("BitCast", since=26)
def bit_cast(b: Builder, node: Node, x: Tensor) -> Tensor:
    number = node.attributes.get("to")
    dtype = dtypes.by_onnx(number) if isinstance(number, int) else None
    if dtype is None:
        raise b.unsupported(f"the bits of ONNX type {number} are not supported; keep to numbers and bool")
    if dtype.bits != x.dtype.bits:
        raise b.invalid(f"{x.dtype.name} has {x.dtype.bits} bits an element and {dtype.name} {dtype.bits}")
    return b.map("", dims(x), lambda *i: bitcast(b.read(x, i), dtype))
