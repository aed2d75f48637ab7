"""The leaves of a kernel as a predictor sees them: how large their parts are, tile by tile, and how loops move them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from typing import Any

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, all_of, axes_of, lt, select, var
from tilewright.ir.forms.loops import Buffer, Memory
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.values import evaluate_exprs
from tilewright.lower.access import Access, Place
from tilewright.lower.items import Ahead, Item, Loop, Together
from tilewright.lower.kernel import KernelLowering
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Range, Size, extent_of, whole
from tilewright.tile_graph.algebra.streams import Work
from tilewright.tile_graph.plan.form import Tile
from tilewright.tile_graph.traffic.touch import Touch, moving_alike, touch
from tilewright.tile_graph.traffic.traffic import LeafTrace, Repeat

_NOWHERE = -(1 << 40)  # in place of what does not run
_MOST_TILES = 1 << 14  # that are looked at one by one

Numbers = np.ndarray[Any, np.dtype[Any]]
Tree = tuple[Repeat, dict[Hashable, Memory]]  # a kernel's loops, and where each of its buffers is


@dataclass(frozen=True, eq=False)
class SizeCounts:
    """How many elements of an axis the tiles have: all that occur, and how often each; candidates lie along further
    dimensions."""

    values: Numbers
    weights: Numbers

    @staticmethod
    def of(counts: Numbers) -> SizeCounts:
        values, times = np.unique(counts, return_counts=True)
        return SizeCounts(values, times / counts.size)

    def mean(self, of: Callable[[Numbers], Numbers] | None = None) -> Size:
        values = self.values if of is None else of(self.values)
        found = (values * self.weights).sum(axis=0)
        return float(found) if np.ndim(found) == 0 else found

    def times(self, factor: int) -> SizeCounts:
        return SizeCounts(self.values * factor, self.weights)


@dataclass(frozen=True, eq=False)
class Placed:
    """A leaf where it runs: its work, the places of what it touches, and how far loops around it move its parts."""

    work: Work
    access: Access
    spreads: Mapping[Axis, SizeCounts]
    grows: Mapping[Hashable, Mapping[Axis, Size]]  # by loop
    origins: Mapping[Axis, int]  # how far a part begins from that of the next tile
    follows: Mapping[Buffer, frozenset[Hashable]]  # loops with which a held buffer moves on
    names: Mapping[Buffer, str]  # of what lies in main memory
    everywhere: Callable[[Expr], Numbers]  # an expression of the kernel's loops in all tiles and steps
    step: Axis | None = None  # of a Scan

    @property
    def nest(self) -> Nest:
        return self.work.nest

    def mean(self, axis: Axis) -> Size:
        return self.spreads[axis].mean()

    def key(self, buffer: Buffer) -> Hashable:
        return self.names.get(buffer, buffer)

    def touches(self, nodes: Iterable[Load]) -> list[Touch]:
        """Reads of tensors, those that move alike together."""
        found: dict[Tensor, list[tuple[Expr, ...]]] = {}
        for node in nodes:
            assert isinstance(node.source, Tensor)
            place = self.access.read[node.source]
            found.setdefault(node.source, []).append(place.layout.storage_indices(node.indices))
        result = []
        for tensor, indices in found.items():
            place = self.access.read[tensor]
            result += [self._touch(place, group, False) for group in moving_alike(indices)]
        return result

    def stores(self) -> list[Touch]:
        here: tuple[Expr, ...] = tuple(var(a) for a in self.nest.axes)
        places = [p for t in self.nest.stores for p in self.access.write[t]]
        return [self._touch(p, [p.layout.storage_indices(here)], True) for p in places]

    def _touch(self, place: Place, indices: Sequence[Sequence[Expr]], is_store: bool) -> Touch:
        shape = [extent_of(e) for e in place.buffer.shape[len(place.prefix) :]]
        follows = self.follows.get(place.buffer, frozenset())
        return touch(self.key(place.buffer), place.buffer.dtype.bytes, indices, shape, is_store, follows)

    def memory(self, tensor: Tensor) -> Memory:
        return self.access.read[tensor].buffer.memory


class _Positions:
    """Every tile of a kernel and every step of the loops inside it, as far as an expression depends on them."""

    def __init__(self, index: Axis, radix: Sequence[tuple[Hashable, int, int]]) -> None:
        self.index = index
        self.radix = radix  # of the flat index: a loop, how many tiles are one step of it, and its steps

    def evaluate(self, root: Expr, env: Mapping[Axis, Any]) -> Numbers:
        def leaf(node: Expr) -> Numbers:
            if isinstance(node, Var):
                return np.asarray(env.get(node.axis, 0))
            raise InternalError(f"{node!r} has no value")

        def read(node: Load, _: object) -> Numbers:
            raise InternalError(f"a part of a tile depends on {node.source.name}")

        return evaluate_exprs((root,), leaf, read)[0]

    def everywhere(self, root: Expr) -> Numbers:
        """The expression in all tiles and steps."""
        axes = axes_of(root)
        env: dict[Axis, Any] = {}
        for number, axis in enumerate(axes):
            extent = axis.extent if isinstance(axis.extent, int) else extent_of(axis.extent)
            points = np.arange(max(1, extent))
            if extent > _MOST_TILES:
                points = np.unique(np.linspace(0, extent - 1, _MOST_TILES).astype(np.int64))
            env[axis] = points.reshape([-1 if i == number else 1 for i in range(len(axes))])
        return self.evaluate(root, env)

    def moved(self, low: Expr, loop: Axis | None, place: int) -> int:
        """How far an origin moves from the first place of a loop to another, all others at their first."""
        axis = loop or self.index
        return int(self.evaluate(low, {axis: place})) - int(self.evaluate(low, {}))


def tree_of(lowering: KernelLowering, walk: Callable[[Placed], LeafTrace]) -> Tree:
    """A kernel as loops over tiles around its leaves, and where each of its buffers is."""
    index, items = lowering.items()
    names = dict(zip(lowering.params, lowering.arguments, strict=True))
    radix = _radix(lowering.plan)
    positions = _Positions(index, radix)
    held = set(lowering.kept)
    places = [p for each in lowering.access.write.values() for p in each]
    follows = {p.buffer: _moving(p.lows, radix) for p in places if p.buffer in held}

    def wherever(root: Expr, condition: Expr | None) -> Numbers:
        """An expression in all tiles and steps in which something runs."""
        if condition is None:
            return positions.everywhere(root)
        found = positions.everywhere(select(condition, root, _NOWHERE))
        return found[found != _NOWHERE] if (found != _NOWHERE).any() else np.zeros(1, found.dtype)

    def spread(count: Expr, condition: Expr | None) -> SizeCounts:
        return SizeCounts.of(np.maximum(0, wherever(count, condition)))

    def placed(work: Work, loops: Sequence[Axis], condition: Expr | None) -> LeafTrace:
        ranges = dict(zip(work.nest.axes, work.box, strict=True))
        ranges.update({a: work.limits.get(a, whole(extent_of(a.extent))) for a in work.nest.reduce_axes})
        spreads = {a: spread(r.count, condition) for a, r in ranges.items()}
        grows = _grows(ranges, positions, radix, loops)
        steps: dict[Hashable, int] = {loop: n for loop, _, n in radix}
        steps.update({axis: extent_of(axis.extent) for axis in loops})
        origins: dict[Axis, int] = {}
        for loop, moving in grows.items():
            for axis, more in moving.items():
                origins[axis] = gcd(origins.get(axis, 0), int(more) // max(1, steps[loop] - 1))
        return walk(Placed(work, lowering.access_of(work), spreads, grows, origins, follows, names,
                           partial(wherever, condition=condition), lowering.step))  # fmt: skip

    def body(inner: Sequence[Item], loops: Sequence[Axis], condition: Expr | None = None) -> list[LeafTrace | Repeat]:
        found: list[LeafTrace | Repeat] = []
        for item in inner:
            if isinstance(item, Work):
                found.append(placed(item, loops, condition))
            elif isinstance(item, Loop):
                runs = _both(condition, _runs(item.axis))
                found.append(Repeat(item.axis, _trips(item, positions), body(item.body, (*loops, item.axis), runs)))
            elif isinstance(item, Ahead):  # all parts, but for those that ran before the loop
                share = spread(select(item.condition, 1, 0), condition).mean()
                found.append(Repeat("ahead", share, body(item.body, loops, _both(condition, item.condition))))
            elif isinstance(item, Together):
                found += [part for _, side in item.sides for part in body(side, loops)]
        return found

    found: Sequence[LeafTrace | Repeat] = body(items, ())
    for loop, _, steps in reversed(radix):
        found = [Repeat(loop, steps, found)]
    memories: dict[Hashable, Memory] = {names.get(b, b): b.memory for b in (*lowering.params, *lowering.kept)}
    if not radix:
        found = [Repeat("tile", 1, found)]
    (root,) = found
    assert isinstance(root, Repeat)
    return root, memories


def _radix(tile: Tile) -> list[tuple[Hashable, int, int]]:
    """The loops over a kernel's tiles, outermost first."""
    extents = {a.name: a.extent for a in tile.axes}
    counts = [(name, -(-max(1, extents[name]) // size)) for name, size in tile.sizes]
    result: list[tuple[Hashable, int, int]] = []
    for number, (name, count) in enumerate(counts):
        if count > 1:
            result.append((f"tile {name}", prod(c for _, c in counts[number + 1 :]), count))
    return result


def _runs(loop: Axis) -> Expr | None:
    """Where a loop runs whose end depends on others."""
    return lt(var(loop), loop.extent) if isinstance(loop.extent, Expr) else None


def _both(one: Expr | None, other: Expr | None) -> Expr | None:
    return other if one is None else one if other is None else all_of([one, other])


def _trips(loop: Loop, positions: _Positions) -> float:
    extent = loop.axis.extent
    return float(extent) if isinstance(extent, int) else float(np.mean(positions.everywhere(extent)))


def _grows(
    ranges: Mapping[Axis, Range], positions: _Positions, radix: Sequence[tuple[Hashable, int, int]],
    loops: Sequence[Axis],
) -> dict[Hashable, dict[Axis, Size]]:  # fmt: skip
    result: dict[Hashable, dict[Axis, Size]] = {}
    steps: list[tuple[Hashable, Axis | None, int]] = [(loop, None, each * (n - 1)) for loop, each, n in radix]
    steps += [(axis, axis, extent_of(axis.extent) - 1) for axis in loops]
    for loop, axis, place in steps:
        for own, part in ranges.items():
            if (axis or positions.index) in axes_of(part.low):
                more = positions.moved(part.low, axis, place)
                if more > 0:
                    result.setdefault(loop, {})[own] = more
    return result


def _moving(lows: Sequence[Expr], radix: Sequence[tuple[Hashable, int, int]]) -> frozenset[Hashable]:
    """The loops that a held buffer follows: all over tiles, since each tile has it to itself, and those inside that
    move its origin."""
    inside = {a for low in lows for a in axes_of(low)}
    return frozenset({loop for loop, _, _ in radix} | inside)
