"""Conditions taken out of a reduction's elements, and when a whole register block lies inside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from tilewright.backend.cpu.constants import MOST_PLACES
from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import linear, simplify_difference
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Symbol,
    Var,
    all_of,
    axes_of,
    cast,
    const,
    flattened,
    is_op,
    mul,
    substitute,
    var,
    walk,
)
from tilewright.ir.meaning.values import evaluate_exprs, grid
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


def is_covered(condition: Expr, ways: Sequence[Expr]) -> bool:
    """Whether one of the ways holds wherever the condition does, as far as a look at every place can tell."""
    roots = (condition, *ways)
    axes = list(dict.fromkeys(a for root in roots for a in axes_of(root)))
    if any(isinstance(n, Load | Symbol) for n in walk(*roots)) or any(not isinstance(a.extent, int) for a in axes):
        return False
    if prod(extent_of(a.extent) for a in axes) > MOST_PLACES:
        return False
    places = grid(tuple((a, range(extent_of(a.extent))) for a in axes))

    def place(node: Expr) -> np.ndarray:
        if not isinstance(node, Var):
            raise InternalError(f"{node} is no place of a loop")
        return places[node.axis]

    def read(node: Load, indices: tuple[np.ndarray, ...]) -> np.ndarray:
        raise InternalError(f"a condition that reads {node.source.name} is not known before it runs")

    holds, *others = evaluate_exprs(roots, place, read)
    for other in others:
        holds = holds & ~other
    return not holds.any()


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
