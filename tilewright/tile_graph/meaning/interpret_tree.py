"""The meaning of a Plan: its tree of tiles run with NumPy, part by part, unit by unit, from memory to memory.

Units of a kernel are generators that stop at barriers; a Hold is a room at its level, filled and written back by copies
whose bytes are counted. Neither Loops nor a backend take part: what a tree means is said here once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program, Reduce, Scan, all_computes, all_tensors
from tilewright.ir.forms.expr import Axis, const
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import bind_inputs, bind_symbols
from tilewright.ir.meaning.machine import TensorValues
from tilewright.ir.meaning.values import Dims, grid
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Range
from tilewright.tile_graph.algebra.streams import Carrier, Work, stream_of
from tilewright.tile_graph.meaning.outside import (
    Axes,
    KernelParts,
    Outside,
    Ranges,
    Span,
    is_filled,
    parts_of,
    span_of,
    whole_span,
)
from tilewright.tile_graph.meaning.rooms import Array, HeldPart, TileScope
from tilewright.tile_graph.plan.form import Hold, Leaf, Plan, Tile, UnitBarrier


@dataclass
class Counted:
    """Bytes that copies moved, by the memories they went between, and the most that Tiles around kernels held."""

    moved: dict[tuple[str, str], int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)  # at a level, of one device
    barriers: int = 0


def interpret_tree(
    program: Program, plan: Plan, inputs: Mapping[str, Array], symbols: Mapping[str, int] | None = None
) -> tuple[dict[str, Array], Counted]:
    """The outputs of a Program by tensor name as a Plan computes them, and what was counted on the way."""
    known = bind_symbols(program, inputs, symbols or {})
    machine = _Tree(program, plan.at(known), inputs, known)
    return machine.run(), machine.counted


@dataclass(frozen=True, eq=False)
class _Kernel:
    """The kernel that runs: its nests, and what it carries along."""

    parts: KernelParts
    by_name: Mapping[str, Nest]
    carrier: Carrier | None


class _Values(TensorValues):
    """One leaf's arithmetic, reading from the rooms around it."""

    def __init__(self, tree: _Tree, scope: TileScope, limits: Mapping[Axis, Range]) -> None:
        super().__init__({}, tree.symbols, steps=dict(scope.steps))
        self.tree, self.scope, self.limits = tree, scope, limits
        self.own: dict[Tensor, HeldPart] = {}  # results of the reduction, for the values that follow

    def dims(self, axes: Any) -> Dims:
        found = []
        for axis in axes:
            most = self.extent(axis.extent)
            low, end = 0, most
            if axis in self.limits:
                ((first, count),) = span_of((self.limits[axis],))
                low, end = min(first, most), min(first + count, most)
            found.append((axis, range(low, end)))
        return tuple(found)

    def read(self, tensor: Tensor, indices: tuple[Array, ...]) -> Array:
        room = self.own.get(tensor) or self.tree.source(tensor, self.scope)
        return room.read(indices, self.scope.unit, self.tree.epoch)

    def _view(self, node: Any, dims: Dims) -> Array | None:
        return None


