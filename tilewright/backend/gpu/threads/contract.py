"""Lowers a contraction whose operands pass through shared memory: all threads load a step, then all use it.

Where the plan has several steps at once, they lie in a ring: while one is used the copies of those behind it are under
way, and one barrier a step is enough (pipeline.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tilewright.backend.gpu.maps.packets import flat_offset
from tilewright.backend.gpu.threads.nest import GpuNest, ThreadTile, drop_true, guarded
from tilewright.backend.gpu.threads.pipeline import commit, wait
from tilewright.ir.analysis.products import Factor, factors
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    all_of,
    axes_of,
    const,
    load,
    loads,
    lt,
    mul,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.loops import Barrier, Buffer, For, ForKind, If, Instruction, Memory, Scope, Stmt, Store
from tilewright.ir.forms.loops import Operand as Moved
from tilewright.lower.nesting import alloc
from tilewright.target.instruction_sets import LEAST_COPY_BYTES, PACKET_BYTES
from tilewright.tile_graph.algebra.propagate import extent_of

SYNC = Barrier(Scope.BLOCK)


@dataclass(frozen=True)
class StagedFactor:
    """A factor as the inner loop reads it: from its buffer in shared memory, or where it is."""

    factor: Factor
    staged: Buffer | None
    fragment: Buffer
    steps: tuple[Axis, ...]  # the register tile's axes it depends on


class GpuContract:
    """The steps of a contraction, on the positions and registers of a GpuNest."""

    def __init__(self, nest: GpuNest) -> None:
        self.base = nest
        self.step = nest.options.step
        self.length = prod(int(r.size) for r in nest.reduce_ranges.values())
        self.steps = -(-self.length // self.step)
        self.factors = factors(nest.nest.elements[0], nest.nest.axes, nest.nest.reduce_axes)
        self.stages = min(nest.options.at_once, self.steps)
        self.buffers = {f: self._stage(f) for f in self.factors if self._wants_stage(f)}

    def statements(self) -> tuple[Stmt, ...]:
        return self.base.in_rounds(self._round)

    def _wants_stage(self, factor: Factor) -> bool:
        """A factor read from shared memory alone is as near as staging would bring it."""
        if not factor.reductions:
            return False
        return any(self.base.access.read[n.source].buffer.memory is not Memory.SHARED for n in loads(factor.value))

    def _stage(self, factor: Factor) -> Buffer:
        base = self.base
        sizes = [base.places[a] * base.register.get(a, 1) for a in self._ordered(factor)]
        if sizes and self._reduction_first(factor):
            sizes[-1] += 1  # neighbouring threads write down a column: an odd row length spreads it over the banks
        elif sizes:
            sizes[-1] += spread(sizes, base.options.split, base.warp)
        ring = (self.stages,) if self.stages > 1 else ()
        buffer = Buffer(base.names.fresh("stage"), (*ring, self.step, *sizes), factor.value.dtype, Memory.SHARED)
        base.shared.append(buffer)
        return buffer

    def _ordered(self, factor: Factor) -> list[Axis]:
        return [a for a in self.base.order if a in factor.outputs]

    def _reduction_first(self, factor: Factor) -> bool:
        """Whether neighbouring threads load along the reduction, because that is what is contiguous."""
        if not self._ordered(factor):
            return False
        here = {a: var(a) for a in (*self.base.nest.axes, *self.base.nest.reduce_axes)}
        for node in loads(self.base.access.lower(substitute(factor.value, here))):
            total = linear(simplify(flat_offset(node)))
            if total.terms.get(var(self._ordered(factor)[-1])) == 1:
                return False
            if self.base.reduction and total.terms.get(var(self.base.reduction[-1])) == 1:
                return True
        return False

    # --- one round

    def _round(self, tile: ThreadTile) -> tuple[Stmt, ...]:
        base = self.base
        monoid = base.nest.monoid
        assert monoid is not None
        states = base.states(monoid, tile.shape, "acc")
        operands = [self._operand(f, tile) for f in self.factors]
        starts = base.initial(monoid, tile) if base.options.split == 1 else monoid.identity
        if base.nest.initial and base.options.split == 1:
            valid = [*tile.active, *tile.inside]
            starts = tuple(
                select(all_of(valid), v, i) if valid else v for v, i in zip(starts, monoid.identity, strict=True)
            )
        body: list[Stmt] = list(
            tile.around(tuple(Store(s, tile.index, v) for s, v in zip(states, starts, strict=True)))
        )
        if self.stages > 1:
            body.extend(self._pipelined(tile, operands, states))
        else:
            body.extend(self._one_by_one(tile, operands, states))
        if base.options.split > 1:
            body.extend(base.combine_shares(monoid, states, tile))
        body.extend(base.finish(monoid, states, tile))
        return alloc(states, body)

    def _one_by_one(self, tile: ThreadTile, operands: list[StagedFactor], states: list[Buffer]) -> list[Stmt]:
        loop = Axis("step", self.steps)
        start = simplify(var(loop) * self.step) if self.steps > 1 else const(0)
        inner = [*self._load_step(start), SYNC, *self._use_step(start, tile, operands, states)]
        if self.steps > 1 or self.base.rounds > 1:
            inner.append(SYNC)
        return [For(loop, ForKind.SERIAL, tuple(inner))] if self.steps > 1 else inner

    def _pipelined(self, tile: ThreadTile, operands: list[StagedFactor], states: list[Buffer]) -> list[Stmt]:
        """A step's place in the ring is free when all have used it: at the barrier of the next, whose copies of the
        last stage fill it."""
        ahead = self.stages - 1
        first = Axis("first", ahead)
        start = simplify(var(first) * self.step)
        body: list[Stmt] = [For(first, ForKind.SERIAL, (*self._load_step(start, var(first)), commit()))]
        loop = Axis("step", self.steps)
        later, slot = simplify(var(loop) + ahead), simplify(var(loop) % self.stages)
        copies = self._load_step(simplify(later * self.step), simplify(later % self.stages))
        inner = [wait(ahead - 1), SYNC, *guarded([lt(later, self.steps)], tuple(copies)), commit(),
                 *self._use_step(simplify(var(loop) * self.step), tile, operands, states, slot)]  # fmt: skip
        body.append(For(loop, ForKind.SERIAL, tuple(inner)))
        return [*body, SYNC] if self.base.rounds > 1 else body

    def _operand(self, factor: Factor, tile: ThreadTile) -> StagedFactor:
        steps = tuple(s for a, s in self._steps(tile).items() if a in factor.outputs)
        shape = tuple(extent_of(s.extent) for s in steps)
        fragment = Buffer(self.base.names.fresh("part"), shape, factor.value.dtype, Memory.REGISTER)
        return StagedFactor(factor, self.buffers.get(factor), fragment, steps)

    def _steps(self, tile: ThreadTile) -> dict[Axis, Axis]:
        tiled = [a for a in self.base.order if a in self.base.register]
        return dict(zip(tiled, tile.unrolled, strict=True))

    def _load_step(self, start: Expr, slot: Expr | None = None) -> list[Stmt]:
        """All threads fill the operands' buffers, or a place of their rings; what lies outside the box becomes zero."""
        return [s for factor, buffer in self.buffers.items() for s in self._fill(factor, buffer, start, slot)]

    def _fill(self, factor: Factor, buffer: Buffer, start: Expr, slot: Expr | None) -> tuple[Stmt, ...]:
        base = self.base
        axes = self._ordered(factor)
        sizes = {a: base.places[a] * base.register.get(a, 1) for a in axes}
        wide = self._packet(factor, axes, sizes)
        total = self.step * prod(sizes.values()) // wide
        trips = -(-total // base.threads)
        loop = Axis("fill", trips)
        flat = var(base.thread) + (var(loop) * base.threads if trips > 1 else const(0))
        order: list[Axis | None] = [None, *axes]  # None is the reduction; the last varies fastest
        if self._reduction_first(factor):
            order = [*axes, None]
        rest = simplify(flat)
        own: dict[Axis | None, Expr] = {}
        for number, item in reversed(list(enumerate(order))):
            size = self.step if item is None else sizes[item]
            if wide > 1 and number == len(order) - 1:
                size //= wide
            own[item] = rest if number == 0 else simplify(rest % size)
            rest = simplify(rest // size)
        lane = Axis("lane", wide)
        if wide > 1:
            own[axes[-1]] = simplify(own[axes[-1]] * wide + var(lane))
        point, cut = base.reduction_point(simplify(start + own[None]))
        env = {**{a: simplify(base.ranges[a].low + own[a]) for a in axes}, **point}
        edges = drop_true([lt(own[a], base.ranges[a].count) for a in axes if base.may_leave(a)])
        value = simplify(base.access.lower(substitute(factor.value, env)))
        place = (*(() if slot is None else (slot,)), own[None], *(own[a] for a in axes))
        zero = const(0, value.dtype)
        filled: tuple[Stmt, ...]
        if wide > 1:
            # a packet lies wholly inside or wholly outside the box
            first = [simplify(substitute(e, {lane: const(0)})) for e in edges]
            copy: Stmt = For(lane, ForKind.VECTOR, (Store(buffer, place, value),))
            if slot is not None:
                copy = self._under_way(buffer, place, value, lane)
            filled = (
                (If(all_of(first), (copy,), (For(lane, ForKind.VECTOR, (Store(buffer, place, zero),)),)),)
                if edges
                else (copy,)
            )
        elif slot is not None and _is_copied(value):
            copy = self._under_way(buffer, place, value, lane)
            filled = (If(all_of(edges), (copy,), (Store(buffer, place, zero),)),) if edges else (copy,)
        else:
            filled = (Store(buffer, place, select(all_of(edges), value, zero) if edges else value),)
        within = [lt(flat, total), *self._within(start, own[None]), *cut]
        body = guarded(within, filled)
        return (For(loop, ForKind.SERIAL, body),) if trips > 1 else body

    def _under_way(self, buffer: Buffer, place: tuple[Expr, ...], value: Expr, lane: Axis) -> Instruction:
        """An asynchronous copy of all lanes."""
        assert isinstance(value, Load)
        to, origin = (tuple(simplify(substitute(i, {lane: const(0)})) for i in x) for x in (place, value.indices))
        return Instruction(f"copy_async{lane.extent}", (Moved(buffer, to), Moved(value.source, origin)))

    def _packet(self, factor: Factor, axes: list[Axis], sizes: dict[Axis, int]) -> int:
        """Neighbouring elements that one load brings: where a row is contiguous and every piece of it aligned."""
        if not axes or not isinstance(factor.value, Load) or self._reduction_first(factor):
            return 1
        here = {a: var(a) for a in (*self.base.nest.axes, *self.base.nest.reduce_axes)}
        node = self.base.access.lower(substitute(factor.value, here))
        assert isinstance(node, Load)
        last = axes[-1]
        wide = PACKET_BYTES // node.source.dtype.bytes
        known = self.base.ranges[last]
        low = linear(known.low)
        even = [
            sizes[last],
            known.extent,
            low.constant,
            *low.terms.values(),
            0 if known.size >= known.extent else int(known.size),
        ]
        if wide < 2 or any(n % wide for n in even):
            return 1
        total = linear(simplify(flat_offset(node)))
        steps = [c for t, c in total.terms.items() if t is not var(last)]
        others = [t for t in total.terms if t is not var(last) and last in axes_of(t)]
        whole = isinstance(node.indices[-1], Expr) and linear(simplify(node.indices[-1])).terms.get(var(last)) == 1
        aligned = not others and all(c % wide == 0 for c in steps) and total.constant % wide == 0
        return wide if whole and aligned and total.terms.get(var(last)) == 1 else 1

    def _within(self, start: Expr, offset: Expr) -> list[Expr]:
        return [lt(start + offset, self.length)] if self.length % self.step else []

    def _use_step(
        self,
        start: Expr,
        tile: ThreadTile,
        operands: list[StagedFactor],
        states: list[Buffer],
        slot: Expr | None = None,
    ) -> tuple[Stmt, ...]:
        base = self.base
        split = base.options.split
        loop = Axis("k", -(-self.step // split))
        k = simplify(var(loop) * split + base.taker()[1])
        point, cut = base.reduction_point(simplify(start + k))
        body: list[Stmt] = []
        product: Expr | None = None
        for operand in operands:
            body.extend(self._fetch(operand, k, {**tile.env, **point}, tile, slot))
            part = load(operand.fragment, tuple(var(s) for s in operand.steps))
            product = part if product is None else mul(product, part)
        assert product is not None and base.nest.monoid is not None
        body.extend(tile.around(base.update(base.nest.monoid, states, tile.index, [product])))
        inner = alloc([o.fragment for o in operands], body)
        inner = guarded([lt(k, self.step), *self._within(start, k), *cut], inner)
        return guarded(tile.active, (For(loop, ForKind.SERIAL, inner),))

    def _fetch(
        self, operand: StagedFactor, k: Expr, env: dict[Axis, Expr], tile: ThreadTile, slot: Expr | None
    ) -> tuple[Stmt, ...]:
        axes = self._ordered(operand.factor)
        if operand.staged is not None:
            place = (*(() if slot is None else (slot,)), k, *(tile.coordinates[a] for a in axes))
            value: Expr = load(operand.staged, place)
        else:
            value = simplify(self.base.access.lower(substitute(operand.factor.value, env)))
            steps = self._steps(tile)
            edges = [
                lt(tile.coordinates[a], self.base.ranges[a].count)
                for a in axes
                if a in steps and self.base.may_leave(a)
            ]
            edges = list(drop_true(edges))
            if edges and loads(value):
                value = select(all_of(edges), value, const(0, value.dtype))
        return tile.around((Store(operand.fragment, tuple(var(s) for s in operand.steps), value),), operand.steps)


def _is_copied(value: Expr) -> bool:
    """Whether an element comes as it lies in memory, and asynchronous copies are that narrow."""
    return isinstance(value, Load) and value.source.memory is Memory.GLOBAL and value.dtype.bytes == LEAST_COPY_BYTES


def spread(sizes: list[int], split: int, warp: int) -> int:
    """Padding of lines after which the rows that the shares of a warp read at once lie in banks of their own."""
    for pad in range(0, warp, 4) if split > 1 else ():
        if prod(sizes[:-1]) * (sizes[-1] + pad) % warp == warp // split:
            return pad
    return 0
