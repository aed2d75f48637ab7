"""Asks for what a map reads of device memory one barrier before that which it waits at: of what nobody writes meanwhile
the latency passes while the leaves before it compute, and reads behind conditions no longer wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from math import prod

from tilewright.ir.forms.bounds import bounds, lower
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, is_op, load, loads, replace_nodes, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, If, Memory, Stmt, Store
from tilewright.ir.forms.scalar import Interval
from tilewright.lower.nesting import alloc
from tilewright.lower.register_block import BufferNames

_MOST = 16  # registers that what is asked for early has until then
_REGISTER_BYTES = 4


@dataclass(frozen=True)
class Early:
    """Reads of the maps behind a barrier: where they are asked for, and what is written from there to the barrier, for
    which they have to wait."""

    names: BufferNames
    thread: Axis
    place: int | None = None  # in the statements; None: there is no barrier
    unsettled: frozenset[Buffer] = frozenset()
    kept: list[Buffer] = field(default_factory=list)

    def asked(self, made: tuple[Stmt, ...], written: Set[Buffer]) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
        """What a map is to ask for, and the map that finds it in registers: what packets fetch first, or what stores
        under one condition read. Since the barrier `written` was written."""
        if self.place is None:
            return (), made
        held, inner = _opened(made)
        asked = self._fetches(inner, self.unsettled | written)
        if not asked:
            return self._of_stores(made, written)
        registers = {b for s in asked for b in _touched(s)[1]}
        self.kept.extend(b for b in held if b in registers)
        return tuple(asked), alloc([b for b in held if b not in registers], [s for s in inner if s not in asked])

    def _fetches(self, body: tuple[Stmt, ...], awaited: Set[Buffer]) -> list[Stmt]:
        """Of the first statements, which fetch into registers, those that find what they fetch, in few of them."""
        found: list[Stmt] = []
        room = _MOST * _REGISTER_BYTES
        for stmt in body:
            reads, writes, is_plain = _touched(stmt)
            if not is_plain or any(b.memory is not Memory.REGISTER for b in writes):
                break
            size = sum(prod(map(int, map(lower, b.shape))) * b.dtype.bytes for b in writes)
            if reads and all(b.memory is Memory.GLOBAL and b not in awaited for b in reads) and size <= room:
                found.append(stmt)
                room -= size
        return found

    def _of_stores(self, made: tuple[Stmt, ...], written: Set[Buffer]) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
        condition: Expr | None = None
        stores = made
        if len(made) == 1 and isinstance(made[0], If) and not made[0].otherwise:
            condition, stores = made[0].condition, made[0].then
        plain = [s for s in stores if isinstance(s, Store)]
        if len(plain) < len(stores):
            return (), made
        ranges: dict[Axis, Interval] = {self.thread: (0, _end(condition, self.thread) - 1)}
        found = [n for n in dict.fromkeys(loads(*(s.value for s in plain)))
                 if n.source.memory is Memory.GLOBAL and n.source not in self.unsettled and n.source not in written
                 and _lies_inside(n, ranges)]  # fmt: skip
        if not 0 < len(found) <= _MOST:
            return (), made
        held: dict[Expr, Expr] = {}
        moved: list[Stmt] = []
        for node in found:
            register = Buffer(self.names.fresh("early"), (), node.dtype, Memory.REGISTER)
            self.kept.append(register)
            moved.append(Store(register, (), node))
            held[node] = load(register, ())
        used = tuple(Store(s.buffer, s.indices, replace_nodes(s.value, held)) for s in plain)
        return _under(condition, moved), _under(condition, used)


def _opened(made: tuple[Stmt, ...]) -> tuple[list[Buffer], tuple[Stmt, ...]]:
    """What is allocated around all statements, and those."""
    held: list[Buffer] = []
    while len(made) == 1 and isinstance(made[0], Alloc):
        held.append(made[0].buffer)
        made = made[0].body
    return held, made


def _touched(stmt: Stmt) -> tuple[set[Buffer], set[Buffer], bool]:
    """Buffers that a statement reads and writes, and whether it is made of loops, conditions and stores alone."""
    if isinstance(stmt, Store):
        return {n.source for n in loads(*stmt.indices, stmt.value)}, {stmt.buffer}, True
    if isinstance(stmt, If):
        parts = [_touched(s) for s in (*stmt.then, *stmt.otherwise)]
        parts.append(({n.source for n in loads(stmt.condition)}, set(), True))
    elif isinstance(stmt, For):
        parts = [_touched(s) for s in stmt.body]
    else:
        return set(), set(), False
    reads, writes, plain = zip(*parts, strict=True)
    return set().union(*reads), set().union(*writes), all(plain)


def _under(condition: Expr | None, body: Iterable[Stmt]) -> tuple[Stmt, ...]:
    return tuple(body) if condition is None else (If(condition, tuple(body)),)


def _end(condition: Expr | None, thread: Axis) -> int:
    """Threads that a condition lets in at most: as many as it names, or all of them."""
    count = bounds(var(thread))[1] + 1
    if condition is not None and is_op(condition, "lt") and condition.args[0] is var(thread):
        limit = condition.args[1]
        count = min(count, limit.value) if isinstance(limit, Const) else count
    return int(count)


def _lies_inside(node: Load, ranges: dict[Axis, Interval]) -> bool:
    """Whether a read lies inside whatever conditions around it say."""
    if any(i.reads for i in node.indices):
        return False
    places = [bounds(i, ranges) for i in node.indices]
    return all(low >= 0 and high < lower(size) for (low, high), size in zip(places, node.source.shape, strict=True))
