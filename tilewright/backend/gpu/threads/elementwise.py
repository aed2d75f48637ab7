"""Lowers a map in packets: a thread moves neighbours together, several packets under way before the first is used.

Packets of a block are numbered flat, and thread t takes t, t + threads, ...: neighbouring threads touch neighbouring
packets. What is left at the end of a row that is no multiple of a packet is moved element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from tilewright.backend.gpu.maps.packets import certain_loads, in_line, packet_width
from tilewright.backend.gpu.threads.nest import GpuNest, ThreadTile, drop_true, guarded
from tilewright.ir.analysis.simplify import join_divisions, linear, simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, all_of, axes_of, const, load, lt, replace_nodes, substitute, var
from tilewright.ir.forms.loops import Buffer, For, ForKind, If, Memory, Stmt, Store
from tilewright.lower.nesting import alloc, unrolled
from tilewright.tile_graph.algebra.propagate import extent_of


class PackedMap:
    """The map of a GpuNest whose plan has lanes, or several positions at once."""

    def __init__(self, base: GpuNest) -> None:
        plan = base.plan
        assert plan.vector is not None
        self.base = base
        self.axis = base.nest.named(plan.vector)
        self.lanes = plan.lanes
        self.lane = Axis("lane", plan.lanes)
        self.turn = Axis("turn", base.options.at_once)
        each = {**base.register, self.axis: plan.lanes}
        self.places = {a: -(-int(r.size) // each.get(a, 1)) for a, r in base.ranges.items()}
        self.repeated = [Axis(f"{a.name}_u", n) for a, n in base.register.items()]  # for which a thread reads once
        self.count = prod(self.places.values())
        if base.options.flat:  # all axes as one
            self.count = -(-prod(int(r.size) for r in base.ranges.values()) // plan.lanes)
        self.registers: list[Buffer] = []

    def statements(self) -> tuple[Stmt, ...]:
        base, turns = self.base, extent_of(self.turn.extent)
        rounds = -(-self.count // (base.threads * turns))
        loop = Axis("round", rounds)
        flat: Expr = var(base.thread)
        if rounds > 1:
            flat = flat + var(loop) * (base.threads * turns)
        if turns > 1:
            flat = flat + var(self.turn) * base.threads
        body = self._round(simplify(flat))
        return (For(loop, ForKind.SERIAL, body),) if rounds > 1 else body

    def _round(self, flat: Expr) -> tuple[Stmt, ...]:
        env, active, whole = self._spot(flat)
        stores = self._repeats(self.base.stores(ThreadTile(env, (), (), (), {}), {}))
        now, fetched = self._fetched(stores)
        inside: list[Stmt] = []
        moved: list[Stmt] = []
        results: list[Buffer] = []
        for store in stores:
            value = replace_nodes(store.value, now)
            if not in_line(load(store.buffer, store.indices), self.lane):
                inside.append(Store(store.buffer, store.indices, value))
                continue
            width = packet_width(self.lanes, value.dtype)
            shape = (self.lanes // width, width)
            out = Buffer(self.base.names.fresh("out"), shape, store.buffer.dtype, Memory.REGISTER)
            results.append(out)
            inside.append(Store(out, self._place(width), value))
            for number, near, place in self._packets(width, store.indices):
                move = Store(store.buffer, place, load(out, (const(number), var(near))))
                moved.append(For(near, ForKind.VECTOR, (move,)))
        packed = alloc(results, (*self._each_lane(inside), *moved))
        if whole is None:
            return alloc(self.registers, (*self._turns(active, fetched), *self._turns(active, packed)))
        # whole packets, and the elements that are left of one
        edge = self._inside(env)
        rest = (For(self.lane, ForKind.SERIAL, guarded((edge,), tuple(stores))),)
        both = (If(whole, packed, rest),)
        return alloc(self.registers, (*self._turns((*active, whole), fetched), *self._turns(active, both)))

    def _repeats(self, stores: Sequence[Stmt]) -> list[Store]:
        """Those of all places along the axes for which a thread reads once."""
        found = []
        for place in product(*(range(extent_of(a.extent)) for a in self.repeated)):
            here: dict[Axis, Expr] = {a: const(n) for a, n in zip(self.repeated, place, strict=True)}
            for store in stores:
                assert isinstance(store, Store)
                indices = tuple(simplify(substitute(i, here)) for i in store.indices)
                found.append(Store(store.buffer, indices, simplify(substitute(store.value, here))))
        return found

    def _each_lane(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        return unrolled([self.lane], body) if body else ()

    def _turns(self, conditions: Sequence[Expr], body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        if not body:
            return ()
        inner = guarded(conditions, tuple(body))
        return unrolled([self.turn], inner) if extent_of(self.turn.extent) > 1 else inner

    # --- where a packet lies

    def _spot(self, flat: Expr) -> tuple[dict[Axis, Expr], tuple[Expr, ...], Expr | None]:
        """The value of every axis; when a packet lies inside the box; when all of its elements do, if not always."""
        base = self.base
        if base.options.flat:
            return self._flat_spot(flat)
        active = [lt(flat, self.count)]
        rest = flat
        env: dict[Axis, Expr] = {}
        whole: Expr | None = None
        for number, axis in reversed(list(enumerate(base.order))):
            places, part = self.places[axis], base.ranges[axis]
            outermost = all(self.places[a] == 1 for a in base.order[:number])
            own = const(0) if places == 1 else rest if outermost else simplify(rest % places)
            rest = simplify(rest // places)
            if axis in base.register:  # of which the box has all
                env[axis] = simplify(part.low + var(self.repeated[list(base.register).index(axis)]))
                continue
            size = self.lanes if axis is self.axis else 1
            first = simplify(own * size)
            if static(part.count) != places * size:
                active.append(lt(first, part.count))
                if size > 1 and not self._in_whole_packets():
                    whole = simplify(lt(first + (size - 1), part.count))
            env[axis] = simplify(part.low + first + (var(self.lane) if size > 1 else 0))
        left = drop_true([whole]) if whole is not None else ()
        return env, drop_true(active), all_of(left) if left else None

    def _flat_spot(self, packet: Expr) -> tuple[dict[Axis, Expr], tuple[Expr, ...], Expr | None]:
        """The same where rows lie one behind the other, all of a box together."""
        first = simplify(packet * self.lanes)
        rest = simplify(self._flat_begin() + first + var(self.lane))
        env: dict[Axis, Expr] = {}
        for number, axis in reversed(list(enumerate(self.base.order))):
            extent = extent_of(axis.extent)
            env[axis] = rest if number == 0 else simplify(rest % extent)
            rest = simplify(rest // extent)
        count = self._flat_count()
        known = static(count)
        active = [lt(packet, self.count), *([] if known is not None else [lt(first, count)])]
        left = [] if known is not None and known % self.lanes == 0 else [simplify(lt(first + (self.lanes - 1), count))]
        left = list(drop_true(left))
        return env, drop_true(active), all_of(left) if left else None

    def _flat_begin(self) -> Expr:
        begin: Expr = const(0)
        for axis in self.base.order:
            begin = begin * extent_of(axis.extent) + self.base.ranges[axis].low
        return simplify(begin)

    def _flat_count(self) -> Expr:
        count: Expr = const(1)
        for part in self.base.ranges.values():
            count = count * part.count
        return simplify(count)

    def _inside(self, env: dict[Axis, Expr]) -> Expr:
        """Whether a lane's element lies inside the box."""
        if self.base.options.flat:
            here: Expr = const(0)
            for axis in self.base.order:
                here = here * extent_of(axis.extent) + env[axis]
            own = join_divisions(linear(simplify(here - self._flat_begin()))).expr()
            return simplify(lt(own, self._flat_count()))
        return lt(simplify(env[self.axis] - self.base.ranges[self.axis].low), self.base.ranges[self.axis].count)

    def _in_whole_packets(self) -> bool:
        """Whether the box ends with a packet, wherever it begins."""
        part = self.base.ranges[self.axis]
        known = static(part.count)
        if known is not None:
            return known % self.lanes == 0
        low = linear(part.low)
        return all(n % self.lanes == 0 for n in (int(part.size), part.extent, low.constant, *low.terms.values()))

    # --- what is fetched first

    def _fetched(self, stores: Sequence[Store]) -> tuple[dict[Expr, Expr], list[Stmt]]:
        """What is read in packets, or once for all lanes, in registers of each turn."""
        now: dict[Expr, Expr] = {}
        made: list[Stmt] = []
        at = var(self.turn) if extent_of(self.turn.extent) > 1 else const(0)
        for node in certain_loads(*(store.value for store in stores)):
            packed = in_line(node, self.lane)
            if not packed and self.lane in axes_of(node):
                continue
            width = packet_width(self.lanes, node.dtype) if packed else 1
            shape = (extent_of(self.turn.extent), self.lanes // width if packed else 1, width)
            buffer = Buffer(self.base.names.fresh("beside"), shape, node.dtype, Memory.REGISTER)
            self.registers.append(buffer)
            if not packed:
                now[node] = load(buffer, (at, const(0), const(0)))
                made.append(Store(buffer, (at, const(0), const(0)), node))
                continue
            now[node] = load(buffer, (at, *self._place(width)))
            for number, near, place in self._packets(width, node.indices):
                move = Store(buffer, (at, const(number), var(near)), load(node.source, place))
                made.append(For(near, ForKind.VECTOR, (move,)))
        return now, made

    def _place(self, width: int) -> tuple[Expr, Expr]:
        return simplify(var(self.lane) // width), simplify(var(self.lane) % width)

    def _packets(self, width: int, indices: Sequence[Expr]) -> list[tuple[int, Axis, tuple[Expr, ...]]]:
        """(number, axis of its elements, where they lie) of every packet of the lanes."""
        found = []
        for number in range(self.lanes // width):
            near = Axis("near", width)
            here: dict[Axis, Expr] = {self.lane: simplify(var(near) + number * width)}
            found.append((number, near, tuple(simplify(substitute(x, here)) for x in indices)))
        return found
