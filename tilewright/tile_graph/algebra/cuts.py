"""Where a range is cut so that conditions on an axis are the same throughout each part, and blocks need no checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Const, Expr, Op, Var, axes_of, const, is_op, loads, var, walk
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Range, extent_of

_MOST_CUTS = 6  # each part is written out with all that is computed on it
_MOST_WRITTEN = 3  # times what a map has, where its parts are pieces of many tensors: Concat, of as many as there are
_WIDEST = 64  # taps of a window


def cut(extent: Range, axis: Axis, nest: Nest, lanes: int) -> list[Range]:
    """The range in parts on which conditions on the axis, and quotients by a number of it, are the same throughout."""
    low, count = static(extent.low), static(extent.count)
    if low is None or count is None:
        return [extent]
    inner = [p for p in _cuts(axis, nest, lanes) if low < p < low + count]
    if not inner:
        return [extent]
    bounds = [low, *inner, low + count]
    return [Range(const(a), b - a, b - a) for a, b in pairwise(bounds)]


def is_cut(axis: Axis, nest: Nest, lanes: int) -> bool:
    return bool(_cuts(axis, nest, lanes))


def is_of_many(axis: Axis, nest: Nest, lanes: int) -> bool:
    """Whether the parts are pieces of so many tensors that choosing between them takes longer than all else."""
    return len(_cuts(axis, nest, lanes)) > _MOST_CUTS


def _cuts(axis: Axis, nest: Nest, lanes: int) -> list[int]:
    """Places along an axis where a condition on it, or its quotient by a number, changes; none where they are many."""
    values = nest.elements or nest.values
    places: set[int] = set()
    for node in walk(*values):
        if is_op(node, "lt") or is_op(node, "le"):
            assert isinstance(node, Op)
            places.update(_flips(node, axis))
        elif (is_op(node, "mod") or is_op(node, "floordiv")) and isinstance(node.args[1], Const):
            period = int(node.args[1].value)
            if node.args[0] is var(axis) and period > lanes:
                places.update(range(period, extent_of(axis.extent), period))
    found = sorted(p for p in places if 0 < p < extent_of(axis.extent))
    if len(found) <= _MOST_CUTS or (nest.monoid is None and _is_short(values, axis, len(found) + 1)):
        return found
    return []


def _is_short(values: Sequence[Expr], axis: Axis, parts: int) -> bool:
    """Whether a map written out for so many parts is not much longer, since each has one branch of its choices."""
    shared: set[Expr] = set()
    left = list(values)
    while left:
        node = left.pop()
        if node not in shared and not (is_op(node, "select") and _is_decided(node.args[0], axis)):
            shared.add(node)
            left += node.args
    every = sum(1 for _ in walk(*values))
    return parts * len(shared) + every - len(shared) <= _MOST_WRITTEN * every


def _is_decided(condition: Expr, axis: Axis) -> bool:
    """Whether a part of an axis tells a condition."""
    if not (is_op(condition, "lt") or is_op(condition, "le")) or condition.args[0].dtype is not dtypes.index:
        return False
    return axes_of(condition) == [axis] and not loads(condition)


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
