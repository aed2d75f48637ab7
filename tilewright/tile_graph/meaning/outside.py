"""Tiles around kernels: the parts they are walked in, and what kernels below touch of a tensor.

A Tile around kernels holds parts of tensors in a device's main memory, brought there by copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from tilewright.ir.forms.compute import Compute
from tilewright.ir.forms.expr import Const, const
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.occurrences import base_name, unique_names
from tilewright.tile_graph.algebra.parts import Limits, between_barriers, boxes_at
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of, merge, reads_box, whole
from tilewright.tile_graph.plan.form import COPIES, Hold, Leaf, Tile, TileAxis
from tilewright.tile_graph.traffic.held import plan_nests

Ranges = Mapping[str, Range]  # the part of each axis that Tiles around cut
Axes = Mapping[str, TileAxis]
Span = tuple[tuple[int, int], ...]  # of a tensor by dimension: first place and elements


def is_filled(hold: Hold) -> bool:
    return hold.fill in COPIES


def parts_of(tile: Tile, ranges: Ranges, axes: Axes) -> Iterator[dict[str, Range]]:
    """The parts that a Tile is walked in, or that it hands out: the last axis fastest."""
    choices: list[list[tuple[str, Range]]] = []
    for name, size in tile.sizes:
        extent = max(1, axes[name].extent)
        around = ranges.get(name, whole(extent))
        low, end = number(around.low), min(number(around.low) + int(around.size), extent)
        choices.append([(name, Range(const(at), size, extent)) for at in range(low, end, size)])
    for chosen in product(*choices):
        yield {**ranges, **dict(chosen)}


def number(value: object) -> int:
    assert isinstance(value, Const)
    return int(value.value)


def span_of(box: Box) -> Span:
    """A box at known places."""
    return tuple((number(r.low), max(0, min(int(r.size), r.extent - number(r.low)))) for r in box)


def span_bytes(tensor: Tensor, span: Span) -> int:
    return prod(count for _, count in span) * tensor.dtype.bytes


def whole_span(tensor: Tensor) -> Span:
    return tuple((0, extent_of(e)) for e in tensor.shape)


@dataclass(frozen=True, eq=False)
class KernelParts:
    """A kernel told apart, its nests, and those between barriers."""

    tile: Tile
    nests: list[Nest]
    groups: list[list[Nest]]


class Outside:
    """What kernels below a Tile touch, kernel by kernel."""

    def __init__(self, computes: Mapping[str, Compute]) -> None:
        self.computes = computes
        self._known: dict[int, KernelParts] = {}
        self._kept: list[Tile] = []  # so that a number is one Tile's
        self._boxes: dict[object, tuple[dict[Nest, Box], Limits]] = {}

    def kernel(self, tile: Tile) -> KernelParts:
        if id(tile) not in self._known:
            apart = unique_names(tile)
            nests = plan_nests(apart, self.computes)
            groups = between_barriers(apart, {n.tensor.name: n for n in nests})
            self._known[id(tile)] = KernelParts(apart, nests, groups)
            self._kept.append(tile)
        return self._known[id(tile)]

    def boxes(self, kernel: KernelParts, ranges: Ranges, axes: Axes) -> tuple[dict[Nest, Box], Limits]:
        """The parts of a kernel's nests, found once for equal parts of axes."""
        key = (id(kernel), tuple((n, number(r.low), int(r.size)) for n, r in ranges.items()))
        if key not in self._boxes:
            known = {**axes, **{a.name: a for t in kernel.tile.walk() if isinstance(t, Tile) for a in t.axes}}
            self._boxes[key] = boxes_at(kernel.groups, ranges, known)
        return self._boxes[key]

    def touched(self, tile: Tile, ranges: Ranges, axes: Axes) -> dict[str, tuple[Tensor, Box]]:
        """Of every tensor that kernels below read from memory or store there, the box of it at these parts."""
        found: dict[str, tuple[Tensor, Box]] = {}
        for kernel, below in kernels_below(tile, axes):
            parts = self.kernel(kernel)
            boxes, limits = self.boxes(parts, ranges, below)
            inside = parts.tile.held
            for nest, box in boxes.items():
                met = [(t, box) for t in nest.stores]
                met += reads_box(nest, box, limits.get(nest, {}), set(nest.reads())).items()
                for tensor, part in met:
                    if tensor.name in inside or base_name(tensor.name) != tensor.name:
                        continue
                    before = found.get(tensor.name)
                    found[tensor.name] = (tensor, part if before is None else merge(before[1], part))
        return found

    def stored(self, tile: Tile) -> set[str]:
        """What leaves below leave in memory."""
        kernels = [k for k, _ in kernels_below(tile, {})]
        leaves = [x for k in kernels for x in k.walk() if isinstance(x, Leaf) and x.tensor not in k.held]
        return {t.name for x in leaves if x.part != "copy" for t in self.computes[x.tensor].outputs}


def kernels_below(tile: Tile, axes: Axes) -> Iterator[tuple[Tile, Axes]]:
    """Every kernel at or below a Tile, with the axes of the Tiles around it."""
    known = {**axes, **{a.name: a for a in tile.axes}}
    if tile.is_kernel:
        yield tile, known
        return
    for node in tile.body:
        if isinstance(node, Tile):
            yield from kernels_below(node, known)


class Held:
    """The most bytes that Tiles around kernels hold at each level, of one device."""

    def __init__(self, outside: Outside, tensors: Mapping[str, Tensor]) -> None:
        self.outside, self.tensors = outside, tensors
        self.alive: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.early: set[tuple[int, str]] = set()
        self.waiting: dict[str, list[tuple[Tile, Hold]]] = {}

    def of(self, body: Tile) -> dict[str, int]:
        for tile in (t for t in body.walk() if isinstance(t, Tile)):
            for hold in tile.holds:
                if hold.issue is not None and is_filled(hold):
                    self.waiting.setdefault(hold.issue, []).append((tile, hold))
        self._tile(body, {}, {})
        return self.most

    def bytes(self, tile: Tile, hold: Hold, ranges: Ranges, axes: Axes) -> int:
        tensor = self.tensors[hold.tensor]
        touched = self.outside.touched(tile, ranges, axes)
        part = span_of(touched[hold.tensor][1]) if hold.tensor in touched else whole_span(tensor)
        return span_bytes(tensor, part)

    def _add(self, level: str, size: int) -> None:
        self.alive[level] = self.alive.get(level, 0) + size
        self.most[level] = max(self.most.get(level, 0), self.alive[level])

    def _tile(self, tile: Tile, ranges: Ranges, axes: Axes) -> None:
        known = {**axes, **{a.name: a for a in tile.axes}}
        if tile.is_kernel:
            for later, hold in self.waiting.get(tile.name, ()):
                self._add(later.level, self.bytes(later, hold, ranges, known))
                self.early.add((id(later), hold.tensor))
            return
        parts = list(parts_of(tile, ranges, known))
        taken = 0
        for hold in tile.holds:
            size = self.bytes(tile, hold, parts[0], known) * min(hold.stages, len(parts))
            taken += size
            if (id(tile), hold.tensor) not in self.early:
                self._add(tile.level, size)
        for node in tile.body:
            if isinstance(node, Tile):
                self._tile(node, parts[0], known)
        self.alive[tile.level] = self.alive.get(tile.level, 0) - taken
