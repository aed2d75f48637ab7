"""Lowers a product whose weights are unpacked from 4 bits as fragments are fetched: shared memory holds codes.

Of 16 places along the sum eight lie in the lower halves of eight bytes and eight in the upper ones, so that two bytes
are what a lane of a fragment has of a column. Scales and zero points of a part come through rings of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.backend.gpu.maps.unpack import PLACES, UNPACKED, Packed, packed_side
from tilewright.backend.gpu.matrix.lower import MatrixContract, Ring
from tilewright.backend.gpu.matrix.sides import Side
from tilewright.backend.gpu.threads.nest import known_true_left_out
from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Expr, Load, all_of, const, load, loads, replace_nodes, substitute, var
from tilewright.ir.forms.loops import Buffer, For, ForKind, Instruction, Memory, Operand, Stmt, Store
from tilewright.lower.nesting import alloc, unrolled
from tilewright.tile_graph.plan.form import Hold


@dataclass(frozen=True)
class Parameter:
    """A scale or zero point: its numbers of a part of the sum, by column."""

    read: Load
    buffer: Buffer
    count: int


class PackedContract(MatrixContract):
    """The same as a MatrixContract, with codes in the ring of the columns' operand."""

    packed: Packed
    parameters: list[Parameter]

    def _ring(self, side: Side, size: int, hold: Hold) -> Ring:
        if side is not self.sides.columns:
            return super()._ring(side, size, hold)
        base = self.base
        found = packed_side(side.value, base.reduction)
        if found is None or self.step % (2 * PLACES):
            raise InternalError(f"'{base.nest.tensor.name}' has no columns of 4 bits in parts of {self.step}")
        self.packed = found
        packets = self.step // PLACES
        # lines of an odd number of 16 bytes: eight of them lie in banks of their own
        shape = (hold.stages, size, packets + (2 if packets // 2 % 2 == 0 else 0), UNPACKED)
        buffer = Buffer(base.names.fresh("codes"), shape, dtypes.uint8, Memory.SHARED)
        base.shared.append(buffer)
        reads = [n for n in dict.fromkeys(loads(found.zero, found.scale)) if isinstance(n, Load)]
        self.parameters = [self._parameter(read, size, hold.stages) for read in reads]
        return Ring(side, buffer, True, size, packets, UNPACKED, hold)

    def _parameter(self, read: Load, size: int, stages: int) -> Parameter:
        count = self.step // self.packed.block
        buffer = Buffer(self.base.names.fresh("numbers"), (stages, size, count), read.dtype, Memory.SHARED)
        self.base.shared.append(buffer)
        return Parameter(read, buffer, count)

    def fill(
        self, number: int, at: Expr, slot: Expr, start: Expr, fixed: dict[Axis, Expr], valid: Sequence[Expr]
    ) -> list[tuple[Stmt, ...]]:
        if number == 0:
            return super().fill(number, at, slot, start, fixed, valid)
        ring = self.ring(1)

        def codes(flat: Expr) -> tuple[Stmt, ...]:
            line, packet = simplify(flat // ring.packets), simplify(flat % ring.packets)
            to = Operand(ring.buffer, (slot, line, packet, const(0)))
            place = simplify(at + packet * PLACES)
            return self._brought(self.packed.codes, to, UNPACKED, place, simplify(start + line), fixed, valid)

        groups = self._shared_out(ring.lines * ring.packets, codes)
        for parameter in self.parameters:

            def numbers(line: Expr, p: Parameter = parameter) -> tuple[Stmt, ...]:
                to = Operand(p.buffer, (slot, line, const(0)))
                return self._brought(p.read, to, p.count, at, simplify(start + line), fixed, valid)

            groups.extend(self._shared_out(ring.lines, numbers))
        return groups

    def _brought(
        self, read: Load, to: Operand, count: int, place: Expr, column: Expr, fixed: dict[Axis, Expr],
        valid: Sequence[Expr],
    ) -> tuple[Stmt, ...]:  # fmt: skip
        """So many neighbours of what is read at a place of the sum, or zeros outside."""
        point, conditions = self._sum_point(place)
        own, limits = self.coordinates(self.sides.columns, column)
        env = {**fixed, **point, **{a: simplify(self.base.ranges[a].low + x) for a, x in own.items()}}
        source = simplify(self.base.access.lower(substitute(read, env)))
        assert isinstance(source, Load)
        inside = known_true_left_out([*conditions, *limits, *valid])
        operands = (to, Operand(source.source, source.indices))
        if inside:
            return (Instruction(f"copy_async_or_zero{count}", operands, (all_of(inside),)),)
        return (Instruction(f"copy_async{count}", operands),)

    def column_fragments(self, b: Buffer, slot: Expr, depth: Expr) -> tuple[Stmt, ...]:
        """Two bytes of a column are four numbers of a lane."""
        ring = self.ring(1)
        j, half, near = Axis("j", self.fragments[1] // 2), Axis("half", 2), Axis("near", 2)
        line = simplify(self.warp_place()[1] + var(j) * 16 + var(half) * 8 + self.lane // 4)
        within = simplify(self.lane % 4 * 2 + var(near))
        raw = Buffer(self.base.names.fresh("raw"), (2,), dtypes.uint8, Memory.REGISTER)
        source = load(ring.buffer, (slot, line, depth, within))
        fetched = For(near, ForKind.VECTOR, (Store(raw, (var(near),), source),))
        block = simplify(depth * PLACES // self.packed.block)
        numbers: dict[Expr, Expr] = {p.read: load(p.buffer, (slot, line, block)) for p in self.parameters}
        # a scale is a half in memory, and stays one: conversions back run at an eighth of the rate
        zero, scale = (simplify(replace_nodes(x, numbers)) for x in (self.packed.zero, self.packed.scale.args[0]))
        to = Operand(b, (var(j), simplify(var(half) * self.form.b.elements)))
        made = Instruction("unpack4", (to, Operand(raw, (const(0),))), (zero, scale))
        return unrolled([j, half], alloc([raw], (fetched, made)))
