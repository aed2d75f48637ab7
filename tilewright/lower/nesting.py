"""Loops and buffers put around statements, as every lowering of a nest does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, Stmt
from tilewright.tile_graph.algebra.propagate import Range


def trip_count(count: Expr) -> int | Expr:
    """What a loop runs to: a number wherever it is one."""
    known = static(count)
    return count if known is None else known


def walked(axes: Sequence[Axis], ranges: Mapping[Axis, Range]) -> tuple[list[Axis], dict[Axis, Expr]]:
    """Loops over the ranges, and where each axis is inside them; a range of one place needs no loop."""
    loops: list[Axis] = []
    env: dict[Axis, Expr] = {}
    for axis in axes:
        extent = ranges[axis]
        if static(extent.count) == 1:
            env[axis] = extent.low
            continue
        loops.append(Axis(axis.name, trip_count(extent.count)))
        env[axis] = simplify(extent.low + var(loops[-1]))
    return loops, env


def serial(loops: Sequence[Axis], body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """The first loop outermost."""
    return _loops(loops, ForKind.SERIAL, body)


def unrolled(axes: Sequence[Axis], body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    return _loops(axes, ForKind.UNROLL, body)


def _loops(axes: Sequence[Axis], kind: ForKind, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    result = tuple(body)
    for axis in reversed(axes):
        result = (For(axis, kind, result),)
    return result


def alloc(buffers: Sequence[Buffer], body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """The first buffer outermost."""
    result = tuple(body)
    for buffer in reversed(buffers):
        result = (Alloc(buffer, result),)
    return result
