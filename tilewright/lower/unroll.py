"""Writes UNROLL loops out, so that every register index becomes a constant."""

from __future__ import annotations

from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Const, Expr, const, substitute, var, walk
from tilewright.ir.forms.loops import (
    Alloc,
    Barrier,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    Operand,
    Stmt,
    Store,
)

Env = dict[Axis, Expr]


def unroll(kernel: Kernel) -> Kernel:
    body = Unroller().body(kernel.body, {})
    return Kernel(kernel.name, kernel.params, body, kernel.symbols, kernel.step)


def at(body: tuple[Stmt, ...], env: Env) -> tuple[Stmt, ...]:
    """Statements with axes at other places, unrolled loops written out."""
    return Unroller().body(body, env)


class Unroller:
    """One walk over a kernel; `conditional` tells which values hold a condition, since each is copied many times."""

    def __init__(self) -> None:
        self.conditional: dict[Expr, bool] = {}

    def body(self, body: tuple[Stmt, ...], env: Env) -> tuple[Stmt, ...]:
        return tuple(s for stmt in body for s in self.statement(stmt, env))

    def statement(self, stmt: Stmt, env: Env) -> tuple[Stmt, ...]:
        if isinstance(stmt, For):
            return self.loop(stmt, env)
        if isinstance(stmt, If):
            condition = simplify(substitute(stmt.condition, env))
            if isinstance(condition, Const):
                return self.body(stmt.then if condition.value else stmt.otherwise, env)
            return (If(condition, self.body(stmt.then, env), self.body(stmt.otherwise, env)),)
        if isinstance(stmt, Alloc):
            return (Alloc(stmt.buffer, self.body(stmt.body, env)),)
        if isinstance(stmt, Store):
            return (Store(stmt.buffer, tuple(substitute(i, env) for i in stmt.indices), self.value(stmt.value, env)),)
        if isinstance(stmt, Instruction):
            operands = tuple(Operand(o.buffer, tuple(substitute(i, env) for i in o.origin)) for o in stmt.operands)
            return (Instruction(stmt.name, operands, tuple(substitute(s, env) for s in stmt.scalars)),)
        if isinstance(stmt, Barrier):
            return (stmt,)
        raise InternalError(f"unknown statement {stmt}")

    def loop(self, stmt: For, env: Env) -> tuple[Stmt, ...]:
        extent = stmt.axis.extent
        if stmt.kind is ForKind.UNROLL:
            trips = static(extent)
            if trips is None:
                raise InternalError(f"loop {stmt.axis.name} to unroll has no constant extent")
            return tuple(s for i in range(trips) for s in self.body(stmt.body, {**env, stmt.axis: const(i)}))
        if isinstance(extent, Expr) and env:
            axis = Axis(stmt.axis.name, simplify(substitute(extent, env)))
            return (For(axis, stmt.kind, self.body(stmt.body, {**env, stmt.axis: var(axis)})),)
        return (For(stmt.axis, stmt.kind, self.body(stmt.body, env)),)

    def value(self, value: Expr, env: Env) -> Expr:
        """In most copies of a padded window its conditions are decided, and then whole vectors can be read."""
        copy = substitute(value, env)
        if copy is value:
            return value
        if value not in self.conditional:
            self.conditional[value] = any(n.dtype.kind == "b" for n in walk(value))
        return simplify(copy) if self.conditional[value] else copy


__all__ = ["Buffer", "Unroller", "at", "unroll"]
