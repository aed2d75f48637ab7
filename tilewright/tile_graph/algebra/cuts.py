"""Where a range is cut so that conditions on an axis are the same throughout each part, and blocks need no checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Const, Expr, Op, Var, const, is_op, var, walk
from tilewright.tile_graph.algebra.propagate import Range, extent_of

_MOST_CUTS = 6
_WIDEST = 64  # taps of a window


def cut(extent: Range, axis: Axis, values: Sequence[Expr], lanes: int) -> list[Range]:
    """The range in parts on which conditions on the axis, and quotients by a number of it, are the same throughout."""
    low, count = static(extent.low), static(extent.count)
    if low is None or count is None:
        return [extent]
    inner = [p for p in _cuts(axis, values, lanes) if low < p < low + count]
    if not inner or len(inner) > _MOST_CUTS:
        return [extent]
    bounds = [low, *inner, low + count]
    return [Range(const(a), b - a, b - a) for a, b in pairwise(bounds)]


def is_cut(axis: Axis, values: Sequence[Expr], lanes: int) -> bool:
    return 0 < len(_cuts(axis, values, lanes)) <= _MOST_CUTS


def _cuts(axis: Axis, values: Sequence[Expr], lanes: int) -> list[int]:
    """Places along an axis where a condition on it, or its quotient by a number, changes."""
    places: set[int] = set()
    for node in walk(*values):
        if is_op(node, "lt") or is_op(node, "le"):
            assert isinstance(node, Op)
            places.update(_flips(node, axis))
        elif (is_op(node, "mod") or is_op(node, "floordiv")) and isinstance(node.args[1], Const):
            period = int(node.args[1].value)
            if node.args[0] is var(axis) and period > lanes:
                places.update(range(period, extent_of(axis.extent), period))
    return sorted(p for p in places if 0 < p < extent_of(axis.extent))


def _flips(node: Op, axis: Axis) -> list[int]:
    """The first place at which a comparison has its other value; with other axes in it, for some value of theirs."""
    if node.args[0].dtype is not dtypes.index:
        return []
    gap = linear(simplify(node.args[1])).plus(linear(simplify(node.args[0])).scaled(-1))
    factor = gap.terms.get(var(axis))
    others = [(t, c) for t, c in gap.terms.items() if t is not var(axis)]
    if factor is None or any(not isinstance(t, Var) or not isinstance(t.axis.extent, int) for t, _ in others):
        return []
    if len(others) > 1 or any(extent_of(t.axis.extent) > _WIDEST for t, _ in others if isinstance(t, Var)):
        return []
    least = gap.constant + sum(min(0, c * (extent_of(t.axis.extent) - 1)) for t, c in others if isinstance(t, Var))
    strict = node.op.name == "lt"
    if factor > 0:
        return [-least // factor + 1 if strict else -(least // factor)]
    return [-(-least // -factor) if strict else least // -factor + 1]
