"""A nest's sum of products as rows times columns, as tensor cores take it."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.analysis.products import factors, is_zero
from tilewright.ir.forms.expr import Axis, Expr, const, is_op, select
from tilewright.tile_graph.algebra.nest import Nest


@dataclass(frozen=True)
class Side:
    """An operand: its value as it lies in shared memory, and the output axes that it alone has."""

    value: Expr
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Sides:
    """The product under a nest's sum as rows times columns, for one instruction."""

    instruction: str
    rows: Side
    columns: Side
    others: tuple[Axis, ...]  # output axes that both have, or neither


def sides_of(nest: Nest, last: Axis | None = None) -> Sides | None:
    """The nest as a product of matrices that tensor cores can take, the columns along `last`; None where it is none."""
    monoid = nest.monoid
    if monoid is None or monoid.operator != "add" or not nest.reduce_axes or len(nest.elements) != 1:
        return None
    parts = factors(nest.elements[0], nest.axes, nest.reduce_axes)
    if len(parts) != 2 or not all(f.reductions for f in parts):
        return None
    narrow = [_operand(f.value) for f in parts]
    if any(n is None for n in narrow):
        return None
    (first, one), (second, other) = narrow  # type: ignore[misc]
    if one != other or FORMS[one].sums is not monoid.left[0].dtype:
        return None
    own = [tuple(a for a in x.outputs if a not in y.outputs) for x, y in (parts, parts[::-1])]
    if not all(own):
        return None
    found = [Side(v, axes) for v, axes in zip((first, second), own, strict=True)]
    if last is not None and last in own[0]:
        found.reverse()
    taken = {*own[0], *own[1]}
    return Sides(one, found[0], found[1], tuple(a for a in nest.axes if a not in taken))


def _operand(value: Expr) -> tuple[Expr, str] | None:
    """A factor as it is kept in shared memory, and the instruction that multiplies it as the Program says."""
    if is_op(value, "select") and is_zero(value.args[2]):
        inner = _operand(value.args[1])
        if inner is None:
            return None
        return select(value.args[0], inner[0], const(0, inner[0].dtype)), inner[1]
    if is_op(value, "cast"):
        kept = value.args[0]
        found = [name for name, form in FORMS.items() if form.operand is kept.dtype and form.sums is value.dtype]
        return (kept, found[0]) if found else None
    return None
