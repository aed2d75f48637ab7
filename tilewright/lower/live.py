"""Loops that end with what is needed: of a kernel's output a run may need less than there is room for, and parts of it
that lie wholly behind are neither computed nor stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from tilewright.ir.analysis.live import Ends
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, upper
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Op,
    Var,
    all_of,
    as_expr,
    cast,
    const,
    flattened,
    is_op,
    load,
    loads,
    lt,
    maximum,
    minimum,
    op,
    replace_nodes,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.graph import Form
from tilewright.ir.forms.loops import (
    HINTS,
    Alloc,
    Barrier,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    Memory,
    Scope,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.access import Place
from tilewright.lower.unroll import Env, Unroller

_NEUTRAL = {"add": 0.0, "max": float("-inf"), "min": float("inf")}
Limits = Mapping[Buffer, Sequence[Expr | None]]  # how far each storage axis of what is stored is needed


@dataclass(frozen=True)
class StreamLoop:
    """A kernel's loop over the blocks of a stream, and the turn from which on none of them changes anything."""

    loop: Axis
    end: Expr


@dataclass(frozen=True)
class StorageEnd:
    """How far a storage axis is needed that counts in steps along a logical one."""

    ends: Ends
    step: int

    def limit(self, numbers: Buffer, low: Expr) -> Expr:
        """The first place that is not needed, counted from the logical place `low`."""
        return (_value(self.ends, numbers) - low + (self.step - 1)) // self.step


def storage_ends(tensor: Tensor, layout: Layout, ends: Sequence[Ends | None]) -> tuple[StorageEnd | None, ...]:
    """By storage axis: of those that a logical axis is split into, the outermost tells, and one that has it all."""
    found = []
    for part in layout.order:
        has_all = part.size is None or (part.step == 1 and part.size >= upper(tensor.shape[part.axis]))
        end = ends[part.axis] if has_all else None
        found.append(None if end is None else StorageEnd(end, part.step))
    return tuple(found)


def ended(
    kernel: Kernel, ends: Mapping[Buffer, Sequence[StorageEnd | None]],
    held: Sequence[tuple[Place, Sequence[StorageEnd | None]]], numbers: Buffer, stream: StreamLoop | None = None,
) -> Kernel:  # fmt: skip
    """The kernel with loops that end with what is needed of its outputs and of what it holds, as `numbers` tell, and
    whose `stream` ends with what there is of it; the same kernel where none does. On a GPU blocks of which nothing is
    needed do nothing."""
    if any(isinstance(s, For) and s.kind is ForKind.BLOCK for s in kernel.body):
        return _without_idle_blocks(kernel, ends, numbers)
    if len(kernel.body) != 1 or not isinstance(kernel.body[0], For) or kernel.body[0].kind is not ForKind.PARALLEL:
        return kernel
    limits = {b: [None if e is None else e.limit(numbers, const(0)) for e in axes] for b, axes in ends.items()}
    for place, axes in held:
        # from where the part begins that is held
        lows = [place.lows[part.axis] for part in place.layout.order] if place.lows else []
        local = [None if e is None else e.limit(numbers, low) for e, low in zip(axes, lows, strict=False)]
        limits[place.buffer] = [*[None] * len(place.prefix), *local]
    grid = kernel.body[0]
    ending = _Ending(limits, kernel, stream)
    part = ending.first_dead(grid)
    body = ending.body(grid.body, {})
    if part is not None:
        body = (If(lt(var(grid.axis), part), body),)
    elif not ending.shortened:
        return kernel
    return replace(kernel, body=(For(grid.axis, grid.kind, body),))


def _without_idle_blocks(kernel: Kernel, ends: Mapping[Buffer, Sequence[StorageEnd | None]], numbers: Buffer) -> Kernel:
    if any(isinstance(s, Barrier) and s.scope is Scope.GRID for s in statements(kernel.body)):
        return kernel  # all blocks are waited for
    limits = {b: [None if e is None else e.limit(numbers, const(0)) for e in axes] for b, axes in ends.items()}
    body = tuple(_where_needed(s, limits) for s in kernel.body)
    return kernel if body == kernel.body else replace(kernel, body=body)


