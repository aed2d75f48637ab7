"""Elementwise functions that ONNX has no name for and other front ends do, in a domain of our own."""

from __future__ import annotations

import math

from tilewright.ir.forms.expr import Expr, const, eq, lt, maximum, minimum, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder
from tilewright.ops.maps.elementwise import arc_tangent, elementwise, hyperbolic_sine, log_of_one_more, through_wide
from tilewright.ops.registry import operator

DOMAIN = "tilewright"


@operator("Log1p", domain=DOMAIN)
def log1p(b: Builder, node: Node, x: Tensor) -> Tensor:
    return elementwise(b, through_wide(log_of_one_more), x)


@operator("Expm1", domain=DOMAIN)
def expm1(b: Builder, node: Node, x: Tensor) -> Tensor:
    return elementwise(b, through_wide(_exp_less_one), x)


def _exp_less_one(x: Expr) -> Expr:
    """e^x - 1: near zero as 2 sinh(x/2) e^(x/2), where the difference would cancel."""
    half = x * 0.5
    near = hyperbolic_sine(half) * op("exp", half) * 2
    return select(lt(op("abs", x), 1), near, op("exp", x) - 1)


@operator("Atan2", domain=DOMAIN)
def atan2(b: Builder, node: Node, y: Tensor, x: Tensor) -> Tensor:
    return elementwise(b, through_wide(_angle), y, x)


def _angle(y: Expr, x: Expr) -> Expr:
    """The angle of the point (x, y): of the smaller side over the larger one, then by octant."""
    high, wide = op("abs", y), op("abs", x)
    longest, shortest = maximum(high, wide), minimum(high, wide)
    even = select(eq(longest, 0), const(0, x.dtype), const(1, x.dtype))
    angle = arc_tangent(select(eq(longest, shortest), even, op("div", shortest, longest)))
    angle = select(lt(wide, high), math.pi / 2 - angle, angle)
    angle = select(lt(x, 0), math.pi - angle, angle)
    return select(lt(y, 0), -angle, angle)
