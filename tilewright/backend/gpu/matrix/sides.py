"""A nest's sum of products as rows times columns, as tensor cores take it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.analysis.products import factors, is_zero
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, Load, axes_of, const, is_op, select, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of


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


def has_whole_packets(side: Side, lane: Axis, packet: int, inside: Container[Tensor]) -> bool:
    """Whether an operand's rows have whole packets along a lane: its axis ends with one, or rows in memory are longer
    than it is, and what lies behind its end is no part of a sum. What is made `inside` the block ends where it does."""
    whole = -(-extent_of(lane.extent) // packet) * packet
    if whole == lane.extent:
        return True
    value = side.value
    while is_op(value, "select") and is_zero(value.args[2]):
        value = value.args[1]
    if lane not in side.axes or not isinstance(value, Load) or value.source in inside:
        return False
    places = [n for n, index in enumerate(value.indices) if lane in axes_of(index)]
    if len(places) != 1 or value.indices[places[0]] is not var(lane):
        return False
    extent = static(value.source.shape[places[0]])
    return extent is not None and extent >= whole


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
