"""Takes the product under a sum apart, so that each factor can be moved and kept by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.forms.expr import Axis, Const, Expr, axes_of, const, flattened, is_op, op, select


@dataclass(frozen=True)
class Factor:
    """One factor of a product and the output and reduction axes it depends on."""

    value: Expr
    outputs: tuple[Axis, ...]
    reductions: tuple[Axis, ...]


def factors(element: Expr, axes: Sequence[Axis], reduce_axes: Sequence[Axis]) -> tuple[Factor, ...]:
    """The product under a sum, taken apart; a condition on the whole product goes to the factor that knows its axes."""
    product = element
    conditions: list[Expr] = []
    while is_op(product, "select"):
        condition, then, otherwise = product.args
        if is_zero(then) and not is_zero(otherwise):
            conditions.append(op("not", condition))
            product = otherwise
        elif is_zero(otherwise):
            conditions.append(condition)
            product = then
        else:
            break
    found = flattened(product, "mul")
    for condition in conditions:
        wanted = set(axes_of(condition))
        place = next((i for i, v in enumerate(found) if wanted <= set(axes_of(v))), 0)
        found[place] = select(condition, found[place], const(0, found[place].dtype))
    parts = []
    for value in found:
        used = set(axes_of(value))
        parts.append(Factor(value, tuple(a for a in axes if a in used), tuple(a for a in reduce_axes if a in used)))
    return tuple(parts)


def is_zero(node: Expr) -> bool:
    return isinstance(node, Const) and node.value == 0
