"""Lowers a contraction whose plan names a dot-product or matrix instruction: rows, panels of columns, blocks of k.

Rows are read where they lie when whole blocks of k are contiguous there; otherwise a tile's rows are first copied to
scratch, padding and left-over elements as zeros, so that the innermost loops never ask where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilewright.intrinsics.cpu import DOTS, TILE_BYTES, TILE_ROWS, TILES, Dot
from tilewright.ir import dtypes
from tilewright.ir.bounds import static
from tilewright.ir.expr import (
    Axis,
    Expr,
    const,
    eq,
    load,
    minimum,
    substitute,
    var,
)
from tilewright.ir.loops import Alloc, Buffer, For, ForKind, If, Instruction, Memory, Operand, Stmt, Store
from tilewright.ir.simplify import linear, simplify
from tilewright.lower.blocks import Piece, pieces
from tilewright.lower.cpu_nest import CpuNest
from tilewright.lower.cpu_operands import Env, Panels, Rows, Setting, do, row_env
from tilewright.lower.nesting import alloc, serial, trip_count, unrolled, walked
from tilewright.lower.register_block import Block
from tilewright.schedule.contraction import Contraction, block_of, contractions, panel_layout
from tilewright.schedule.propagate import Range, extent_of

_STAYS = 16 << 10  # bytes that stay in L1 beside a block of the other operand; every core with tiles has 48 KB


@dataclass(frozen=True, eq=False)
class _Part:
    """One block of outputs, its sizes fixed: where it is in the tile, and where its columns are in the tensor."""

    row: Expr
    rows: int
    place: Expr
    column: Expr
    columns: int
    lanes: int  # columns that are stored together: fewer than the instruction has in a last, partly filled vector

    def vectors(self, lanes: int) -> int:
        return -(-self.columns // lanes)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Scratch for accumulators: (block of rows, block of columns, row, column); `steps` of k come at a time."""

    buffer: Buffer
    steps: int
    loop: Axis | None  # over the parts of the reduction; None when there is one

    def around(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        inner = tuple(body) if self.loop is None else (For(self.loop, ForKind.SERIAL, tuple(body)),)
        return (Alloc(self.buffer, inner),)

    def at(self, part: _Part, row: Expr, column: Expr) -> tuple[Expr, ...]:
        if self.loop is None:
            return (const(0), const(0), row, column)
        height, width = int(self.buffer.shape[2]), int(self.buffer.shape[3])  # type: ignore[arg-type]
        places = (part.row // height, part.place // width, part.row % height + row, part.place % width + column)
        return tuple(simplify(p) for p in places)


class CpuInstruction(CpuNest):
    """The lowering of one contraction under a plan with an instruction; what it cannot take runs as any nest."""

    def statements(self) -> tuple[Stmt, ...]:
        setting = self._setting()
        if setting is None:
            return super().statements()
        plain = [a for a in self.outer if a is not setting.found.column and a not in setting.rows]
        loops, env = walked(plain, self.ranges)
        body = serial(loops, self._panel(env, setting))
        if setting.dot.is_tile:
            body = (*body, Instruction("tile_release", ()))
        return body

    # --- what is known before

    def _setting(self) -> Setting | None:
        dot = DOTS[self.plan.instruction or ""]
        inner = self.nest.named(self.plan.order[-1])
        found = next((c for c in contractions(self.nest) if c.column is self.vector and _name(dot, c)), None)
        if found is None or self.nest.initial:
            return None
        if any(static(self.ranges[r].count) != extent_of(r.extent) for r in self.nest.reduce_axes):
            return None  # a streamed reduction comes in blocks that need not be whole groups
        outer = found.outer(self.nest, inner)
        block = block_of(dot, extent_of(inner.extent))
        width = dot.lanes if dot.is_tile else self.register[found.column]
        place = self.access.read[found.b.source]
        is_packed = found.is_packable and not place.lows and _is_multiple(self.ranges[found.column].low, width)
        is_packed = is_packed and place.layout == panel_layout(found, outer, inner, dot.group, block, width)
        rows: list[Axis] = []
        for axis in reversed(found.rows):
            rows.insert(0, axis)
            if static(self.ranges[axis].count) != extent_of(axis.extent):
                break
        height = Range(const(0), 1, 1)
        if rows:
            first, below = self.ranges[rows[0]], prod(extent_of(a.extent) for a in rows[1:])
            height = Range(simplify(first.low * below), int(first.size) * below, first.extent * below)
        size = self.register.get(found.rows[-1], 1) if found.rows else 1
        columns = self.ranges[found.column]
        kind, lost = dot.moves(found.a.dtype.name, found.b.dtype.name)
        return Setting(dot, _name(dot, found) or "", found, inner, outer, block, tuple(rows), height, size,
                        self.register[found.column], min(int(columns.size), columns.extent), is_packed,
                       dtypes.by_name(kind), lost)  # fmt: skip

    # --- loops around

    def _panel(self, env: Env, setting: Setting) -> tuple[Stmt, ...]:
        rows = Rows(self, setting, env)
        panels = Panels(self, setting, env)
        sums = self._sums(setting) if setting.dot.is_tile else None
        columns = self.ranges[setting.found.column]
        across = [p for p in pieces(columns, setting.width, setting.dot.lanes) if _any(p)]
        down = [p for p in pieces(setting.height, setting.size, 1) if _any(p)]
        body: list[Stmt] = []
        for piece in across:
            loop = Axis(f"{setting.found.column.name}_block", trip_count(piece.trips))
            position = simplify(piece.base + var(loop) * piece.size)
            inner: list[Stmt] = []
            for part in down:
                row_loop = Axis("row_block", trip_count(part.trips))
                row = simplify(part.base + var(row_loop) * part.size)
                here = _Part(row, part.size, position, simplify(columns.low + position), piece.size, piece.lanes)
                if sums is None:
                    block = self._vectors(here, rows, panels, setting, env)
                else:
                    block = self._tiles(here, rows, panels, sums, setting, env)
                    if len(across) * len(down) > 1:
                        inner.append(_configure(setting, part.size, piece.size))
                inner.append(For(row_loop, ForKind.SERIAL, block))
            body.append(For(loop, ForKind.SERIAL, tuple(inner)))
        if sums is not None:
            body = list(sums.around(body))
            if len(across) * len(down) == 1:
                body.insert(0, _configure(setting, down[0].size, across[0].size))
        return rows.around(panels.around([*rows.fill(), *panels.fill(), *body]))

    def _sums(self, setting: Setting) -> _Sums:
        """Where tiles leave their sums: one block, or the whole tile where the reduction comes in several parts."""
        assert self.nest.monoid is not None
        dtype = self.nest.monoid.identity[0].dtype
        part = self.plan.step // setting.block if not setting.outer else 0
        block = (setting.size, -(-setting.width // setting.dot.lanes) * setting.dot.lanes)
        if not part or part >= setting.steps:
            return _Sums(Buffer(self.names.fresh("sums"), (1, 1, *block), dtype, Memory.SCRATCH), setting.steps, None)
        rows = min(int(setting.height.size), setting.height.extent)
        shape = (-(-rows // setting.size), -(-setting.most_columns // setting.width), *block)
        buffer = Buffer(self.names.fresh("sums"), shape, dtype, Memory.SCRATCH)
        return _Sums(buffer, part, Axis("part", -(-setting.steps // part)))

    def _loops(self, setting: Setting, sums: _Sums | None = None) -> tuple[list[Axis], Env, Expr]:
        """Loops over the reduction, outermost first; the axes they stand for; where a block of the innermost begins."""
        loops = [Axis(a.name, extent_of(a.extent)) for a in setting.outer]
        env: Env = {a: var(loop) for a, loop in zip(setting.outer, loops, strict=True)}
        if sums is None or sums.loop is None:
            last = Axis(setting.inner.name, setting.steps)
            return [*loops, last], env, var(last) * setting.block
        first = var(sums.loop) * sums.steps
        last = Axis(setting.inner.name, trip_count(simplify(minimum(sums.steps, const(setting.steps) - first))))
        return [*loops, last], env, simplify((first + var(last)) * setting.block)

    # --- accumulators in vector registers

    def _vectors(self, part: _Part, rows: Rows, panels: Panels, setting: Setting, env: Env) -> tuple[Stmt, ...]:
        dot = setting.dot
        monoid = self.nest.monoid
        assert monoid is not None
        vectors = part.vectors(dot.lanes)
        acc = self._states(monoid, (part.rows, vectors, dot.lanes), "acc")[0]
        u, v, lane = Axis("row_u", part.rows), Axis("column_u", vectors), Axis("column_lane", dot.lanes)
        row = row_env(self, setting, simplify(part.row + var(u)))
        column = simplify(part.column + var(v) * dot.lanes + var(lane))
        seed = self._seed(monoid) if part.lanes == dot.lanes and not setting.lost else None
        first = monoid.identity[0]
        if seed is not None:
            first = simplify(self.access.lower(substitute(seed[1], {**env, **row, setting.found.column: column})))
        zero: tuple[Stmt, ...] = (Store(acc, (var(u), var(v), var(lane)), first),)
        body: list[Stmt] = list(unrolled((u, v), (For(lane, ForKind.VECTOR, zero),)))
        lost = _Lost(self, setting, vectors) if setting.lost else None
        loops, outer, _ = self._loops(setting)

        def step(k: Expr, groups: int) -> tuple[Stmt, ...]:
            inner: list[Stmt] = []
            held: Buffer | None = None
            if dot.row_groups > 1:
                held = Buffer(self.names.fresh("row"), (part.rows, setting.block), setting.row_type, Memory.REGISTER)
                e = Axis("k_lane", setting.block)
                source = rows.at(simplify(part.row + var(u)), outer, simplify(k + var(e)))
                kept = Store(held, (var(u), var(e)), load(source.buffer, source.origin))
                inner.extend(unrolled((u,), (For(e, ForKind.VECTOR, (kept,)),)))
            for group in range(groups):
                here = simplify(k + group * dot.group)
                own = rows.at(simplify(part.row + var(u)), outer, here) if held is None else None
                a = own or Operand(held, (var(u), const(0)))  # type: ignore[arg-type]
                b = panels.at(part.place, part.column, var(v) * dot.lanes, outer, here)
                scalars = (const(group),) if held is not None else ()
                one = Instruction(setting.name, (Operand(acc, (var(u), var(v), const(0))), a, b), scalars)
                inner.extend(unrolled((u, v), (one,)))
                if lost is not None:
                    inner.extend(lost.add(panels, part, outer, here, group))
            return tuple(inner) if held is None else (Alloc(held, tuple(inner)),)

        # the last block ends with its last group that is not all padding
        full, rest = divmod(-(-extent_of(setting.inner.extent) // dot.group), dot.row_groups)
        along: tuple[Stmt, ...] = ()
        if full:
            last = Axis(setting.inner.name, full)
            along = (For(last, ForKind.SERIAL, step(var(last) * setting.block, dot.row_groups)),)
        if rest:
            along = (*along, *step(const(full * setting.block), rest))
        body.extend(serial(loops[:-1], along))
        index: tuple[Expr, ...]
        if part.lanes == dot.lanes:
            at = {**env, **row, setting.found.column: column}
            block, index = Block(at, (u, v), lane), (var(u), var(v), var(lane))
        else:
            single = Axis("column_u", part.columns)
            at = {**env, **row, setting.found.column: simplify(part.column + var(single))}
            block, index = Block(at, (u, single), None), (var(u), const(0), var(single))
        results = self._results(monoid, [acc], index)
        if seed is not None:
            results = {seed[0]: load(acc, index)}
        if lost is not None:
            results = {t: value + lost.value(index[1:]) for t, value in results.items()}
        body.extend(self._stores(block, results))
        return (Alloc(acc, tuple(body) if lost is None else lost.around(body)),)

    # --- accumulators in matrix registers

    def _tiles(
        self, part: _Part, rows: Rows, panels: Panels, sums: _Sums, setting: Setting, env: Env
    ) -> tuple[Stmt, ...]:
        dot, monoid = setting.dot, self.nest.monoid
        assert monoid is not None
        down, across = -(-part.rows // dot.rows), part.vectors(dot.lanes)
        heights = [min(dot.rows, part.rows - i * dot.rows) for i in range(down)]
        dtype = monoid.identity[0].dtype
        groups = setting.block // dot.group
        c = [[self._tile("c", dot.lanes, dtype) for _ in range(across)] for _ in range(down)]
        a_type, b_type = setting.found.a.dtype, setting.found.b.dtype
        a = [self._tile("a", TILE_BYTES // a_type.bytes, a_type) for _ in range(down)]
        b = [self._tile("b", TILE_BYTES // b_type.bytes, b_type) for _ in range(across)]
        every = [(i, j, c[i][j]) for i in range(down) for j in range(across)]
        width = int(sums.buffer.shape[3])  # type: ignore[arg-type]
        kept = {t: Operand(sums.buffer, sums.at(part, const(i * dot.rows), const(j * dot.lanes))) for i, j, t in every}
        body: list[Stmt] = [do("tile_zero", (_whole(t),), heights[i], dot.lanes) for i, _, t in every]
        if sums.loop is not None:
            again = [do("tile_load", (_whole(t), kept[t]), heights[i], dot.lanes, width) for i, _, t in every]
            body = [If(eq(var(sums.loop), 0), tuple(body), tuple(again))]
        loops, outer, k = self._loops(setting, sums)
        rows_pass, columns_pass = _passing(rows, sums, setting)
        take_a, take_b = ("tile_load_passing" if passes else "tile_load" for passes in (rows_pass, columns_pass))

        def load_a(i: int) -> Stmt:
            source = rows.at(simplify(part.row + i * dot.rows), outer, k)
            return do(take_a, (_whole(a[i]), source), heights[i], setting.block, rows.stride)

        def load_b(j: int) -> Stmt:
            source = panels.at(part.place, part.column, const(j * dot.lanes), outer, k)
            width = dot.lanes * dot.group
            return do(take_b, (_whole(b[j]), source), groups, width, width)

        def multiply(i: int, j: int) -> Stmt:
            tiles = (_whole(c[i][j]), _whole(a[i]), _whole(b[j]))
            return do(setting.name, tiles, heights[i], dot.lanes, groups)

        inner: list[Stmt] = []
        if down <= across:
            inner.extend(load_a(i) for i in range(down))
            for j in range(across):
                inner.append(load_b(j))
                inner.extend(multiply(i, j) for i in range(down))
        else:
            inner.extend(load_b(j) for j in range(across))
            for i in range(down):
                inner.append(load_a(i))
                inner.extend(multiply(i, j) for j in range(across))
        body.extend(serial(loops, tuple(inner)))
        body.extend(do("tile_store", (kept[t], _whole(t)), heights[i], dot.lanes, width) for i, _, t in every)
        multiplied = alloc([*(t for row in c for t in row), *a, *b], body)
        finished = self._finish(part, sums, setting, env)
        if sums.loop is not None:
            finished = (If(eq(var(sums.loop), extent_of(sums.loop.extent) - 1), finished),)
        return (*multiplied, *finished)

    def _tile(self, stem: str, columns: int, dtype: dtypes.DType) -> Buffer:
        return Buffer(self.names.fresh(f"tile_{stem}"), (TILE_ROWS, columns), dtype, Memory.TILE)

    def _finish(self, part: _Part, sums: _Sums, setting: Setting, env: Env) -> tuple[Stmt, ...]:
        """The epilogue on what the tiles left in scratch."""
        monoid = self.nest.monoid
        assert monoid is not None
        row = Axis("row", part.rows)
        at = {**env, **row_env(self, setting, simplify(part.row + var(row)))}
        lane: Axis | None = None
        if part.lanes > 1:
            u, lane = Axis("column_u", part.columns // part.lanes), Axis("column_lane", part.lanes)
            column = var(u) * part.lanes + var(lane)
        else:
            u = Axis("column_u", part.columns)
            column = var(u)
        at[setting.found.column] = simplify(part.column + column)
        results = self._results(monoid, [sums.buffer], sums.at(part, var(row), simplify(column)))
        return (For(row, ForKind.SERIAL, self._stores(Block(at, (u,), lane), results)),)


class _Lost:
    """The sums of the columns that rows moved to another type leave out; a row of ones adds them up on the way."""

    def __init__(self, nest: CpuInstruction, setting: Setting, vectors: int) -> None:
        self.setting = setting
        dot = setting.dot
        self.by_lane = dot.row_groups > 1
        self.v, self.lane = Axis("column_u", vectors), Axis("column_lane", dot.lanes)
        self.ones = Buffer(nest.names.fresh("ones"), (setting.block,), setting.row_type,
                           Memory.REGISTER if self.by_lane else Memory.SCRATCH)  # fmt: skip
        self.sums = Buffer(nest.names.fresh("lost"), (vectors, dot.lanes), dtypes.by_name(dot.accumulator),
                           Memory.REGISTER)  # fmt: skip

    def around(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        e = Axis("k_lane", self.setting.block)
        one = Store(self.ones, (var(e),), const(1, self.ones.dtype))
        zero = Store(self.sums, (var(self.v), var(self.lane)), const(0, self.sums.dtype))
        cleared = unrolled((self.v,), (For(self.lane, ForKind.VECTOR, (zero,)),))
        return (Alloc(self.ones, (Alloc(self.sums, (For(e, ForKind.VECTOR, (one,)), *cleared, *body)),)),)

    def add(self, panels: Panels, part: _Part, outer: Env, k: Expr, group: int) -> tuple[Stmt, ...]:
        columns = panels.at(part.place, part.column, var(self.v) * self.setting.dot.lanes, outer, k)
        operands = (Operand(self.sums, (var(self.v), const(0))), Operand(self.ones, (const(0),)), columns)
        return unrolled((self.v,), (do(self.setting.name, operands, *((group,) if self.by_lane else ())),))

    def value(self, index: tuple[Expr, ...]) -> Expr:
        return load(self.sums, index) * const(self.setting.lost, self.sums.dtype)


def _passing(rows: Rows, sums: _Sums, setting: Setting) -> tuple[bool, bool]:
    """Whether the rows, and the columns, only pass through: blocks of rows turn inside those of columns."""
    most = min(int(setting.height.size), setting.height.extent)
    outer = prod(extent_of(a.extent) for a in setting.outer)
    depth = outer * min(sums.steps, setting.steps) * setting.block
    if most <= setting.size:  # one block of rows, which stays
        return False, depth * setting.most_columns * setting.found.b.dtype.bytes > _STAYS
    size = setting.found.a.dtype.bytes
    # a row that begins inside a cache line shares the line with the next block of k, which comes soon
    is_aligned = rows.stride * size % TILE_BYTES == 0
    return is_aligned and depth * most * size > _STAYS, False


def _configure(setting: Setting, rows: int, columns: int) -> Instruction:
    """Sizes of the eight tiles, in the order in which a block allocates them."""
    dot = setting.dot
    down, across = -(-rows // dot.rows), -(-columns // dot.lanes)
    heights = [min(dot.rows, rows - i * dot.rows) for i in range(down)]
    sizes = [(h, TILE_BYTES) for h in heights for _ in range(across)]
    sizes += [(heights[i], setting.block * setting.found.a.dtype.bytes) for i in range(down)]
    sizes += [(setting.block // dot.group, TILE_BYTES)] * across
    sizes += [(0, 0)] * (TILES - len(sizes))
    return do("tile_configure", (), *(h for h, _ in sizes), *(b for _, b in sizes))


def _name(dot: Dot, found: Contraction) -> str | None:
    return dot.instruction(found.a.dtype.name, found.b.dtype.name)


def _whole(tile: Buffer) -> Operand:
    return Operand(tile, (const(0), const(0)))


def _any(piece: Piece) -> bool:
    return static(piece.trips) != 0


def _is_multiple(low: Expr, of: int) -> bool:
    total = linear(low)
    return total.constant % of == 0 and all(c % of == 0 for c in total.terms.values())
