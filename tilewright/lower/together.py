"""Kernels that share a launch as one: loops over blocks beside each other, every buffer under a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilewright.errors import InternalError
from tilewright.ir.forms.expr import Expr, Load, load, rewrite
from tilewright.ir.forms.loops import Alloc, Barrier, Buffer, For, If, Instruction, Kernel, Operand, Stmt, Store


def beside(kernels: Sequence[Kernel]) -> Kernel:
    """One kernel that takes what all take, in their order."""
    used: set[str] = set()
    params: list[Buffer] = []
    body: list[Stmt] = []
    for kernel in kernels:
        if kernel.step is not None or kernel.symbols:
            raise InternalError(f"kernel '{kernel.name}' is run in steps or for any extent: it shares no launch")
        renamed = _Renamed(used)
        params += [renamed.buffer(p) for p in kernel.params]
        body += renamed.body(kernel.body)
    return Kernel(kernels[0].name, tuple(params), tuple(body))


@dataclass
class _Renamed:
    """One walk over a kernel whose buffers get names that are not used yet."""

    used: set[str]
    made: dict[Buffer, Buffer] = field(default_factory=dict)
    texts: dict[Expr, Expr] = field(default_factory=dict)

    def buffer(self, old: Buffer) -> Buffer:
        if old not in self.made:
            name, number = old.name, 1
            while name in self.used:
                name, number = f"{old.name}of{number}", number + 1
            self.used.add(name)
            self.made[old] = replace(old, name=name)
        return self.made[old]

    def expr(self, value: Expr) -> Expr:
        if value not in self.texts:
            self.texts[value] = rewrite(value, self._read)
        return self.texts[value]

    def _read(self, node: Expr) -> Expr | None:
        if not isinstance(node, Load) or not isinstance(node.source, Buffer):
            return None
        return load(self.buffer(node.source), node.args)  # what stands inside is rewritten already

    def body(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        return tuple(self._statement(s) for s in body)

    def _statement(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, For):
            return For(stmt.axis, stmt.kind, self.body(stmt.body))  # no loop's end is read from memory
        if isinstance(stmt, If):
            return If(self.expr(stmt.condition), self.body(stmt.then), self.body(stmt.otherwise))
        if isinstance(stmt, Alloc):
            return Alloc(self.buffer(stmt.buffer), self.body(stmt.body))
        if isinstance(stmt, Store):
            indices = tuple(self.expr(i) for i in stmt.indices)
            return Store(self.buffer(stmt.buffer), indices, self.expr(stmt.value))
        if isinstance(stmt, Instruction):
            operands = tuple(Operand(self.buffer(o.buffer), tuple(self.expr(i) for i in o.origin))
                             for o in stmt.operands)  # fmt: skip
            return Instruction(stmt.name, operands, tuple(self.expr(s) for s in stmt.scalars))
        assert isinstance(stmt, Barrier)
        return stmt
