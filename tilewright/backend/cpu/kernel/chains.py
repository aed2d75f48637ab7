"""Brings calls of one function together, so that their text can alternate.

A function of vector mathematics is a chain in which each operation waits for the one before it. Other chains beside it
fill the pipes; behind it, they are too far away for a processor to find.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, lower
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    const,
    is_op,
    load,
    loads,
    op,
    replace_nodes,
    var,
    walk,
)
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, If, Kernel, Memory, Stmt, Store, statements
from tilewright.ir.forms.scalar import CHAINS
from tilewright.lower.nesting import alloc

_AHEAD = 16  # calls are looked for in so many statements


def join_calls(kernel: Kernel, most: int) -> Kernel:
    """The same kernel, with so many calls together at most. Its UNROLL loops are written out already."""
    # written out loops store thousands of values that share most of their nodes: each node is looked at once
    stored = dict.fromkeys(s.value for s in statements(kernel.body) if isinstance(s, Store))
    if not any(isinstance(n, Op) and n.op.name in CHAINS for n in walk(*stored)):
        return kernel
    taken = {b.name for b in kernel.params}
    taken |= {s.buffer.name for s in statements(kernel.body) if isinstance(s, Alloc)}
    return Kernel(kernel.name, kernel.params, _body(kernel.body, taken, most), kernel.symbols, kernel.step)


def _body(body: Sequence[Stmt], taken: set[str], most: int) -> tuple[Stmt, ...]:
    inside = tuple(_inside(s, taken, most) for s in body)
    if not any(_has_calls(s) for s in inside):
        return inside
    return _Straight(inside, taken, most).statements()


def _has_calls(stmt: Stmt) -> bool:
    """Whether a vector loop holds any; most hold none, which is seen without asking what may run first."""
    if not isinstance(stmt, For) or stmt.kind is not ForKind.VECTOR:
        return False
    stored = [s.value for s in statements(stmt.body) if isinstance(s, Store)]
    if not any(isinstance(n, Op) and n.op.name in CHAINS for n in walk(*stored)):
        return False
    return any(v.calls for v in _vector_stores(stmt))


def _inside(stmt: Stmt, taken: set[str], most: int) -> Stmt:
    if isinstance(stmt, For) and stmt.kind is not ForKind.VECTOR:
        return For(stmt.axis, stmt.kind, _body(stmt.body, taken, most))
    if isinstance(stmt, If):
        return If(stmt.condition, _body(stmt.then, taken, most), _body(stmt.otherwise, taken, most))
    if isinstance(stmt, Alloc):
        return Alloc(stmt.buffer, _body(stmt.body, taken, most))
    return stmt


@dataclass
class _VectorStore:
    """A store on all lanes, by itself; `calls` are those of its value that can run first."""

    lane: Axis
    store: Store
    calls: Sequence[Op] = field(init=False)

    def __post_init__(self) -> None:
        self.calls = _calls(self.store.value, self.lane)

    def loop(self) -> For:
        return For(self.lane, ForKind.VECTOR, (self.store,))

    def replace(self, call: Op, value: Expr) -> None:
        self.store = Store(self.store.buffer, self.store.indices, replace_nodes(self.store.value, {call: value}))
        self.calls = _calls(self.store.value, self.lane)


def _vector_stores(stmt: Stmt) -> list[_VectorStore]:
    """The stores of a vector loop, also those inside registers of its own; none where it holds anything else."""
    if not isinstance(stmt, For) or stmt.kind is not ForKind.VECTOR:
        return []
    found = list(statements(stmt.body))
    if not all(isinstance(s, Store | Alloc) for s in found):
        return []
    return [_VectorStore(stmt.axis, s) for s in found if isinstance(s, Store)]


def _calls(value: Expr, lane: Axis) -> Sequence[Op]:
    """Calls that may always be evaluated and hold no other call, so that nothing keeps them from running first."""
    found: dict[Expr, Sequence[Op]] = {}
    if not any(isinstance(n, Op) and n.op.name in CHAINS for n in walk(value)):
        return ()
    for node in walk(value):  # operands before their users
        if isinstance(node, Op) and lane in node.axes:
            below = [f for f in (found.get(a, ()) for a in _always(node, found)) if f]
            is_call = node.op.name in CHAINS and node.dtype is dtypes.float32
            if len(below) > 1:
                found[node] = tuple(dict.fromkeys(c for calls in below for c in calls))
            else:
                found[node] = below[0] if below else (node,) if is_call else ()
    return found.get(value, ())


def _always(value: Op, found: Mapping[Expr, Sequence[Op]]) -> Sequence[Expr]:
    """Operands that may be evaluated whatever a condition says."""
    if not is_op(value, "select"):
        return value.args
    condition, *chosen = value.args
    calling = [a for a in chosen if found.get(a)]
    # calls on both sides would be work for nothing; what a condition selects may be read from a place that only the
    # condition makes safe
    return [condition, *calling] if len(calling) == 1 and _is_inside(calling[0]) else [condition]


def _is_inside(root: Expr) -> bool:
    """Whether all that is read lies inside its buffer, but for what an inner condition selects."""
    seen: set[Expr] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Load):
            for index, extent in zip(node.indices, node.source.shape, strict=True):
                low, high = bounds(index)
                if low < 0 or high >= lower(extent):
                    return False
        stack.extend(node.args[:1] if is_op(node, "select") else node.args)
    return True


class _Straight:
    """A list of statements, its vector loops taken apart into single stores."""

    def __init__(self, body: Sequence[Stmt], taken: set[str], most: int) -> None:
        self.taken = taken
        self.most = most
        self.items: list[Stmt | _VectorStore] = []
        self.registers: dict[Buffer, None] = {}  # of vector loops and of calls, made around the whole list
        for stmt in body:
            stores = _vector_stores(stmt)
            self.items.extend(stores or [stmt])
            if stores and isinstance(stmt, For):
                self.registers.update({s.buffer: None for s in statements(stmt.body) if isinstance(s, Alloc)})

    def statements(self) -> tuple[Stmt, ...]:
        result: list[Stmt] = []
        for position, item in enumerate(self.items):
            if not isinstance(item, _VectorStore):
                result.append(item)
                continue
            while len(found := self.side_by_side(position, item)) > 1:
                result.extend(self.together(found))
            result.append(item.loop())
        return alloc(list(self.registers), result)

    def side_by_side(self, position: int, item: _VectorStore) -> list[tuple[_VectorStore, Op]]:
        """Calls of one function, the first of this item and the others of this one or later; none where it has no
        other."""
        for call in item.calls:
            others = {
                partner: owner
                for owner, partner in self.ahead(position)
                if partner is not call and partner.op is call.op and owner.lane.extent == item.lane.extent
            }
            if others:
                return [(item, call), *((owner, partner) for partner, owner in others.items())][: self.most]
        return []

    def ahead(self, position: int) -> Iterator[tuple[_VectorStore, Op]]:
        """Calls that could run before the item at the position stores its result."""
        between: list[Store] = []
        for item in self.items[position : position + _AHEAD]:
            if not isinstance(item, _VectorStore):
                return
            for call in item.calls:
                if not any(_may_read(call, store) for store in between):
                    yield item, call
            between.append(item.store)

    def together(self, calls: list[tuple[_VectorStore, Op]]) -> Iterator[Stmt]:
        """Arguments into registers, then the calls; the stores read the results."""
        first, call = calls[0]
        count = len(calls)
        registers = Buffer(self.fresh(), (2 * count, first.lane.extent), call.dtype, Memory.REGISTER)
        self.registers[registers] = None
        for place, (owner, node) in enumerate(calls):
            at = (const(place), var(owner.lane))
            yield For(owner.lane, ForKind.VECTOR, (Store(registers, at, node.args[0]),))
        for place, (owner, node) in enumerate(calls):
            at = (const(place + count), var(owner.lane))
            value = op(node.op.name, load(registers, (const(place), var(owner.lane))))
            yield For(owner.lane, ForKind.VECTOR, (Store(registers, at, value),))
        for place, (owner, node) in enumerate(calls):
            owner.replace(node, load(registers, (const(place + count), var(owner.lane))))

    def fresh(self) -> str:
        name = next(n for n in (f"calls_{i}" for i in range(len(self.taken) + 1)) if n not in self.taken)
        self.taken.add(name)
        return name


def _may_read(value: Expr, store: Store) -> bool:
    return any(n.source is store.buffer and not _is_elsewhere(n, store) for n in loads(value))


def _is_elsewhere(node: Load, store: Store) -> bool:
    """Whether two places differ in an index that is a number."""
    pairs = zip(node.indices, store.indices, strict=True)
    return any(isinstance(a, Const) and isinstance(b, Const) and a.value != b.value for a, b in pairs)
