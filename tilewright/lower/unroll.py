"""Writes UNROLL loops out, so that every register index becomes a constant."""

from __future__ import annotations

from tilewright.errors import InternalError
from tilewright.ir.bounds import static
from tilewright.ir.expr import Axis, Expr, const, substitute
from tilewright.ir.loops import Alloc, Barrier, Buffer, For, ForKind, If, Instruction, Kernel, Operand, Stmt, Store
from tilewright.ir.simplify import simplify


def unroll(kernel: Kernel) -> Kernel:
    return Kernel(kernel.name, kernel.params, _body(kernel.body, {}), kernel.symbols, kernel.step)


def _body(body: tuple[Stmt, ...], env: dict[Axis, Expr]) -> tuple[Stmt, ...]:
    return tuple(s for stmt in body for s in _statement(stmt, env))


def _statement(stmt: Stmt, env: dict[Axis, Expr]) -> tuple[Stmt, ...]:
    if isinstance(stmt, For):
        if stmt.kind is ForKind.UNROLL:
            trips = static(stmt.axis.extent)
            if trips is None:
                raise InternalError(f"loop {stmt.axis.name} to unroll has no constant extent")
            return tuple(s for i in range(trips) for s in _body(stmt.body, {**env, stmt.axis: const(i)}))
        extent = stmt.axis.extent
        if isinstance(extent, Expr) and env:
            axis = Axis(stmt.axis.name, simplify(substitute(extent, env)))
            return (For(axis, stmt.kind, _body(stmt.body, {**env, stmt.axis: _var(axis)})),)
        return (For(stmt.axis, stmt.kind, _body(stmt.body, env)),)
    if isinstance(stmt, If):
        condition = simplify(substitute(stmt.condition, env))
        known = getattr(condition, "value", None)
        if known is not None:
            return _body(stmt.then if known else stmt.otherwise, env)
        return (If(condition, _body(stmt.then, env), _body(stmt.otherwise, env)),)
    if isinstance(stmt, Alloc):
        return (Alloc(stmt.buffer, _body(stmt.body, env)),)
    if isinstance(stmt, Store):
        # in most copies of a padded window its conditions are decided, and whole vectors can be read
        value = simplify(substitute(stmt.value, env)) if env else stmt.value
        return (Store(stmt.buffer, tuple(substitute(i, env) for i in stmt.indices), value),)
    if isinstance(stmt, Instruction):
        operands = tuple(Operand(o.buffer, tuple(substitute(i, env) for i in o.origin)) for o in stmt.operands)
        return (Instruction(stmt.name, operands, tuple(substitute(s, env) for s in stmt.scalars)),)
    if isinstance(stmt, Barrier):
        return (stmt,)
    raise InternalError(f"unknown statement {stmt}")


def _var(axis: Axis) -> Expr:
    from tilewright.ir.expr import var

    return var(axis)


__all__ = ["Buffer", "unroll"]
