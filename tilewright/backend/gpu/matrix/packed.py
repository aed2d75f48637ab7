"""Lowers a product whose weights are unpacked from 4 or 8 bits on their way to the tensor cores: shared memory holds
codes.

Of 64 places along the sum the four lanes that share a column have 16 neighbours each, which are one read of codes and
two of a row; four products take them, two pairs of places of every lane at a time. Both operands are summed in the same
order, so that the sum is the same. Scales and zero points of a part come through rings of their own; those of a whole
column stay in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.backend.gpu.maps.unpack import FETCHED, PLACES, Packed, packed_side
from tilewright.backend.gpu.matrix.lower import MatrixContract, Ring
from tilewright.backend.gpu.matrix.sides import Side
from tilewright.backend.gpu.threads.nest import drop_true
from tilewright.backend.gpu.threads.pipeline import Copies, Gathered, pipelined
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import ROW_BYTES
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Expr, Load, all_of, const, is_op, load, op, replace_nodes, substitute, var
from tilewright.ir.forms.loops import Buffer, For, ForKind, Instruction, Memory, Operand, Stmt, Store
from tilewright.lower.nesting import alloc, unrolled
from tilewright.tile_graph.plan.form import ASYNC, Hold
from tilewright.tile_graph.plan.leaf_form import FragmentForm

_LANES = FETCHED // PLACES  # that share a column
_PAIR = 2  # neighbours that are a register


@dataclass(frozen=True)
class Parameter:
    """A scale or zero point: its numbers of a part of the sum, by column; none where it is the same for the whole."""

    read: Load
    buffer: Buffer | None
    count: int


@dataclass(frozen=True)
class _Fetched:
    """What a warp has in registers of 64 places: its rows, and codes and parameters of its columns."""

    rows: Buffer
    codes: Buffer
    numbers: Sequence[Buffer]


class PackedContract(MatrixContract):
    """The same as a MatrixContract, with codes in the ring of the columns' operand."""

    packed: Packed
    parameters: list[Parameter]

    def _ring(self, side: Side, size: int, hold: Hold) -> Ring:
        if side is not self.sides.columns:
            return super()._ring(side, size, hold)
        base = self.base
        found = packed_side(side.value, base.reduction)
        if found is None or self.step % (FETCHED * self.groups) or not self._runs_along_sum(self.sides.rows):
            raise InternalError(f"'{base.nest.tensor.name}' has no columns of codes in parts of {self.step}")
        self.packed = found
        packets, width = self.step // PLACES, PLACES * found.bits // 8
        # what four lanes read lies in other banks than what those of the columns beside read
        shape = (hold.stages, size, packets + (_LANES if packets // _LANES % 2 == 0 else 0), width)
        buffer = Buffer(base.names.fresh("codes"), shape, dtypes.uint8, Memory.SHARED)
        base.shared.append(buffer)
        self.parameters = [self._parameter(read, size, hold.stages) for read in found.parameters()]
        return Ring(side, buffer, True, size, packets, width, hold)

    def _parameter(self, read: Load, size: int, stages: int) -> Parameter:
        if self.packed.block == self.packed.length:
            return Parameter(read, None, 1)
        count = self.step // self.packed.block
        buffer = Buffer(self.base.names.fresh("numbers"), (stages, size, count), read.dtype, Memory.SHARED)
        self.base.shared.append(buffer)
        return Parameter(read, buffer, count)

    # --- copies into shared memory

    def fill(
        self, number: int, at: Expr, slot: Expr, start: Expr, fixed: dict[Axis, Expr], valid: Sequence[Expr]
    ) -> list[tuple[Stmt, ...]]:
        if number == 0:
            return super().fill(number, at, slot, start, fixed, valid)
        ring = self.ring(1)
        if ring.hold.fill != ASYNC:
            raise InternalError(f"'{ring.hold.tensor}' has codes: '{self.base.nest.tensor.name}' takes them by {ASYNC}")

        def codes(flat: Expr) -> tuple[Stmt, ...]:
            line, packet = simplify(flat // ring.packets), simplify(flat % ring.packets)
            to = Operand(ring.buffer, (slot, line, packet, const(0)))
            place = simplify(at + packet * PLACES)
            return self._brought(self.packed.codes, to, ring.packet, place, simplify(start + line), fixed, valid)

        groups = self._shared_out(ring.lines * ring.packets, codes)
        for parameter in self.parameters:
            if parameter.buffer is None:
                continue
            each = min(parameter.count, ROW_BYTES // parameter.read.dtype.bytes)
            copies = parameter.count // each

            def numbers(flat: Expr, p: Parameter = parameter, each: int = each, n: int = copies) -> tuple[Stmt, ...]:
                assert p.buffer is not None
                line, first = simplify(flat // n), simplify(flat % n * each)
                place = simplify(at + first * self.packed.block)
                to = Operand(p.buffer, (slot, line, first))
                return self._brought(p.read, to, each, place, simplify(start + line), fixed, valid)

            groups.extend(self._shared_out(ring.lines * copies, numbers))
        return groups

    def _brought(
        self, read: Load, to: Operand, count: int, place: Expr, column: Expr, fixed: dict[Axis, Expr],
        valid: Sequence[Expr],
    ) -> tuple[Stmt, ...]:  # fmt: skip
        """So many neighbours of what is read at a place of the sum, or zeros outside."""
        point, conditions = self._sum_point(place)
        source, limits = self._source(read, column, {**fixed, **point})
        inside = drop_true([*conditions, *limits, *valid])
        operands = (to, Operand(source.source, source.indices))
        if inside:
            return (Instruction(f"copy_async_or_zero{count}", operands, (all_of(inside),)),)
        return (Instruction(f"copy_async{count}", operands),)

    def _source(self, read: Load, column: Expr, env: dict[Axis, Expr]) -> tuple[Load, list[Expr]]:
        """Where a column's numbers are read, and when they are inside."""
        own, limits = self.coordinates(self.sides.columns, column)
        env = {**env, **{a: simplify(self.base.ranges[a].low + x) for a, x in own.items()}}
        source = simplify(self.base.access.lower(substitute(read, env)))
        assert isinstance(source, Load)
        return source, limits

    # --- fragments

    def walk(
        self, total: Buffer, parts: int, copies: Copies, reused: bool, gathered: Gathered | None = None
    ) -> tuple[Stmt, ...]:
        sets = [self._registers() for _ in range(2)]
        whole = {p.read: self._register("number", (self.fragments[1],), p.read) for p in self.parameters
                 if p.buffer is None}  # fmt: skip
        depth = self.step // FETCHED // self.groups

        def fetch(slot: Expr, step: int, number: int) -> list[Stmt]:
            at = simplify(self.group * depth + step)
            return [*self._rows(sets[number].rows, slot, at), *self._columns(sets[number], slot, at)]

        def use(number: int) -> tuple[Stmt, ...]:
            return self._products(total, sets[number], whole)

        stages, rolled = self.ring(0).hold.stages, self.base.plan.options(FragmentForm).rolled
        steps = pipelined("part", parts, stages, depth, copies, fetch, use, reused, rolled, gathered)
        every = [b for s in sets for b in (s.rows, s.codes, *s.numbers)]
        return alloc([*every, *whole.values()], (*self._whole_columns(whole), *steps))

    def _register(self, name: str, shape: tuple[int, ...], like: Load) -> Buffer:
        return Buffer(self.base.names.fresh(name), shape, like.dtype, Memory.REGISTER)

    def _registers(self) -> _Fetched:
        fresh, (rows, columns) = self.base.names.fresh, self.fragments
        a = Buffer(fresh("a"), (rows, _LANES, self.form.a.elements), self.form.operand, Memory.REGISTER)
        codes = Buffer(fresh("raw"), (columns, self.ring(1).packet), dtypes.uint8, Memory.REGISTER)
        numbers = [self._register("number", (columns,), p.read) for p in self.parameters if p.buffer is not None]
        return _Fetched(a, codes, numbers)

    def _whole_columns(self, whole: dict[Load, Buffer]) -> list[Stmt]:
        """Parameters of columns of their own, once; behind the last column they are those of the last."""
        made: list[Stmt] = []
        last = self.base.ranges[self.sides.columns.axes[-1]]
        for read, buffer in whole.items():
            j = Axis("j", self.fragments[1])
            column = simplify(self.warp_place()[1] + var(j) * 8 + self.lane // _LANES)
            column = op("min", column, simplify(last.count - 1))
            source, _ = self._source(read, column, {})
            made.extend(unrolled([j], (Store(buffer, (var(j),), source),)))
        return made

    def _rows(self, a: Buffer, slot: Expr, at: Expr) -> tuple[Stmt, ...]:
        """16 neighbours of two rows of every 16, pair by pair to the products that take them."""
        ring = self.ring(0)
        i, lower, second = Axis("i", self.fragments[0]), Axis("lower", 2), Axis("second", 2)
        near = Axis("near", ring.packet)
        line = simplify(self.warp_place()[0] + var(i) * self.form.a.rows + var(lower) * 8 + self.lane // _LANES)
        packet = simplify((at * _LANES + self.lane % _LANES) * 2 + var(second))
        run = Buffer(self.base.names.fresh("run"), (ring.packet,), ring.buffer.dtype, Memory.REGISTER)
        source = load(ring.buffer, ring.place(slot, line, packet, var(near)))
        fetched = For(near, ForKind.VECTOR, (Store(run, (var(near),), source),))
        moved = [Instruction("copy2", (Operand(a, (var(i), const(s), simplify(var(lower) * 2 + var(second) * 4))),
                                       Operand(run, (const(_PAIR * s),)))) for s in range(_LANES)]  # fmt: skip
        return unrolled([i, lower, second], alloc([run], (fetched, *moved)))

    def _columns(self, to: _Fetched, slot: Expr, at: Expr) -> tuple[Stmt, ...]:
        """Codes of 16 neighbours of every eighth column, and the numbers that go with them."""
        ring = self.ring(1)
        j, near = Axis("j", self.fragments[1]), Axis("near", ring.packet)
        line = simplify(self.warp_place()[1] + var(j) * 8 + self.lane // _LANES)
        number = simplify(at * _LANES + self.lane % _LANES)
        source = load(ring.buffer, (slot, line, number, var(near)))
        body: list[Stmt] = [For(near, ForKind.VECTOR, (Store(to.codes, (var(j), var(near)), source),))]
        block = simplify(number * PLACES // self.packed.block)
        ringed = [p.buffer for p in self.parameters if p.buffer is not None]
        body.extend(Store(kept, (var(j),), load(buffer, (slot, line, block)))
                    for kept, buffer in zip(to.numbers, ringed, strict=True))  # fmt: skip
        return unrolled([j], tuple(body))

    def _products(self, total: Buffer, of: _Fetched, whole: dict[Load, Buffer]) -> tuple[Stmt, ...]:
        """Products of one place of the sums wait for each other, so that those of other columns stand between them;
        what the next ones take is unpacked meanwhile."""
        rows, columns = self.fragments
        i, j, s = Axis("i", rows), Axis("j", columns), Axis("s", _LANES)
        b = Buffer(self.base.names.fresh("b"), (columns, self.form.b.elements), self.form.operand, Memory.REGISTER)
        ringed = iter(of.numbers)
        numbers: dict[Expr, Expr] = {p.read: load(whole[p.read] if p.buffer is None else next(ringed), (var(j),))
                                     for p in self.parameters}  # fmt: skip
        # zero points are bytes and scales halves in memory, and stay so: conversions run at an eighth of the rate
        scalars = tuple(simplify(replace_nodes(x.args[0] if is_op(x, "cast") else x, numbers))
                        for x in (self.packed.zero, self.packed.scale))  # fmt: skip
        ends = (Operand(b, (var(j), const(0))), Operand(of.codes, (var(j), const(0))))
        unpacked = unrolled([j], (Instruction(f"unpack_codes{self.packed.bits}", ends, (*scalars, var(s))),))
        operands = (Operand(total, (var(i), var(j), const(0))), Operand(of.rows, (var(i), var(s), const(0))),
                    Operand(b, (var(j), const(0))))  # fmt: skip
        multiplied = unrolled([i, j], (Instruction(self.form.name, operands),))
        return unrolled([s], alloc([b], (*unpacked, *multiplied)))
