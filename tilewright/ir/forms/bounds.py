"""Intervals of expressions: axes run from 0 to extent - 1, symbols between their limits, integers that are loaded hold
what their type holds. Index arithmetic never leaves its type; integers of data wrap around where they would."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewright.errors import InternalError
from tilewright.ir.forms.expr import Axis, Const, Expr, Extent, Op, Symbol, Var, walk
from tilewright.ir.forms.scalar import UNBOUNDED, Interval


def bounds(root: Expr, ranges: Mapping[Axis, Interval] | None = None) -> Interval:
    """A closed interval that holds the value of `root`; `ranges` overrides what an axis says of itself."""
    if not ranges or not any(a in ranges for a in root.axes):
        return _own_bounds(root)
    known: dict[Expr, Interval] = {}
    for node in walk(root):
        if not any(a in ranges for a in node.axes):
            known[node] = _own_bounds(node)
        elif isinstance(node, Var):
            known[node] = ranges[node.axis]
        else:
            known[node] = _from_operands(node, [known[a] for a in node.args])
    return known[root]


def _own_bounds(root: Expr) -> Interval:
    """The interval under the axes' own extents, kept on the node."""
    stack = [root]
    while stack:
        node = stack[-1]
        if node.interval is None:
            waiting = [a for a in node.args if a.interval is None]
            if waiting:
                stack.extend(waiting)
                continue
            node.interval = _node_bounds(node)
        stack.pop()
    found: Interval = root.interval
    return found


def _node_bounds(node: Expr) -> Interval:
    if isinstance(node, Const):
        return (node.value, node.value)
    if isinstance(node, Symbol):
        return (node.low, node.high)
    if isinstance(node, Var):
        return (0, upper(node.axis.extent) - 1)
    return _from_operands(node, [a.interval for a in node.args])


def _from_operands(node: Expr, operands: list[Interval]) -> Interval:
    if not node.dtype.is_int:
        return node.op.interval(*operands) if isinstance(node, Op) and node.op.interval is not None else UNBOUNDED
    if not isinstance(node, Op):
        return node.dtype.limits
    if node.op.name == "cast" and node.args[0].dtype.is_float:
        low, high = operands[0]
        exact: Interval = (low if math.isinf(low) else math.trunc(low), high if math.isinf(high) else math.trunc(high))
    else:
        exact = node.op.interval(*operands) if node.op.interval is not None else UNBOUNDED
    if not node.wraps and node.op.name != "cast":
        return exact
    low, high = node.dtype.limits
    return exact if low <= exact[0] and exact[1] <= high else node.dtype.limits


def exceeds(node: Op) -> bool:
    """Whether integer arithmetic of data can leave its type, so that it has to wrap around."""
    if not node.wraps or not node.dtype.is_int or node.op.interval is None:
        return False
    exact = node.op.interval(*(bounds(a) for a in node.args))
    low, high = node.dtype.limits
    return not (low <= exact[0] and exact[1] <= high)


def upper(extent: Extent) -> float:
    """The largest value an extent can take."""
    return extent if isinstance(extent, int) else bounds(extent)[1]


def lower(extent: Extent) -> float:
    return extent if isinstance(extent, int) else bounds(extent)[0]


def static(extent: Extent) -> int | None:
    """The extent as an integer when it can only be one."""
    if isinstance(extent, int):
        return extent
    low, high = bounds(extent)
    return int(low) if low == high and not math.isinf(low) else None


def fixed(extent: Extent) -> int:
    """The extent as an integer, where one that varies has been refused before."""
    known = static(extent)
    if known is None:
        raise InternalError(f"extent {extent!r} is not fixed")
    return known
