"""Lowers a contraction to tensor cores: operands through a ring in shared memory, fragments of a warp in registers.

The block's rows and columns are numbered flat over the axes that only one operand has. Every warp takes a part of them,
as the Tile over warps says; lanes keep elements as the lane maps of the instruction say. What lies outside the box or
behind the end of the sum is zero in shared memory, so the multiplication needs no conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod

from tilewright.backend.gpu.boxes import cuts_packets, filled, is_multiple
from tilewright.backend.gpu.maps.packets import flat_offset, in_packets, in_registers, packet_place, packets_of
from tilewright.backend.gpu.matrix.epilogue import MatrixEpilogue
from tilewright.backend.gpu.matrix.sides import Side, Sides, has_whole_packets
from tilewright.backend.gpu.threads.nest import GpuNest, ThreadTile, drop_true, guarded
from tilewright.backend.gpu.threads.pipeline import Copies, Gathered, pipelined, sync
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS, LaneMap
from tilewright.ir.analysis.products import is_zero
from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    all_of,
    axes_of,
    const,
    eq,
    flattened,
    is_op,
    load,
    lt,
    op,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.loops import Buffer, For, ForKind, If, Instruction, Memory, Operand, Stmt, Store
from tilewright.ir.meaning.instruct import WARP
from tilewright.lower.nesting import alloc, unrolled
from tilewright.target.instruction_sets import BANK_PACKETS
from tilewright.tile_graph.plan.form import ASYNC, COPIED, PADDED, SWIZZLED, Hold
from tilewright.tile_graph.plan.leaf_form import FragmentForm


@dataclass(frozen=True)
class Ring:
    """An operand in shared memory: stages of lines of packets, along the sum or along its own axes."""

    side: Side
    buffer: Buffer
    along_sum: bool  # neighbours of a line follow each other along the sum
    lines: int
    packets: int  # of a line
    packet: int  # elements
    hold: Hold

    def place(self, slot: Expr, line: Expr, packet: Expr, within: Expr) -> tuple[Expr, ...]:
        if self.hold.layout == SWIZZLED:
            turn = simplify(line // max(1, BANK_PACKETS // self.packets) % min(BANK_PACKETS, self.packets))
            packet = op("bitxor", packet, turn)
        return slot, line, packet, within


class MatrixContract:
    """The steps of a contraction on fragments, with the positions of a GpuNest."""

    def __init__(
        self, nest: GpuNest, sides: Sides, block: tuple[int, int], warp: tuple[int, int], holds: Sequence[Hold | None]
    ) -> None:
        """`block` and `warp`: rows and columns; `holds`: how both operands come, None for one that is in registers."""
        self.base = nest
        options = nest.plan.options(FragmentForm)
        self.form = FORMS[options.instruction]
        self.block_rows, self.block_columns = block
        self.warp_rows, self.warp_columns = warp
        self.sides = sides
        self.lane, self.warp = simplify(var(nest.thread) % WARP), simplify(var(nest.thread) // WARP)
        self.length = prod(int(r.size) for r in nest.reduce_ranges.values())
        self.step = options.step
        # groups of warps that each take some steps of every part of the sum, for the same rows and columns
        self.groups = options.split
        together = self.block_rows // self.warp_rows * (self.block_columns // self.warp_columns)
        self.group = simplify(self.warp // together) if self.groups > 1 else const(0)
        self.warp = simplify(self.warp % together) if self.groups > 1 else self.warp
        self.fragments = (self.warp_rows // self.form.c.rows, self.warp_columns // self.form.c.columns)
        both = zip((sides.rows, sides.columns), block, holds, strict=True)
        self.rings = [None if hold is None else self._ring(side, size, hold) for side, size, hold in both]

    def of_part(self, nest: GpuNest) -> MatrixContract:
        """The same operands in the same places, of another part of the product."""
        made = copy(self)
        made.base = nest
        return made

    def ring(self, number: int) -> Ring:
        """Of the rows' operand, or the columns'."""
        found = self.rings[number]
        assert found is not None
        return found

    # --- shared memory

    def _ring(self, side: Side, size: int, hold: Hold) -> Ring:
        packet = self.form.packet
        along_sum = self._runs_along_sum(side)
        outer, line = (size, self.step) if along_sum else (self.step, size)
        packets = line // packet
        pad = 1 if hold.layout == PADDED and packets % 2 == 0 else 0
        if hold.layout == PADDED and self.form.operand is dtypes.tf32 and not along_sum:
            pad = 2  # four lines of eight neighbours in banks of their own, element by element
        shape = (hold.stages, outer, packets + pad, packet)
        buffer = Buffer(self.base.names.fresh("ring"), shape, self.form.operand, Memory.SHARED)
        self.base.shared.append(buffer)
        return Ring(side, buffer, along_sum, outer, packets, packet, hold)

    def _runs_along_sum(self, side: Side) -> bool:
        return runs_along_sum(side, self.base)

    # --- the whole

    def statements(self) -> tuple[Stmt, ...]:
        base = self.base
        batch = [a for a in base.order if a in self.sides.others]
        counts = [int(base.ranges[a].size) for a in batch]
        flat_rows, flat_columns = (
            prod(int(base.ranges[a].size) for a in s.axes) for s in (self.sides.rows, self.sides.columns)
        )
        turns = (*counts, -(-flat_rows // self.block_rows), -(-flat_columns // self.block_columns))
        loops = [
            Axis(name, n) for name, n in zip((*(a.name for a in batch), "row_turn", "column_turn"), turns, strict=True)
        ]
        here = [var(a) if n > 1 else const(0) for a, n in zip(loops, turns, strict=True)]
        fixed = {a: simplify(base.ranges[a].low + h) for a, h in zip(batch, here, strict=False)}
        inside = [lt(h, base.ranges[a].count) for a, h in zip(batch, here, strict=False)]
        body = self._block(fixed, drop_true(inside), here[-2], here[-1], prod(turns) > 1)
        result = alloc(base.shared, body)  # of one turn: sums on their way out may lie where its operands were
        for axis, n in zip(reversed(loops), reversed(turns), strict=True):
            if n > 1:
                result = (For(axis, ForKind.SERIAL, result),)
        return result

    def _block(
        self, fixed: dict[Axis, Expr], valid: Sequence[Expr], row_turn: Expr, column_turn: Expr, reused: bool
    ) -> tuple[Stmt, ...]:
        base = self.base
        monoid = base.nest.monoid
        assert monoid is not None
        starts = (simplify(row_turn * self.block_rows), simplify(column_turn * self.block_columns))
        tile = self._elements(fixed, valid, starts)
        (total,) = base.states(monoid, tile.shape, "acc")
        first = base.initial(monoid, tile)[0]
        begins = [*tile.inside, *([eq(self.group, 0)] if self.groups > 1 else [])]
        if base.nest.initial and begins:
            first = select(all_of(begins), first, monoid.identity[0])

        def copies(part: Expr, slot: Expr) -> list[tuple[Stmt, ...]]:
            at = simplify(part * self.step)
            return [g for number, start in enumerate(starts) for g in self.fill(number, at, slot, start, fixed, valid)]

        parts = -(-self.length // self.step)
        epilogue = MatrixEpilogue(self)
        body: list[Stmt] = list(epilogue.asked(total, fixed, valid, starts)) if base.plan.lanes > 1 else []
        body.extend(tile.around((Store(total, tile.index, first),)))
        body.extend(self._gathering(total, tile, parts, copies, reused) if base.plan.options(FragmentForm).anew else
                    self.walk(total, parts, copies, reused))  # fmt: skip
        if base.plan.lanes > 1:
            body.extend((*(() if reused else (sync(),)), *epilogue.in_rows(total, fixed, valid, starts, reused)))
        else:
            body.extend(epilogue.on_fragments(total, tile))
        return alloc([total], body)

    def _gathering(self, total: Buffer, tile: ThreadTile, parts: int, copies: Copies, reused: bool) -> tuple[Stmt, ...]:
        """The sum in sums of some parts each: tensor cores cut off what float32 would round, at every step."""
        own = Buffer(self.base.names.fresh("part_sums"), total.shape, total.dtype, total.memory)
        zero = Store(own, tile.index, const(0, own.dtype))
        added = Store(total, tile.index, load(total, tile.index) + load(own, tile.index))
        gathered = Gathered(self.base.plan.options(FragmentForm).anew // self.step, [tile.around((added, zero))])
        walked = self.walk(own, parts, copies, reused, gathered)
        rest = tile.around((added,)) if parts % gathered.every else ()
        return alloc([own], (*tile.around((zero,)), *walked, *rest))

    def walk(
        self, total: Buffer, parts: int, copies: Copies, reused: bool, gathered: Gathered | None = None
    ) -> tuple[Stmt, ...]:
        """The sum, part by part: copied into the rings, fetched into fragments, multiplied."""
        form = self.form
        sets = range(2)
        a = [
            Buffer(self.base.names.fresh("a"), (self.fragments[0], form.a.elements), form.operand, Memory.REGISTER)
            for _ in sets
        ]
        b = [
            Buffer(
                self.base.names.fresh("b"), (self.fragments[1] // 2, 2 * form.b.elements), form.operand, Memory.REGISTER
            )
            for _ in sets
        ]
        depth = self.step // form.depth // self.groups

        def fetch(slot: Expr, step: int, number: int) -> list[Stmt]:
            at = slot, simplify(self.group * depth + step)
            return [*self.row_fragments(a[number], *at), *self.column_fragments(b[number], *at)]

        def use(number: int) -> tuple[Stmt, ...]:
            return self._multiply(total, a[number], b[number])

        stages, rolled = self.ring(0).hold.stages, self.base.plan.options(FragmentForm).rolled
        steps = pipelined("part", parts, stages, depth, copies, fetch, use, reused, rolled, gathered)
        return alloc([*a, *b], steps)

    # --- positions

    def warp_place(self) -> tuple[Expr, Expr]:
        """Where the rows and columns of this warp begin in the block's."""
        across = self.block_columns // self.warp_columns
        return simplify(self.warp // across * self.warp_rows), simplify(self.warp % across * self.warp_columns)

    def _elements(self, fixed: dict[Axis, Expr], valid: Sequence[Expr], starts: tuple[Expr, Expr]) -> ThreadTile:
        """The elements of the sum that a lane keeps."""
        base, c = self.base, self.form.c
        i, j, e = (Axis(n, size) for n, size in zip("ije", (*self.fragments, c.elements), strict=True))
        origins = self.warp_place()
        flat = (
            origins[0] + var(i) * c.rows + c.row(self.lane, var(e)),
            origins[1] + var(j) * c.columns + c.column(self.lane, var(e)),
        )
        env, inside = dict(fixed), list(valid)
        coordinates: dict[Axis, Expr] = {}
        for side, place, start in zip((self.sides.rows, self.sides.columns), flat, starts, strict=True):
            own, limits = self.coordinates(side, simplify(start + place))
            coordinates.update(own)
            inside.extend(limits)
        env.update({a: simplify(base.ranges[a].low + x) for a, x in coordinates.items()})
        return ThreadTile(env, (), drop_true(inside), (i, j, e), coordinates)

    def coordinates(
        self, side: Side, flat: Expr, lane: Expr | None = None, packet: int = 1
    ) -> tuple[dict[Axis, Expr], list[Expr]]:
        """Positions in the box along a side's own axes, the last fastest, and when they are inside; `flat` counts
        packets of neighbours along the last, of which `lane` is one."""
        rest = flat
        own: dict[Axis, Expr] = {}
        conditions: list[Expr] = []
        for number, axis in reversed(list(enumerate(side.axes))):
            part = self.base.ranges[axis]
            size = -(-int(part.size) // packet) if number == len(side.axes) - 1 else int(part.size)
            digit = rest if number == 0 else simplify(rest % size)
            rest = simplify(rest // size)
            if number == len(side.axes) - 1 and lane is not None:
                digit = simplify(digit * packet + lane)
            own[axis] = digit
            conditions.append(simplify(lt(digit, part.count)))
        return own, list(drop_true(conditions))

    def _sum_point(self, flat: Expr, lane: Expr | None = None, packet: int = 1) -> tuple[dict[Axis, Expr], list[Expr]]:
        """The axes that are summed over at a place of the flat sum, in packets as above."""
        base = self.base
        env: dict[Axis, Expr] = {}
        conditions = [] if self.length % self.step == 0 else [lt(flat, self.length // packet)]
        rest = flat
        for number, axis in reversed(list(enumerate(base.reduction))):
            part = base.reduce_ranges[axis]
            last = number == len(base.reduction) - 1
            size = int(part.size) // packet if last else int(part.size)
            digit = rest if number == 0 else simplify(rest % size)
            rest = simplify(rest // size)
            if last and lane is not None:
                digit = simplify(digit * packet + lane)
            env[axis] = simplify(part.low + digit)
            if static(part.count) != int(part.size):
                conditions.append(lt(digit, part.count))
        return env, list(drop_true(conditions))

    # --- copies into shared memory

    def fill(
        self, number: int, at: Expr, slot: Expr, start: Expr, fixed: dict[Axis, Expr], valid: Sequence[Expr]
    ) -> list[tuple[Stmt, ...]]:
        """All threads bring one part of an operand, by copies of packets or as they compute it: in packets where lines
        have whole ones, elements otherwise; in groups."""
        ring = self.ring(number)
        count = ring.lines * ring.packets
        if ring.hold.fill == ASYNC:
            if not self._packets(ring, at, start, fixed, Axis("lane", ring.packet)):
                raise InternalError(f"'{ring.hold.tensor}' does not lie in packets that an {ASYNC} could bring for "
                                    f"'{self.base.nest.tensor.name}': its tile holds it by {COPIED}")  # fmt: skip
            return self._shared_out(count, lambda flat: self._copy(ring, flat, slot, at, start, fixed, valid))
        if self._whole_lines(ring):
            made = self._shared_out(count, lambda flat: self._compute(ring, flat, slot, at, start, fixed, valid))
            return [tuple(s for group in made for s in group)]
        stored = self._shared_out(
            count * ring.packet, lambda flat: self._store(ring, flat, slot, at, start, fixed, valid)
        )
        return [tuple(s for group in stored for s in group)]

    def _shared_out(self, count: int, one: Callable[[Expr], tuple[Stmt, ...]]) -> list[tuple[Stmt, ...]]:
        """`one(flat)` for every number below `count`, thread by thread."""
        threads = self.base.threads
        made = []
        for trip in range(-(-count // threads)):
            flat = simplify(var(self.base.thread) + trip * threads)
            body = one(flat)
            made.append(body if (trip + 1) * threads <= count else guarded([lt(flat, count)], body))
        return made

    def _at(
        self, ring: Ring, line: Expr, packet: Expr, lane: Expr | None, at: Expr, start: Expr
    ) -> tuple[dict[Axis, Expr], list[Expr]]:
        """Axes of the nest at an element of a part, or at the packets that `lane` counts in, and when it is inside."""
        size = 1 if lane is None else ring.packet
        along, across = (at, start) if ring.along_sum else (start, at)
        near = simplify(along // size + packet) if lane is not None else simplify(along + packet)
        far = simplify(across + line)
        if ring.along_sum:
            point, conditions = self._sum_point(near, lane, size)
            own, limits = self.coordinates(ring.side, far)
        else:
            own, limits = self.coordinates(ring.side, near, lane, size)
            point, conditions = self._sum_point(far)
        env = {**point, **{a: simplify(self.base.ranges[a].low + x) for a, x in own.items()}}
        return env, [*conditions, *limits]

    def _packets(self, ring: Ring, at: Expr, start: Expr, fixed: dict[Axis, Expr], lane: Axis) -> bool:
        """Whether packets are contiguous, aligned, and wholly inside or wholly outside."""
        if not self._whole_lines(ring):
            return False
        size = ring.packet
        line, packet = Axis("line", ring.lines), Axis("packet", ring.packets)
        env, _ = self._at(ring, var(line), var(packet), var(lane), at, start)
        value, conditions = self._read(ring, {**fixed, **env})
        if not isinstance(value, Load) or value.source.memory is not Memory.GLOBAL or lane in axes_of(*conditions):
            return False
        total = linear(simplify(flat_offset(value)))
        inner = linear(simplify(value.indices[-1])).terms.get(var(lane))
        if inner != 1 or total.terms.get(var(lane)) != 1:
            return False
        first = {t: c for t, c in total.terms.items() if t is not var(lane)}
        return not any(lane in axes_of(t) for t in first) and bool(
            is_multiple(Linear(first, total.constant).expr(), size, {})
        )

    def _read(self, ring: Ring, env: dict[Axis, Expr]) -> tuple[Expr, list[Expr]]:
        """What an operand reads at a place, and when: taken apart before it is known that it never does."""
        value, conditions = guarded_read(ring.side.value)
        lowered = [simplify(self.base.access.lower(substitute(x, env))) for x in (value, *conditions)]
        return lowered[0], lowered[1:]

    def _copy(
        self, ring: Ring, flat: Expr, slot: Expr, at: Expr, start: Expr, fixed: dict[Axis, Expr], valid: Sequence[Expr]
    ) -> tuple[Stmt, ...]:
        line, packet = simplify(flat // ring.packets), simplify(flat % ring.packets)
        env, conditions = self._at(ring, line, packet, const(0), at, start)
        source, padding = self._read(ring, {**fixed, **env})
        assert isinstance(source, Load)
        inside = drop_true([*conditions, *valid, *padding])
        place = ring.place(slot, line, packet, const(0))
        operands = (Operand(ring.buffer, place), Operand(source.source, source.indices))
        if inside:
            return (Instruction(f"copy_async_or_zero{ring.packet}", operands, (all_of(inside),)),)
        return (Instruction(f"copy_async{ring.packet}", operands),)

    def _whole_lines(self, ring: Ring) -> bool:
        """Whether the packets of a line are wholly inside or wholly outside."""
        base = self.base
        lane = base.reduction[-1] if ring.along_sum else ring.side.axes[-1]
        last = base.reduce_ranges[lane] if ring.along_sum else base.ranges[lane]
        inside = {t for t, place in base.access.read.items() if place.buffer.memory is not Memory.GLOBAL}
        if has_whole_packets(ring.side, lane, ring.packet, inside):
            last = filled(last, ring.packet)
        return not cuts_packets(last, ring.packet, {})

    def _compute(
        self, ring: Ring, flat: Expr, slot: Expr, at: Expr, start: Expr, fixed: dict[Axis, Expr], valid: Sequence[Expr]
    ) -> tuple[Stmt, ...]:
        """A packet of values that are computed, or do not lie beside each other."""
        lane = Axis("lane", ring.packet)
        line, packet = simplify(flat // ring.packets), simplify(flat % ring.packets)
        env, conditions = self._at(ring, line, packet, var(lane), at, start)
        whole = [simplify(substitute(x, {lane: const(0)})) for x in (*conditions, *valid)]
        value = simplify(self.base.access.lower(substitute(ring.side.value, {**fixed, **env})))
        value, fetched, kept = in_registers(self.base.names, value, lane)
        out = packets_of(self.base.names.fresh("out"), lane, ring.buffer.dtype)
        place = packet_place(out, lane)
        body = alloc(kept, (*fetched, For(lane, ForKind.UNROLL, (Store(out, place, value),))))
        inside = drop_true(whole)
        if inside:
            zero = For(lane, ForKind.UNROLL, (Store(out, place, const(0, out.dtype)),))
            body = (If(all_of(inside), tuple(body), (zero,)),)
        moved = in_packets(ring.buffer, ring.place(slot, line, packet, var(lane)), out, lane, is_load=False)
        return alloc([out], (*body, *moved))

    def _store(
        self, ring: Ring, flat: Expr, slot: Expr, at: Expr, start: Expr, fixed: dict[Axis, Expr], valid: Sequence[Expr]
    ) -> tuple[Stmt, ...]:
        """One element; neighbouring threads take neighbours of a line."""
        length = ring.packets * ring.packet
        line, within = simplify(flat // length), simplify(flat % length)
        env, conditions = self._at(ring, line, within, None, at, start)
        value = simplify(self.base.access.lower(substitute(ring.side.value, {**fixed, **env})))
        inside = drop_true([*conditions, *valid])
        if inside:
            value = select(all_of(inside), value, const(0, value.dtype))
        place = ring.place(slot, line, simplify(within // ring.packet), simplify(within % ring.packet))
        return (Store(ring.buffer, place, value),)

    # --- fragments

    def row_fragments(self, a: Buffer, slot: Expr, depth: Expr) -> tuple[Stmt, ...]:
        """Matrices of ldmatrix: the upper and lower rows of the first half of the depth, then of the second."""
        ring, lane = self.ring(0), self.lane
        i = Axis("i", self.fragments[0])
        origin = simplify(self.warp_place()[0] + var(i) * self.form.a.rows)
        body: tuple[Stmt, ...]
        if ring.along_sum:
            body = self._ldmatrix(a, var(i), ring, slot, origin + lane % 16, depth * 2 + lane // 16)
        elif ring.packet == 8:
            line = depth * 16 + lane // 16 * 8 + lane % 8
            body = self._ldmatrix(a, var(i), ring, slot, line, origin // 8 + lane // 8 % 2)
        else:
            body = self._by_element(a, var(i), ring, slot, self.form.a, origin, depth, is_rows=True)
        return unrolled([i], body)

    def column_fragments(self, b: Buffer, slot: Expr, depth: Expr) -> tuple[Stmt, ...]:
        """The same for two neighbouring fragments: both halves of the depth of the first, then of the second."""
        ring, lane = self.ring(1), self.lane
        j = Axis("j", self.fragments[1] // 2)
        origin = simplify(self.warp_place()[1] + var(j) * 16)
        body: tuple[Stmt, ...]
        if ring.along_sum:
            body = self._ldmatrix(b, var(j), ring, slot, origin + lane // 16 * 8 + lane % 8, depth * 2 + lane // 8 % 2)
        elif ring.packet == 8:
            line = depth * 16 + lane // 8 % 2 * 8 + lane % 8
            body = self._ldmatrix(b, var(j), ring, slot, line, origin // 8 + lane // 16)
        else:
            body = self._by_element(b, var(j), ring, slot, self.form.b, origin, depth, is_rows=False)
        return unrolled([j], body)

    def _ldmatrix(self, to: Buffer, number: Expr, ring: Ring, slot: Expr, line: Expr, packet: Expr) -> tuple[Stmt, ...]:
        name = f"ldmatrix{ring.packet}{'' if ring.along_sum else '_trans'}"
        source = ring.place(slot, simplify(line), simplify(packet), const(0))
        return (Instruction(name, (Operand(to, (number, const(0))), Operand(ring.buffer, source))),)

    def _by_element(
        self,
        to: Buffer,
        number: Expr,
        ring: Ring,
        slot: Expr,
        lanes: LaneMap,
        origin: Expr,
        depth: Expr,
        is_rows: bool,
    ) -> tuple[Stmt, ...]:
        """Lines along an operand's own axes, which ldmatrix turns over where elements have 16 bits alone."""
        e = Axis("e", to.shape[1])
        element, half = var(e) % lanes.elements, var(e) // lanes.elements
        row, column = lanes.row(self.lane, element), lanes.column(self.lane, element)
        own, summed = (row, column) if is_rows else (column, row)
        place = simplify(origin + half * 8 + own)
        line = simplify(depth * self.form.depth + summed)
        source = ring.place(slot, line, simplify(place // ring.packet), simplify(place % ring.packet))
        return unrolled([e], (Store(to, (number, var(e)), load(ring.buffer, source)),))

    def _multiply(self, total: Buffer, a: Buffer, b: Buffer) -> tuple[Stmt, ...]:
        i, j, half = Axis("i", self.fragments[0]), Axis("j", self.fragments[1] // 2), Axis("half", 2)
        operands = (
            Operand(total, (var(i), simplify(var(j) * 2 + var(half)), const(0))),
            Operand(a, (var(i), const(0))),
            Operand(b, (var(j), simplify(var(half) * self.form.b.elements))),
        )
        return unrolled([i, j, half], (Instruction(self.form.name, operands),))


def guarded_read(value: Expr) -> tuple[Expr, list[Expr]]:
    """What is read where all conditions hold; it is zero where one does not, as in the padding of a window."""
    conditions: list[Expr] = []
    while is_op(value, "select") and is_zero(value.args[2]):
        conditions.extend(flattened(value.args[0], "and"))
        value = value.args[1]
    return value, conditions


def runs_along_sum(side: Side, base: GpuNest) -> bool:
    """Whether neighbours in memory follow each other along the sum: then lines of shared memory do so too."""
    here = {a: var(a) for a in (*base.nest.axes, *base.nest.reduce_axes)}
    lowered = base.access.lower(substitute(side.value, here))
    steps: set[Axis] = set()
    stack: list[Expr] = [lowered]
    while stack:
        node = stack.pop()
        stack.extend(node.args)
        if isinstance(node, Load):
            total = linear(simplify(flat_offset(node)))
            steps.update(a for a in (base.reduction[-1], side.axes[-1]) if total.terms.get(var(a)) == 1)
    return side.axes[-1] not in steps
