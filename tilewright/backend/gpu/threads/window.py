"""Lowers a sum over windows in registers: a thread has packets of neighbouring outputs, and reads once what they share.

Steps along the innermost axis of the sum are written out. Reads of all of them that turn out to be the same place are
one; padding is filled in, in registers. Other axes of the sum are loops around that.
"""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.backend.gpu.maps.packets import in_line, in_packets, in_registers, packet_place, packets_of
from tilewright.backend.gpu.threads.nest import GpuNest, ThreadTile, drop_true, guarded
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    all_of,
    axes_of,
    cast,
    const,
    flattened,
    is_op,
    load,
    lt,
    replace_nodes,
    var,
)
from tilewright.ir.forms.loops import Buffer, For, ForKind, If, Memory, Stmt, Store
from tilewright.lower.nesting import alloc, serial, unrolled, walked
from tilewright.tile_graph.algebra.propagate import extent_of


class WindowSum:
    """The sum of a GpuNest whose plan has lanes along an axis of the result."""

    def __init__(self, base: GpuNest) -> None:
        plan, nest = base.plan, base.nest
        assert plan.vector is not None
        self.base = base
        self.vector = nest.named(plan.vector)
        self.lane = Axis("lane", plan.lanes)
        self.sizes = {self.vector: plan.lanes, **{nest.named(a): n for a, n in plan.register}}
        self.along = next((nest.named(a) for a, _ in plan.register), None)
        self.outputs = prod(n for _, n in plan.register)
        self.places = {a: -(-int(r.size) // self.sizes.get(a, 1)) for a, r in base.ranges.items()}
        self.count = prod(self.places.values())

    def statements(self) -> tuple[Stmt, ...]:
        rounds = -(-self.count // self.base.threads)
        loop = Axis("round", rounds)
        flat = simplify(var(self.base.thread) + (var(loop) * self.base.threads if rounds > 1 else 0))
        body = self._round(flat)
        return (For(loop, ForKind.SERIAL, body),) if rounds > 1 else body

    def _round(self, flat: Expr) -> tuple[Stmt, ...]:
        base, monoid = self.base, self.base.nest.monoid
        assert monoid is not None
        env, active, inside = self._spot(flat)
        total = Buffer(base.names.fresh("acc"), (self.outputs, extent_of(self.lane.extent)), monoid.left[0].dtype,
                       Memory.REGISTER)  # fmt: skip
        own = Axis("own", self.outputs)
        start = unrolled([own, self.lane], (Store(total, (var(own), var(self.lane)), monoid.identity[0]),))
        loops, outer = walked(base.reduction[:-1], base.reduce_ranges)
        turn = self._turn(total, [{**e, **outer} for e in env], inside)
        stored = [s for e, limit, n in zip(env, inside, range(self.outputs), strict=True)
                  for s in guarded(limit, self._stored(total, e, n))]  # fmt: skip
        return alloc([total], guarded(active, (*start, *serial(loops, turn), *stored)))

    def _spot(self, flat: Expr) -> tuple[list[dict[Axis, Expr]], list[Expr], list[list[Expr]]]:
        """The value of every axis for each output of a thread, when the first is inside the box, and when each is."""
        base = self.base
        active = [lt(flat, self.count)]
        env: dict[Axis, Expr] = {}
        rest = flat
        firsts: dict[Axis, Expr] = {}
        for number, axis in reversed(list(enumerate(base.order))):
            places, part = self.places[axis], base.ranges[axis]
            outermost = all(self.places[a] == 1 for a in base.order[:number])
            own = const(0) if places == 1 else rest if outermost else simplify(rest % places)
            rest = simplify(rest // places)
            size = self.sizes.get(axis, 1)
            firsts[axis] = simplify(own * size)
            if static(part.count) != places * size:
                active.append(lt(firsts[axis], part.count))
            env[axis] = simplify(part.low + firsts[axis] + (var(self.lane) if axis is self.vector else 0))
        if self.along is None:
            return [env], list(drop_true(active)), [[]]
        every, inside = [], []
        part = base.ranges[self.along]
        for number in range(self.outputs):
            every.append({**env, self.along: simplify(env[self.along] + number)})
            limit = [] if static(part.count) == self.places[self.along] * self.outputs else [
                lt(firsts[self.along] + number, part.count)]  # fmt: skip
            inside.append(list(drop_true(limit)) if number else [])
        return every, list(drop_true(active)), inside

    # --- one turn along the innermost axis

    def _turn(self, total: Buffer, env: list[dict[Axis, Expr]], inside: list[list[Expr]]) -> tuple[Stmt, ...]:
        base, monoid = self.base, self.base.nest.monoid
        assert monoid is not None
        inner = base.reduction[-1]
        part = base.reduce_ranges[inner]
        values: list[tuple[int, Expr]] = []
        limits: dict[Expr, list[Expr]] = {}  # of what is read: when the first output that reads it is there
        for number, here in enumerate(env):
            for tap in range(int(part.size)):
                (value,) = base.elements({**here, inner: simplify(part.low + tap)})
                values.append((number, value))
                for read in self._reads(value):
                    limits.setdefault(read, inside[number])
        fetched: list[Stmt] = []
        kept: list[Buffer] = []
        now: dict[Expr, Expr] = {}
        for read, limit in limits.items():
            buffer, body = self._fetch(read, limit)
            kept.append(buffer)
            fetched.extend(body)
            place = packet_place(buffer, self.lane) if self.lane in axes_of(read) else (const(0), const(0))
            now[read] = cast(load(buffer, place), read.dtype)
        added: list[Stmt] = []
        for number, value in values:
            index = (const(number), var(self.lane))
            states: dict[Expr, Expr] = {monoid.left[0]: load(total, index), monoid.right[0]: replace_nodes(value, now)}
            added.extend(unrolled([self.lane], (Store(total, index, replace_nodes(monoid.combine[0], states)),)))
        return alloc(kept, (*fetched, *added))

    def _reads(self, value: Expr) -> list[Expr]:
        """What a value reads, each with the condition around it where all lanes have the same."""
        found: list[Expr] = []
        stack = [value]
        while stack:
            node = stack.pop()
            if isinstance(node, Load) or self._padded(node):
                found.append(node)
            else:
                stack.extend(reversed(node.args))
        return found

    def _padded(self, node: Expr) -> bool:
        if not is_op(node, "select") or not isinstance(node.args[2], Const) or self.lane in axes_of(node.args[0]):
            return False
        return isinstance(_unwidened(node.args[1]), Load) and _fits(node.args[2], _unwidened(node.args[1]))

    def _fetch(self, read: Expr, limit: list[Expr]) -> tuple[Buffer, tuple[Stmt, ...]]:
        """What is read in registers; what lies outside filled in."""
        padded = not isinstance(read, Load)
        source = _unwidened(read.args[1]) if padded else read
        assert isinstance(source, Load)
        conditions = drop_true([*limit, *(flattened(read.args[0], "and") if padded else ())])
        base = self.base
        body: tuple[Stmt, ...]
        if self.lane in axes_of(source):
            buffer = packets_of(base.names.fresh("near"), self.lane, source.dtype)
            place = packet_place(buffer, self.lane)
            body = (*in_packets(source.source, source.indices, buffer, self.lane, is_load=True),) if in_line(
                source, self.lane) else unrolled([self.lane], (Store(buffer, place, source),))  # fmt: skip
        else:
            buffer = Buffer(base.names.fresh("near"), (1, 1), source.dtype, Memory.REGISTER)
            place = (const(0), const(0))
            body = (Store(buffer, place, source),)
        if not conditions:
            return buffer, body
        filler = const(read.args[2].value if padded else 0, source.dtype)  # type: ignore[attr-defined]
        fill: tuple[Stmt, ...] = (Store(buffer, place, filler),)
        if self.lane in axes_of(source):
            fill = unrolled([self.lane], fill)
        return buffer, (If(all_of(conditions), body, fill),)

    # --- results

    def _stored(self, total: Buffer, env: dict[Axis, Expr], number: int) -> tuple[Stmt, ...]:
        base, monoid = self.base, self.base.nest.monoid
        assert monoid is not None
        results = base.results(monoid, [total], (const(number), var(self.lane)))
        body: list[Stmt] = []
        for store in base.stores(ThreadTile(env, (), (), (self.lane,), {}), results):
            value, fetched, kept = in_registers(base.names, simplify(store.value), self.lane)
            if not in_line(load(store.buffer, store.indices), self.lane):
                each = unrolled([self.lane], (Store(store.buffer, store.indices, value),))
                body.extend(alloc(kept, (*fetched, *each)))
                continue
            out = packets_of(base.names.fresh("out"), self.lane, store.value.dtype)
            inner = (*fetched, For(self.lane, ForKind.UNROLL, (Store(out, packet_place(out, self.lane), value),)))
            moved = in_packets(store.buffer, store.indices, out, self.lane, is_load=False)
            body.extend(alloc([*kept, out], (*inner, *moved)))
        return tuple(body)


def _unwidened(node: Expr) -> Expr:
    if not is_op(node, "cast"):
        return node
    given = node.args[0].dtype
    return node.args[0] if given.bytes < node.dtype.bytes or dtypes.widens(given, node.dtype) else node


def _fits(filler: Const, read: Expr) -> bool:
    """Whether what is filled in has the type of what is read."""
    with np.errstate(over="ignore"):
        return bool(np.asarray(filler.value, read.dtype.numpy) == filler.value)
