"""Registers told apart by name: element 2 of `row` is written row_2, which must not be another buffer's name."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np

from tilewright.ir.expr import Expr, Load, load, rewrite
from tilewright.ir.loops import Alloc, Barrier, Buffer, For, If, Instruction, Kernel, Memory, Operand, Stmt, Store
from tilewright.render.c_address import element_name, lane_buffers

_New = Mapping[Buffer, Buffer]


def with_own_names(kernel: Kernel) -> Kernel:
    """The kernel in which no register has a name that another has which can be seen where it is used."""
    body = _Naming(lane_buffers(kernel)).body(kernel.body, frozenset(b.name for b in kernel.params), {})
    return kernel if body is kernel.body else replace(kernel, body=body)


class _Naming:
    def __init__(self, vectors: Container[Buffer]) -> None:
        self.vectors = vectors  # whose last index is the lane: one register

    def body(self, body: tuple[Stmt, ...], taken: frozenset[str], new: _New) -> tuple[Stmt, ...]:
        made = tuple(self.statement(s, taken, new) for s in body)
        return body if all(a is b for a, b in zip(made, body, strict=True)) else made

    def names(self, buffer: Buffer, like: Buffer) -> frozenset[str]:
        """What C calls its elements."""
        if buffer.memory is not Memory.REGISTER:
            return frozenset((buffer.name,))
        shape = tuple(int(s) for s in buffer.shape)  # type: ignore[arg-type]
        places = np.ndindex(*(shape[:-1] if like in self.vectors else shape))
        return frozenset(element_name(buffer, p) for p in places)

    def statement(self, stmt: Stmt, taken: frozenset[str], new: _New) -> Stmt:
        if isinstance(stmt, Alloc):
            buffer = stmt.buffer
            own = self.names(buffer, stmt.buffer)
            while not taken.isdisjoint(own):
                buffer = replace(buffer, name=f"{buffer.name}x")
                own = self.names(buffer, stmt.buffer)
            renamed = new if buffer is stmt.buffer else {**new, stmt.buffer: buffer}
            inner = self.body(stmt.body, taken | own, renamed)
            return stmt if inner is stmt.body and buffer is stmt.buffer else Alloc(buffer, inner)
        if isinstance(stmt, For):
            inner = self.body(stmt.body, taken, new)
            return stmt if inner is stmt.body else For(stmt.axis, stmt.kind, inner)
        if isinstance(stmt, If):
            then, otherwise = self.body(stmt.then, taken, new), self.body(stmt.otherwise, taken, new)
            if not new and then is stmt.then and otherwise is stmt.otherwise:
                return stmt
            return If(_renamed(stmt.condition, new), then, otherwise)
        if not new or isinstance(stmt, Barrier):
            return stmt
        if isinstance(stmt, Store):
            places = tuple(_renamed(i, new) for i in stmt.indices)
            return Store(new.get(stmt.buffer, stmt.buffer), places, _renamed(stmt.value, new))
        operands = tuple(
            Operand(new.get(o.buffer, o.buffer), tuple(_renamed(i, new) for i in o.origin)) for o in stmt.operands
        )
        return Instruction(stmt.name, operands, tuple(_renamed(s, new) for s in stmt.scalars))


def _renamed(value: Expr, new: _New) -> Expr:
    if not new or not value.reads:
        return value
    return rewrite(value, lambda n: load(new[n.source], n.args) if isinstance(n, Load) and n.source in new else None)
