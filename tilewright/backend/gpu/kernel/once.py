"""What a thread has fetched it fetches once: leaves of a block that have the same elements read the packets of another
from its registers, and what it has just stored from where that was computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, Load, const, load, loads, replace_nodes, substitute, var
from tilewright.ir.forms.loops import (
    Alloc,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Memory,
    Operand,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)
from tilewright.lower.nesting import alloc

_MOST = 32  # registers that packets have which are kept so
_REGISTER_BYTES = 4

Spot = tuple[Buffer, tuple[Expr, ...], int]  # a packet in memory: where its first element lies, and how many it has


def fetched_once(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """The statements of a thread without fetches of what one of its registers has."""
    body = tuple(body)
    walk = _Walk({b for s in statements(body) for b in _written(s) if b.memory is Memory.GLOBAL}, _writes(body))
    walk.visit(body)
    if not walk.same:
        return body
    kept = [b for b in dict.fromkeys(walk.same.values()) if b in walk.allocated]
    made = _Rewrite(walk, set(kept)).body(body)
    read = {b for s in statements(made) for b in _read(s)}
    unread = {b for s in statements(made) for b in _written(s) if b.memory is Memory.SHARED and b not in read}
    return alloc(kept, _without_stores(made, unread) if unread else made)


def _writes(body: tuple[Stmt, ...]) -> dict[Buffer, list[int]]:
    found: dict[Buffer, list[int]] = {}
    for number, stmt in enumerate(_straight(body), 1):
        for buffer in {b for s in statements((stmt,)) for b in _written(s)}:
            found.setdefault(buffer, []).append(number)
    return found


def _straight(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """Statements one after the other, whatever is allocated around them."""
    for stmt in body:
        if isinstance(stmt, Alloc):
            yield from _straight(stmt.body)
        else:
            yield stmt


def _without_stores(body: tuple[Stmt, ...], unread: set[Buffer]) -> tuple[Stmt, ...]:
    """Packets that nobody fetches need not be stored."""
    made: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, Alloc):
            stmt = Alloc(stmt.buffer, _without_stores(stmt.body, unread))
        moved = _packet(stmt)
        if moved is None or moved[0][0] not in unread:
            made.append(stmt)
    return tuple(made)


@dataclass
class _Walk:
    """Straight through the statements; what loops and conditions write is forgotten."""

    changing: set[Buffer]  # of device memory, which others may write meanwhile
    writes: dict[Buffer, list[int]]  # the numbers of the statements that write a register, loops and conditions whole
    known: dict[Spot, Buffer] = field(default_factory=dict)
    same: dict[Buffer, Buffer] = field(default_factory=dict)  # registers, by those that have the same already
    dropped: set[int] = field(default_factory=set)  # statements, by identity
    allocated: set[Buffer] = field(default_factory=set)
    room: int = _MOST * _REGISTER_BYTES
    number: int = 0

    def visit(self, body: Iterable[Stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, Alloc):
                self.allocated.add(stmt.buffer)
                self.visit(stmt.body)
                continue
            self.number += 1
            moved = _packet(stmt)
            if moved is not None and moved[2]:
                self._fetch(stmt, moved[0], moved[1])
                continue
            written = {b for s in statements((stmt,)) for b in _written(s)}
            if written:
                self.known = {spot: b for spot, b in self.known.items() if spot[0] not in written and b not in written}
            if moved is not None and moved[0][0] not in self.changing:
                self.known[moved[0]] = moved[1]

    def _fetch(self, stmt: Stmt, spot: Spot, register: Buffer) -> None:
        first = self.known.get(spot)
        is_alone = self.writes[register] == [self.number]
        if first is not None and is_alone and max(self.writes[first]) < self.number and first.dtype is register.dtype:
            size = 0 if first in self.same.values() else prod(map(int, map(_extent, first.shape))) * first.dtype.bytes
            if size <= self.room:
                self.room -= size
                self.same[register] = first
                self.dropped.add(id(stmt))
                return
        self.known = {s: b for s, b in self.known.items() if b is not register}
        if spot[0] not in self.changing:
            self.known[spot] = register


@dataclass
class _Rewrite:
    walk: _Walk
    kept: set[Buffer]

    def body(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(s for stmt in body for s in self._statement(stmt))

    def _statement(self, stmt: Stmt) -> tuple[Stmt, ...]:
        if id(stmt) in self.walk.dropped:
            return ()
        if isinstance(stmt, Alloc):
            inner = self.body(stmt.body)
            return inner if stmt.buffer in self.kept or stmt.buffer in self.walk.same else (Alloc(stmt.buffer, inner),)
        if isinstance(stmt, For):
            return (For(stmt.axis, stmt.kind, self.body(stmt.body)),)
        if isinstance(stmt, If):
            return (If(self._value(stmt.condition), self.body(stmt.then), self.body(stmt.otherwise)),)
        if isinstance(stmt, Store):
            return (Store(stmt.buffer, tuple(map(self._value, stmt.indices)), self._value(stmt.value)),)
        if isinstance(stmt, Instruction):
            operands = tuple(map(self._operand, stmt.operands))
            return (Instruction(stmt.name, operands, tuple(map(self._value, stmt.scalars))),)
        return (stmt,)

    def _value(self, value: Expr) -> Expr:
        found: dict[Expr, Expr] = {n: load(self.walk.same[n.source], self._place(n.source, n.indices))
                                   for n in loads(value) if n.source in self.walk.same}  # fmt: skip
        return replace_nodes(value, found) if found else value

    def _operand(self, operand: Operand) -> Operand:
        if operand.buffer not in self.walk.same:
            return operand
        return Operand(self.walk.same[operand.buffer], self._place(operand.buffer, operand.origin))

    def _place(self, register: Buffer, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Of the same element in the other, whose dimensions but the last have one place as well."""
        return (*(const(0) for _ in self.walk.same[register].shape[1:]), indices[-1])


