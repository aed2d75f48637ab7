"""The operands of a contraction that an instruction runs: rows and panels of columns, in place or packed in scratch.

Rows are read where they lie when whole blocks of k are contiguous there, columns when they were packed at compile time;
otherwise a tile's part of them is first copied, padding and left-over elements as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilewright.backend.cpu.dot.contraction import Contraction
from tilewright.backend.cpu.vector.nest import CpuNest
from tilewright.intrinsics.cpu import Dot
from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    all_of,
    axes_of,
    cast,
    const,
    minimum,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, If, Instruction, Memory, Operand, Stmt, Store
from tilewright.lower.nesting import serial, trip_count
from tilewright.tile_graph.algebra.propagate import Range, extent_of

_COPY_LANES = 16  # elements of a row that is computed, not copied, into scratch at a time

Env = dict[Axis, Expr]


@dataclass(frozen=True, eq=False)
class Setting:
    """What holds for the whole nest on this tile."""

    dot: Dot
    name: str  # of the multiply-accumulate instruction
    found: Contraction
    inner: Axis
    windows: tuple[Axis, ...]  # reduction axes around the innermost
    block: int
    rows: tuple[Axis, ...]  # row axes walked as one, outermost first; all but the first lie whole in the tile
    height: Range  # of the rows walked as one
    size: int  # of the register tile along rows
    width: int  # and along columns
    most_columns: int  # of the tile
    is_packed: bool  # whether b lies in panels already
    row_type: DType  # rows as the instruction takes them
    lost: int  # what their elements are less by then

    @property
    def padded(self) -> int:
        """The innermost reduction in whole blocks."""
        return -(-extent_of(self.inner.extent) // self.block) * self.block

    @property
    def steps(self) -> int:
        return self.padded // self.block


def row_env(nest: CpuNest, setting: Setting, row: Expr) -> Env:
    """The row axes at a position of the rows walked as one."""
    env: Env = {}
    below = 1
    for axis in reversed(setting.rows):
        place = row if below == 1 else row // below
        if axis is setting.rows[0]:
            env[axis] = simplify(nest.ranges[axis].low + place)
        else:
            env[axis] = simplify(place % extent_of(axis.extent))
        below *= extent_of(axis.extent)
    return env


class RowSource:
    """Where the rows of a tile are read: in place, or in scratch that `fill` writes."""

    def __init__(self, nest: CpuNest, setting: Setting, env: Env) -> None:
        self.nest = nest
        self.setting = setting
        self.env = env
        self.outer_sizes = tuple(extent_of(a.extent) for a in setting.windows)
        self.row = Axis("row", max(1, int(setting.height.size)))
        self.contiguous = self._contiguous()
        step = self._in_place()
        self.buffer: Buffer | None = None
        self.stride = step or 0  # elements between rows
        if step is None:
            most = min(int(setting.height.size), setting.height.extent)
            shape = (most, *self.outer_sizes, setting.padded)
            self.buffer = Buffer(nest.names.fresh("rows"), shape, setting.row_type, Memory.SCRATCH)
            self.stride = prod(shape[1:])

    def _read(self, row: Expr, outer: Env, k: Expr) -> Expr:
        env = {**self.env, **row_env(self.nest, self.setting, row), **outer, self.setting.inner: k}
        return simplify(self.nest.access.lower(substitute(self.setting.found.a, env)))

    def _offset(self) -> tuple[Linear, Axis] | None:
        """Where element k of a row is; None when it is not one read."""
        k = Axis("k", extent_of(self.setting.inner.extent))
        outer: Env = {a: var(Axis(a.name, n)) for a, n in zip(self.setting.windows, self.outer_sizes, strict=True)}
        node = self._read(var(self.row), outer, var(k))
        if not isinstance(node, Load) or any(i.reads for i in node.indices):
            return None
        return flat(node), k

    def _contiguous(self) -> bool:
        found = self._offset()
        return found is not None and step_along(found[0], found[1]) == 1

    def _in_place(self) -> int | None:
        """Elements between rows that can be read as they lie; None when they must be copied."""
        found = self._offset()
        extent = extent_of(self.setting.inner.extent)
        if found is None or not self.contiguous or self.setting.found.conditions or extent != self.setting.padded:
            return None
        if self.setting.row_type is not self.setting.found.a.dtype:
            return None
        return step_along(found[0], self.row) or 0  # vectors take every row at an address of its own

    def at(self, row: Expr, outer: Env, k: Expr) -> Operand:
        if self.buffer is not None:
            places = tuple(outer[a] for a in self.setting.windows)
            return Operand(self.buffer, (row, *places, k))
        node = self._read(row, outer, k)
        assert isinstance(node, Load)
        return Operand(node.source, node.indices)

    def around(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        return tuple(body) if self.buffer is None else (Alloc(self.buffer, tuple(body)),)

    def fill(self) -> tuple[Stmt, ...]:
        """The rows of the tile, in scratch."""
        if self.buffer is None:
            return ()
        setting = self.setting
        row = Axis("row", trip_count(setting.height.count))
        loops = [Axis(a.name, n) for a, n in zip(setting.windows, self.outer_sizes, strict=True)]
        outer: Env = {a: var(loop) for a, loop in zip(setting.windows, loops, strict=True)}
        places = (var(row), *(var(loop) for loop in loops))
        env = {**self.env, **row_env(self.nest, setting, var(row)), **outer}
        extent = extent_of(setting.inner.extent)
        conditions = setting.found.conditions
        is_kept = setting.row_type is setting.found.a.dtype
        if self.contiguous and is_kept and not any(setting.inner in axes_of(c) for c in conditions):
            source = self._read(var(row), outer, const(0))
            assert isinstance(source, Load)
            to = Operand(self.buffer, (*places, const(0)))
            copy = do("copy_run", (to, Operand(source.source, source.indices)), extent)
            check = simplify(self.nest.access.lower(all_of(substitute(c, env) for c in conditions)))
            if isinstance(check, Const) and check.value:
                body: tuple[Stmt, ...] = (copy,)
            else:
                body = (If(check, (copy,), (do("clear_run", (to,), extent),)),)
        else:
            body = self._computed(env, places, extent)
        if setting.padded > extent:
            rest = Operand(self.buffer, (*places, const(extent)))
            body = (*body, do("clear_run", (rest,), setting.padded - extent))
        return serial((row, *loops), body)

    def _computed(self, env: Env, places: tuple[Expr, ...], extent: int) -> tuple[Stmt, ...]:
        """Elements that are no plain run of memory."""
        assert self.buffer is not None
        found, inner = self.setting.found, self.setting.inner
        value = found.a
        if found.conditions:
            value = select(all_of(found.conditions), value, const(0, value.dtype))
        if self.setting.lost:
            # in 8 bits, where adding and taking away 128 are the same
            value = value + const(self.setting.lost, value.dtype)
        value = cast(value, self.setting.row_type)
        result: list[Stmt] = []
        whole = extent // _COPY_LANES
        if whole:
            block, lane = Axis("k_block", whole), Axis("k_lane", _COPY_LANES)
            k = var(block) * _COPY_LANES + var(lane)
            result.append(For(block, ForKind.SERIAL, (
                For(lane, ForKind.VECTOR, (self._store(value, env, places, inner, k),)),)))  # fmt: skip
        if extent - whole * _COPY_LANES:
            rest = Axis("k", extent - whole * _COPY_LANES)
            one = self._store(value, env, places, inner, simplify(var(rest) + whole * _COPY_LANES))
            result.append(For(rest, ForKind.SERIAL, (one,)))
        return tuple(result)

    def _store(self, value: Expr, env: Env, places: tuple[Expr, ...], inner: Axis, k: Expr) -> Store:
        assert self.buffer is not None
        lowered = simplify(self.nest.access.lower(substitute(value, {**env, inner: k})))
        return Store(self.buffer, (*places, k), lowered)


class Panels:
    """Where the columns of a tile are read: packed at compile time, or in scratch that `fill` writes."""

    def __init__(self, nest: CpuNest, setting: Setting, env: Env) -> None:
        self.nest = nest
        self.setting = setting
        self.env = env
        self.width = setting.width
        self.group = setting.dot.group
        self.buffer: Buffer | None = None
        if not setting.is_packed:
            outer = tuple(extent_of(a.extent) for a in setting.windows)
            panels, groups = -(-setting.most_columns // self.width), setting.padded // self.group
            shape: tuple[int, ...] = (panels, *outer, groups, self.width, self.group)
            if setting.dot.is_tile:  # registers of a panel one behind the other in every block of k
                lanes, block = setting.dot.lanes, setting.block // self.group
                shape = (panels, *outer, setting.steps, self.width // lanes, block, lanes, self.group)
            self.buffer = Buffer(nest.names.fresh("panels"), shape, setting.found.b.dtype, Memory.SCRATCH)

    def at(self, place: Expr, column: Expr, more: Expr, outer: Env, k: Expr) -> Operand:
        """Columns from `place` in the tile, `column` in the tensor, and `more` on top; elements from k."""
        if self.buffer is not None:
            return Operand(self.buffer, (*self._index(simplify(place + more), outer, k // self.group), const(0)))
        env = {**self.env, **outer, self.setting.found.column: column + more, self.setting.inner: k}
        source = self.nest.access.read[self.setting.found.b.source]
        logical = tuple(simplify(substitute(i, env)) for i in self.setting.found.b.indices)
        return Operand(source.buffer, source.indices(logical))

    def _index(self, column: Expr, outer: Env, group: Expr) -> tuple[Expr, ...]:
        """Where a group of a column is in the buffer."""
        places = tuple(outer[a] for a in self.setting.windows)
        panel, within = column // self.width, column % self.width
        index: tuple[Expr, ...] = (panel, *places, group, within)
        if self.setting.dot.is_tile:
            lanes, block = self.setting.dot.lanes, self.setting.block // self.group
            index = (panel, *places, group // block, within // lanes, group % block, column % lanes)
        return tuple(simplify(i) for i in index)

    def around(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        return tuple(body) if self.buffer is None else (Alloc(self.buffer, tuple(body)),)

    def _read(self, column: Expr, outer: Env, k: Expr) -> Load:
        env = {**self.env, **outer, self.setting.found.column: column, self.setting.inner: k}
        node = simplify(self.nest.access.lower(substitute(self.setting.found.b, env)))
        assert isinstance(node, Load)
        return node

    def fill(self) -> tuple[Stmt, ...]:
        """The columns of the tile in groups of k; elements beyond either end are zeros."""
        if self.buffer is None:
            return ()
        setting, width, group = self.setting, self.width, self.group
        columns = self.nest.ranges[setting.found.column]
        count = columns.count
        panel = Axis("panel", trip_count(simplify((count + (width - 1)) // width)))
        column = Axis("column", trip_count(simplify(minimum(width, count - var(panel) * width))))
        loops = [Axis(a.name, extent_of(a.extent)) for a in setting.windows]
        outer: Env = {a: var(loop) for a, loop in zip(setting.windows, loops, strict=True)}
        here = simplify(columns.low + var(panel) * width + var(column))
        extent = extent_of(setting.inner.extent)
        is_run = self._is_run(here, outer)
        body: tuple[Stmt, ...] = ()
        for groups, first, size in ((extent // group, 0, group), (1, extent // group, extent % group)):
            if not groups or not size:
                continue
            loop = Axis("group", groups)
            number = simplify(var(loop) + first)
            at: tuple[Expr, ...] = (var(panel), *(var(x) for x in loops), number, var(column))
            if setting.dot.is_tile:
                at = self._index(simplify(var(panel) * width + var(column)), outer, number)
            k = simplify((var(loop) + first) * group)
            if is_run:
                node = self._read(here, outer, k)
                move: tuple[Stmt, ...] = (
                    do("copy_run", (Operand(self.buffer, (*at, const(0))), Operand(node.source, node.indices)), size),
                )
                order = (column, loop)
            else:
                q = Axis("element", size)
                one = Store(self.buffer, (*at, var(q)), self._read(here, outer, simplify(k + var(q))))
                move = (For(q, ForKind.UNROLL, (one,)),)
                order = (loop, column)
            body = (*body, *serial((panel, *loops, *order), move))
        shape = [int(e) for e in self.buffer.shape]  # type: ignore[arg-type]
        if extent == setting.padded and static(count) == shape[0] * width:
            return body
        start = Operand(self.buffer, tuple(const(0) for _ in shape))
        return (do("clear_run", (start,), prod(shape)), *body)

    def _is_run(self, column: Expr, outer: Env) -> bool:
        """Whether the elements of a group lie side by side."""
        k = Axis("k", extent_of(self.setting.inner.extent))
        node = self._read(column, outer, var(k))
        if any(i.reads for i in node.indices):
            return False
        return step_along(flat(node), k) == 1


def do(name: str, operands: tuple[Operand, ...], *scalars: int) -> Instruction:
    return Instruction(name, operands, tuple(const(s) for s in scalars))


def flat(node: Load) -> Linear:
    """Where a read is in storage."""
    offset: Expr = const(0)
    for index, size in zip(node.indices, node.source.shape, strict=True):
        offset = offset * size + index
    return join_divisions(linear(simplify(offset)))


def step_along(offset: Linear, axis: Axis) -> int | None:
    """Elements between neighbours along the axis; None when it is not one number."""
    if any(axis in axes_of(t) for t in offset.terms if t is not var(axis)):
        return None
    return offset.terms.get(var(axis), 0)
