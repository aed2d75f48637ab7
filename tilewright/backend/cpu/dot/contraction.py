"""Reads a nest as a contraction of two narrow operands, and says how the second lies in memory for an instruction.

c[plain, rows, column] = sum over the reduction of a[plain, rows, k] * b[plain, k, column]. What keeps an element out of
the sum (padding) counts as a zero of a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.intrinsics.cpu import Dot
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, axes_of, is_op
from tilewright.ir.forms.tensor import Layout, StorageAxis
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of

# steps of matrix registers, some 64 cycles each, that columns are asked for before they are read: a few times what the
# second cache takes, and little of the first
AHEAD = 2


@dataclass(frozen=True, eq=False)
class Contraction:
    a: Expr  # the value of the row operand before it is widened
    b: Load
    conditions: tuple[Expr, ...]  # where an element counts
    rows: tuple[Axis, ...]  # of a alone, outermost first
    column: Axis  # of b alone
    plain: tuple[Axis, ...]  # of both, or of none
    is_packable: bool  # whether b has an axis of its own for the column and for each axis of the reduction

    def windows(self, nest: Nest, inner: Axis) -> tuple[Axis, ...]:
        """The axes of the reduction around the innermost."""
        return tuple(r for r in nest.reduce_axes if r is not inner)

    def b_axis(self, axis: Axis) -> int:
        return next(d for d, i in enumerate(self.b.indices) if isinstance(i, Var) and i.axis is axis)


def contractions(nest: Nest) -> list[Contraction]:
    """Both ways to see the nest as rows times columns, where it is a sum of products of two widened values."""
    product = narrow_product(nest)
    if product is None:
        return []
    conditions, *operands = product
    found = []
    for a, b in (operands, operands[::-1]):
        made = _as_contraction(nest, a, b, conditions) if a is not None and isinstance(b, Load) else None
        if made is not None:
            found.append(made)
    return found


def narrow_product(nest: Nest) -> tuple[list[Expr], Expr | None, Expr | None] | None:
    """Conditions and factors of a sum of products; a factor that is not widened before is None."""
    if nest.monoid is None or nest.monoid.operator != "add" or len(nest.elements) != 1:
        return None
    conditions, element = _strip(nest.elements[0])
    if not is_op(element, "mul"):
        return None
    left, right = element.args
    return conditions, _narrow(left), _narrow(right)


def _as_contraction(nest: Nest, a: Expr, b: Load, conditions: Sequence[Expr]) -> Contraction | None:
    in_b = set(axes_of(*b.indices))
    in_a = set(axes_of(a, *conditions))
    if not all(r in in_b for r in nest.reduce_axes):
        return None
    columns = [x for x in nest.axes if x in in_b and x not in in_a and extent_of(x.extent) > 1]
    # among several the last keeps its place in the vector; the others become plain loops
    if not columns:
        return None
    column = columns[-1]
    is_packable = all(_is_own(b, axis) for axis in (column, *nest.reduce_axes))
    rows = tuple(x for x in nest.axes if x in in_a and x not in in_b and extent_of(x.extent) > 1)
    others = tuple(x for x in nest.axes if x is not column and x not in rows)
    return Contraction(a, b, tuple(conditions), rows, column, others, is_packable)


def _is_own(b: Load, axis: Axis) -> bool:
    plain = [d for d, i in enumerate(b.indices) if isinstance(i, Var) and i.axis is axis]
    return len(plain) == 1 and sum(axis in axes_of(i) for i in b.indices) == 1


def _narrow(value: Expr) -> Expr | None:
    """What is widened before it is multiplied."""
    if is_op(value, "cast") and value.args[0].dtype.bytes < value.dtype.bytes:
        return value.args[0]
    return None


def _strip(element: Expr) -> tuple[list[Expr], Expr]:
    """element = select(all conditions, rest, 0), looking through products and casts."""
    if is_op(element, "select"):
        condition, then, otherwise = element.args
        if isinstance(otherwise, Const) and otherwise.value == 0:
            inner, rest = _strip(then)
            return [condition, *inner], rest
    if is_op(element, "mul"):
        left, a = _strip(element.args[0])
        right, b = _strip(element.args[1])
        return ([*left, *right], element.rebuild((a, b))) if left or right else ([], element)
    if is_op(element, "cast"):
        inner, rest = _strip(element.args[0])
        return (inner, element.rebuild((rest,))) if inner else ([], element)
    return [], element


def block_of(dot: Dot, extent: int) -> int:
    """Elements of the innermost reduction one step takes; a tile can be made narrower where there are not as many."""
    return min(dot.block, -(-extent // dot.group) * dot.group) if dot.is_tile else dot.block


def panel_layout(
    found: Contraction, outer: Sequence[Axis], inner: Axis, dot: Dot, block: int, width: int, step: int
) -> Layout:
    """b as (panel, outer reduction, block, group in the block, column in the panel, element of the group). Matrix
    registers are `dot.lanes` columns wide: those of a panel lie one behind the other in every block, and panels so in
    every pass of `step` elements, so that a pass over the panels reads one run of memory."""
    group = dot.group
    n, k = found.b_axis(found.column), found.b_axis(inner)
    between = [found.b_axis(r) for r in outer]
    first = [d for d in range(len(found.b.indices)) if d not in (n, k, *between)]
    steps = [StorageAxis(k, block), StorageAxis(k, group, block // group)] if block > group else [StorageAxis(k, group)]
    lanes = width
    if dot.is_tile and width > dot.lanes:
        lanes = dot.lanes
        steps.insert(1, StorageAxis(n, lanes, width // lanes))
    passes = []
    if dot.is_tile and step:
        passes = [StorageAxis(k, step)]
        steps[0] = StorageAxis(k, steps[0].step, step // block)
    return Layout((
        *(StorageAxis(d) for d in first), *passes, StorageAxis(n, width), *(StorageAxis(d) for d in between),
        *steps, StorageAxis(n, 1, lanes), StorageAxis(k, 1, group),
    ))  # fmt: skip
