"""Lowers a window that slides over every channel by itself: taps interleaved row by row, then lane-wise dot products.

For every row of outputs the window's taps across it are kept in scratch, four side by side for each channel and
position, padding as zeros. A position then serves all the outputs whose window it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod

from tilewright.backend.cpu.depthwise.window import CHANNELS, DepthwiseWindow, splits_well, window_of
from tilewright.backend.cpu.dot.operands import Env, do
from tilewright.backend.cpu.vector.nest import CpuNest
from tilewright.intrinsics.cpu import WINDOW_DOTS, Dot
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Const, Expr, all_of, axes_of, const, load, minimum, substitute, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, If, Instruction, Memory, Operand, Stmt, Store
from tilewright.lower.blocks import BlockRun, pieces
from tilewright.lower.nesting import serial, trip_count, unrolled, walked
from tilewright.lower.register_block import RegisterBlock
from tilewright.tile_graph.algebra.propagate import Range, extent_of
from tilewright.tile_graph.plan.leaf_form import WindowForm


@dataclass(frozen=True, eq=False)
class _Taps:
    """Scratch for one row: (position, group of taps, channel of the tile, tap)."""

    buffer: Buffer
    dot: Dot
    found: DepthwiseWindow
    groups: int
    size: int  # of one position


class CpuWindow(CpuNest):
    """The lowering of one window under a plan with a lane-wise dot product; what it cannot take runs as any nest."""

    def statements(self) -> tuple[Stmt, ...]:
        found = window_of(self.nest)
        dot = WINDOW_DOTS[self.plan.options(WindowForm).instruction]
        if found is None or not self._is_ready(found, dot):
            return super().statements()
        row, channels = self.ranges[found.row], self.ranges[found.channel]
        positions = found.step * (int(row.size) - 1) + extent_of(found.along.extent)
        shape = (positions, found.groups(dot), min(int(channels.size), channels.extent), dot.group)
        buffer = Buffer(self.names.fresh("taps"), shape, found.a.dtype, Memory.SCRATCH)
        taps = _Taps(buffer, dot, found, found.groups(dot), prod(shape[1:]))
        plain = [a for a in self.loop_axes if a not in (found.row, found.channel)]
        loops, env = walked(plain, self.ranges)
        return (Alloc(buffer, serial(loops, (*self._fill(env, taps), *self._outputs(env, taps)))),)

    def _is_ready(self, found: DepthwiseWindow, dot: Dot) -> bool:
        channels = self.ranges[found.channel]
        size = min(int(channels.size), channels.extent)
        whole = all(static(self.ranges[r].count) == extent_of(r.extent) for r in self.nest.reduce_axes)
        place = self.access.read[found.b.source]
        is_packed = not place.lows and place.layout == found.layout(dot)
        return whole and is_packed and bool(splits_well(size, channels.extent)) and not self.nest.initial

    # --- taps

    def _fill(self, env: Env, taps: _Taps) -> tuple[Stmt, ...]:
        found = taps.found
        row = self.ranges[found.row]
        count = simplify(found.step * (row.count - 1) + extent_of(found.along.extent))
        position = Axis("position", trip_count(count))
        # conditions and reads ask for row·step + outer alone: the first output of the row stands for all
        env = {**env, found.row: row.low, found.along: var(position)}
        across = [c for c in found.conditions if found.inner not in axes_of(c)]
        check = self._lowered(all_of(across), env)
        blocks = self._channel_blocks(found, lambda start: self._interleaved(start, env, var(position), taps))
        if not (isinstance(check, Const) and check.value):
            size = taps.size
            clear = do("clear_run", (Operand(taps.buffer, (var(position), *(const(0),) * 3)),), size)
            blocks = (If(check, blocks, (clear,)),)
        return (For(position, ForKind.SERIAL, blocks),)

    def _lowered(self, condition: Expr, env: Env) -> Expr:
        return simplify(self.access.lower(substitute(condition, env)))

    def _interleaved(self, start: Expr, env: Env, position: Expr, taps: _Taps) -> tuple[Stmt, ...]:
        """One block of channels at one position: every tap in a register, then side by side in scratch."""
        found, group = taps.found, taps.dot.group
        count = extent_of(found.inner.extent)
        down = [c for c in found.conditions if found.inner in axes_of(c)]
        lane = Axis("channel_lane", CHANNELS)
        low = self.ranges[found.channel].low
        body: list[Stmt] = []
        held = Buffer(self.names.fresh("tap"), (count, CHANNELS), found.a.dtype, Memory.REGISTER)
        for tap in range(count):
            here = {**env, found.inner: const(tap), found.channel: simplify(low + start + var(lane))}
            value = simplify(self.access.lower(substitute(found.a, here)))
            place = (const(tap), var(lane))
            read: tuple[Stmt, ...] = (For(lane, ForKind.VECTOR, (Store(held, place, value),)),)
            check = self._lowered(all_of(down), here)
            if not (isinstance(check, Const) and check.value):
                zero = For(lane, ForKind.VECTOR, (Store(held, place, const(0, held.dtype)),))
                read = (If(check, read, (zero,)),)
            body.extend(read)
        for number in range(taps.groups):
            # beyond the last tap weights are zero: any value will do
            members = [min(number * group + i, count - 1) for i in range(group)]
            to = Operand(taps.buffer, (position, const(number), start, const(0)))
            operands = (to, *(Operand(held, (const(m), const(0))) for m in members))
            body.append(Instruction("interleave_4", operands))
        return (Alloc(held, tuple(body)),)

    def _channel_blocks(self, found: DepthwiseWindow, inner: Callable[[Expr], tuple[Stmt, ...]]) -> tuple[Stmt, ...]:
        """Blocks over the tile's channels; the last begins earlier where the channels are not whole blocks."""
        channels = self.ranges[found.channel]
        count = channels.count
        block = Axis("channel_block", trip_count(simplify((count + (CHANNELS - 1)) // CHANNELS)))
        if static(block.extent) == 1:
            return inner(const(0))
        start: Expr = var(block) * CHANNELS
        size = min(int(channels.size), channels.extent)
        if size % CHANNELS or channels.extent % CHANNELS:
            start = minimum(start, count - CHANNELS)
        return (For(block, ForKind.SERIAL, inner(simplify(start))),)

    # --- outputs

    def _outputs(self, env: Env, taps: _Taps) -> tuple[Stmt, ...]:
        return self._channel_blocks(taps.found, lambda start: self._rows(start, env, taps))

    def _rows(self, start: Expr, env: Env, taps: _Taps) -> tuple[Stmt, ...]:
        row = self.ranges[taps.found.row]
        body: list[Stmt] = []
        for piece in pieces(row, self.register.get(taps.found.row, 1), 1):
            if static(piece.trips) != 0:
                body.extend(self._row_blocks(piece, row, start, env, taps))
        return tuple(body)

    def _row_blocks(self, piece: BlockRun, row: Range, start: Expr, env: Env, taps: _Taps) -> tuple[Stmt, ...]:
        if static(piece.trips) == 1:
            return self._sums(piece.base, piece.size, start, env, taps)
        loop = Axis("row_block", trip_count(piece.trips))
        first = simplify(piece.base + var(loop) * piece.size)
        return (For(loop, ForKind.SERIAL, self._sums(first, piece.size, start, env, taps)),)

    def _sums(self, first: Expr, size: int, start: Expr, env: Env, taps: _Taps) -> tuple[Stmt, ...]:
        found, dot, monoid = taps.found, taps.dot, self.nest.monoid
        assert monoid is not None
        vectors = CHANNELS // dot.lanes
        acc = self._states(monoid, (size, vectors, dot.lanes), "acc")[0]
        u, v, lane = Axis("row_u", size), Axis("channel_u", vectors), Axis("channel_lane", dot.lanes)
        index = (var(u), var(v), var(lane))
        low = self.ranges[found.channel].low
        at = {**env, found.row: simplify(self.ranges[found.row].low + first + var(u)),
              found.channel: simplify(low + start + var(v) * dot.lanes + var(lane))}  # fmt: skip
        seed = self._seed(monoid)
        begin = monoid.identity[0] if seed is None else self._lowered(seed[1], at)
        results = self._results(monoid, [acc], index)
        if seed is not None:
            results = {seed[0]: load(acc, index)}
        zero: tuple[Stmt, ...] = (For(lane, ForKind.VECTOR, (Store(acc, index, begin),)),)
        body: list[Stmt] = list(unrolled((u, v), zero))
        weights = self.access.read[found.b.source]
        name = dot.instruction(found.a.dtype.name, found.b.dtype.name) or ""
        terms = list(product(*(range(extent_of(t.extent)) for t in found.terms)))
        for tap in range(extent_of(found.along.extent)):
            for number, term in product(range(taps.groups), terms):
                channel = simplify(start + var(v) * dot.lanes)
                position = simplify((first + var(u)) * found.step + tap)
                a = Operand(taps.buffer, (position, const(number), channel, const(0)))
                place: Env = dict(zip(found.terms, map(const, term), strict=True))
                place |= {found.along: const(tap), found.inner: const(number * dot.group)}
                place[found.channel] = simplify(low + channel)
                logical = tuple(simplify(substitute(i, place)) for i in found.b.indices)
                b = Operand(weights.buffer, weights.indices(logical))
                one = Instruction(name, (Operand(acc, (var(u), var(v), const(0))), a, b))
                body.extend(unrolled((u, v), (one,)))
        body.extend(self._stores(RegisterBlock(at, (u, v), lane), results))
        return (Alloc(acc, tuple(body)),)
