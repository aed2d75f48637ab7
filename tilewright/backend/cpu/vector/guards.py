"""Conditions taken out of a reduction's elements, and when a whole register block lies inside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from tilewright.ir.analysis.simplify import linear, simplify_difference
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    all_of,
    axes_of,
    cast,
    const,
    flattened,
    is_op,
    mul,
    substitute,
    var,
)
from tilewright.tile_graph.algebra.propagate import extent_of


def worst(condition: Expr, unrolled: Sequence[Axis]) -> Expr:
    """A condition that implies the given one for every value of the unrolled axes."""
    if is_op(condition, "and"):
        return all_of(worst(a, unrolled) for a in condition.args)
    inside = [a for a in unrolled if a in axes_of(condition)]
    if not condition.wraps and (is_op(condition, "le") or is_op(condition, "lt")):
        slack = linear(simplify_difference(condition.args[1], condition.args[0]))
        ends: dict[Axis, int] = {}
        for axis in inside:
            coefficient = slack.terms.get(var(axis))
            if coefficient is None:
                break
            ends[axis] = 0 if coefficient > 0 else extent_of(axis.extent) - 1
        else:
            return substitute(condition, ends)
    return all_of(
        substitute(condition, dict(zip(inside, point, strict=True)))
        for point in product(*(range(extent_of(a.extent)) for a in inside))
    )


def strip(element: Expr, identity: Expr, additive: bool) -> tuple[list[Expr], Expr]:
    """element = select(conditions, rest, identity), conditions as a list; through products for sums."""
    if is_op(element, "select"):
        condition, then, otherwise = element.args
        if isinstance(otherwise, Const) and isinstance(identity, Const) and otherwise.value == identity.value:
            inner, rest = strip(then, identity, additive)
            return [*flattened(condition, "and"), *inner], rest
    if additive and is_op(element, "mul"):
        left, a = strip(element.args[0], identity, additive)
        right, b = strip(element.args[1], identity, additive)
        if left or right:
            return [*left, *right], mul(a, b)
    if is_op(element, "cast") and element.dtype.is_float and isinstance(identity, Const) and identity.value == 0:
        inner, rest = strip(element.args[0], const(0, element.args[0].dtype), additive)
        if inner:
            return inner, cast(rest, element.dtype)
    return [], element