class _Tree:
    def __init__(self, program: Program, plan: Plan, inputs: Mapping[str, Array], symbols: Mapping[str, int]) -> None:
        self.program, self.plan, self.symbols = program, plan, symbols
        self.computes = all_computes(program)
        self.tensors = {t.name: t for t in all_tensors(program)}
        self.outside = Outside(self.computes)
        self.counted = Counted()
        self.epoch = 0
        self.units = 0
        self.alive: dict[str, int] = {}
        self.scans = [c for c in program.computes if isinstance(c, Scan)]
        self.following = {t.name: (s, i) for s in self.scans for i, t in enumerate(s.following)}
        self.carried = {t.name: (s, i) for s in self.scans for i, t in enumerate(s.carry)}
        self.states: dict[tuple[str, int], HeldPart] = {}  # what a Scan takes along, by step
        self.early: dict[tuple[int, str], HeldPart] = {}  # copies that an earlier kernel started
        self.shapes = TensorValues({}, symbols)
        level = plan.body.level
        self.world = TileScope({t.name: HeldPart.given(t, level, a) for t, a in bind_inputs(program, inputs).items()})
        left = [*program.outputs, *(t for s in self.scans for t in s.outputs)]
        for tensor in left:
            if tensor.name not in self.world.rooms:
                self.world.rooms[tensor.name] = self._empty(tensor, level, self._actual(tensor))

    def run(self) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            for _ in self._tile(self.plan.body, self.world, {}, {}, None):
                raise InternalError("tree: a barrier outside of kernels")
        return {t.name: self.world.room(t.name).data for t in self.program.outputs}

    # --- memory

    def _actual(self, tensor: Tensor) -> Span:
        return tuple((0, n) for n in self.shapes.shape(tensor))

    def _empty(self, tensor: Tensor, level: str, span: Span) -> HeldPart:
        return HeldPart.empty(tensor, level, span, tensor.dtype.numpy)

    def _count(self, source: str, target: str, size: int) -> None:
        way = (source, target)
        self.counted.moved[way] = self.counted.moved.get(way, 0) + size

    def source(self, tensor: Tensor, scope: TileScope) -> HeldPart:
        """Where a leaf reads a tensor: what a Scan takes along is what the step before left."""
        if tensor.name in self.carried:
            scan, number = self.carried[tensor.name]
            step = scope.steps[scan.axis]
            first = self._extent(scan) - 1 if scan.reverse else 0
            if step == first:
                return self.source(scan.initial[number], scope)
            return self._state(scan, number, step + 1 if scan.reverse else step - 1)
        if tensor.name in self.following:
            scan, number = self.following[tensor.name]
            return self._state(scan, number, scope.steps[scan.axis])
        return scope.room(tensor.name)

    def _extent(self, scan: Scan) -> int:
        return self.shapes.extent(scan.axis.extent)

    def _state(self, scan: Scan, number: int, step: int) -> HeldPart:
        tensor = scan.carry[number]
        if (tensor.name, step) not in self.states:
            self.states[tensor.name, step] = self._empty(tensor, self.plan.body.level, self._actual(tensor))
        return self.states[tensor.name, step]

    def _store(self, tensor: Tensor, span: Span, values: Array, scope: TileScope) -> None:
        rooms: list[tuple[HeldPart, Span, Array]] = []
        for scan in self.scans:
            for body, output in scan.stacked:
                if body.name == tensor.name:
                    at = ((scope.steps[scan.axis], 1), *span)
                    rooms.append((self.world.room(output.name), at, values[None]))
        if tensor.name in self.following:
            scan, number = self.following[tensor.name]
            step = scope.steps[scan.axis]
            rooms.append((self._state(scan, number, step), span, values))
            final = scan.finals[number]
            if final is not None and step == (0 if scan.reverse else self._extent(scan) - 1):
                rooms.append((self.world.room(final.name), span, values))
        elif not rooms or scope.found(tensor.name) is not None:
            rooms.append((scope.room(tensor.name), span, values))
        for room, where, value in rooms:
            room.write(where, value, scope.unit, self.epoch)

    # --- tiles

    def _tile(
        self, tile: Tile, scope: TileScope, ranges: Ranges, axes: Axes, kernel: _Kernel | None
    ) -> Iterator[UnitBarrier]:
        if tile.is_kernel:
            self._issued(tile.name, scope, ranges, axes)
            parts = self.outside.kernel(tile)
            tile = parts.tile
            stream = stream_of(tile, parts.nests)
            by_name = {n.tensor.name: n for n in parts.nests}
            leaves = dict(zip(parts.nests, tile.leaves, strict=True))
            kernel = _Kernel(parts, by_name, None if stream is None else Carrier(stream, leaves))
        axes = {**axes, **{a.name: a for a in tile.axes}}
        if tile.over in ("cores", "blocks"):
            self._side_by_side(
                [self._part(tile, scope.inner(unit=self._new_unit()), part, axes, kernel)
                 for part in parts_of(tile, ranges, axes)]
            )  # fmt: skip
        elif tile.over == "steps":
            yield from self._steps(tile, scope, ranges, axes, kernel)
        elif tile.over in ("lanes", "warps") or not tile.sizes:
            yield from self._part(tile, scope.inner(), ranges, axes, kernel)
        else:
            yield from self._in_order(tile, scope, ranges, axes, kernel)

    def _new_unit(self) -> int:
        self.units += 1
        return self.units

    def _side_by_side(self, units: Sequence[Iterator[UnitBarrier]]) -> None:
        """Units from barrier to barrier, the last first: nothing may depend on who comes before whom."""
        waiting = list(reversed(units))
        self.epoch += 1
        while waiting:
            arrived = [next(unit, None) for unit in waiting]
            if any(a is None for a in arrived) and any(a is not None for a in arrived):
                raise InternalError("tree: some units wait at a barrier that others never reach")
            self.epoch += 1
            if arrived[0] is None:
                return
            self.counted.barriers += 1

    def _steps(
        self, tile: Tile, scope: TileScope, ranges: Ranges, axes: Axes, kernel: _Kernel | None
    ) -> Iterator[UnitBarrier]:
        scan = self.computes[tile.scan or ""]
        assert isinstance(scan, Scan)
        count = self._extent(scan)
        for step in reversed(range(count)) if scan.reverse else range(count):
            inner = scope.inner(steps={**scope.steps, scan.axis: step})
            yield from self._part(tile, inner, ranges, axes, kernel)

    def _in_order(
        self, tile: Tile, scope: TileScope, ranges: Ranges, axes: Axes, kernel: _Kernel | None
    ) -> Iterator[UnitBarrier]:
        """Part after part; what is held in stages is filled ahead, of a window what overlaps stays."""
        parts = [(scope.inner(), part) for part in parts_of(tile, ranges, axes)]
        stages = max((h.stages for h in tile.holds), default=1)
        kept: dict[str, HeldPart] = {}
        filled = 0
        for number, (inner, part) in enumerate(parts):
            while stages > 1 and filled < min(len(parts), number + stages):
                self._fill_ahead(tile, *parts[filled], axes, kernel)
                filled += 1
            yield from self._part(tile, inner, part, axes, kernel, kept)
            kept = {h.tensor: inner.room(h.tensor) for h in tile.holds if h.mode == "rolling"}
            inner.rooms.clear()

    def _fill_ahead(self, tile: Tile, scope: TileScope, ranges: Ranges, axes: Axes, kernel: _Kernel | None) -> None:
        """What fills the Holds in stages, for one part."""
        staged = {h.tensor for h in tile.holds if h.stages > 1}
        if kernel is None:
            for hold in tile.holds:
                if hold.tensor in staged:
                    scope.rooms[hold.tensor] = self._fetched(tile, hold, scope, ranges, axes)
            return
        self._allocate(
            replace(tile, holds=tuple(h for h in tile.holds if h.tensor in staged)), scope, ranges, axes, kernel
        )
        for node in _filling(tile, staged):
            self._leaf(node, scope, ranges, axes, kernel)

    def _part(
        self, tile: Tile, scope: TileScope, ranges: Ranges, axes: Axes, kernel: _Kernel | None,
        kept: Mapping[str, HeldPart] | None = None,
    ) -> Iterator[UnitBarrier]:  # fmt: skip
        """One part of a Tile: what it holds, its body, and what it writes back."""
        if kernel is not None:
            self._allocate(tile, scope, ranges, axes, kernel, kept or {})
        else:
            self._enter(tile, scope, ranges, axes)
        if tile.runs == "together" and kernel is None:
            self._side_by_side([self._tile(n, scope.inner(unit=self._new_unit()), ranges, axes, None)
                                for n in tile.body if isinstance(n, Tile)])  # fmt: skip
        else:
            for node in tile.body:
                if isinstance(node, Tile):
                    yield from self._tile(node, scope, ranges, axes, kernel)
                elif isinstance(node, UnitBarrier):
                    yield node
                else:
                    assert kernel is not None
                    self._leaf(node, scope, ranges, axes, kernel)
        if kernel is None:
            self._leave(tile, scope)

    # --- inside kernels

    def _allocate(
        self, tile: Tile, scope: TileScope, ranges: Ranges, axes: Axes, kernel: _Kernel,
        kept: Mapping[str, HeldPart] | None = None,
    ) -> None:  # fmt: skip
        holds = [h for h in tile.holds if h.mode != "carry" and h.fill is None and h.tensor not in scope.rooms]
        if not holds:
            return
        boxes, _ = self.outside.boxes(kernel.parts, ranges, axes)
        for hold in holds:
            nest = kernel.by_name.get(hold.tensor)
            for tensor in () if nest is None else nest.stores:
                room = self._empty(tensor, tile.level, span_of(boxes[kernel.by_name[hold.tensor]]))
                room.keeps = hold.stages > 1 or hold.mode == "rolling"
                if tensor.name in (kept or {}):
                    room.take((kept or {})[tensor.name])
                scope.rooms[tensor.name] = room

    def _leaf(self, leaf: Leaf, scope: TileScope, ranges: Ranges, axes: Axes, kernel: _Kernel) -> None:
        nest = kernel.by_name[leaf.tensor]
        boxes, limits = self.outside.boxes(kernel.parts, ranges, axes)
        carrier, box, limit = kernel.carrier, boxes[nest], limits.get(nest, {})
        there = scope.found(leaf.tensor)
        if isinstance(there, HeldPart) and there.keeps and leaf.part in ("whole", "copy"):
            if there.written.all():
                return  # filled ahead
            box = tuple(Range(const(low), n, r.extent) for (low, n), r in zip(there.missing(), box, strict=True))
        if leaf.part == "start" and carrier is not None:
            works = carrier.start(nest, box)
        elif leaf.part == "step" and carrier is not None:
            works = carrier.step(nest, box, limit)
        elif leaf.part == "finish" and carrier is not None:
            works = carrier.finish(nest, box)
        elif carrier is not None and nest in carrier.stream.wide:
            works = carrier.wide(nest, box)
        else:
            works = [Work(nest, leaf, box, limit)]
        for work in works:
            self._work(work, scope)

    def _work(self, work: Work, scope: TileScope) -> None:
        nest = work.nest
        values = _Values(self, scope, {**dict(zip(nest.axes, work.box, strict=True)), **work.limits})
        dims = values.dims(nest.axes)
        points, shape = grid(dims), tuple(len(r) for _, r in dims)
        if 0 in shape:
            return  # a part beyond the end of an extent that is shorter than it may be
        span = tuple((r.start, len(r)) for _, r in dims)
        if nest.monoid is not None:
            core = Reduce(nest.accumulated, nest.axes, nest.reduce_axes, nest.elements, nest.monoid)
            results: Sequence[Array] = values.fold(core, points, shape)
            if nest.initial:
                begun = [np.broadcast_to(v, shape) for v in values.values(nest.initial, points)]
                results = values._combine(nest.monoid, begun, results, points)
            for tensor, array in zip(nest.accumulated, results, strict=True):
                data = np.broadcast_to(array, shape)
                values.own[tensor] = replace(HeldPart.given(tensor, "", data), span=span)
        for tensor, value in zip(nest.stores, values.values(nest.values, points), strict=True):
            if work.owner is not None and scope.found(tensor.name) is None:
                scope.rooms[tensor.name] = self._empty(tensor, "", span)
            self._store(tensor, span, np.broadcast_to(value, shape).astype(tensor.dtype.numpy), scope)

    # --- around kernels

    def _enter(self, tile: Tile, scope: TileScope, ranges: Ranges, axes: Axes) -> None:
        for hold in tile.holds:
            if hold.tensor not in scope.rooms:  # copied ahead of its part otherwise
                scope.rooms[hold.tensor] = self._fetched(tile, hold, scope, ranges, axes)

    def _leave(self, tile: Tile, scope: TileScope) -> None:
        stored = self.outside.stored(tile)
        for hold in tile.holds:
            room = scope.rooms.pop(hold.tensor)
            if is_filled(hold) and hold.tensor in stored and scope.parent is not None:
                outer = scope.room(hold.tensor)
                self._count(room.level, outer.level, outer.take(room))
            self.alive[tile.level] = self.alive.get(tile.level, 0) - room.bytes

    def _fetched(self, tile: Tile, hold: Hold, scope: TileScope, ranges: Ranges, axes: Axes) -> HeldPart:
        """A room for what a Tile around kernels holds, filled where a copy brings it."""
        early = self.early.pop((id(tile), hold.tensor), None)
        if early is not None:
            return early
        tensor = self.tensors[hold.tensor]
        touched = self.outside.touched(tile, ranges, axes)
        span = span_of(touched[hold.tensor][1]) if hold.tensor in touched else whole_span(tensor)
        actual = self._actual(tensor)
        span = tuple((low, max(0, min(n, most - low))) for (low, n), (_, most) in zip(span, actual, strict=True))
        room = self._empty(tensor, tile.level, span)
        self._held(tile.level, room.bytes)
        if is_filled(hold) and hold.tensor not in self.outside.stored(tile):
            source = (scope.parent or scope).room(hold.tensor)
            self._count(source.level, tile.level, room.take(source))
        return room

    def _held(self, level: str, size: int) -> None:
        self.alive[level] = self.alive.get(level, 0) + size
        self.counted.most[level] = max(self.counted.most.get(level, 0), self.alive[level])

    def _issued(self, kernel: str, scope: TileScope, ranges: Ranges, axes: Axes) -> None:
        """Copies of later Tiles that start with this kernel."""
        for tile in self.plan.body.walk():
            for hold in tile.holds if isinstance(tile, Tile) else ():
                if hold.issue == kernel and is_filled(hold) and isinstance(tile, Tile):
                    self.early[id(tile), hold.tensor] = self._fetched(tile, hold, scope.inner(), ranges, axes)


def _filling(tile: Tile, staged: set[str]) -> Iterator[Leaf]:
    return (n for n in tile.walk() if isinstance(n, Leaf) and n.tensor in staged)