def _where_needed(stmt: Stmt, limits: Limits) -> Stmt:
    """A loop over blocks that run only where something that they store is needed."""
    if not isinstance(stmt, For) or stmt.kind is not ForKind.BLOCK:
        return stmt
    if len(stmt.body) == 1 and isinstance(stmt.body[0], For) and stmt.body[0].kind is ForKind.BLOCK:
        inner = _where_needed(stmt.body[0], limits)
        return stmt if inner is stmt.body[0] else replace(stmt, body=(inner,))
    inside = list(statements(stmt.body))
    axes = {s.axis for s in inside if isinstance(s, For)}
    needed: dict[Expr, None] = {}
    for each in inside:
        if not isinstance(each, Store | Instruction):
            continue
        if isinstance(each, Instruction) and (each.name in HINTS or not each.operands):
            continue
        target, place = (each.buffer, each.indices) if isinstance(each, Store) else _destination(each)
        if target.memory is not Memory.GLOBAL:
            continue
        pairs = zip(place, limits.get(target, ()), strict=False)
        lows = [(_least(index, axes), limit) for index, limit in pairs if limit is not None]
        below = [(low, limit) for low, limit in lows if low is not None and low.axes]
        if not below:
            return stmt  # some of it is needed, whichever block it is
        needed[all_of(lt(low, limit) for low, limit in below)] = None
    return replace(stmt, body=(If(simplify(reduce(partial(op, "or"), needed)), stmt.body),)) if needed else stmt


def _least(index: Expr, inner: set[Axis]) -> Expr | None:
    """The smallest value of an index over the loops inside a block; None where it is not known."""
    total = linear(index)
    found: Expr = const(total.constant)
    for term, coefficient in total.terms.items():
        if inner.isdisjoint(term.axes):
            found = found + term * coefficient
            continue
        least = bounds(term)[0 if coefficient > 0 else 1]
        if least in (float("inf"), float("-inf")):
            return None
        found = found + int(least) * coefficient
    return simplify(found)


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

    def __init__(self, limits: Limits, kernel: Kernel, stream: StreamLoop | None) -> None:
        super().__init__()
        self._stream = stream
        self.shortened = 0
        self._limits = limits
        self._reads = _counted(statements(kernel.body))
        self._holds: dict[Expr, None] = {}  # conditions that loops around fulfil by where they end

    def loop(self, stmt: For, env: Env) -> tuple[Stmt, ...]:
        is_stream = self._stream is not None and stmt.axis is self._stream.loop
        end = self._stream.end if is_stream and self._stream is not None else self.first_dead(stmt)
        if stmt.kind is not ForKind.SERIAL or end is None:
            if not (isinstance(stmt.axis.extent, Expr) and env):
                return (For(stmt.axis, stmt.kind, self.body(stmt.body, env)),)
            return (self._turns(stmt, env, const(0), as_expr(stmt.axis.extent), ()),)
        self.shortened += 1
        stop = maximum(minimum(stmt.axis.extent, end), 0)
        fulfilled = _fulfilled(stmt)
        always = [condition for condition, until in fulfilled.items() if until is end]
        # lanes of one turn may lie on both sides: as long as none lies behind, none is asked
        earlier = {until for until in fulfilled.values() if until is not end}
        if len(earlier) != 1 or any(isinstance(s, Alloc) for s in statements(stmt.body)):
            return (self._turns(stmt, env, const(0), stop, always),)
        middle = maximum(minimum(stop, earlier.pop()), 0)
        return (self._turns(stmt, env, const(0), middle, list(fulfilled)),
                self._turns(stmt, env, middle, stop, always))  # fmt: skip

    def _turns(self, stmt: For, env: Env, begin: Expr, stop: Expr, holds: Sequence[Expr]) -> For:
        """Some turns of a loop, in which conditions hold."""
        axis = Axis(stmt.axis.name, simplify(substitute(stop - begin, env)))
        self._holds.update(dict.fromkeys(holds))
        place = simplify(substitute(begin, env)) + var(axis)
        made = For(axis, stmt.kind, self.body(stmt.body, {**env, stmt.axis: simplify(place)}))
        for condition in holds:
            self._holds.pop(condition, None)
        return made

    def value(self, value: Expr, env: Env) -> Expr:
        chosen = {n: n.args[1] for n in walk(value) if is_op(n, "select") and n.args[0] in self._holds}
        return super().value(replace_nodes(value, chosen) if chosen else value, env)

    def first_dead(self, loop: For) -> Expr | None:
        """The turn from which on nothing that a loop does is needed: all it stores lies behind, or changes nothing.
        None where that is not known, or what it leaves for others would be missing."""
        inside = list(statements(loop.body))
        inner = {s.axis for s in inside if isinstance(s, For)}
        own = {s.buffer for s in inside if isinstance(s, Alloc)}
        here = _counted(inside)
        found: list[Expr] = []
        for stmt in inside:
            if not isinstance(stmt, Store | Instruction) or (isinstance(stmt, Instruction) and stmt.name in HINTS):
                continue
            target, place = (stmt.buffer, stmt.indices) if isinstance(stmt, Store) else _destination(stmt)
            if target in own:
                continue
            is_seen = target.memory is Memory.GLOBAL or target in self._limits or self._reads[target] > here[target]
            pairs = zip(place, self._limits.get(target, ()), strict=False)
            ends = [_turn(i, loop.axis, inner, limit) for i, limit in pairs if limit is not None]
            ends += [_neutral_from(stmt, loop.axis, inner)] if isinstance(stmt, Store) else []
            known = [e for e in ends if e is not None]
            if known:
                found.append(reduce(minimum, known))
            elif is_seen or (isinstance(stmt, Store) and target in _read(stmt)):
                return None
        return simplify(reduce(maximum, dict.fromkeys(found))) if found else None


