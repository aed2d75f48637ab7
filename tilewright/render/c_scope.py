"""Names for sums of loop variables: each address is a name plus a constant, and the name is declared in the loop
where its last variable starts. The text stays short, and the compiler need not find what is common in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilewright.ir.analysis.simplify import Linear
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, State, Var, walk

_Group = tuple[tuple[Expr, int], ...]


@dataclass(eq=False)
class LoopScope:
    """The body of a loop: declarations at its start, and what is known by name or text inside."""

    depth: int
    indent: int
    declarations: list[str] = field(default_factory=list)
    sums: dict[Any, str] = field(default_factory=dict)
    texts: dict[Expr, str] = field(default_factory=dict)


class Scopes:
    """The loops around the statement being written, outermost first."""

    def __init__(self, spell: Callable[[Expr], str], fresh: Callable[[str], str]) -> None:
        self.spell = spell
        self.fresh = fresh
        self.stack: list[LoopScope] = []
        self.of_axis: dict[Axis, LoopScope] = {}

    @property
    def inner(self) -> LoopScope:
        return self.stack[-1]

    def open(self, indent: int, *axes: Axis) -> LoopScope:
        scope = LoopScope(len(self.stack), indent)
        self.stack.append(scope)
        self.bind(*axes)
        return scope

    def bind(self, *axes: Axis) -> None:
        for axis in axes:
            self.of_axis[axis] = self.inner

    def close(self) -> None:
        gone = self.stack.pop()
        self.of_axis = {a: s for a, s in self.of_axis.items() if s is not gone}

    def offset(self, total: Linear, more: int = 0) -> str:
        """The text of total + more."""
        constant = total.constant + more
        if not total.terms:
            return str(constant)
        base = self._sum(total)
        return f"{base} {'+' if constant > 0 else '-'} {abs(constant)}" if constant else base

    def _sum(self, total: Linear) -> str:
        key = tuple(total.terms.items())
        known = self.inner.sums.get(key)
        if known is not None:
            return known
        parts: dict[LoopScope, list[tuple[Expr, int]]] = {}
        loose: list[tuple[Expr, int]] = []
        for term, coefficient in key:
            scope = self._home(term)
            (loose if scope is None else parts.setdefault(scope, [])).append((term, coefficient))
        text = ""
        for scope in sorted(parts, key=lambda s: s.depth):
            text = self._declared(scope, text, tuple(parts[scope]))
        if loose:
            text = self._spelled(text, tuple(loose))
        self.inner.sums[key] = text
        return text

    def _declared(self, scope: LoopScope, outer: str, group: _Group) -> str:
        if not outer and len(group) == 1 and isinstance(group[0][0], Var) and group[0][1] == 1:
            return self.spell(group[0][0])
        key = (outer, group)
        if key not in scope.sums:
            name = self.fresh("at")
            scope.declarations.append(f"{'    ' * scope.indent}const int64_t {name} = {self._spelled(outer, group)};")
            scope.sums[key] = name
        return scope.sums[key]

    def _spelled(self, start: str, group: _Group) -> str:
        text = start
        for term, coefficient in sorted(group, key=lambda item: item[1] < 0):
            factor = coefficient if not text else abs(coefficient)
            piece = self.spell(term) if factor == 1 else f"{self.spell(term)} * {factor}"
            text = piece if not text else f"{text} {'+' if coefficient > 0 else '-'} {piece}"
        return text

    def _home(self, term: Expr) -> LoopScope | None:
        """The outermost loop body that may compute the term; None when only the statement itself may."""
        if any(a not in self.of_axis for a in term.axes) or not _total(term):
            return None
        return max((self.of_axis[a] for a in term.axes), key=lambda s: s.depth, default=self.stack[0])


def _total(term: Expr) -> bool:
    """Whether a term has a value everywhere, not just where a condition around the statement holds."""
    if isinstance(term, Var):
        return True
    for node in walk(term):
        if isinstance(node, Load | State):
            return False
        divides = isinstance(node, Op) and node.op.name in ("floordiv", "truncdiv", "mod", "fmod", "div")
        if divides and not isinstance(node.args[1], Const):
            return False
    return True
