"""Lowers a contraction to tensor cores that four warps feed as one, with both operands in shared memory.

Nothing is fetched into registers but the sums, whose lane maps are those of fragments: a warp has 16 rows and all
columns of its block. Lines of shared memory are 128 bytes, eight of which exchange their packets by the line's number,
as the hardware expects; longer lines along the rows or columns lie as pieces of 128 bytes, one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.backend.gpu.maps.unpack import packed_side
from tilewright.backend.gpu.matrix.cost import columns_at_a_time
from tilewright.backend.gpu.matrix.lower import MatrixContract, Ring
from tilewright.backend.gpu.matrix.packed import PackedContract
from tilewright.backend.gpu.matrix.sides import Side, sides_of
from tilewright.backend.gpu.threads.nest import GpuNest, ThreadTile
from tilewright.backend.gpu.threads.pipeline import Copies, Gathered, in_groups
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS, ROW_BYTES, with_kept_rows
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Expr, const, load, op, var
from tilewright.ir.forms.loops import Buffer, Instruction, Memory, Operand, Stmt, Store
from tilewright.lower.nesting import alloc, unrolled
from tilewright.target.instruction_sets import BANK_PACKETS
from tilewright.tile_graph.plan.form import Hold, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm


@dataclass(frozen=True)
class GroupRing(Ring):
    """A ring whose lines are cut into pieces of 128 bytes."""

    def place(self, slot: Expr, line: Expr, packet: Expr, within: Expr) -> tuple[Expr, ...]:
        piece = simplify(packet // BANK_PACKETS)
        own = op("bitxor", simplify(packet % BANK_PACKETS), simplify(line % BANK_PACKETS))
        return slot, simplify(piece * self.lines + line), own, within


class GroupContract(MatrixContract):
    """The same as a MatrixContract, all operands staying in shared memory."""

    def _ring(self, side: Side, size: int, hold: Hold) -> Ring:
        packet = self.form.packet
        along_sum = self._runs_along_sum(side)
        outer, line = (size, self.step) if along_sum else (self.step, size)
        if outer % BANK_PACKETS:
            raise InternalError(f"{outer} lines are not as many as exchange their packets for {self.form.name}")
        shape = (hold.stages, outer * -(-line // (BANK_PACKETS * packet)), BANK_PACKETS, packet)
        buffer = Buffer(self.base.names.fresh("ring"), shape, self.form.operand, Memory.SHARED)
        self.base.shared.append(buffer)
        return GroupRing(side, buffer, along_sum, outer, line // packet, packet, hold)

    def walk(
        self, total: Buffer, parts: int, copies: Copies, reused: bool, gathered: Gathered | None = None
    ) -> tuple[Stmt, ...]:
        depth = self.step // self.form.depth
        sums = _whole(total), self.block_columns // 2

        def multiply(slot: Expr) -> list[list[Stmt]]:
            return [[self.product(total, slot, step) for step in range(depth)]]

        stages, rolled = self.ring(0).hold.stages, self.base.plan.options(FragmentForm).rolled
        return tuple(in_groups("part", parts, stages, copies, multiply, sums, reused, rolled, gathered))

    def _gathering(self, total: Buffer, tile: ThreadTile, parts: int, copies: Copies, reused: bool) -> tuple[Stmt, ...]:
        """Where every part has sums of its own, some columns of it at a time: their registers are used again."""
        if self.base.plan.options(FragmentForm).anew != self.step:
            return super()._gathering(total, tile, parts, copies, reused)
        columns = columns_at_a_time(self.block_columns)
        fragments = columns // self.form.c.columns
        shape = (1, fragments, self.form.c.elements)
        own = Buffer(self.base.names.fresh("part_sums"), shape, total.dtype, total.memory)
        depth = self.step // self.form.depth
        starts = range(0, self.block_columns, columns)
        near, e = Axis("j", fragments), Axis("e", self.form.c.elements)

        def multiply(slot: Expr) -> list[list[Stmt]]:
            return [[self.product(own, slot, step, step > 0, (start, columns)) for step in range(depth)]
                    for start in starts]  # fmt: skip

        def added(start: int) -> tuple[Stmt, ...]:
            place = (const(0), simplify(var(near) + start // self.form.c.columns), var(e))
            more = load(own, (const(0), var(near), var(e)))
            return unrolled([near, e], (Store(total, place, load(total, place) + more),))

        gathered = Gathered(1, [added(start) for start in starts])
        stages, rolled = self.ring(0).hold.stages, self.base.plan.options(FragmentForm).rolled
        sums = _whole(own), columns // 2
        return alloc([own], in_groups("part", parts, stages, copies, multiply, sums, reused, rolled, gathered))

    def product(
        self, total: Buffer, slot: Expr, step: int, goes_on: bool = True, columns: tuple[int, int] | None = None
    ) -> Stmt:
        """A step of a part, both operands in shared memory; sums go on or begin with it. Of all columns, or of some
        from one on."""
        start, count = columns or (0, self.block_columns)
        rows = self.ring(0)
        group = simplify(self.warp // self.form.warps)
        at = slot if rows.hold.stages > 1 else const(0)
        row = simplify(group * self.form.c.rows * self.form.warps)
        first = Operand(rows.buffer, (at, *self._first(rows, row, step), const(0)))
        scalars = (count, not rows.along_sum, *self._lines_of_columns(), goes_on)
        operands = (_whole(total), first, self._columns(slot, step, start))
        return Instruction(self.form.name, operands, tuple(const(int(x)) for x in scalars))

    def product_of_kept(self, total: Buffer, rows: Operand, slot: Expr, step: int) -> Stmt:
        """The same with the rows' operand of the step in registers."""
        operands = (_whole(total), rows, self._columns(slot, step))
        scalars = (self.block_columns, *self._lines_of_columns())
        return Instruction(with_kept_rows(self.form), operands, tuple(const(int(x)) for x in scalars))

    def _columns(self, slot: Expr, step: int, start: int = 0) -> Operand:
        columns = self.ring(1)
        return Operand(columns.buffer, (slot, *self._first(columns, const(start), step), const(0)))

    def _lines_of_columns(self) -> tuple[bool, int]:
        """Whether lines run along the columns, and bytes from 64 of them to the next."""
        return not self.ring(1).along_sum, self.step * BANK_PACKETS * ROW_BYTES

    def _first(self, ring: Ring, own: Expr, step: int) -> tuple[Expr, Expr]:
        """The line and the packet where an operand's rows or columns from `own` on begin, for a step of a part."""
        along = step * self.form.depth
        if not ring.along_sum:
            return simplify(own // (BANK_PACKETS * ring.packet) * ring.lines + along), const(0)
        packet = along // ring.packet
        return simplify(own + packet // BANK_PACKETS * ring.lines), const(packet % BANK_PACKETS)


def _whole(total: Buffer) -> Operand:
    return Operand(total, (const(0), const(0), const(0)))


def contract_of(nest: GpuNest, warps: Tile, holds: Sequence[Hold]) -> MatrixContract:
    """A product as a Tile over warps shares it out: each warp by itself, or four as one."""
    (_, rows), (_, columns) = warps.sizes
    row_axes = tuple(nest.nest.named(b.axis) for b in warps.axes[0].binds)
    sides = sides_of(nest.nest, nest.nest.named(warps.axes[1].binds[-1].axis))
    if sides is None or set(sides.rows.axes) != set(row_axes):
        raise InternalError(f"'{nest.nest.tensor.name}' is no product that {nest.plan.instruction} runs")
    block = (warps.axes[0].extent, warps.axes[1].extent)
    is_packed = packed_side(sides.columns.value, nest.reduction) is not None
    form = MatrixContract
    if FORMS[nest.plan.options(FragmentForm).instruction].warps > 1 or is_packed:
        form = PackedContract if is_packed else GroupContract
    return form(nest, sides, block, (rows, columns), holds)
