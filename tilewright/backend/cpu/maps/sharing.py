"""Stores written out over a block of positions: what several of them use is computed once and kept in registers.

Each value is computed as soon as what it needs is there, so that little has to wait in registers at a time; C compilers
keep to the order of the text, and cannot find common parts themselves where stores may overlap what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.ir.analysis.simplify import Linear, linear, simplify, simplify_difference
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    all_of,
    const,
    flattened,
    is_op,
    le,
    load,
    rewrite,
    var,
    walk,
)
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, If, Memory, Stmt, Store


def shared_stores(stores: Sequence[Store], lane: Axis | None, fresh: Callable[[str], str]) -> tuple[Stmt, ...]:
    """The stores, common parts first; where every guarded read is inside, without its check."""
    slow = _in_order(stores, lane, fresh)
    guards = _guards([s.value for s in stores], lane)
    if not guards:
        return slow
    bare = [Store(s.buffer, s.indices, _unguarded(s.value, guards)) for s in stores]
    inside = all_of(_weakest(guards))
    return (If(inside, _in_order(bare, lane, fresh), slow),)


def _guards(values: Sequence[Expr], lane: Axis | None) -> dict[Expr, None]:
    """Conditions that are the same on every lane and keep a read inside its data, zero being read elsewhere."""
    found: dict[Expr, None] = {}
    for node in walk(*values):
        if is_op(node, "select") and isinstance(node.args[2], Const) and isinstance(node.args[1], Load):
            condition = node.args[0]
            if lane in condition.axes or condition.reads:
                continue
            if all(_is_bound(c) for c in flattened(condition, "and")):
                found[condition] = None
    return found


def _unguarded(value: Expr, guards: dict[Expr, None]) -> Expr:
    return rewrite(value, lambda n: n.args[1] if is_op(n, "select") and n.args[0] in guards else None)


def _is_bound(condition: Expr) -> bool:
    return is_op(condition, "le") or is_op(condition, "lt")


def _weakest(guards: dict[Expr, None]) -> list[Expr]:
    """Checks that imply all others: of those that differ by a constant the one that leaves least room."""
    room: dict[tuple[tuple[Expr, int], ...], int] = {}
    for condition in (c for g in guards for c in flattened(g, "and")):
        slack = linear(simplify_difference(condition.args[1], condition.args[0]))
        constant = slack.constant - (1 if is_op(condition, "lt") else 0)
        terms = tuple(slack.terms.items())
        room[terms] = min(room.get(terms, constant), constant)
    return [simplify(le(0, Linear(dict(terms), constant).expr())) for terms, constant in room.items()]


# --- common parts


def _in_order(stores: Sequence[Store], lane: Axis | None, fresh: Callable[[str], str]) -> tuple[Stmt, ...]:
    kept = _common([s.value for s in stores])
    width: tuple[int, ...] = () if lane is None else (int(lane.extent),)  # type: ignore[arg-type]
    place: tuple[Expr, ...] = () if lane is None else (var(lane),)
    if not kept:
        return _wrapped(stores, lane)
    buffer = Buffer(fresh("part"), (len(kept), *width), stores[0].value.dtype, Memory.REGISTER)
    number = {n: i for i, n in enumerate(kept)}
    needs = [_needs(n.args, number) for n in kept] + [_needs((s.value,), number) for s in stores]
    body: list[Stmt] = []
    for unit in _eager(needs, len(kept)):
        held: dict[Expr, Expr] = {kept[n]: load(buffer, (const(n), *place)) for n in needs[unit]}
        if unit < len(kept):
            body.append(Store(buffer, (const(unit), *place), _read_from(held, kept[unit])))
        else:
            store = stores[unit - len(kept)]
            body.append(Store(store.buffer, store.indices, _read_from(held, store.value)))
    return (Alloc(buffer, _wrapped(body, lane)),)


def _read_from(held: Mapping[Expr, Expr], root: Expr) -> Expr:
    """The expression with what is held read from its register; what lies below that is not looked at."""
    done: dict[Expr, Expr] = dict(held)
    stack = [root]
    while stack:
        node = stack[-1]
        waiting = [a for a in node.args if a not in done] if node not in done and node.reads else []
        if waiting:
            stack.extend(waiting)
            continue
        if node not in done:
            done[node] = node.rebuild(tuple([done[a] for a in node.args])) if node.reads else node
        stack.pop()
    return done[root]


def _wrapped(body: Sequence[Stmt], lane: Axis | None) -> tuple[Stmt, ...]:
    return tuple(body) if lane is None else (For(lane, ForKind.VECTOR, tuple(body)),)


def _common(values: Sequence[Expr]) -> list[Expr]:
    """What is used more than once and always evaluated: data, of the type that is stored."""
    uses: dict[Expr, int] = {}
    order: dict[Expr, None] = {}
    stack = [_unscaled(v) for v in reversed(values)]
    for value in stack:
        uses[value] = uses.get(value, 0) + 1
    while stack:
        node = stack.pop()
        if node in order:
            continue
        order[node] = None
        # what a select guards is evaluated only behind its condition, and indices are not data
        operands = () if isinstance(node, Load) or is_op(node, "select") else node.args
        for operand in map(_unscaled, operands):
            uses[operand] = uses.get(operand, 0) + 1
            stack.append(operand)
    dtype = values[0].dtype
    return [n for n in order if uses[n] > 1 and n.dtype is dtype and n.reads]


def _unscaled(node: Expr) -> Expr:
    """A product with a constant is not worth keeping: it is part of a multiply-add wherever it is used."""
    while is_op(node, "mul") and isinstance(node.args[1], Const):
        node = node.args[0]
    return node


def _needs(operands: Sequence[Expr], number: dict[Expr, int]) -> list[int]:
    """The kept values read directly below some operands."""
    found: dict[int, None] = {}
    seen: set[Expr] = set()
    stack = list(reversed(operands))
    while stack:
        node = stack.pop()
        if node in number:
            found[number[node]] = None
        elif node not in seen and node.reads:
            seen.add(node)
            stack.extend(() if isinstance(node, Load) else reversed(node.args))
    return list(found)


def _eager(needs: Sequence[Sequence[int]], kept: int) -> list[int]:
    """An order in which each unit comes as soon as what it needs is there; the first `kept` units are needed.

    When nothing is ready, the unit that misses least gets the first thing it misses.
    """
    missing = [set(need) for need in needs]
    users: dict[int, list[int]] = {}
    for unit, need in enumerate(needs):
        for other in need:
            users.setdefault(other, []).append(unit)
    order: list[int] = []
    waiting = {u for u in range(len(needs)) if needs[u]}
    ready = [u for u in range(kept, len(needs)) if not needs[u]]
    while ready or waiting:
        if not ready:
            bases = [u for u in sorted(waiting) if all(not needs[n] for n in missing[u])]
            nearest = min(bases, key=lambda u: len(missing[u]))
            ready.append(min(missing[nearest]))
        unit = ready.pop(0)
        order.append(unit)
        for user in users.get(unit, []):
            missing[user].discard(unit)
            if not missing[user]:
                waiting.discard(user)
                ready.append(user)
    return order
