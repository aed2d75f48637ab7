"""Seeded faults in Loops: a barrier removed, a wait one group short, an index shifted by one, a loop made one longer or
shorter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilewright.ir.forms.expr import Axis, Expr, Load, add, load, loads, rewrite, substitute, var
from tilewright.ir.forms.loops import (
    Alloc,
    Barrier,
    For,
    If,
    Instruction,
    Kernel,
    Operand,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)


@dataclass(frozen=True, eq=False)
class Site:
    """A place in a kernel and what to do to it."""

    stmt: Stmt
    kind: str  # "barrier", "wait", "store index", "load index", "operand index", "bound"
    target: Load | int | None = None  # the load, or the operand's number
    dimension: int = 0
    shift: int = 0

    def describe(self) -> str:
        what = f" of {self.target.source.name}" if isinstance(self.target, Load) else ""
        return f"{self.kind}{what} {self.dimension} {self.shift:+d}" if self.shift else self.kind


def sites(kernel: Kernel) -> list[Site]:
    """Every fault that can be put into the kernel, in order of its statements."""
    found: list[Site] = []
    for stmt in statements(kernel.body):
        if isinstance(stmt, Barrier):
            found.append(Site(stmt, "barrier"))
        if isinstance(stmt, Instruction) and stmt.name == "wait":
            found.append(Site(stmt, "wait"))
        for shift in (-1, 1):
            found += _shifts(stmt, shift)
    return found


def _shifts(stmt: Stmt, shift: int) -> list[Site]:
    found = [
        Site(stmt, "load index", node, d, shift) for node in loads(*stmt_exprs(stmt)) for d in range(len(node.indices))
    ]
    if isinstance(stmt, Store):
        found += [Site(stmt, "store index", None, d, shift) for d in range(len(stmt.indices))]
    if isinstance(stmt, Instruction):
        found += [
            Site(stmt, "operand index", n, d, shift)
            for n, operand in enumerate(stmt.operands)
            for d in range(len(operand.origin))
        ]
    if isinstance(stmt, For):
        found.append(Site(stmt, "bound", None, 0, shift))
    return found


def inject(kernel: Kernel, site: Site, name: str) -> Kernel:
    """The kernel with one fault, under a name of its own."""
    return replace(kernel, name=name, body=_body(kernel.body, site))


def sample(kernel: Kernel, count: int, seed: int) -> list[Site]:
    found = sites(kernel)
    return random.Random(seed).sample(found, min(count, len(found)))


def _body(body: tuple[Stmt, ...], site: Site) -> tuple[Stmt, ...]:
    return tuple(new for stmt in body for new in _stmt(stmt, site))


def _stmt(stmt: Stmt, site: Site) -> tuple[Stmt, ...]:
    if stmt is site.stmt:
        return _faulty(stmt, site)
    if isinstance(stmt, For | Alloc):
        return (replace(stmt, body=_body(stmt.body, site)),)
    if isinstance(stmt, If):
        return (replace(stmt, then=_body(stmt.then, site), otherwise=_body(stmt.otherwise, site)),)
    return (stmt,)


def _faulty(stmt: Stmt, site: Site) -> tuple[Stmt, ...]:
    if site.kind == "barrier":
        return ()
    if site.kind == "wait":
        assert isinstance(stmt, Instruction)
        return (replace(stmt, scalars=tuple(add(pending, 1) for pending in stmt.scalars)),)
    if site.kind == "bound":
        assert isinstance(stmt, For)
        extent = stmt.axis.extent + site.shift
        axis = Axis(stmt.axis.name, extent)
        return (For(axis, stmt.kind, tuple(_renamed(s, stmt.axis, axis) for s in stmt.body)),)
    if site.kind == "store index":
        assert isinstance(stmt, Store)
        return (replace(stmt, indices=_shifted(stmt.indices, site)),)
    if site.kind == "operand index":
        assert isinstance(stmt, Instruction)
        operands = tuple(
            Operand(o.buffer, _shifted(o.origin, site)) if n == site.target else o for n, o in enumerate(stmt.operands)
        )
        return (replace(stmt, operands=operands),)

    def shift_load(node: Expr) -> Expr | None:
        if node is not site.target:
            return None
        assert isinstance(node, Load)
        return load(node.source, _shifted(node.indices, site))

    return (_map(stmt, lambda e: rewrite(e, shift_load), deep=False),)


def _shifted(indices: tuple[Expr, ...], site: Site) -> tuple[Expr, ...]:
    return tuple(add(i, site.shift) if d == site.dimension else i for d, i in enumerate(indices))


def _renamed(stmt: Stmt, old: Axis, new: Axis) -> Stmt:
    return _map(stmt, lambda e: substitute(e, {old: var(new)}), deep=True)


def _map(stmt: Stmt, change: Callable[[Expr], Expr], deep: bool) -> Stmt:
    """The statement with its expressions changed, those of inner statements too if `deep`."""

    def inner(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(_map(s, change, deep) for s in body) if deep else body

    if isinstance(stmt, Store):
        return Store(stmt.buffer, tuple(change(i) for i in stmt.indices), change(stmt.value))
    if isinstance(stmt, If):
        return If(change(stmt.condition), inner(stmt.then), inner(stmt.otherwise))
    if isinstance(stmt, Alloc):
        return Alloc(stmt.buffer, inner(stmt.body))
    if isinstance(stmt, Instruction):
        operands = tuple(Operand(o.buffer, tuple(change(i) for i in o.origin)) for o in stmt.operands)
        return Instruction(stmt.name, operands, tuple(change(s) for s in stmt.scalars))
    if isinstance(stmt, For):
        if not isinstance(stmt.axis.extent, Expr):
            return For(stmt.axis, stmt.kind, inner(stmt.body))
        axis = Axis(stmt.axis.name, change(stmt.axis.extent))
        return For(axis, stmt.kind, tuple(_renamed(s, stmt.axis, axis) for s in inner(stmt.body)))
    return stmt
