"""What becomes of the sums that a block's warps keep in fragments: the epilogue on them, and their way to memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

from tilewright.backend.gpu.maps.packets import (
    certain_loads,
    in_line,
    in_packets,
    in_registers,
    packet_place,
    packets_of,
)
from tilewright.backend.gpu.matrix.sides import Side, Sides
from tilewright.backend.gpu.threads.nest import GpuNest, ThreadTile, guarded
from tilewright.backend.gpu.threads.pipeline import sync
from tilewright.intrinsics.gpu_matrix import MatrixForm
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.compute import Monoid
from tilewright.ir.forms.expr import Axis, Expr, Load, axes_of, const, load, lt, replace_nodes, substitute, var
from tilewright.ir.forms.loops import PREFETCH, Buffer, For, ForKind, Instruction, Memory, Operand, Stmt, Store
from tilewright.lower.nesting import alloc, serial, unrolled
from tilewright.target.instruction_sets import BANK_ROW_BYTES
from tilewright.tile_graph.algebra.propagate import extent_of

_TRIPS_AT_ONCE, _MOST_AT_ONCE = 4, 8  # of the epilogue, one behind the other in the text
SUMS_PAD = 8  # elements: four lines of pairs of a tile of sums lie in banks of their own


class SumsOfWarps(Protocol):
    """The block of a product whose sums its warps keep: where each lane's are."""

    base: GpuNest
    form: MatrixForm
    sides: Sides
    lane: Expr
    group: Expr
    groups: int
    block_rows: int
    block_columns: int
    fragments: tuple[int, int]

    def warp_place(self) -> tuple[Expr, Expr]: ...
    def coordinates(
        self, side: Side, flat: Expr, lane: Expr | None = None, packet: int = 1
    ) -> tuple[dict[Axis, Expr], list[Expr]]: ...


