"""Lowers one nest to what the threads of a GPU block do: each takes positions of the nest's box by its flat index.

Five ways: a position a thread; packets of a map's neighbours; a reduction shared by neighbouring threads and combined
by shuffles, of one output or of several that read an operand together; a contraction whose operands go through shared
memory in steps, with a register tile a thread, or with fragments of matrices a warp.
Barriers and shuffles stand outside every condition that depends on the thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import e, log2, prod

from tilewright.backend.gpu.maps.packets import chosen_places, in_registers
from tilewright.backend.gpu.threads.plan import shares_sum
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Monoid
from tilewright.ir.forms.dtypes import float32
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    all_of,
    axes_of,
    const,
    eq,
    is_op,
    le,
    load,
    loads,
    lt,
    op,
    replace_nodes,
    rewrite,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.loops import (
    Barrier,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Memory,
    Operand,
    Scope,
    Stmt,
    Store,
)
from tilewright.ir.meaning.instruct import WARP
from tilewright.lower.access import Access
from tilewright.lower.nesting import alloc, serial, unrolled, walked
from tilewright.lower.register_block import BufferNames
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of, whole
from tilewright.tile_graph.plan.form import Hold, Leaf, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm, ThreadForm

_SMALL = 1e-30  # the reciprocal of a larger number is a normal one
_LOG2_E = log2(e)


@dataclass(frozen=True)
class ThreadTile:
    """What one thread works on in one round: the value of every output axis, and when that is inside the box."""

    env: dict[Axis, Expr]
    active: tuple[Expr, ...]  # the same for the whole register tile
    inside: tuple[Expr, ...]  # by position of the register tile
    unrolled: tuple[Axis, ...]
    coordinates: dict[Axis, Expr]  # relative to the box

    @property
    def index(self) -> tuple[Expr, ...]:
        return tuple(var(a) for a in self.unrolled)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(extent_of(a.extent) for a in self.unrolled)

    def around(self, body: tuple[Stmt, ...], axes: Sequence[Axis] | None = None) -> tuple[Stmt, ...]:
        return unrolled(self.unrolled if axes is None else axes, body)


def thread_options(leaf: Leaf) -> ThreadForm:
    """Of a leaf that threads run; of one on tensor cores as if they passed its operands in the same steps."""
    form = leaf.form
    return ThreadForm(split=form.split, step=form.step) if isinstance(form, FragmentForm) else leaf.options(ThreadForm)


class GpuNest:
    """The lowering of one nest under one plan. `shared` collects buffers of its own that it needs meanwhile: they are
    allocated around what needs them and no further, so that other nests, and its own next turn, may have the room."""

    def __init__(
        self, nest: Nest, plan: Leaf, box: Box, reduce_box: dict[Axis, Range], access: Access, names: BufferNames,
        thread: Axis, warps: Tile | None = None, operands: Sequence[Hold] = (), warp: int = WARP, begun: int = 0,
    ) -> None:  # fmt: skip
        self.nest = nest
        self.plan = plan
        self.options = thread_options(plan)
        self.ranges = dict(zip(nest.axes, box, strict=True))
        self.reduce_ranges = {a: reduce_box.get(a, whole(extent_of(a.extent))) for a in nest.reduce_axes}
        self.access = access
        self.names = names
        self.thread = thread
        self.warp = warp  # threads that exchange values
        self.shared: list[Buffer] = []
        self.warps = warps
        self.operands = operands
        self.register = {nest.named(a): n for a, n in plan.register}
        order = [nest.named(a) for a in plan.order]
        self.order = [a for a in order if a in nest.axes]
        self.reduction = [a for a in order if a in nest.reduce_axes]
        self.places = {a: -(-int(r.size) // self.register.get(a, 1)) for a, r in self.ranges.items()}
        self.count = prod(self.places.values())
        self.threads = extent_of(thread.extent)
        self.takers = self.threads // self.options.split  # threads that take a position of their own
        self.rounds = -(-self.count // self.takers)
        # threads that a leaf before it has, which it does not wait for: where enough are left, it takes those
        asks = self.count * self.options.split
        self.first = begun if shares_sum(plan, nest, warp) and begun + asks <= self.threads else 0
        self.end = self.first + asks

    def statements(self) -> tuple[Stmt, ...]:
        return self.in_rounds(self._one_round)

    # --- who computes what

    def in_rounds(self, body: object) -> tuple[Stmt, ...]:
        """`body(tile)` for every round of positions."""
        assert callable(body)
        if self.rounds == 1:
            return tuple(body(self.thread_tile(const(0))))
        loop = Axis("round", self.rounds)
        return (For(loop, ForKind.SERIAL, tuple(body(self.thread_tile(var(loop))))),)

    def taker(self) -> tuple[Expr, Expr]:
        """(which position a thread starts from, which share of its reduction it has)."""
        split = self.options.split
        thread = var(self.thread) - self.first if self.first else var(self.thread)
        if split == 1:
            return thread, const(0)
        if self.along_reduction or split > self.warp:
            return simplify(thread // split), simplify(thread % split)
        # neighbours walk the outputs; the shares of one position are spread over the warp
        near = self.warp // split
        return simplify(thread // self.warp * near + thread % near), simplify(thread % self.warp // near)

    @property
    def along_reduction(self) -> bool:
        return self.plan.vector is not None and self.plan.vector[0] == "r"

    def thread_tile(self, round_: Expr) -> ThreadTile:
        flat = simplify(self.taker()[0] + round_ * self.takers)
        active = [lt(flat, self.count), *([le(self.first, var(self.thread))] if self.first else [])]
        rest = flat
        coordinates: dict[Axis, Expr] = {}
        unrolled: list[Axis] = []
        for number, axis in reversed(list(enumerate(self.order))):
            places = self.places[axis]
            outermost = all(self.places[a] == 1 for a in self.order[:number])
            own = const(0) if places == 1 else rest if outermost else simplify(rest % places)
            rest = simplify(rest // places)
            if self.register.get(axis, 1) > 1:
                # a thread's outputs lie `places` apart: neighbours then touch neighbouring addresses
                step = Axis(f"{axis.name}_u", self.register[axis])
                unrolled.append(step)
                own = simplify(own + var(step) * places)
            coordinates[axis] = own
        unrolled.reverse()
        env = {a: simplify(self.ranges[a].low + c) for a, c in coordinates.items()}
        edges = [lt(c, self.ranges[a].count) for a, c in coordinates.items() if self.may_leave(a)]
        steps = set(unrolled)
        active += [e for e in edges if not steps.intersection(axes_of(e))]
        inside = [e for e in edges if steps.intersection(axes_of(e))]
        return ThreadTile(env, drop_true(active), drop_true(inside), tuple(unrolled), coordinates)

    def may_leave(self, axis: Axis) -> bool:
        """Whether positions along the axis may lie outside: register tiles that stick out, or a cut last tile."""
        covered = self.places[axis] * self.register.get(axis, 1)
        return static(self.ranges[axis].count) != covered

    # --- a position a thread, or a few threads a position

    def _one_round(self, tile: ThreadTile) -> tuple[Stmt, ...]:
        monoid = self.nest.monoid
        if monoid is None:
            return guarded(tile.active, tile.around(guarded(tile.inside, self.stores(tile, {}))))
        states = self.states(monoid, tile.shape, "acc")
        if self.options.split == 1:
            starts = self.initial(monoid, tile)
            body = (
                *(Store(s, (), v) for s, v in zip(states, starts, strict=True)),
                *self._reduction_loops(tile, states, monoid),
                *self.stores(tile, self.results(monoid, states, ())),
            )
            return alloc(states, guarded(tile.active, body))
        return alloc(states, self._shared_reduction(tile, states, monoid))

    def _reduction_loops(self, tile: ThreadTile, states: Sequence[Buffer], monoid: Monoid) -> tuple[Stmt, ...]:
        packet = self._packet(tile)
        if packet == 1:
            loops, env = walked(self.reduction, self.reduce_ranges)
            return serial(loops, self.update(monoid, states, (), self.elements({**tile.env, **env})))
        loops, env = walked(self.reduction[:-1], self.reduce_ranges)
        inner = self.reduce_ranges[self.reduction[-1]]
        near, lane = Axis("near", int(inner.size) // packet), Axis("lane", packet)
        start = simplify(inner.low + (var(near) * packet if int(inner.size) > packet else const(0)))
        env[self.reduction[-1]] = simplify(start + var(lane))
        body = self._in_packets(states, monoid, self.elements({**tile.env, **env}), lane, tile)
        return serial([*loops, *([near] if int(inner.size) > packet else [])], body)

    def _shared_reduction(self, tile: ThreadTile, states: Sequence[Buffer], monoid: Monoid) -> tuple[Stmt, ...]:
        split = self.options.split
        share = self.taker()[1]
        packet = self.plan.lanes if self.along_reduction else 1
        count = prod(int(r.size) for r in self.reduce_ranges.values()) // packet
        loop = Axis("share", -(-count // split))
        is_once = loop.extent == 1
        flat = simplify((const(0) if is_once else var(loop)) * split + share)
        lane = Axis("lane", packet)
        env, valid = self.reduction_point(flat, lane)
        conditions = drop_true([lt(flat, count), *valid])
        step = guarded(conditions, self._in_packets(states, monoid, self.elements({**tile.env, **env}), lane, tile))
        starts = tuple(Store(s, tile.index, v) for s, v in zip(states, monoid.identity, strict=True))
        body: list[Stmt] = list(tile.around(starts))
        body.extend(guarded(tile.active, step if is_once else (For(loop, ForKind.SERIAL, step),)))
        if not tile.unrolled:
            return (*body, *self.combine_shares(monoid, states, tile), *self.finish(monoid, states, tile))
        own = self.states(monoid, (), "own")
        halved, place, share = self._halve_shares(monoid, states, own, tile)
        env = {a: simplify(substitute(e, place)) for a, e in tile.env.items()}
        alone = replace(tile, env=env, unrolled=(), inside=tuple(substitute(c, place) for c in tile.inside))
        return (*body, *alloc(own, (*halved, *self.finish(monoid, own, alone, share))))

    def _in_packets(
        self, states: Sequence[Buffer], monoid: Monoid, elements: Sequence[Expr], lane: Axis, tile: ThreadTile
    ) -> tuple[Stmt, ...]:
        """Neighbours one after the other, what they read in memory fetched together: once what a whole register tile
        reads."""
        if lane.extent == 1:
            here = {lane: const(0)}
            values = [simplify(substitute(e, here)) for e in elements]
            return tile.around(guarded(tile.inside, self.update(monoid, states, tile.index, values)))
        steps = set(tile.unrolled)
        common = [in_registers(self.names, e, lane, which=lambda n: not steps.intersection(axes_of(*n.indices)))
                  for e in elements]  # fmt: skip
        found = [in_registers(self.names, value, lane) for value, _, _ in common]
        inner = For(lane, ForKind.UNROLL, self.update(monoid, states, tile.index, [value for value, _, _ in found]))
        each = alloc([b for _, _, kept in found for b in kept], (*(s for _, moved, _ in found for s in moved), inner))
        fetched = [stmt for _, moved, _ in common for stmt in moved]
        return alloc([b for _, _, kept in common for b in kept], (*fetched, *tile.around(guarded(tile.inside, each))))

    def _halve_shares(
        self, monoid: Monoid, states: Sequence[Buffer], own: Sequence[Buffer], tile: ThreadTile
    ) -> tuple[tuple[Stmt, ...], dict[Axis, Expr], Expr]:
        """The outputs of a register tile from the shares of a warp: lanes that are far apart give each other half of
        what they have, until each has one output, which those beside it have too. Then `own` is that, with its place
        in the tile, and a lane's number among those that have it. Of eight outputs that is 9 exchanges, not 40."""
        lane, distance = self.taker()[1], self.options.split // 2
        given, other = (self.states(monoid, (), stem) for stem in ("given", "other"))
        place: dict[Axis, Expr] = {}
        body: list[Stmt] = []

        def exchanged(at: tuple[Expr, ...], with_: tuple[Expr, ...] | None) -> None:
            upper = eq(simplify(lane // distance % 2), 1)
            for state, out in zip(states, given, strict=True):
                kept = load(state, at)
                body.append(Store(out, (), kept if with_ is None else select(upper, kept, load(state, with_))))
                if with_ is not None:
                    body.append(Store(state, at, select(upper, load(state, with_), kept)))
            for out, into in zip(given, other, strict=True):
                body.append(Instruction("shuffle_xor", (Operand(into, ()), Operand(out, ())), (const(distance),)))
            body.extend(self.update(monoid, states, at, [load(o, ()) for o in other]))

        for number, axis in enumerate(tile.unrolled):
            left, first = extent_of(axis.extent), simplify(const(0))
            behind = list(itertools.product(*(range(extent_of(a.extent)) for a in tile.unrolled[number + 1 :])))
            while left > 1:
                left //= 2
                first = simplify(first + lane // distance % 2 * left)
                for near, rest in itertools.product(range(left), behind):
                    before = [const(0)] * number
                    after = [const(n) for n in rest]
                    exchanged((*before, const(near), *after), (*before, const(near + left), *after))
                distance //= 2
            place[axis] = first
        share = simplify(lane % (2 * distance)) if distance else const(0)
        start = (const(0),) * len(tile.unrolled)
        while distance:
            exchanged(start, None)
            distance //= 2
        body.extend(Store(o, (), load(s, start)) for o, s in zip(own, states, strict=True))
        return alloc([*given, *other], body), place, share

    def _packet(self, tile: ThreadTile) -> int:
        """Neighbours along a reduction of its own that a thread takes at a time: as many as memory hands over in one
        packet, where some operand lies there beside each other."""
        if not self.reduction:  # of a scalar
            return 1
        inner = self.reduce_ranges[self.reduction[-1]]
        if static(inner.count) != int(inner.size):
            return 1
        for packet in (8, 4, 2):
            if int(inner.size) % packet:
                continue
            lane = Axis("lane", packet)
            env, _ = self.reduction_point(const(0), lane)
            if any(in_registers(self.names, e, lane)[2] for e in self.elements({**tile.env, **env})):
                return packet
        return 1

    def combine_shares(self, monoid: Monoid, states: Sequence[Buffer], tile: ThreadTile) -> tuple[Stmt, ...]:
        """Every thread of a position gets the whole reduction; all threads take part."""
        split = min(self.options.split, self.warp)
        distance = 1 if self.along_reduction else self.warp // split
        others = self.states(monoid, (), "other")
        combine: list[Stmt] = []
        for _ in range(split.bit_length() - 1):
            for state, other in zip(states, others, strict=True):
                operands = (Operand(other, ()), Operand(state, tile.index))
                combine.append(Instruction("shuffle_xor", operands, (const(distance),)))
            combine.extend(self.update(monoid, states, tile.index, [load(o, ()) for o in others]))
            distance *= 2
        within = tile.around(alloc(others, combine))
        return within if self.options.split <= self.warp else (*within, *self._of_all_warps(monoid, states))

    def _of_all_warps(self, monoid: Monoid, states: Sequence[Buffer]) -> tuple[Stmt, ...]:
        """The shares of the warps of a position, which meet in shared memory."""
        warps = self.options.split // self.warp
        tables = [Buffer(self.names.fresh("shares"), (self.threads // self.warp,), s.dtype, Memory.SHARED)
                  for s in states]  # fmt: skip
        self.shared.extend(tables)
        thread, first = var(self.thread), simplify(self.taker()[0] * warps)
        put = [Store(t, (simplify(thread // self.warp),), load(s, ())) for t, s in zip(tables, states, strict=True)]
        body: list[Stmt] = [Barrier(Scope.BLOCK)] if self.rounds > 1 else []
        body.extend((If(eq(simplify(thread % self.warp), 0), tuple(put)), Barrier(Scope.BLOCK)))
        # all in the same order, so that all have the same
        body.extend(Store(s, (), load(t, (first,))) for s, t in zip(states, tables, strict=True))
        for number in range(1, warps):
            body.extend(self.update(monoid, states, (), [load(t, (simplify(first + number),)) for t in tables]))
        return tuple(body)

    def finish(
        self, monoid: Monoid, states: Sequence[Buffer], tile: ThreadTile, share: Expr | None = None
    ) -> tuple[Stmt, ...]:
        """One thread of a position stores, and it alone reads what the accumulators should have started from; each
        does where they keep it."""
        last: list[Stmt] = []
        if self.nest.initial and self.options.split > 1:
            now: dict[Expr, Expr] = dict(zip(monoid.left, self.initial(monoid, tile), strict=True))
            now.update({s: load(b, tile.index) for s, b in zip(monoid.right, states, strict=True)})
            last.extend(self._assign(states, tile.index, [replace_nodes(c, now) for c in monoid.combine]))
        last.extend(self.stores(tile, self.results(monoid, states, tile.index)))
        kept = [place.buffer.memory for t in self.nest.stores for place in self.access.write[t]]
        is_known = all(memory is Memory.REGISTER for memory in kept)  # all that share it keep it
        share = self.taker()[1] if share is None else share
        alone = [eq(share, 0)] if self.options.split > 1 and not is_known else []
        return guarded([*tile.active, *alone], tile.around(guarded(tile.inside, tuple(last))))

    def reduction_point(self, flat: Expr, lane: Axis | None = None) -> tuple[dict[Axis, Expr], list[Expr]]:
        """Reduction axes from a flat index, and the conditions that cut ranges add; the index counts packets of the
        innermost axis where `lane` is one of their elements."""
        env: dict[Axis, Expr] = {}
        conditions: list[Expr] = []
        rest = flat
        for number, axis in reversed(list(enumerate(self.reduction))):
            extent = self.reduce_ranges[axis]
            packet = extent_of(lane.extent) if lane is not None and number == len(self.reduction) - 1 else 1
            size = int(extent.size) // packet
            own = const(0) if size == 1 else rest if number == 0 else simplify(rest % size)
            rest = simplify(rest // size)
            if packet > 1 and lane is not None:
                own = simplify(own * packet + var(lane))
            env[axis] = simplify(extent.low + own)
            if static(extent.count) != int(extent.size):
                conditions.append(simplify(lt(own, extent.count)))
        return env, conditions

    # --- pieces

    def elements(self, env: dict[Axis, Expr]) -> list[Expr]:
        lowered = (simplify(self.access.lower(substitute(quick_powers(e), env))) for e in self.nest.elements)
        return [chosen_places(e) for e in lowered]

    def initial(self, monoid: Monoid, tile: ThreadTile) -> tuple[Expr, ...]:
        if not self.nest.initial:
            return monoid.identity
        return tuple(simplify(self.access.lower(substitute(v, tile.env))) for v in self.nest.initial)

    def states(self, monoid: Monoid, shape: tuple[int, ...], stem: str) -> list[Buffer]:
        return [Buffer(self.names.fresh(stem), shape, s.dtype, Memory.REGISTER) for s in monoid.left]

    def results(self, monoid: Monoid, states: Sequence[Buffer], index: tuple[Expr, ...]) -> dict[Expr, Expr]:
        """What the epilogue reads in place of the accumulated tensors."""
        now: dict[Expr, Expr] = {s: load(b, index) for s, b in zip(monoid.left, states, strict=True)}
        here = [var(a) for a in self.nest.axes]
        return {load(t, here): replace_nodes(f, now) for t, f in zip(self.nest.accumulated, monoid.final, strict=True)}

    def update(
        self, monoid: Monoid, states: Sequence[Buffer], index: tuple[Expr, ...], right: Sequence[Expr]
    ) -> tuple[Stmt, ...]:
        """states[index] = combine(states[index], right), all components at once."""
        now: dict[Expr, Expr] = {s: load(b, index) for s, b in zip(monoid.left, states, strict=True)}
        now.update(dict(zip(monoid.right, right, strict=True)))
        return self._assign(states, index, [replace_nodes(c, now) for c in monoid.combine])

    def _assign(self, states: Sequence[Buffer], index: tuple[Expr, ...], values: Sequence[Expr]) -> tuple[Stmt, ...]:
        if len(states) == 1:
            return (Store(states[0], index, values[0]),)
        fresh = [Buffer(self.names.fresh("next"), (), s.dtype, Memory.REGISTER) for s in states]
        body = [*(Store(b, (), v) for b, v in zip(fresh, values, strict=True)),
                *(Store(s, index, load(b, ())) for s, b in zip(states, fresh, strict=True))]  # fmt: skip
        return alloc(fresh, body)

    def stores(self, tile: ThreadTile, results: dict[Expr, Expr]) -> tuple[Store, ...]:
        logical = tuple(tile.env[a] for a in self.nest.axes)
        body: list[Store] = []
        for tensor, value in zip(self.nest.stores, self.nest.values, strict=True):
            final = self.access.lower(substitute(replace_nodes(quick_powers(value), results), tile.env))
            body.extend(self.access.stores(tensor, logical, chosen_places(simplify(final))))
        return tuple(body)


def quick_powers(value: Expr) -> Expr:
    """The value with exp as the instruction that there is has it, a power of two, where it is taken of numbers of 16
    bits: up to where the result is zero the error is a hundredth of theirs."""

    def rule(node: Expr) -> Expr | None:
        if not is_op(node, "exp") or node.dtype is not float32 or any(n.dtype.bits > 16 for n in loads(node)):
            return None
        scale, inner = const(_LOG2_E, float32), node.args[0]
        if is_op(inner, "sub"):  # what is the same for a whole row is scaled once: an element takes one multiply-add
            return op("exp2", op("sub", op("mul", inner.args[0], scale), op("mul", inner.args[1], scale)))
        return op("exp2", op("mul", inner, scale))

    return rewrite(quick_erf(value), rule)


def quick_erf(value: Expr) -> Expr:
    """The value with erf of a quotient by a number as erf of a product: a unit in the last place of what it is taken of
    is a tenth of its own error, and a division that is rounded once takes four instructions more."""

    def rule(node: Expr) -> Expr | None:
        if not is_op(node, "erf") or node.dtype is not float32 or not is_op(node.args[0], "div"):
            return None
        above, below = node.args[0].args
        if not isinstance(below, Const) or not _SMALL < abs(below.value) < 1 / _SMALL:
            return None
        return op("erf", op("mul", above, const(1 / below.value, float32)))

    return rewrite(value, rule)


def drop_true(conditions: Sequence[Expr]) -> tuple[Expr, ...]:
    shorter = [simplify(c) for c in conditions]
    return tuple(c for c in shorter if not (isinstance(c, Const) and c.value))


def guarded(conditions: Sequence[Expr], body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    left = drop_true(conditions)
    return (If(all_of(left), body),) if left else body
