"""Loops that end with what is needed: of a kernel's output a run may need less than there is room for, and parts of it
that lie wholly behind are neither computed nor stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tilewright.ir.analysis.live import Ends
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Op,
    Var,
    as_expr,
    cast,
    const,
    load,
    loads,
    lt,
    maximum,
    minimum,
    substitute,
    var,
)
from tilewright.ir.forms.graph import Form
from tilewright.ir.forms.loops import (
    HINTS,
    Alloc,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    Memory,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)
from tilewright.ir.forms.tensor import Layout
from tilewright.lower.access import Place
from tilewright.lower.unroll import Env, Unroller

Limits = Mapping[Buffer, Sequence[Expr | None]]  # how far each storage axis of what is stored is needed


def storage_ends(layout: Layout, ends: Sequence[Ends | None]) -> tuple[Ends | None, ...]:
    """By storage axis, where one is a logical axis as it is."""
    whole = [p.axis for p in layout.order]
    return tuple(ends[p.axis] if p.step == 1 and p.size is None and whole.count(p.axis) == 1 else None
                 for p in layout.order)  # fmt: skip


def ended(
    kernel: Kernel, ends: Mapping[Buffer, Sequence[Ends | None]], held: Mapping[Place, Sequence[Ends | None]],
    numbers: Buffer,
) -> Kernel:  # fmt: skip
    """The kernel of a CPU whose loops end with what is needed of its outputs and of what it holds, as `numbers` tell;
    the same kernel where none does."""
    if len(kernel.body) != 1 or not isinstance(kernel.body[0], For) or kernel.body[0].kind is not ForKind.PARALLEL:
        return kernel
    limits = {b: [None if e is None else _value(e, numbers) for e in axes] for b, axes in ends.items()}
    for place, axes in held.items():
        # from where the part begins that is held
        lows = [place.lows[part.axis] for part in place.layout.order] if place.lows else []
        local = [None if e is None else _value(e, numbers) - low
                 for e, low in zip(storage_ends(place.layout, axes), lows, strict=False)]  # fmt: skip
        limits[place.buffer] = [*[None] * len(place.prefix), *local]
    grid = kernel.body[0]
    ending = _Ending(limits, kernel)
    part = ending.first_dead(grid)
    body = ending.body(grid.body, {})
    if part is not None:
        body = (If(lt(var(grid.axis), part), body),)
    elif not ending.shortened:
        return kernel
    return replace(kernel, body=(For(grid.axis, grid.kind, body),))


def _value(ends: Ends, numbers: Buffer) -> Expr:
    found: Expr | None = None
    for form in sorted(ends, key=lambda f: (f.constant, f.factors)):
        value = _sum(form, numbers)
        found = value if found is None else maximum(found, value)
    assert found is not None
    return found


def _sum(form: Form, numbers: Buffer) -> Expr:
    value: Expr = const(form.constant)
    for place, factor in enumerate(form.factors):
        if factor:
            value = value + cast(load(numbers, (place,)), dtypes.index) * factor
    return value


class _Ending(Unroller):
    """A copy of a kernel's statements, loops ended early."""

    def __init__(self, limits: Limits, kernel: Kernel) -> None:
        super().__init__()
        self.shortened = 0
        self._limits = limits
        self._reads = _counted(statements(kernel.body))

    def loop(self, stmt: For, env: Env) -> tuple[Stmt, ...]:
        end = self.first_dead(stmt) if stmt.kind is ForKind.SERIAL else None
        if end is None and not (isinstance(stmt.axis.extent, Expr) and env):
            return (For(stmt.axis, stmt.kind, self.body(stmt.body, env)),)
        extent = as_expr(stmt.axis.extent)
        if end is not None:
            self.shortened += 1
            extent = maximum(minimum(extent, end), 0)
        axis = Axis(stmt.axis.name, simplify(substitute(extent, env)))
        return (For(axis, stmt.kind, self.body(stmt.body, {**env, stmt.axis: var(axis)})),)

    def first_dead(self, loop: For) -> Expr | None:
        """The turn from which on nothing that a loop does is needed: all it stores lies behind. None where that is not
        known, or what it leaves for others would be missing."""
        inside = list(statements(loop.body))
        inner = {s.axis for s in inside if isinstance(s, For)}
        written = [s for s in inside if isinstance(s, Store | Instruction)]
        own = {s.buffer for s in inside if isinstance(s, Alloc)}
        here = _counted(inside)
        found: Expr | None = None
        for stmt in written:
            if isinstance(stmt, Instruction) and stmt.name in HINTS:
                continue
            target, place = (stmt.buffer, stmt.indices) if isinstance(stmt, Store) else _destination(stmt)
            if target in own:
                continue
            if target.memory is not Memory.GLOBAL and target not in self._limits:
                if self._reads[target] > here[target]:
                    return None
                continue
            pairs = zip(place, self._limits.get(target, ()), strict=False)
            ends = [_turn(i, loop.axis, inner, limit) for i, limit in pairs if limit is not None]
            known = [e for e in ends if e is not None]
            if not known:
                return None
            end = known[0]
            for other in known[1:]:
                end = minimum(end, other)
            found = end if found is None or found is end else maximum(found, end)
        return None if found is None else simplify(found)


def _counted(body: Iterable[Stmt]) -> Counter[Buffer]:
    """How often each buffer is read."""
    return Counter(buffer for stmt in body for buffer in _read(stmt))


def _read(stmt: Stmt) -> list[Buffer]:
    found = [node.source for e in stmt_exprs(stmt) for node in loads(e)]
    operands = stmt.operands if isinstance(stmt, Instruction) else ()
    # an instruction may add to its destination
    return [*found, *(o.buffer for o in operands)]


def _destination(stmt: Instruction) -> tuple[Buffer, tuple[Expr, ...]]:
    first = stmt.operands[0]
    return first.buffer, first.origin


def _turn(index: Expr, axis: Axis, inner: set[Axis], limit: Expr) -> Expr | None:
    """The turn of an axis from which on an index is not below the limit, wherever the loops inside are."""
    if isinstance(index, Op) and index.op.name == "floordiv" and isinstance(index.args[1], Const):
        divisor = int(index.args[1].value)
        return _turn(index.args[0], axis, inner, limit * divisor) if divisor > 0 else None
    total = linear(index)
    step = total.terms.get(var(axis), 0)
    if step <= 0:
        return None
    rest: Expr = const(total.constant)
    for term, coefficient in total.terms.items():
        if isinstance(term, Var) and term.axis is axis:
            continue
        if axis in term.axes:
            return None
        if inner.isdisjoint(term.axes):
            rest = rest + term * coefficient
            continue
        low, high = bounds(term)
        least = low if coefficient > 0 else high
        if least in (float("inf"), float("-inf")):
            return None
        rest = rest + int(least) * coefficient
    return simplify((limit - rest + (step - 1)) // step)
