"""Axes along which a map is a choice between formulas: a register block covers them whole, so that no choice is left.

A select that compares a short axis, or the rest of one divided by a small number, with constants (the transforms of a
fast convolution are such) costs nothing once every position is written out, and neighbours share their parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from tilewright.ir.analysis.decide import decide
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.compute import Map
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, Var, const, is_op, loads, var, walk

_LONGEST = 8  # positions along one axis
_MOST_POSITIONS = 64  # of a block: more would make functions that compile slowly and spill all they hold

Split = dict[Axis, int]


def unswitched(axes: Sequence[Axis], *values: Expr) -> Split:
    """Axes to write out and how many positions of each; empty where a value makes no such choice."""
    found: Split = {}
    for node in walk(*values):
        if is_op(node, "select"):
            _compared(node.args[0], axes, found)
    while prod(found.values()) > _MOST_POSITIONS:
        found.popitem()
    return found


def _compared(condition: Expr, axes: Sequence[Axis], found: Split) -> None:
    if not is_op(condition, "eq") or not isinstance(condition.args[1], Const):
        return
    split = _split(condition.args[0])
    if split is not None and split[0] in axes and split[1] > 1:
        found[split[0]] = max(found.get(split[0], 1), split[1])


def _split(index: Expr) -> tuple[Axis, int] | None:
    """The axis and the number of positions it takes: all of a short axis, or a % m."""
    if isinstance(index, Var):
        extent = index.axis.extent
        return (index.axis, extent) if isinstance(extent, int) and extent <= _LONGEST else None
    if is_op(index, "mod") and isinstance(index.args[0], Var) and isinstance(index.args[1], Const):
        axis, size = index.args[0].axis, int(index.args[1].value)
        return (axis, size) if size <= _LONGEST else None
    return None


def writes_streams(split: Mapping[Axis, int], *values: Expr) -> bool:
    """Whether the positions of a block are streams apart that have no arithmetic in common: one at a time then, since a
    cache takes whole lines of one stream at three times the rate of pieces of seven."""
    axes = list(split)
    if len(axes) != 1 or split[axes[0]] != axes[0].extent:
        return False
    parts = positions(split, *values)
    return _operations(*parts) == sum(_operations(part) for part in parts)


def _operations(*values: Expr) -> int:
    return sum(1 for n in walk(*values) if isinstance(n, Op) and n.dtype.is_float)


def is_choice(compute: Map) -> bool:
    return bool(unswitched(compute.axes, compute.value))


def positions(split: Mapping[Axis, int], *values: Expr) -> list[Expr]:
    """The values at every position of a block, choices between them decided."""
    result = list(values)
    # axis after axis: what a choice leaves out is gone before the next one is decided
    for axis, size in split.items():
        block = const(0) if size == axis.extent else var(axis) * size
        at_place = [decide(result, axis, simplify(block + place)) for place in range(size)]
        result = [at[number] for number in range(len(result)) for at in at_place]
    return result


def composes(compute: Map, reader: Map) -> bool:
    """Whether a map of choices is computed no more than once an element when composed into its reader's blocks."""
    split = unswitched(reader.axes, reader.value)
    own = [n for n in loads(reader.value) if n.source is compute.output]
    for node in own:  # along these the composed value will be a choice of the reader's
        for index in node.indices:
            found = _split(index)
            if found is not None and found[0] in reader.axes and not isinstance(index, Var):
                split.setdefault(*found)
    if prod(split.values()) > _MOST_POSITIONS:
        return False
    reads = {n for n in loads(*positions(split, *own)) if isinstance(n, Load) and n.source is compute.output}
    domain, elements = (prod(int(upper(a.extent)) for a in c.axes) for c in (reader, compute))
    return len(reads) * domain / prod(split.values()) <= 1.01 * elements
