"""Bytes that Loops load and store, counted from the loop extents: the proof that connecting tiles moves less data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf, prod
from typing import Any

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import join_divisions, linear, simplify
from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.expr import Axis, Expr, Extent, Load, Symbol, Var, axes_of, const, loads, var
from tilewright.ir.forms.loops import (
    Alloc,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    LoopProgram,
    Memory,
    Stmt,
    Store,
    copied_elements,
    statements,
    stmt_exprs,
)
from tilewright.ir.meaning.values import evaluate_exprs

EXACT = 1 << 20  # iterations looked at one by one; beyond, a loop is sampled at SAMPLES points
SAMPLES = 64
MOST = 1 << 24  # iterations of a whole nest, of those loops that what is inside depends on; in any case looked at


@dataclass
class Traffic:
    """Bytes loaded and stored: by memory, by buffer (a kernel) or tensor (a program), and by role of tensor."""

    loaded: dict[str, float] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)
    loaded_by: dict[Memory, float] = field(default_factory=dict)
    stored_by: dict[Memory, float] = field(default_factory=dict)
    by_role: dict[str, float] = field(default_factory=dict)  # both ways together; programs alone
    distinct: dict[str, float] = field(default_factory=dict)  # by role, an element once a call and direction

    def total(self, memory: Memory) -> float:
        return self.loaded_by.get(memory, 0) + self.stored_by.get(memory, 0)

    @property
    def intermediate(self) -> float:
        """Bytes moved to and from temporaries in global memory, an element once a call and direction.

        What a kernel reads again comes from caches; a temporary that never leaves a kernel does not count at all.
        """
        return self.distinct.get("temporary", 0)


def count_traffic(loops: Kernel | LoopProgram, symbols: Mapping[str, int] | None = None) -> Traffic:
    """Count a kernel, or every call of a program. A load is counted once for all lanes of a vector that share it, and
    once for all copies of a statement that is written out which are at the same place: they are in a register.

    Conditions that depend on loaded data count as taken; loads under a select count always. Of instructions copies
    count, with zeros that they fill in place of what lies outside; operands of others move registers.
    """
    if isinstance(loops, Kernel):
        return _Counter(loops, symbols or {}).result
    total = Traffic()
    roles = {s.name: s.role for s in loops.tensors}
    sizes = {s.name: prod(s.shape) * s.dtype.bytes for s in loops.tensors}
    counted = {k.name: _Counter(k, symbols or {}).result for k in loops.kernels}
    for call in loops.calls:
        one, kernel = counted[call.kernel], loops.kernel(call.kernel)
        for source, target in ((one.loaded_by, total.loaded_by), (one.stored_by, total.stored_by)):
            for memory, amount in source.items():
                target[memory] = target.get(memory, 0) + amount
        for param, argument in zip(kernel.params, call.arguments, strict=True):
            for amounts, result in ((one.loaded, total.loaded), (one.stored, total.stored)):
                moved = amounts.get(param.name, 0)
                result[argument] = result.get(argument, 0) + moved
                role = roles.get(argument, "temporary")
                total.by_role[role] = total.by_role.get(role, 0) + moved
                once = min(moved, sizes.get(argument, moved))
                total.distinct[role] = total.distinct.get(role, 0) + once
    return total


class _Counter:
    """Walks a kernel with a weight: how often a statement runs, an array over the axes that inner extents use."""

    def __init__(self, kernel: Kernel, symbols: Mapping[str, int]) -> None:
        self.result = Traffic()
        self._kernel = kernel
        self._symbols = symbols
        self._env: dict[Axis, Any] = {} if kernel.step is None else {kernel.step: np.asarray(0)}
        self._vectors: list[tuple[Axis, float]] = []
        self._copies: list[tuple[Axis, int]] = []  # loops that are written out
        self._depth = 0
        self._run(kernel.body, np.asarray(1.0))

    def _run(self, body: Iterable[Stmt], weight: np.ndarray) -> None:
        for stmt in body:
            if isinstance(stmt, For):
                self._for(stmt, weight)
                continue
            for node in loads(*stmt_exprs(stmt)):
                places = weight * self._places(node)
                self._count(self.result.loaded, self.result.loaded_by, node.source, node.args, places)
            if isinstance(stmt, Alloc):
                self._run(stmt.body, weight)
            elif isinstance(stmt, If):
                taken = self._value(stmt.condition)
                outside, self._copies = self._copies, []  # what a branch has loaded is not known beside it
                self._run(stmt.then, weight if taken is None else weight * taken)
                self._run(stmt.otherwise, weight if taken is None else weight * np.logical_not(taken))
                self._copies = outside
            elif isinstance(stmt, Store):
                self._count(self.result.stored, self.result.stored_by, stmt.buffer, stmt.indices, weight)
            elif isinstance(stmt, Instruction) and (moved := copied_elements(stmt)):
                to, source = stmt.operands
                self._count(self.result.loaded, self.result.loaded_by, source.buffer, source.origin, weight * moved)
                self._count(self.result.stored, self.result.stored_by, to.buffer, to.origin, weight * moved)

    def _for(self, loop: For, weight: np.ndarray) -> None:
        extent = self._extent(loop.axis.extent)
        vector = loop.kind is ForKind.VECTOR
        outside = self._copies
        if vector:
            self._vectors.append((loop.axis, float(np.mean(extent))))
        elif loop.kind is ForKind.UNROLL and extent.ndim == 0:
            self._copies = [*outside, (loop.axis, int(extent))]
        else:
            self._copies = []
        if _shapes_inside(loop):
            self._depth += 1
            size = int(np.max(extent, initial=0))
            points = np.arange(size)
            share = 1.0
            if kept := _sampled(size, weight.size, self._inside(loop.body) if size > SAMPLES else 1):
                points = np.linspace(0, size - 1, kept).astype(np.int64)
                share = size / kept
            self._env[loop.axis] = points.reshape(-1, *(1,) * (self._depth - 1))
            self._run(loop.body, weight * (self._env[loop.axis] < extent) * share)
            self._depth -= 1
            del self._env[loop.axis]
        else:
            self._run(loop.body, weight * extent)
        if vector:
            self._vectors.pop()
        self._copies = outside

    def _inside(self, body: Sequence[Stmt]) -> int:
        """Iterations of the loops in there whose values conditions depend on, at most."""
        most = 1
        for stmt in body:
            if isinstance(stmt, For):
                own = upper(stmt.axis.extent) if _shapes_inside(stmt) else 1
                most = max(most, (SAMPLES if isinf(own) else int(own)) * self._inside(stmt.body))
            elif isinstance(stmt, If):
                most = max(most, self._inside(stmt.then), self._inside(stmt.otherwise))
            elif isinstance(stmt, Alloc):
                most = max(most, self._inside(stmt.body))
        return most

    def _count(
        self,
        by_name: dict[str, float],
        by_memory: dict[Memory, float],
        buffer: Buffer,
        indices: tuple[Expr, ...],
        weight: np.ndarray,
    ) -> None:
        amount = float(weight.sum()) * buffer.dtype.bytes
        used = set(axes_of(*indices))
        for axis, lanes in self._vectors:
            if axis not in used and lanes:
                amount /= lanes
        by_name[buffer.name] = by_name.get(buffer.name, 0) + amount
        by_memory[buffer.memory] = by_memory.get(buffer.memory, 0) + amount

    def _places(self, node: Load) -> float:
        """The part of a load's copies that are at places of their own."""
        if not self._copies:
            return 1.0
        counted = prod(n for _, n in self._copies)
        offset: Expr = const(0)
        for index, extent in zip(node.args, node.source.shape, strict=True):
            offset = offset * extent + index
        moving = join_divisions(linear(simplify(offset))).terms
        places = np.zeros(1, dtype=np.int64)
        for axis, size in self._copies:
            if any(axis in t.axes and not isinstance(t, Var) for t in moving):
                return 1.0
            if var(axis) in moving:
                places = np.add.outer(places, np.arange(size) * moving[var(axis)]).ravel()
        return len(np.unique(places)) / max(1, counted)

    def _extent(self, extent: Extent) -> Any:
        if isinstance(extent, int):
            return np.asarray(extent)
        value = self._value(extent)
        if value is None and not isinf(upper(extent)):
            return np.asarray(int(upper(extent)))  # where a run tells, the most there can be
        if value is None:
            raise InternalError(f"kernel {self._kernel.name}: extent {extent!r} depends on loaded data")
        return np.maximum(value, 0)

    def _value(self, root: Expr) -> np.ndarray | None:
        """The expression over the axes bound to arrays, None where it depends on data."""
        if loads(root):
            return None

        def leaf(node: Expr) -> np.ndarray:
            if isinstance(node, Var) and node.axis in self._env:
                return self._env[node.axis]
            if isinstance(node, Symbol) and node.name in self._symbols:
                return np.asarray(self._symbols[node.name])
            name = node.axis.name if isinstance(node, Var) else getattr(node, "name", type(node).__name__)
            raise InternalError(f"kernel {self._kernel.name}: {name} has no value")

        def read(node: Load, indices: tuple[np.ndarray, ...]) -> np.ndarray:
            raise InternalError(f"kernel {self._kernel.name}: an extent reads {node.source.name}")

        return evaluate_exprs((root,), leaf, read)[0]


def _sampled(size: int, outside: int, inside: int) -> int:
    """How many points of a loop are looked at; 0 for all of them."""
    kept = size
    if size > SAMPLES and (outside * size > EXACT or outside * size * inside > MOST):
        kept = SAMPLES
    kept = min(kept, max(2, MOST // outside))
    return kept if kept < size else 0


def _shapes_inside(loop: For) -> bool:
    """Does an extent or a condition inside depend on this loop's axis?"""
    for stmt in statements(loop.body):
        if isinstance(stmt, For | If):
            roots = stmt_exprs(stmt)
            if loop.axis in axes_of(*roots):
                return True
    return False
