"""The loops of a leaf on a CPU as the traffic model sees them: blocks of registers, sums, loops over blocks.

Reads of one block that has been written out count once for each place they are at; whole vectors count all their lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from math import prod

import numpy as np

from tilewright.backend.cpu.dot.instruction import CpuInstruction
from tilewright.backend.cpu.leaf.busy import AxisRegisters, Busy, LoweredLeaf, Shape, blocks_of
from tilewright.backend.cpu.leaf.instructions import instruction_seconds
from tilewright.backend.cpu.leaf.padding import filled_extent
from tilewright.backend.cpu.leaf.strides import lines_of, offset_at, read_stride, squares_along, stride_of
from tilewright.backend.cpu.leaf.window_ends import WindowEnds
from tilewright.backend.cpu.maps.rows import range_of, run_of_blocks
from tilewright.backend.cpu.vector.crowding import crowded_seconds
from tilewright.backend.cpu.vector.nest import CpuNest
from tilewright.backend.cpu.vector.remainders import are_whole_groups
from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, Op, Var, axes_of, const, le, loads, lt, select, var
from tilewright.ir.forms.loops import Memory
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.access import Place
from tilewright.lower.blocks import BlockRun, pieces
from tilewright.lower.placed import Numbers, Placed, SizeCounts
from tilewright.lower.register_block import BufferNames
from tilewright.target import Target
from tilewright.tile_graph.algebra.cuts import cut
from tilewright.tile_graph.algebra.nest import heavy, moves, period
from tilewright.tile_graph.algebra.propagate import Range, Size, extent_of
from tilewright.tile_graph.algebra.unswitch import positions
from tilewright.tile_graph.traffic.touch import Touch, chosen, inside_share, merged
from tilewright.tile_graph.traffic.traffic import LeafTrace


def cpu_walk(target: Target | None = None) -> Callable[[Placed], LeafTrace]:
    """The walk of a leaf; of a target with what it keeps one of its cores busy."""
    return lambda placed: _Leaf(placed, target).walk()


class _Leaf:
    """One leaf: what its lowering decides, asked of the lowering itself."""

    def __init__(self, placed: Placed, target: Target | None) -> None:
        work = placed.work
        self.target = target
        self.placed = placed
        self.nest = work.nest
        kind = CpuInstruction if work.leaf.instruction else CpuNest
        self.low = low = kind(
            work.nest, work.leaf, work.box, dict(work.limits), placed.access, BufferNames(), placed.step
        )
        self.run = low.run
        outer = list(low.loop_axes)
        if self.nest.monoid is not None and low.vector is not None and low.vector in self.nest.axes:
            self.run = low.run = run_of_blocks(self.nest, low.vector, low.register, low.ranges, placed.access)
        self.loop_axes = [a for a in outer if a not in self.run[:-1]]
        self.along = low.vector is not None and low.vector in self.nest.reduce_axes
        # axes in blocks: those of the register tile; one walked on from others stands for all of them
        self.blocked = [a for a in self.loop_axes if a in low.register]
        self.spreads = {a: self._spread(a) for a in (*self.loop_axes, *self.nest.reduce_axes)}
        self.cuts = {a: self._cuts(a) for a in self.blocked}
        self.form = self._form()
        self.ends = WindowEnds(self.form, low.reduction, self._starts)
        self.flat = Axis("run", prod(extent_of(a.extent) for a in self.run)) if self.run else None

    def _spread(self, axis: Axis) -> SizeCounts:
        if axis in self.run:
            inner = prod(extent_of(a.extent) for a in self.run[1:])
            return self.placed.spreads[self.run[0]].times(inner)
        return self.placed.spreads[axis]

    # --- blocks

    def _cuts(self, axis: Axis) -> list[tuple[BlockRun, Size]]:
        """The blocks along an axis, with how many of each a tile has."""
        low = self.low
        extent = range_of(self.run, low.ranges) if axis in self.run else low.ranges[axis]
        lanes = low.plan.lanes if axis is low.vector else 1
        group = period(self.nest, axis)
        groups: Size = 1
        if group is not None and are_whole_groups(extent, group):
            groups = self.spreads[axis].mean() / group
            extent = Range(const(0), group, group)
        parts = [extent]
        is_cut = axis is low.vector or (self.nest.monoid is None and not self.nest.unswitched)
        if is_cut and axis not in self.run and group is None:
            parts = cut(extent, axis, self.nest, low.plan.lanes)
        found: list[BlockRun] = []
        for part in parts:
            if axis is low.transposed:
                found += pieces(part, low.register[axis], low.plan.lanes)
            else:
                found += low._pieces(axis, part, lanes)
        return [(p, groups * float(np.mean(self.placed.everywhere(p.trips)))) for p in found]

    def _counted(self, axis: Axis, of: Callable[[BlockRun], int]) -> Size:
        """The mean over tiles of something that blocks along an axis have."""
        return sum((trips * of(piece) for piece, trips in self.cuts[axis]), 0.0)

    def _blocks(self, axis: Axis) -> Size:
        return self._counted(axis, lambda p: 1)

    def _covered(self, axis: Axis) -> Size:
        return self._counted(axis, lambda p: p.size)

    def _kept(self, axis: Axis) -> Size:
        return self._counted(axis, lambda p: p.kept or p.size)

    def _moves(self, node: Load, axis: Axis) -> bool:
        return any(moves(node, a) for a in (self.run if axis in self.run else (axis,)))

    # --- registers

    def _starts(self, axis: Axis) -> list[tuple[int, Numbers]]:
        """Where the blocks of all tiles begin along an axis, those of each size together."""
        low, result = self.low, []
        for piece in low._pieces(axis, low.ranges[axis], 1):
            most = extent_of(piece.trips) if isinstance(piece.trips, Expr) else piece.trips
            loop = Axis("block", max(1, int(most)))
            start = simplify(low.ranges[axis].low + piece.base + var(loop) * piece.size)
            runs = lt(var(loop), piece.trips)
            begins = self.placed.everywhere(select(runs, start, -1))
            result.append((piece.size, begins[begins >= 0].ravel()))
        return result

    def _inside(self, node: Load) -> float:
        share = 1.0
        for index, extent in zip(node.indices, node.source.shape, strict=True):
            share *= inside_share(index, extent_of(extent))
        return share

    def _read(self, node: Load, along: Mapping[Axis, Size], covered: Callable[[Axis], Size]) -> Size:
        """Bytes of a read in a whole tile: `along` the axes of loops, in every block once for each of its places."""
        count: Size = float(node.source.dtype.bytes)
        for axis in self.blocked:
            count = count * (covered(axis) if self._moves(node, axis) else self._blocks(axis))
        for size in along.values():
            count = count * size
        return count

    def _epilogue(self, node: Load) -> Size:
        single = {a: self.spreads[a].mean() for a in self.loop_axes if a not in self.blocked}
        return self._read(node, single, self._kept)

    def _element(self, node: Load) -> Size:
        along = {a: self.spreads[a].mean() for a in self.loop_axes if a not in self.blocked}
        along.update({a: self.placed.mean(a) for a in self.nest.reduce_axes})
        if self.along:
            vector = self.low.vector
            assert vector is not None
            if not moves(node, vector):
                step = self._step
                along[vector] = self.spreads[vector].mean(lambda n: n // step + n % step)
        return self._read(node, along, self._covered) * self._distinct(node) * self.ends.share(node)

    @property
    def _step(self) -> int:
        """Elements of a sum along its vector that are added up side by side."""
        lanes = self.low.plan.lanes
        return lanes * max(1, self.low.register.get(self.low.vector, lanes) // lanes) if self.low.vector else 1

    def _distinct(self, node: Load) -> float:
        """Of the reads of a block that has been written out with parts of the sum, the part at places of its own."""
        written = [a for a in self.nest.reduce_axes if a in self.low.unrolled_reduction]
        if not written:
            return 1.0
        apart = self.ends.distinct(node)
        return self._places(node, written) if apart is None else apart

    def _places(self, node: Load, written: Sequence[Axis]) -> float:
        steps: list[tuple[Axis, int, int]] = [(a, 1, extent_of(a.extent)) for a in written]
        for axis in self.blocked:
            lanes = self.low.plan.lanes if axis is self.low.vector else 1
            most = int(np.max(self.spreads[axis].values))
            steps.append((axis, lanes, max(1, min(self.low.register[axis], most) // lanes)))
        if prod(n for _, _, n in steps) > 1 << 16:
            return 1.0
        place = _flat(node)
        if place is None:
            return 1.0
        moving = [(place.get(a, 0) * each, n) for a, each, n in steps]
        values = np.zeros(1, dtype=np.int64)
        for step, n in moving:
            values = np.add.outer(values, np.arange(n) * step).ravel()
        counted = prod(n for (a, _, n) in steps if a in written or self._moves(node, a))
        return len(np.unique(values)) / counted

    def _map_reads(self) -> list[tuple[Load, Size]]:
        """Reads of a map, with their bytes."""
        nest = self.nest
        if nest.unswitched:
            block = nest.unswitched
            found = []
            for node in loads(*positions(nest.unswitched, *nest.values)):
                count: Size = float(node.source.dtype.bytes)
                for axis in self.loop_axes:
                    if axis in block:
                        count = count * self.spreads[axis].mean() / block[axis]
                    elif axis in self.blocked:
                        count = count * (self._kept(axis) if self._moves(node, axis) else self._blocks(axis))
                    else:
                        count = count * self.spreads[axis].mean()
                found.append((node, count))
            return found
        early = self._early()
        return [(n, early[n] if n in early else self._epilogue(n) * self._inside(n)) for n in nest.loads()]

    def _early(self) -> dict[Load, Size]:
        """Reads for costly parts of a map that are computed before its inner loops."""
        single = [a for a in self.loop_axes if a not in self.blocked]
        found: dict[Load, Size] = {}
        for node in heavy(*self.nest.values):
            used = axes_of(node)
            if any(a not in single for a in used) or not self.blocked:
                continue
            depth = max((self.loop_axes.index(a) for a in used), default=-1)
            count: Size = 1.0
            for axis in self.loop_axes[: depth + 1]:
                count = count * (self._blocks(axis) if axis in self.blocked else self.spreads[axis].mean())
            found.update({n: n.source.dtype.bytes * count for n in loads(node)})
        others = _outside(self.nest.values, heavy(*self.nest.values))
        return {n: c for n, c in found.items() if n not in others}

    def _registers(self) -> tuple[dict[Hashable, Size], dict[Hashable, Size]]:
        nest, placed = self.nest, self.placed
        loaded: dict[Hashable, Size] = {}
        stored: dict[Hashable, Size] = {}

        def add(to: dict[Hashable, Size], key: Hashable, size: Size) -> None:
            to[key] = to.get(key, 0.0) + size

        def source(node: Load) -> Hashable:
            assert isinstance(node.source, Tensor)
            return placed.key(placed.access.read[node.source].buffer)

        if nest.monoid is None:
            for node, size in self._map_reads():
                add(loaded, source(node), size)
        else:
            own = set(nest.accumulated)
            for node in loads(*nest.elements):
                add(loaded, source(node), self._element(node))
            for node in (*loads(*nest.values), *loads(*nest.initial)):
                if node.source not in own:
                    add(loaded, source(node), self._epilogue(node))
        results: Size = 1.0
        for axis in self.loop_axes:
            results = results * (self._kept(axis) if axis in self.blocked else self.spreads[axis].mean())
        passes = extent_of(self.low.passes.extent) if self.low.passes is not None else 1
        for tensor in nest.stores:
            for place in placed.access.write[tensor]:
                add(stored, placed.key(place.buffer), results * tensor.dtype.bytes * passes)
                beyond = self._beyond(place)
                if beyond:
                    add(stored, placed.key(place.buffer), beyond * tensor.dtype.bytes)
            if passes > 1:
                add(loaded, placed.key(placed.access.read[tensor].buffer), results * tensor.dtype.bytes * (passes - 1))
        return loaded, stored

    def _beyond(self, place: Place) -> Size:
        """Elements that fill up the last panels of what is stored, in the tiles that hold an axis's end."""
        total: Size = 0.0
        if place.buffer.memory is not Memory.GLOBAL or place.prefix:
            return total
        ranges = dict(zip(self.nest.axes, self.placed.work.box, strict=True))
        for number, axis in enumerate(self.nest.axes):
            extent = extent_of(axis.extent)
            more = filled_extent(place.layout, number, extent) - extent
            if not more:
                continue
            part = ranges[axis]
            count: Size = more * float(np.mean(self.placed.everywhere(le(extent, part.low + int(part.size)))))
            for other in self.nest.axes:
                count = count * (1.0 if other is axis else self.placed.mean(other))
            total = total + count
        return total

    # --- parts

    def walk(self) -> LeafTrace:
        nest, low = self.nest, self.low
        sizes: dict[Axis, Size] = dict.fromkeys((*nest.axes, *nest.reduce_axes), 1)
        for axis in self.blocked:
            self._set(sizes, axis, self._covered(axis) / np.maximum(self._blocks(axis), 1e-9))
        if self.along and low.vector is not None:
            sizes[low.vector] = np.minimum(self._step, self.placed.mean(low.vector))
        for axis in low.unrolled_reduction:
            sizes[axis] = self.placed.mean(axis)
        parts = [dict(sizes)]
        trips: list[Size] = []

        def grow(axis: Axis, to: Size, count: Size | None = None) -> None:
            before = sizes[axis]
            sizes[axis] = to
            if axis is self.flat:
                sizes.update({a: self.placed.mean(a) for a in self.run})
            parts.append(dict(sizes))
            trips.append(np.maximum(1.0, to / np.maximum(before, 1e-9) if count is None else count))

        inner = [a for a in low.reduction if a is not low.vector] + ([low.vector] if self.along and low.vector else [])
        cut = {nest.named(a): n for a, n in low.options.cut} if low.passes is not None else {}
        for axis in reversed(inner):
            grow(axis, min(cut[axis], self.placed.mean(axis)) if axis in cut else self.placed.mean(axis))
        after = len(parts) - 1
        first = next((i for i, a in enumerate(self.loop_axes) if a in low.register), len(self.loop_axes))
        parted = self._near_part()
        for number in range(len(self.loop_axes) - 1, -1, -1):
            axis = self.loop_axes[number]
            if number == first - 1:
                for each in cut:
                    grow(each, self.placed.mean(each))
                    cut = {}
            count = self._blocks(axis) if axis in self.blocked else None
            along = self.flat if axis in self.run and self.flat is not None else axis
            whole = self.spreads[axis].mean() if along is self.flat else self.placed.mean(axis)
            if parted and number == len(self.loop_axes) - 1:
                grow(along, np.minimum(parted, whole), np.minimum(parted / low.register[axis], self._blocks(axis)))
                continue
            grow(along, whole, count)
            if parted and number == len(self.loop_axes) - 2:  # all panels have passed by the part: the next one
                row = self.loop_axes[-1]
                along = self.flat if row in self.run and self.flat is not None else row
                whole = self.spreads[row].mean() if along is self.flat else self.placed.mean(row)
                grow(along, whole, whole / np.minimum(parted, whole))
        for each in cut:
            grow(each, self.placed.mean(each))
        return self._walk(parts, trips, after)

    def _near_part(self) -> int:
        """Rows that stay near while panels pass; 0 where all of them pass by each panel."""
        low, near = self.low, self.low.options.near_rows
        if not near or low.vector in self.run:
            return 0
        row = self.loop_axes[-1]
        piece, trips = self.cuts[row][0]
        return near if piece.size == low.register[row] and trips > near // piece.size else 0

    def _mixes(self) -> dict[Axis, list[tuple[int, float]]]:
        found = {}
        for axis in self.blocked:
            blocks = self._blocks(axis)
            sizes = [(p.size, trips / blocks) for p, trips in self.cuts[axis] if trips]
            if len(sizes) > 1 and axis not in self.run:
                found[axis] = sizes
        return found

    def _steps(self) -> dict[Axis, int]:
        found = {a: self.low.register[a] for a in self.blocked if a not in self.run}
        if self.flat is not None:
            found[self.flat] = self.low.register.get(self.run[-1], 1)
        if self.along and self.low.vector is not None:
            found[self.low.vector] = self._step
        return found

    def _origins(self) -> dict[Axis, int]:
        found = dict(self.placed.origins)
        if self.flat is not None and self.run[0] in found:
            found[self.flat] = found[self.run[0]] * prod(extent_of(a.extent) for a in self.run[1:])
        return found

    def _set(self, sizes: dict[Axis, Size], axis: Axis, size: Size) -> None:
        """So many places of a block, along an axis or along all that are walked as one."""
        if axis not in self.run or self.flat is None:
            sizes[axis] = size
            return
        sizes[self.flat] = size
        for own in reversed(self.run):
            extent = self.placed.mean(own)
            sizes[own] = np.minimum(size, extent)
            size = np.maximum(1.0, size / np.maximum(extent, 1e-9))

    def _walk(self, parts: Sequence[Mapping[Axis, Size]], trips: Sequence[Size], after: int) -> LeafTrace:
        nest, placed = self.nest, self.placed
        touches: list[tuple[Touch, int]] = []
        if nest.monoid is None:
            touches += [(t, 0) for t in placed.touches(nest.loads())]
        else:
            own = set(nest.accumulated)
            touches += [(t, 0) for t in placed.touches(loads(*nest.elements))]
            late = [n for n in (*loads(*nest.values), *loads(*nest.initial)) if n.source not in own]
            touches += [(t, after) for t in placed.touches(late)]
        touches += [(t, after) for t in placed.stores()]
        loaded, stored = self._registers()
        grows = placed.grows
        if self.flat is not None:
            inner = prod(extent_of(a.extent) for a in self.run[1:])
            touches = [(merged(t, self.run, self.flat), first) for t, first in touches]
            grows = {v: {**m, self.flat: m[self.run[0]] * inner} if self.run[0] in m else m for v, m in grows.items()}
        return LeafTrace(parts, trips, touches, grows, self._steps(), self._origins(), self._mixes(), loaded, stored,
                         0.0 if self.target is None else self._busy(self.target))  # fmt: skip

    # --- time

    def _busy(self, target: Target) -> Size:
        """Seconds of a core on the tile, all that the leaf touches being in the nearest cache."""
        if self.low.plan.instruction is not None:
            work = self.placed.work
            return float(np.mean(instruction_seconds(work.nest, work.leaf, work.box, target)))
        busy = Busy(self.form, target)
        return busy.cycles(self._shape()) / target.fma_clock

    def _form(self) -> LoweredLeaf:
        nest, low, plan, access = self.nest, self.low, self.low.plan, self.placed.access
        vector, lanes = low.vector, plan.lanes
        places = [p for t in nest.stores for p in access.write[t]]
        return LoweredLeaf(
            nest, vector, lanes, self.run, self.blocked,
            frozenset(a for a in low.reduction if a in low.unrolled_reduction), max(1, low.options.together),
            low.options.row_lanes, low.transposed,
            lambda n: 1 if vector is None else read_stride(n, nest, vector, lanes, access), self._lines,
            [1 if vector is None else stride_of(p, nest.place, vector, lanes) for p in places],
            squares_along(nest, vector, self.blocked, [offset_at(p, nest.place) for p in places]), self._crowded,
        )  # fmt: skip

    def _lines(self, node: Load) -> float:
        source, vector = node.source, self.low.vector
        if self.target is None or vector is None or not isinstance(source, Tensor) or source in self.nest.accumulated:
            return 1.0
        offset = offset_at(self.placed.access.read[source], node.indices)
        return lines_of(offset, vector, source.dtype.bytes, self.target)

    def _crowded(self, reads: int) -> float:
        access = self.placed.access

        def offset(tensor: Tensor, indices: tuple[Expr, ...]) -> Linear:
            place = access.write[tensor][0] if tensor in access.write else access.read[tensor]
            return offset_at(place, indices)

        return 0.0 if self.target is None else crowded_seconds(self.nest, reads, self.target, offset)

    def _shape(self) -> Shape:
        nest, low = self.nest, self.low
        single: Size = 1.0
        for axis in self.loop_axes:
            if axis not in self.blocked:
                block = nest.unswitched.get(axis, 1)
                single = single * self.spreads[axis].mean() / block
        starts: Size = single
        for axis in self.blocked:
            blocks = self._blocks(axis)
            inner = axis is low.vector or axis in self.run
            starts = starts * (chosen(blocks > 1, 1.0, 0.0) if inner else blocks)
        # a register for each place along the axis that squares are read along
        lanes = {a: 1 if a is low.transposed else None for a in self.cuts}
        cuts = {a: [(n, AxisRegisters(-(-p.size // (lanes[a] or p.lanes)), lanes[a] or p.lanes)) for p, n in parts]
                for a, parts in self.cuts.items()}  # fmt: skip
        inside = {a: self.placed.mean(a) for a in low.reduction}
        return Shape(blocks_of(cuts, single), inside, self.ends.most_share(), cache(self._distinct), starts,
                     self._step // low.plan.lanes if self.along else 1,
                     extent_of(low.passes.extent) if low.passes is not None else 1)  # fmt: skip


def _flat(node: Load) -> dict[Axis, int] | None:
    """How far a read moves with each axis, dimensions far apart from each other; None where it is no such sum."""
    result: dict[Axis, int] = {}
    scale = 1
    for index, extent in zip(reversed(node.indices), reversed(node.source.shape), strict=True):
        for term, step in linear(simplify(index)).terms.items():
            if not isinstance(term, Var):
                return None
            result[term.axis] = result.get(term.axis, 0) + step * scale
        scale *= 4 * extent_of(extent)
    return result


def _outside(values: Sequence[Expr], parts: Sequence[Op]) -> set[Load]:
    """Reads that stand outside of all of these parts too."""
    taken = set(parts)
    found: set[Load] = set()
    stack: list[Expr] = list(values)
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in seen or node in taken:
            continue
        seen.add(id(node))
        if isinstance(node, Load):
            found.add(node)
        stack.extend(node.args)
    return found
