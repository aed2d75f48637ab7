"""exp(x - m) where m is the largest x: it never exceeds 1, whatever the data are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, axes_of, is_op, substitute, var


@dataclass(frozen=True)
class Largest:
    """A maximum over `reduce_axes` of `element`, as a function of `axes`."""

    axes: Sequence[Axis]
    reduce_axes: Sequence[Axis]
    element: Expr


def at_most_one(node: Expr, largest: Callable[[object], Largest | None]) -> bool:
    """Whether a value is exp of something less the largest of it; `largest` tells what a tensor is the maximum of."""
    if not is_op(node, "exp") or not is_op(node.args[0], "sub"):
        return False
    value, top = (simplify(part) for part in node.args[0].args)
    if is_op(value, "cast") and is_op(top, "cast"):  # of the same type, or there would be no difference
        value, top = value.args[0], top.args[0]
    found = largest(top.source) if isinstance(top, Load) else None
    if found is None or len(found.reduce_axes) != 1:
        return False
    assert isinstance(top, Load)
    here = dict(zip(found.axes, top.indices, strict=True))
    (summed,) = found.reduce_axes
    return any(simplify(substitute(found.element, {**here, summed: var(a)})) is value for a in axes_of(value))