class MatrixEpilogue:
    """Either way, for the block of a product."""

    def __init__(self, block: SumsOfWarps) -> None:
        self.block = block

    def on_fragments(self, total: Buffer, tile: ThreadTile) -> tuple[Stmt, ...]:
        """The epilogue on the sums that a lane keeps; neighbours along the columns are stored as one."""
        base = self.block.base
        monoid = base.nest.monoid
        assert monoid is not None
        if not self._in_pairs():
            return base.finish(monoid, [total], tile)
        i, j, e = tile.unrolled
        half, pair, lane = Axis("half", 2), Axis("pair", 2), Axis("lane", 2)

        def at(second: Axis) -> dict[Axis, Expr]:
            return {e: simplify(var(half) * 2 + var(second))}

        body: list[Stmt] = []
        for store in base.stores(tile, base.results(monoid, [total], tile.index)):
            kept = Buffer(base.names.fresh("pair"), (2,), store.value.dtype, Memory.REGISTER)
            value = simplify(substitute(store.value, at(pair)))
            place = tuple(simplify(substitute(x, at(lane))) for x in store.indices)
            moved = For(lane, ForKind.VECTOR, (Store(store.buffer, place, load(kept, (var(lane),))),))
            body.extend(alloc([kept], (For(pair, ForKind.UNROLL, (Store(kept, (var(pair),), value),)), moved)))
        inside = [simplify(substitute(substitute(x, at(pair)), {pair: const(0)})) for x in tile.inside]
        return unrolled([i, j, half], guarded(inside, tuple(body)))

    def _in_pairs(self) -> bool:
        """Whether two neighbouring columns are both inside the box or both outside, and one behind the other."""
        part = self.block.base.ranges[self.block.sides.columns.axes[-1]]
        even = [int(part.size)]
        if int(part.size) < part.extent:
            low = linear(part.low)
            even.extend((part.extent, low.constant, *low.terms.values()))
        return all(n % 2 == 0 for n in even)

    def asked(
        self, total: Buffer, fixed: dict[Axis, Expr], valid: Sequence[Expr], starts: tuple[Expr, Expr]
    ) -> tuple[Stmt, ...]:
        """What the epilogue reads in packets, asked for before the sum: weights that other layers have driven out of
        the L2 cache, and a residual, come from device memory, which takes longer than what is left to do."""
        block, base = self.block, self.block.base
        monoid = base.nest.monoid
        assert monoid is not None
        size = base.plan.lanes
        packets = block.block_columns // size
        row, packet, lane = Axis("row", block.block_rows), Axis("packet", packets), Axis("lane", size)
        own, inside = block.coordinates(block.sides.rows, simplify(starts[0] + var(row)))
        there = simplify(starts[1] // size + var(packet))
        across, limits = block.coordinates(block.sides.columns, there, var(lane), size)
        env = {**fixed, **{a: simplify(base.ranges[a].low + x) for a, x in (*own.items(), *across.items())}}
        whole = Buffer("sums", (block.groups, block.block_rows, block.block_columns), total.dtype, Memory.SHARED)
        results = self._of_all_groups(monoid, whole, (const(0), var(row), var(lane)))
        stores = base.stores(ThreadTile(env, (), (), (lane,), {}), results)
        reads = [n for n in certain_loads(*(simplify(store.value) for store in stores))
                 if n.source.memory is Memory.GLOBAL and in_line(n, lane)]  # fmt: skip
        body: list[Stmt] = []
        for by_row in (False, True):
            places: dict[tuple[Buffer, tuple[Expr, ...]], int] = {}
            for node in reads:
                if (row in axes_of(*node.indices)) == by_row:
                    place = tuple(simplify(substitute(i, {lane: const(0)})) for i in node.indices)
                    places[node.source, place] = max(1, BANK_ROW_BYTES // (size * node.dtype.bytes)) if by_row else 1
            guards = [simplify(substitute(x, {lane: const(0)})) for x in (*valid, *limits, *(inside if by_row else ()))]
            for (buffer, place), near in places.items():
                ask = Instruction(PREFETCH, (Operand(buffer, place),))
                body.extend(self._shared_out(ask, guards, row if by_row else None, packet, near))
        return tuple(body)

    def _shared_out(
        self, ask: Instruction, guards: Sequence[Expr], row: Axis | None, packet: Axis, near: int
    ) -> tuple[Stmt, ...]:
        """One request for every line of a tile, of `near` packets each, or of a row of it, thread by thread."""
        base = self.block.base
        lines = -(-extent_of(packet.extent) // near)
        count = lines * (1 if row is None else extent_of(row.extent))
        trips = -(-count // base.threads)
        if trips > (1 if row is None else _TRIPS_AT_ONCE):
            return ()
        made: list[Stmt] = []
        for trip in range(trips):
            flat = simplify(var(base.thread) + trip * base.threads)
            now: dict[Axis, Expr] = {packet: simplify(flat % lines * near) if row is not None else flat}
            if row is not None:
                now[row] = simplify(flat // lines)
            (operand,) = ask.operands
            place = tuple(simplify(substitute(x, now)) for x in operand.origin)
            conditions = [simplify(substitute(x, now)) for x in guards]
            conditions += [lt(flat, count)] if (trip + 1) * base.threads > count else []
            made.extend(guarded(conditions, (Instruction(PREFETCH, (Operand(operand.buffer, place),)),)))
        return tuple(made)

    def in_rows(
        self, total: Buffer, fixed: dict[Axis, Expr], valid: Sequence[Expr], starts: tuple[Expr, Expr], reused: bool
    ) -> tuple[Stmt, ...]:
        """The epilogue in packets of neighbouring columns: the sums go through shared memory, so that lines of memory
        are read and written whole, which lanes of a fragment would touch in pieces."""
        block, base = self.block, self.block.base
        size = base.plan.lanes
        monoid = base.nest.monoid
        assert monoid is not None
        size_of = (block.groups, block.block_rows, block.block_columns + SUMS_PAD)
        sums = Buffer(base.names.fresh("sums"), size_of, total.dtype, Memory.SHARED)
        base.shared.append(sums)
        packets = block.block_columns // size
        count = block.block_rows * packets
        trips = -(-count // base.threads)
        at_once = self._trips_at_once(trips)
        loops = [Axis("trip", trips // at_once), Axis("next", at_once)]
        trip = sum((var(a) * n for a, n in zip(loops, (at_once, 1), strict=True) if a.extent != 1), const(0))
        flat = simplify(var(base.thread) + trip * base.threads)
        row, packet = simplify(flat // packets), simplify(flat % packets)
        lane = Axis("lane", size)
        own, inside = block.coordinates(block.sides.rows, simplify(starts[0] + row))
        across, limits = block.coordinates(block.sides.columns, simplify(starts[1] // size + packet), var(lane), size)
        env = {**fixed, **{a: simplify(base.ranges[a].low + x) for a, x in (*own.items(), *across.items())}}
        whole = [simplify(substitute(x, {lane: const(0)})) for x in (*valid, *inside, *limits)]
        index = (const(0), row, simplify(packet * size + var(lane)))
        tile = ThreadTile(env, (), (), (lane,), {})

        def stays(read: Load) -> bool:
            """Whether a thread reads the same in all trips, the columns being inside: it is read once for all."""
            return read.source.memory is Memory.GLOBAL and not limits and not set(loops) & set(axes_of(*read.indices))

        before: list[Stmt] = []
        held: list[Buffer] = []
        read: list[Stmt] = []
        body: list[Stmt] = []
        registers: list[Buffer] = []
        turn = loops[1] if at_once > 1 else None
        for store in base.stores(tile, self._of_all_groups(monoid, sums, index)):
            value, first, constant = in_registers(base.names, simplify(store.value), lane, which=stays)
            before.extend(first)
            held.extend(constant)
            value, fetched, kept = in_registers(base.names, value, lane, turn)
            read.extend(fetched)
            registers.extend(kept)
            out = packets_of(base.names.fresh("out"), lane, store.value.dtype)
            inner = For(lane, ForKind.UNROLL, (Store(out, packet_place(out, lane), value),))
            body.extend(alloc([out], (inner, *in_packets(store.buffer, store.indices, out, lane, is_load=False))))
        guards = [*whole, *([lt(flat, count)] if count % base.threads else [])]
        # all that the trips read is under way before the first of them waits for its own, whatever conditions they have
        phases = [(*read, *body)] if turn is None else [tuple(read), tuple(body)]
        turns = [s for phase in phases if phase for s in unrolled([loops[1]] if turn else [], guarded(guards, phase))]
        end = (sync(),) if reused else ()
        walked = serial([loops[0]] if trips > at_once else [], alloc(registers, turns))
        return (*self._put_down(total, sums), sync(), *alloc(held, (*before, *walked)), *end)

    def _trips_at_once(self, trips: int) -> int:
        """Trips that read together, all written out: as many as registers of the sums, which are free again, have room
        for what each reads and makes, and there is a whole number of such turns."""
        block, size = self.block, self.block.base.plan.lanes
        sums = prod(block.fragments) * block.form.c.elements
        read = sum(n.dtype.bytes for n in block.base.nest.value_loads if n.source not in block.base.nest.accumulated)
        room = max(1, sums // max(1, size * (2 + read // 4)))
        most = min(_MOST_AT_ONCE, max(_TRIPS_AT_ONCE, room))
        return next(n for n in range(most, 0, -1) if trips % n == 0)

    def _of_all_groups(self, monoid: Monoid, sums: Buffer, index: tuple[Expr, ...]) -> dict[Expr, Expr]:
        """What the epilogue reads in place of the sum: the sums of the groups of warps, in order."""
        found = self.block.base.results(monoid, [sums], index)
        first = load(sums, index)
        whole: Expr = first
        for group in range(1, self.block.groups):
            now: dict[Expr, Expr] = {monoid.left[0]: whole, monoid.right[0]: load(sums, (const(group), *index[1:]))}
            whole = replace_nodes(monoid.combine[0], now)
        return {tensor: replace_nodes(value, {first: whole}) for tensor, value in found.items()}

    def _put_down(self, total: Buffer, sums: Buffer) -> tuple[Stmt, ...]:
        """The sums of all lanes into a tile of shared memory, two by two."""
        block = self.block
        c, origins = block.form.c, block.warp_place()
        i, j = Axis("i", block.fragments[0]), Axis("j", block.fragments[1])
        half, lane = Axis("half", 2), Axis("lane", 2)
        element = simplify(var(half) * 2 + var(lane))
        row = simplify(origins[0] + var(i) * c.rows + block.lane // 4 + var(half) * 8)
        column = simplify(origins[1] + var(j) * c.columns + block.lane % 4 * 2 + var(lane))
        put = Store(sums, (block.group, row, column), load(total, (var(i), var(j), element)))
        return unrolled([i, j, half], (For(lane, ForKind.VECTOR, (put,)),))