def _conditions(body: Iterable[Stmt]) -> list[Expr]:
    """Those that choose what is stored."""
    stores = [s for s in statements(tuple(body)) if isinstance(s, Store)]
    return list(dict.fromkeys(n.args[0] for s in stores for n in walk(s.value) if is_op(n, "select")))


def _fulfilled(loop: For) -> dict[Expr, Expr]:
    """Conditions of what a loop stores that hold in all its first turns, each with the first turn of which a part, for
    what loops inside it do, may lie behind."""
    inner = {s.axis for s in statements(loop.body) if isinstance(s, For)}
    found: dict[Expr, Expr] = {}
    for condition in _conditions(loop.body):
        turns: dict[Expr | None, None] = {}
        for part in flattened(condition, "and"):
            is_end = is_op(part, "lt") and {loop.axis, *inner}.isdisjoint(part.args[1].axes)
            turns[_turn(part.args[0], loop.axis, inner, part.args[1], nearest=False) if is_end else None] = None
        if None not in turns:
            found[condition] = simplify(reduce(minimum, [turn for turn in turns if turn is not None]))
    return found


def _neutral_from(stmt: Store, axis: Axis, inner: set[Axis]) -> Expr | None:
    """The turn from which on a store leaves what was there: it combines it with what is neutral then."""
    value = stmt.value
    if not isinstance(value, Op) or value.op.name not in _NEUTRAL or load(stmt.buffer, stmt.indices) not in value.args:
        return None
    added = next((a for a in value.args if a is not load(stmt.buffer, stmt.indices)), None)
    if added is None or not is_op(added, "select"):
        return None
    condition, _, otherwise = added.args
    if not isinstance(otherwise, Const) or otherwise.value != _NEUTRAL[value.op.name]:
        return None
    for part in flattened(condition, "and"):
        if is_op(part, "lt") and axis not in part.args[1].axes and inner.isdisjoint(part.args[1].axes):
            turn = _turn(part.args[0], axis, inner, part.args[1])
            if turn is not None:
                return turn
    return None


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


def _turn(index: Expr, axis: Axis, inner: set[Axis], limit: Expr, nearest: bool = True) -> Expr | None:
    """The turn of an axis from which on an index is not below the limit, wherever the loops inside are, where they are
    `nearest` to the begin or else farthest from it."""
    if isinstance(index, Op) and index.op.name == "floordiv" and isinstance(index.args[1], Const):
        divisor = int(index.args[1].value)
        return _turn(index.args[0], axis, inner, limit * divisor, nearest) if divisor > 0 else None
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
        least = low if (coefficient > 0) == nearest else high
        if least in (float("inf"), float("-inf")):
            return None
        rest = rest + int(least) * coefficient
    return simplify((limit - rest + (step - 1)) // step)
