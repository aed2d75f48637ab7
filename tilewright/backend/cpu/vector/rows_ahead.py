"""Asks for the rows that a map, or a sum of rows, reads next while it walks those before.

    for row: for column: y[row, column] = p[row, 0, column] + p[row, 3, column]

reads two runs of a row's length each, neither of which goes on where it ended: hardware loses such rows, and follows
few long ones at a time. Every step of the inner loop asks for what it will read of a later row. On a Neoverse N1 sums
of seven short rows take half the time, those of two long ones 15% less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, const, loads, substitute, var
from tilewright.ir.forms.loops import (
    PREFETCH,
    PREFETCH_TILE,
    Alloc,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Memory,
    Operand,
    Stmt,
    stmt_exprs,
)
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.tile_graph.algebra.propagate import extent_of

_Way = tuple[Buffer, frozenset[tuple[Expr, int]], int]  # what is read, how it moves, and how far in a step of the loop


def with_rows_ahead(body: Sequence[Stmt], rows: int, around: Axis | None = None, own: bool = False) -> tuple[Stmt, ...]:
    """The loops of a map, with hints in the innermost for what the loop `around` them reads so many turns later; of a
    sum of rows, for what the innermost reads in its `own` later turns."""
    return tuple(_asking(stmt, rows, around, own) for stmt in body)


def _asking(stmt: Stmt, rows: int, around: Axis | None, own: bool) -> Stmt:
    if isinstance(stmt, Alloc):
        return replace(stmt, body=with_rows_ahead(stmt.body, rows, around, own))
    if isinstance(stmt, If):
        then, otherwise = (with_rows_ahead(part, rows, around, own) for part in (stmt.then, stmt.otherwise))
        return replace(stmt, then=then, otherwise=otherwise)
    if not isinstance(stmt, For) or stmt.kind is not ForKind.SERIAL:
        return stmt
    if any(_has_loops(inner) for inner in stmt.body):
        return replace(stmt, body=with_rows_ahead(stmt.body, rows, stmt.axis, own))
    if around is None and not own:
        return stmt
    return replace(stmt, body=(*_hints(stmt, rows, stmt.axis if own or around is None else around), *stmt.body))


def _has_loops(stmt: Stmt) -> bool:
    if isinstance(stmt, Alloc | For):
        return (isinstance(stmt, For) and stmt.kind is ForKind.SERIAL) or any(map(_has_loops, stmt.body))
    return isinstance(stmt, If) and any(map(_has_loops, (*stmt.then, *stmt.otherwise)))


def _hints(inner: For, rows: int, around: Axis) -> list[Stmt]:
    """One for every line that steps of the loop read `rows` rows later and not in this row."""
    asked: dict[_Way, list[tuple[int, Operand]]] = {}
    here: dict[_Way, set[int]] = {}
    for node, places in _reads(inner.body, {}):
        now = _offset(node, places)
        step, row = (now.terms.get(var(axis), 0) for axis in (inner.axis, around))
        line = LINE_BYTES // node.dtype.bytes
        here.setdefault((node.source, frozenset(now.terms.items()), step), set()).add(now.constant)
        if not step or not row or (around is inner.axis and abs(step) < line):
            continue
        later = {**places, around: var(around) + rows}
        indices = tuple(simplify(substitute(index, later)) for index in node.indices)
        there = _offset(node, later)
        same = asked.setdefault((node.source, frozenset(there.terms.items()), step), [])
        if all(abs(there.constant - other) >= line for other, _ in same):
            same.append((there.constant, Operand(node.source, indices)))
    hints: list[Stmt] = []
    for way, found in asked.items():
        fresh = [(place, operand) for place, operand in found if place not in here.get(way, ())]
        fresh.sort(key=lambda x: x[0])
        if around is inner.axis:
            hints += [Instruction(PREFETCH_TILE, (operand,)) for _, operand in fresh]
        else:
            hints += _spread(fresh, inner, way[2], LINE_BYTES // way[0].dtype.bytes)
    return hints


def _spread(found: Sequence[tuple[int, Operand]], inner: For, step: int, line: int) -> list[Stmt]:
    """Of steps that read the same lines each asks for some of them: processors drop what is asked for all at once."""
    turns = line // step if step > 0 and line % step == 0 else 1
    trips = inner.axis.extent
    if turns == 1 or not isinstance(trips, int) or trips % turns:
        return [Instruction(PREFETCH, (operand,)) for _, operand in found]
    hints: list[Stmt] = []
    turn = var(inner.axis) % turns
    for first in range(0, len(found), turns):
        places = [place for place, _ in found[first : first + turns]]
        apart = {b - a for a, b in pairwise(places)}
        if len(places) < turns or len(apart) > 1:
            hints += [Instruction(PREFETCH, (operand,)) for _, operand in found[first : first + turns]]
            continue
        *outer, last = found[first][1].origin
        place = (*outer, simplify(last + turn * (apart.pop() - step)))
        hints.append(Instruction(PREFETCH_TILE, (replace(found[first][1], origin=place),)))
    return hints


def _reads(body: Sequence[Stmt], places: dict[Axis, Expr]) -> Iterator[tuple[Load, dict[Axis, Expr]]]:
    """Reads of global memory at places that no data decides, with every place of what is written out around them."""
    for stmt in body:
        for node in loads(*stmt_exprs(stmt)):
            if isinstance(node.source, Buffer) and node.source.memory is Memory.GLOBAL and not loads(*node.indices):
                yield node, places
        if isinstance(stmt, Alloc):
            yield from _reads(stmt.body, places)
        elif isinstance(stmt, If):
            yield from _reads((*stmt.then, *stmt.otherwise), places)
        elif isinstance(stmt, For):
            turns = 1 if stmt.kind is ForKind.VECTOR else extent_of(stmt.axis.extent)
            for turn in range(turns):
                yield from _reads(stmt.body, {**places, stmt.axis: const(turn)})


def _offset(node: Load, places: dict[Axis, Expr]) -> Linear:
    offset: Expr = const(0)
    for index, size in zip(node.indices, node.source.shape, strict=True):
        offset = offset * size + substitute(index, places)
    return join_divisions(linear(simplify(offset)))
