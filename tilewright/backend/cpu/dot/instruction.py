"""Lowers a contraction whose plan names a dot-product instruction: rows, panels of columns, blocks of k.

Rows are read where they lie when whole blocks of k are contiguous there; otherwise a tile's rows are first copied to
scratch, padding and left-over elements as zeros, so that the innermost loops never ask where they are. Matrix
instructions sum up in registers of their own: `amx/tiles.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilewright.backend.cpu.dot.contraction import Contraction, block_of, contractions, panel_layout
from tilewright.backend.cpu.dot.operands import Env, Panels, RowSource, Setting, do, row_env
from tilewright.backend.cpu.vector.nest import CpuNest
from tilewright.errors import InternalError
from tilewright.intrinsics.cpu import DOTS, Dot
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, const, load, substitute, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, Instruction, Memory, Operand, Stmt, Store
from tilewright.lower.blocks import BlockRun, pieces
from tilewright.lower.nesting import serial, trip_count, unrolled, walked
from tilewright.lower.register_block import RegisterBlock
from tilewright.tile_graph.algebra.propagate import Range, extent_of
from tilewright.tile_graph.plan.leaf_form import InstructionForm


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


class CpuInstruction(CpuNest):
    """The lowering of one contraction under a plan with an instruction."""

    def statements(self) -> tuple[Stmt, ...]:
        setting = self.setting()
        plain = [a for a in self.loop_axes if a is not setting.found.column and a not in setting.rows]
        loops, env = walked(plain, self.ranges)
        return serial(loops, self._panel(env, setting))

    # --- what is known before

    @property
    def summed(self) -> int:
        """Elements of k in a pass; 0: all."""
        return 0

    def setting(self) -> Setting:
        """Of a plan with an instruction that the nest can take; InternalError of others."""
        dot = DOTS[self.plan.options(InstructionForm).instruction]
        inner = self.nest.named(self.plan.order[-1])
        found = next((c for c in contractions(self.nest) if c.column is self.vector and _name(dot, c)), None)
        # a streamed reduction comes in blocks that need not be whole groups, and begins from what is carried
        blocks = any(static(self.ranges[r].count) != extent_of(r.extent) for r in self.nest.reduce_axes)
        if found is None or self.nest.initial or blocks:
            raise InternalError(f"leaf '{self.plan.tensor}': {dot.name} takes whole sums of products alone")
        outer = found.windows(self.nest, inner)
        block = block_of(dot, extent_of(inner.extent))
        width = self.register[found.column]
        place = self.access.read[found.b.source]
        is_packed = found.is_packable and not place.lows and _is_multiple(self.ranges[found.column].low, width)
        is_packed = is_packed and place.layout == panel_layout(found, outer, inner, dot, block, width, self.summed)
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
        rows = RowSource(self, setting, env)
        panels = Panels(self, setting, env)
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
                inner.append(For(row_loop, ForKind.SERIAL, self._vectors(here, rows, panels, setting, env)))
            body.append(For(loop, ForKind.SERIAL, tuple(inner)))
        return rows.around(panels.around([*rows.fill(), *panels.fill(), *body]))

    def _loops(self, setting: Setting) -> tuple[list[Axis], Env]:
        """Loops over the reduction but the innermost, outermost first, and the axes they stand for."""
        loops = [Axis(a.name, extent_of(a.extent)) for a in setting.windows]
        return loops, {a: var(loop) for a, loop in zip(setting.windows, loops, strict=True)}

    # --- accumulators in vector registers

    def _vectors(self, part: _Part, rows: RowSource, panels: Panels, setting: Setting, env: Env) -> tuple[Stmt, ...]:
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
        loops, outer = self._loops(setting)

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
        body.extend(serial(loops, along))
        index: tuple[Expr, ...]
        if part.lanes == dot.lanes:
            at = {**env, **row, setting.found.column: column}
            block, index = RegisterBlock(at, (u, v), lane), (var(u), var(v), var(lane))
        else:
            single = Axis("column_u", part.columns)
            at = {**env, **row, setting.found.column: simplify(part.column + var(single))}
            block, index = RegisterBlock(at, (u, single), None), (var(u), const(0), var(single))
        results = self._results(monoid, [acc], index)
        if seed is not None:
            results = {seed[0]: load(acc, index)}
        if lost is not None:
            results = {t: value + lost.value(index[1:]) for t, value in results.items()}
        body.extend(self._stores(block, results))
        return (Alloc(acc, tuple(body) if lost is None else lost.around(body)),)


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


def _name(dot: Dot, found: Contraction) -> str | None:
    return dot.instruction(found.a.dtype.name, found.b.dtype.name)


def _any(piece: BlockRun) -> bool:
    return static(piece.trips) != 0


def _is_multiple(low: Expr, of: int) -> bool:
    total = linear(low)
    return total.constant % of == 0 and all(c % of == 0 for c in total.terms.values())
