"""Intervals of expressions: axes run from 0 to extent - 1, symbols between their limits, loads are unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewright.ir.expr import Axis, Const, Expr, Extent, Op, Symbol, Var, walk
from tilewright.ir.scalar import UNBOUNDED, Interval


def bounds(root: Expr, ranges: Mapping[Axis, Interval] | None = None) -> Interval:
    """A closed interval that holds the value of `root`; `ranges` overrides what an axis says of itself."""
    known: dict[int, Interval] = {}
    for node in walk(root):
        known[id(node)] = _node_bounds(node, known, ranges)
    return known[id(root)]


def _node_bounds(node: Expr, known: dict[int, Interval], ranges: Mapping[Axis, Interval] | None) -> Interval:
    if isinstance(node, Const):
        return (node.value, node.value)
    if isinstance(node, Symbol):
        return (node.low, node.high)
    if isinstance(node, Var):
        if ranges is not None and node.axis in ranges:
            return ranges[node.axis]
        return (0, upper(node.axis.extent) - 1)
    if isinstance(node, Op) and node.op.interval is not None:
        return node.op.interval(*(known[id(a)] for a in node.args))
    return UNBOUNDED


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
