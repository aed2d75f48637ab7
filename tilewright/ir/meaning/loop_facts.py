"""What the interpreter of Loops works out once a kernel: which loops may run in lock-step, which indices are in range.

A serial loop whose iterations touch different elements runs like a parallel one: thousands of times fewer steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from math import prod

from tilewright.ir.analysis.simplify import Linear, linear
from tilewright.ir.forms.bounds import bounds, upper
from tilewright.ir.forms.expr import Axis, Expr, Extent, Load, Var, axes_of, is_op, loads, var, walk
from tilewright.ir.forms.loops import (
    HINTS,
    Alloc,
    Barrier,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Scope,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)

LANES = 1 << 19  # lanes in lock-step at a time; more iterations than that run in turns
LOCK_STEP = frozenset((ForKind.PARALLEL, ForKind.BLOCK, ForKind.THREAD, ForKind.VECTOR))


class Facts:
    """Facts about the statements and expressions of a kernel, found when first asked for."""

    def __init__(self) -> None:
        self._plans: dict[Expr, list[Expr]] = {}
        self._guarded: dict[Expr, bool] = {}
        self._independent: dict[For, bool] = {}
        self._lanes: dict[For, int] = {}
        self._proven: dict[Load | Store, tuple[bool, ...]] = {}

    def guarded(self, node: Expr) -> bool:
        """Is this a select with a branch that reads memory, and so may only be evaluated where it is taken?"""
        return self._guarded.get(node, False)

    def proven(self, access: Load | Store) -> tuple[bool, ...]:
        """For each index, whether it is in range whatever the axes are."""
        found = self._proven.get(access)
        if found is None:
            shape = access.source.shape if isinstance(access, Load) else access.buffer.shape
            found = tuple(_inside(i, e) for i, e in zip(access.indices, shape, strict=False))
            self._proven[access] = found
        return found

    def lock_step(self, loop: For) -> bool:
        """May all iterations move together, statement by statement?"""
        if loop.kind in LOCK_STEP:
            return True
        found = self._independent.get(loop)
        if found is None:
            found = self._independent[loop] = _independent(loop)
        return found

    def lanes_inside(self, loop: For) -> int | None:
        """How many lanes one iteration brings along; None where a barrier needs all iterations at once."""
        if loop not in self._lanes:
            whole = loop.kind in (ForKind.THREAD, ForKind.VECTOR) or _has_grid_barrier(loop)
            self._lanes[loop] = 0 if whole else _lanes_inside(loop.body)
        return self._lanes[loop] or None

    def plan(self, root: Expr) -> list[Expr]:
        """Nodes in order of evaluation; branches of a select that read memory are left to the select."""
        found = self._plans.get(root)
        if found is None:
            found = self._plans[root] = self._make_plan(root)
        return found

    def _make_plan(self, root: Expr) -> list[Expr]:
        for node in walk(root):
            if is_op(node, "select") and node not in self._guarded:
                self._guarded[node] = bool(loads(*node.args[1:]))
        order: list[Expr] = []
        done: set[Expr] = set()
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in done:
                continue
            if ready:
                done.add(node)
                order.append(node)
                continue
            stack.append((node, True))
            needed: Sequence[Expr] = node.args
            if self.guarded(node):
                # what both branches surely evaluate is evaluated once, for all lanes
                common = self._certain(node.args[1]) & self._certain(node.args[2])
                needed = (node.args[0], *(n for n in walk(*node.args[1:]) if n in common))
            stack.extend((a, False) for a in reversed(needed))
        return order

    def _certain(self, root: Expr) -> set[Expr]:
        """Nodes that evaluating `root` evaluates whatever its conditions say."""
        found: set[Expr] = set()
        stack = [root]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(node.args[:1] if self.guarded(node) else node.args)
        return found


def _inside(index: Expr, extent: Extent) -> bool:
    if not isinstance(extent, int):
        return False
    low, high = bounds(index)
    return low >= 0 and high < extent


def _has_grid_barrier(loop: For) -> bool:
    return any(isinstance(s, Barrier) and s.scope is Scope.GRID for s in statements(loop.body))


def _lanes_inside(body: Iterable[Stmt]) -> int:
    most = 1
    for stmt in body:
        inside = 1
        if isinstance(stmt, For):
            inside = _lanes_inside(stmt.body)
            if stmt.kind in LOCK_STEP:
                inside *= _finite(stmt.axis.extent)
        elif isinstance(stmt, If):
            inside = max(_lanes_inside(stmt.then), _lanes_inside(stmt.otherwise))
        elif isinstance(stmt, Alloc):
            inside = max(prod(_finite(e) for e in stmt.buffer.shape), _lanes_inside(stmt.body))
        most = max(most, inside)
    return most


def _finite(extent: Extent) -> int:
    return int(min(upper(extent), LANES))


def _independent(loop: For) -> bool:
    """Do different iterations touch different elements of everything that outlives an iteration and is written?"""
    parts = list(statements(loop.body))
    if any(isinstance(s, Barrier) or (isinstance(s, Instruction) and s.name not in HINTS) for s in parts):
        return False
    private = {s.buffer for s in parts if isinstance(s, Alloc)}
    accesses: dict[Buffer, list[tuple[Expr, ...]]] = {
        s.buffer: [] for s in parts if isinstance(s, Store) and s.buffer not in private
    }
    for stmt in parts:
        if isinstance(stmt, Store) and stmt.buffer in accesses:
            accesses[stmt.buffer].append(stmt.indices)
        for node in loads(*stmt_exprs(stmt)):
            if node.source in accesses:
                accesses[node.source].append(node.args)
    inner = {s.axis for s in parts if isinstance(s, For)}
    return all(
        any(_apart([i[place] for i in places], loop.axis, inner) for place in range(len(buffer.shape)))
        for buffer, places in accesses.items()
    )


def _apart(indices: Sequence[Expr], axis: Axis, inner: set[Axis]) -> bool:
    """Are these indices factor·axis + outer + small, with the same factor and outer, and small within one factor?"""
    first: tuple[int, dict[Expr, int]] | None = None
    lowest, highest = math.inf, -math.inf
    for index in indices:
        form = linear(index)
        factor = form.terms.get(var(axis), 0)
        outer: dict[Expr, int] = {}
        small: dict[Expr, int] = {}
        for term, coefficient in form.terms.items():
            if isinstance(term, Var) and term.axis is axis:
                continue
            used = set(axes_of(term))
            if axis in used or loads(term):
                return False
            (small if used & inner else outer)[term] = coefficient
        if not factor or (first is not None and first != (factor, outer)):
            return False
        first = (factor, outer)
        low, high = bounds(Linear(small, form.constant).expr())
        lowest, highest = min(lowest, low), max(highest, high)
    return first is not None and highest - lowest < abs(first[0])