def _packet(stmt: Stmt) -> tuple[Spot, Buffer, bool] | None:
    """Where a statement that moves one packet finds or leaves it in memory, the register, and whether it fetches."""
    if not isinstance(stmt, For) or stmt.kind is not ForKind.VECTOR or len(stmt.body) != 1:
        return None
    (move,) = stmt.body
    if not isinstance(move, Store) or not isinstance(move.value, Load):
        return None
    source = move.value.source
    if not isinstance(source, Buffer):
        return None
    into_register, from_register = move.buffer.memory is Memory.REGISTER, source.memory is Memory.REGISTER
    if into_register == from_register:
        return None
    register, place = (move.buffer, move.indices) if into_register else (source, move.value.indices)
    memory, at = (source, move.value.indices) if into_register else (move.buffer, move.indices)
    width = _extent(stmt.axis.extent)
    whole = all(_extent(n) == 1 for n in register.shape[:-1]) and _extent(register.shape[-1]) == width
    if not whole or place[-1] is not var(stmt.axis) or any(i.reads for i in at):
        return None
    return (memory, _first(at, stmt.axis), width), register, into_register


def _first(indices: tuple[Expr, ...], near: Axis) -> tuple[Expr, ...]:
    return tuple(substitute(i, {near: const(0)}) for i in indices)


def _extent(extent: int | Expr) -> int:
    known = static(extent)
    return -1 if known is None else known


def _read(stmt: Stmt) -> list[Buffer]:
    found = [n.source for n in loads(*stmt_exprs(stmt)) if isinstance(n.source, Buffer)]
    return found + ([o.buffer for o in stmt.operands] if isinstance(stmt, Instruction) else [])


def _written(stmt: Stmt) -> list[Buffer]:
    if isinstance(stmt, Store):
        return [stmt.buffer]
    return [o.buffer for o in stmt.operands] if isinstance(stmt, Instruction) else []
