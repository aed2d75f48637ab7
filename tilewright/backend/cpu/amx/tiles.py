"""Lowers a contraction onto matrix registers: passes over k, blocks of rows, and panels of columns inside them.

A block of rows stays in the first cache while the panels of columns pass, which lie packed in the order in which they
are read: each step asks for what it will read some steps later. Sums wait in scratch between passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.backend.cpu.amx.tile_rows import Steps, tile_rows
from tilewright.backend.cpu.constants import AMX_STAYS, ROWS_AHEAD
from tilewright.backend.cpu.dot.contraction import AHEAD
from tilewright.backend.cpu.dot.instruction import CpuInstruction
from tilewright.backend.cpu.dot.operands import Env, Panels, Setting, do, row_env
from tilewright.backend.cpu.vector.nest import CpuNest
from tilewright.intrinsics.cpu import TILE_BYTES, TILE_ROWS, TILES
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, const, eq, minimum, var
from tilewright.ir.forms.loops import (
    PREFETCH,
    PREFETCH_TILE,
    Alloc,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Memory,
    Operand,
    Stmt,
)
from tilewright.lower.blocks import BlockRun, pieces
from tilewright.lower.nesting import alloc, serial, trip_count, walked
from tilewright.lower.register_block import RegisterBlock
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.leaf_form import TileForm

_Configuration = tuple[tuple[int, int], ...]  # rows and bytes of a row, by tile


@dataclass(frozen=True, eq=False)
class _Part:
    """One block of outputs, its sizes fixed: where it is in the tile, and where its columns are in the tensor."""

    row: Expr
    rows: int
    place: Expr
    column: Expr
    columns: int
    lanes: int  # columns that are stored together: fewer than the instruction has in a last, partly filled vector
    turn: Axis  # over panels of columns

    def vectors(self, lanes: int) -> int:
        return -(-self.columns // lanes)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Scratch for accumulators: (block of rows, block of columns, row, column); `steps` of k come at a time."""

    buffer: Buffer
    steps: int
    loop: Axis | None  # over passes; None when there is one

    def around(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        inner = tuple(body) if self.loop is None else (For(self.loop, ForKind.SERIAL, tuple(body)),)
        return (Alloc(self.buffer, inner),)

    def at(self, part: _Part, row: Expr, column: Expr) -> tuple[Expr, ...]:
        if self.loop is None:
            return (const(0), const(0), row, column)
        height, width = int(self.buffer.shape[2]), int(self.buffer.shape[3])  # type: ignore[arg-type]
        places = (part.row // height, part.place // width, part.row % height + row, part.place % width + column)
        return tuple(simplify(p) for p in places)


class CpuTileInstruction(CpuInstruction):
    """The same nest where the instruction is one of matrix registers."""

    @property
    def summed(self) -> int:
        return self.plan.options(TileForm).step

    def statements(self) -> tuple[Stmt, ...]:
        return CpuTiles(self, self.setting()).statements()


class CpuTiles:
    """The lowering of one contraction whose instruction sums up in matrix registers."""

    def __init__(self, nest: CpuNest, setting: Setting) -> None:
        self.nest = nest
        self.sums = _sums(nest, setting)
        self.rows = tile_rows(nest, setting, self._most(setting), nest.plan.options(TileForm).packs)
        self.setting = self.rows.setting

    def _most(self, setting: Setting) -> int:
        """Blocks of k that one pass takes."""
        most = min(self.sums.steps, setting.steps)
        for axis in setting.windows:
            most *= extent_of(axis.extent)
        return most

    def statements(self) -> tuple[Stmt, ...]:
        setting = self.setting
        plain = [a for a in self.nest.loop_axes if a is not setting.found.column and a not in setting.rows]
        loops, env = walked(plain, self.nest.ranges)
        body = (*self.rows.fill(), *serial(loops, self._panels(env)))
        return (*self.rows.around(body), Instruction("tile_release", ()))

    def _panels(self, env: Env) -> tuple[Stmt, ...]:
        setting = self.setting
        panels = Panels(self.nest, setting, env)
        columns = self.nest.ranges[setting.found.column]
        across = [p for p in pieces(columns, setting.width, setting.dot.lanes) if static(p.trips) != 0]
        down = [p for p in self.rows.blocks() if static(p.trips) != 0]
        configurations = [[self._configuration(part.size, piece.size) for piece in across] for part in down]
        common = _common([c for line in configurations for c in line])
        body: list[Stmt] = []
        for part, line in zip(down, configurations, strict=True):
            row_loop = Axis("row_block", trip_count(part.trips))
            row = simplify(part.base + var(row_loop) * part.size)
            inner: list[Stmt] = [*self.rows.stage(env, row, part.size, self._steps())]
            alike = _common(line)
            for piece, configuration in zip(across, line, strict=True):
                if alike is None:
                    inner.append(_configure(configuration))
                inner.append(self._across(piece, row, part.size, panels, env))
            if common is None and alike is not None:
                body.append(_configure(alike))
            body.append(For(row_loop, ForKind.SERIAL, tuple(inner)))
        body = list(self.sums.around(body))
        if common is not None:
            body.insert(0, _configure(common))
        return panels.around([*panels.fill(), *body])

    def _across(self, piece: BlockRun, row: Expr, rows: int, panels: Panels, env: Env) -> Stmt:
        """The panels of columns that pass a block of rows."""
        columns = self.nest.ranges[self.setting.found.column]
        loop = Axis(f"{self.setting.found.column.name}_block", trip_count(piece.trips))
        place = simplify(piece.base + var(loop) * piece.size)
        here = _Part(row, rows, place, simplify(columns.low + place), piece.size, piece.lanes, loop)
        return For(loop, ForKind.SERIAL, self._block(here, panels, env))

    def _steps(self) -> Steps:
        """The blocks of k of this pass."""
        setting, sums = self.setting, self.sums
        if sums.loop is None:
            return Steps(const(0), const(setting.steps), setting.steps)
        first = simplify(var(sums.loop) * sums.steps)
        return Steps(first, simplify(minimum(sums.steps, const(setting.steps) - first)), sums.steps)

    # --- one block of outputs

    def _block(self, part: _Part, panels: Panels, env: Env) -> tuple[Stmt, ...]:
        setting, sums, dot = self.setting, self.sums, self.setting.dot
        heights = self.rows.heights(part.rows)
        down, across = len(heights), part.vectors(dot.lanes)
        dtype = sums.buffer.dtype
        groups = setting.block // dot.group
        c = [[self._tile("c", dot.lanes, dtype) for _ in range(across)] for _ in range(down)]
        a_type, b_type = setting.found.a.dtype, setting.found.b.dtype
        a = [self._tile("a", TILE_BYTES // a_type.bytes, a_type) for _ in range(down)]
        b = [self._tile("b", TILE_BYTES // b_type.bytes, b_type) for _ in range(across)]
        every = [(i, j, c[i][j]) for i in range(down) for j in range(across)]
        width = int(sums.buffer.shape[3])  # type: ignore[arg-type]
        first_rows = [sum(heights[:i]) for i in range(down)]
        kept = {t: Operand(sums.buffer, sums.at(part, const(first_rows[i]), const(j * dot.lanes))) for i, j, t in every}
        body: list[Stmt] = [do("tile_zero", (_whole(t),), heights[i], dot.lanes) for i, _, t in every]
        if sums.loop is not None:
            again = [do("tile_load", (_whole(t), kept[t]), heights[i], dot.lanes, width) for i, _, t in every]
            body = [If(eq(var(sums.loop), 0), tuple(body), tuple(again))]
        loops = [Axis(x.name, extent_of(x.extent)) for x in setting.windows]
        outer: Env = {x: var(loop) for x, loop in zip(setting.windows, loops, strict=True)}
        steps = self._steps()
        last = Axis(setting.inner.name, trip_count(steps.count))
        k = simplify((steps.first + var(last)) * setting.block)
        step: Expr = const(0)
        for loop in loops:
            step = step * extent_of(loop.extent) + var(loop)
        step = simplify(step * setting.steps + var(last))
        hints = self._hints(part, panels, env, outer, var(last), k)

        def load_a(i: int) -> Stmt:
            source = self.rows.at(env, part.row, i, outer, k, step)
            return do("tile_load", (_whole(a[i]), source), heights[i], setting.block, self.rows.stride)

        def load_b(j: int) -> Stmt:
            source = panels.at(part.place, part.column, const(j * dot.lanes), outer, k)
            wide = dot.lanes * dot.group
            return do("tile_load", (_whole(b[j]), source), groups, wide, wide)

        def multiply(i: int, j: int) -> tuple[Stmt, ...]:
            tiles = (_whole(c[i][j]), _whole(a[i]), _whole(b[j]))
            number = i * across + j  # hints between the products, which leave the ports that load idle
            mine = hints[number * len(hints) // len(every) : (number + 1) * len(hints) // len(every)]
            return (do(setting.name, tiles, heights[i], dot.lanes, groups), *mine)

        inner: list[Stmt] = []
        if down <= across:
            inner.extend(load_a(i) for i in range(down))
            for j in range(across):
                inner.append(load_b(j))
                inner.extend(s for i in range(down) for s in multiply(i, j))
        else:
            inner.extend(load_b(j) for j in range(across))
            for i in range(down):
                inner.append(load_a(i))
                inner.extend(s for j in range(across) for s in multiply(i, j))
        body.extend(serial([*loops, last], tuple(inner)))
        body.extend(do("tile_store", (kept[t], _whole(t)), heights[i], dot.lanes, width) for i, _, t in every)
        multiplied = alloc([*(t for row in c for t in row), *a, *b], body)
        finished = self._finish(part, env)
        if sums.loop is not None:
            finished = (If(eq(var(sums.loop), extent_of(sums.loop.extent) - 1), finished),)
        return (*multiplied, *finished)

    def _hints(self, part: _Part, panels: Panels, env: Env, outer: Env, step: Expr, k: Expr) -> list[Stmt]:
        """What a step asks for: columns some steps ahead, its share of the next block of rows, and of the sums that
        the next panel adds to."""
        setting, sums = self.setting, self.sums
        found: list[Stmt] = []
        if setting.most_columns * self._most(setting) * setting.block * setting.found.b.dtype.bytes > AMX_STAYS:
            found.extend(self._columns_ahead(part, panels, outer, k))
        # of the next rows an even share in each of the whole panels that a tile has
        share = -(-part.rows // max(1, setting.most_columns // setting.width))
        most = 0 if setting.windows or part.columns < setting.width else part.rows if self.rows.in_place else ROWS_AHEAD
        hint = PREFETCH if self.rows.in_place else PREFETCH_TILE
        for number in range(share if share <= most else 0):
            row = simplify(part.row + part.rows + minimum(var(part.turn) * share + number, part.rows - 1))
            source = self.rows.ahead(env, row, outer, k)
            if source is not None:
                found.append(Instruction(hint, (source,)))
        if sums.loop is not None:
            size = int(sums.buffer.shape[2]) * int(sums.buffer.shape[3]) * sums.buffer.dtype.bytes  # type: ignore[arg-type]
            share = -(-size // LINE_BYTES // sums.steps)
            elements = LINE_BYTES // sums.buffer.dtype.bytes
            block, panel, *_ = sums.at(part, const(0), const(0))
            for number in range(share):
                place = simplify((step * share + number) * elements)
                next_one = (block, simplify(panel + 1), const(0), place)
                found.append(Instruction(PREFETCH, (Operand(sums.buffer, next_one),)))
        return found

    def _columns_ahead(self, part: _Part, panels: Panels, outer: Env, k: Expr) -> list[Stmt]:
        """Panels follow each other in the order in which they are read: so many steps on is so far on in memory."""
        dtype = self.setting.found.b.dtype
        step = self.setting.block * self.setting.width
        base = panels.at(part.place, part.column, const(0), outer, k)
        later = Operand(base.buffer, (*base.origin[:-1], simplify(base.origin[-1] + AHEAD * step)))
        return _lines(later, step * dtype.bytes, dtype)

    def _tile(self, stem: str, columns: int, dtype: dtypes.DType) -> Buffer:
        return Buffer(self.nest.names.fresh(f"tile_{stem}"), (TILE_ROWS, columns), dtype, Memory.TILE)

    def _finish(self, part: _Part, env: Env) -> tuple[Stmt, ...]:
        """The epilogue on what the tiles left in scratch."""
        nest, setting = self.nest, self.setting
        monoid = nest.nest.monoid
        assert monoid is not None
        row = Axis("row", part.rows)
        at = {**env, **row_env(nest, setting, simplify(part.row + var(row)))}
        lane: Axis | None = None
        if part.lanes > 1:
            u, lane = Axis("column_u", part.columns // part.lanes), Axis("column_lane", part.lanes)
            column = var(u) * part.lanes + var(lane)
        else:
            u = Axis("column_u", part.columns)
            column = var(u)
        at[setting.found.column] = simplify(part.column + column)
        results = nest.results_of(monoid, self.sums.buffer, self.sums.at(part, var(row), simplify(column)))
        return (For(row, ForKind.SERIAL, nest.stores_of(RegisterBlock(at, (u,), lane), results)),)

    def _configuration(self, rows: int, columns: int) -> _Configuration:
        """Sizes of the tiles, in the order in which a block allocates them."""
        setting, dot = self.setting, self.setting.dot
        heights, across = self.rows.heights(rows), -(-columns // dot.lanes)
        sizes = [(h, TILE_BYTES) for h in heights for _ in range(across)]
        sizes += [(h, setting.block * setting.found.a.dtype.bytes) for h in heights]
        sizes += [(setting.block // dot.group, TILE_BYTES)] * across
        return tuple(sizes)


def _sums(nest: CpuNest, setting: Setting) -> _Sums:
    """Where tiles leave their sums: one block, or the whole tile where the reduction comes in several passes."""
    assert nest.nest.monoid is not None
    dtype = nest.nest.monoid.identity[0].dtype
    part = nest.plan.options(TileForm).step // setting.block if not setting.windows else 0
    block = (setting.size, -(-setting.width // setting.dot.lanes) * setting.dot.lanes)
    if not part or part >= setting.steps:
        return _Sums(Buffer(nest.names.fresh("sums"), (1, 1, *block), dtype, Memory.SCRATCH), setting.steps, None)
    rows = min(int(setting.height.size), setting.height.extent)
    shape = (-(-rows // setting.size), -(-setting.most_columns // setting.width), *block)
    buffer = Buffer(nest.names.fresh("sums"), shape, dtype, Memory.SCRATCH)
    return _Sums(buffer, part, Axis("part", -(-setting.steps // part)))


def _lines(base: Operand, size: int, dtype: dtypes.DType) -> list[Stmt]:
    """A hint for every line of a run of memory."""
    elements = LINE_BYTES // dtype.bytes
    hints: list[Stmt] = []
    for number in range(-(-size // LINE_BYTES)):
        origin = (*base.origin[:-1], simplify(base.origin[-1] + number * elements))
        hints.append(Instruction(PREFETCH, (Operand(base.buffer, origin),)))
    return hints


def _common(found: Sequence[_Configuration]) -> _Configuration | None:
    """One configuration in which every block finds its tiles, where there is one: loading another takes long."""
    longest = max(found, key=len)
    return longest if all(c == longest[: len(c)] for c in found) else None


def _configure(sizes: _Configuration) -> Instruction:
    whole = (*sizes, *((0, 0),) * (TILES - len(sizes)))
    return do("tile_configure", (), *(h for h, _ in whole), *(b for _, b in whole))


def _whole(tile: Buffer) -> Operand:
    return Operand(tile, (const(0), const(0)))
