"""Traffic of a tree of loops through caches: distinct bytes of every part of it against what a cache holds.

A leaf is a sequence of nested parts, from one block of registers to the whole of its tile. A part whose distinct bytes
fit a cache is read into it once; what lies around it reads again whatever it does not keep from one part to the next
(footprints as in Welder, reuse distances as in the analysis of stack caches). Between leaves, tiles and kernels a line
is found again if what was touched since then fits. Lines are taken as used least recently first, caches as fully
associative, stores as bringing their line in; one unit walks all tiles in their order.

Bytes may be arrays with an entry a candidate.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.ir.expr import Axis
from tilewright.tile_graph.propagate import Size, extent_of
from tilewright.tile_graph.touch import Touch

Bytes = dict[Hashable, Size]  # by buffer


@dataclass(frozen=True)
class Cache:
    capacity: int
    line: int


@dataclass(frozen=True, eq=False)
class Walk:
    """The loops of a leaf on its tile: the sizes of its axes in part after part, the innermost first."""

    parts: Sequence[Mapping[Axis, Size]]
    trips: Sequence[Size]  # how often a part runs in the one around it
    touches: Sequence[tuple[Touch, int]]  # with the innermost part that holds them
    grows: Mapping[Hashable, Mapping[Axis, Size]]  # by loops around the leaf: how far an axis moves in all of one
    loaded: Bytes = field(default_factory=dict)  # bytes between registers and what is next to them, exactly
    stored: Bytes = field(default_factory=dict)

    def footprint(self, part: int, line: int) -> Bytes:
        """Distinct bytes of each buffer in one of the parts."""
        return _together((t, t.bytes(self.parts[part], line)) for t, first in self.touches if first <= part)

    def footprint_in(self, loops: frozenset[Hashable], line: int) -> Bytes:
        """Distinct bytes of each buffer in all of the leaf's tile and of some loops around it."""
        result = []
        for touch, _ in self.touches:
            sizes = dict(self.parts[-1])
            for loop in loops - touch.follows:
                for axis, more in self.grows.get(loop, {}).items():
                    sizes[axis] = np.minimum(sizes.get(axis, 1) + more, extent_of(axis.extent))
            result.append((touch, touch.bytes(sizes, line)))
        return _together(result)

    @property
    def written(self) -> frozenset[Hashable]:
        return frozenset(t.buffer for t, _ in self.touches if t.is_store)


@dataclass(frozen=True, eq=False)
class Repeat:
    """A loop around leaves: tiles of a kernel, parts walked in order, steps."""

    loop: Hashable
    trips: Size
    body: Sequence[Walk | Repeat]

    def footprint_in(self, loops: frozenset[Hashable], line: int) -> Bytes:
        return _most([item.footprint_in(loops | {self.loop}, line) for item in self.body])

    @property
    def written(self) -> frozenset[Hashable]:
        return frozenset(b for item in self.body for b in item.written)


Node = Walk | Repeat


@dataclass(frozen=True)
class Moved:
    """What part of a tree touches, and what of it a cache has to fetch and to write back."""

    touched: Bytes
    fetched: Bytes
    written: Bytes

    @property
    def total(self) -> Size:
        return sum(self.touched.values(), 0.0)


def moved(node: Node, cache: Cache) -> Moved:
    """One run of a leaf or loop, nothing in the cache before."""
    if isinstance(node, Walk):
        return _leaf(node, cache)
    inner = sequence(node.body, [moved(item, cache) for item in node.body], cache)
    touched = node.footprint_in(frozenset(), cache.line)
    once = _most([m.touched for m in inner])
    fetched = _sum([m.fetched for m in inner])
    written = _sum([m.written for m in inner])
    all_of_it = _total(once)
    for buffer, whole in touched.items():
        again = np.maximum(0.0, (node.trips * once[buffer] - whole) / np.maximum(node.trips - 1, 1))
        kept = _kept_around(inner, buffer, all_of_it, cache) * again * np.maximum(node.trips - 1, 0)
        fetched[buffer] = np.maximum(node.trips * fetched[buffer] - kept, whole)
        if buffer in written:
            written[buffer] = np.maximum(node.trips * written[buffer] - kept, whole)
    return Moved(touched, fetched, written)


def held(node: Node, cache: Cache) -> float:
    """Distinct bytes of the largest part of a tree that a cache holds."""
    found: list[float] = []

    def below(inner: Node) -> None:
        if isinstance(inner, Repeat):
            found.append(float(_total(inner.footprint_in(frozenset(), cache.line))))
            for item in inner.body:
                below(item)
        else:
            found.extend(float(_total(inner.footprint(part, cache.line))) for part in range(len(inner.parts)))

    below(node)
    return max((size for size in found if size <= cache.capacity), default=0.0)


def sequence(nodes: Sequence[Node], alone: Sequence[Moved], cache: Cache) -> list[Moved]:
    """What each of several nodes fetches, one after the other: what is left of an earlier one is not fetched again."""
    result: list[Moved] = []
    last: dict[Hashable, int] = {}  # who touched a buffer last
    dirty: set[Hashable] = set()
    totals = [m.total for m in alone]
    sums = np.concatenate([[0.0], np.cumsum(totals)]) if all(np.ndim(t) == 0 for t in totals) else None
    for number, (node, found) in enumerate(zip(nodes, alone, strict=True)):
        fetched, written = dict(found.fetched), dict(found.written)
        for buffer, size in found.touched.items():
            if buffer in last:
                before = last[buffer]
                between = sums[number] - sums[before + 1] if sums is not None else sum(totals[before + 1 : number], 0.0)
                share = _kept(totals[before] + between, between + totals[number], cache.capacity)
                kept = share * np.minimum(size, alone[before].touched[buffer])
                fetched[buffer] = fetched[buffer] - kept
                if buffer in written and buffer in dirty:
                    written[buffer] = written[buffer] - kept
            last[buffer] = number
        dirty |= node.written
        result.append(Moved(found.touched, fetched, written))
    return result


def _leaf(walk: Walk, cache: Cache) -> Moved:
    touched = walk.footprint(0, cache.line)
    fetched = dict(touched)
    for number, trips in enumerate(walk.trips):
        around = walk.footprint(number + 1, cache.line)
        fits = _total(touched) <= cache.capacity
        fetched = {b: np.where(fits, n, fetched[b] * trips) if b in fetched else n for b, n in around.items()}
        touched = around
    return Moved(touched, fetched, {b: n for b, n in fetched.items() if b in walk.written})


def _kept_around(inner: Sequence[Moved], buffer: Hashable, whole: Size, cache: Cache) -> Size:
    """The part of what the next run of a loop's body touches again that the cache still holds."""
    users = [i for i, m in enumerate(inner) if buffer in m.touched]
    first, last = users[0], users[-1]
    if first == last:
        return np.where(whole <= cache.capacity, 1.0, 0.0)
    between = sum((m.total for m in (*inner[last + 1 :], *inner[:first])), 0.0)
    start, end = (np.minimum(whole, between + inner[i].total) for i in (last, first))
    return _kept(start, end, cache.capacity)


def _kept(start: Size, end: Size, capacity: int) -> Size:
    """The part of a buffer that is found again where so many bytes are touched from its first element to its first,
    and from its last to its last: in between the distance changes evenly."""
    low, high = np.minimum(start, end), np.maximum(start, end)
    return np.clip((capacity - low) / np.maximum(high - low, 1e-9), 0.0, 1.0) * (low <= capacity)


def _together(found: object) -> Bytes:
    """Bytes by buffer; reads that move unlike each other count each, to the whole buffer at most."""
    result: Bytes = {}
    whole: Bytes = {}
    for touch, size in found:  # type: ignore[attr-defined]
        result[touch.buffer] = result.get(touch.buffer, 0.0) + size
        whole[touch.buffer] = touch.storage
    return {b: np.minimum(n, np.maximum(whole[b], 64)) for b, n in result.items()}


def _most(found: Sequence[Bytes]) -> Bytes:
    result: Bytes = {}
    for each in found:
        for buffer, size in each.items():
            result[buffer] = np.maximum(result[buffer], size) if buffer in result else size
    return result


def _sum(found: Sequence[Bytes]) -> Bytes:
    result: Bytes = {}
    for each in found:
        for buffer, size in each.items():
            result[buffer] = result.get(buffer, 0.0) + size
    return result


def _total(found: Bytes) -> Size:
    return sum(found.values(), 0.0)
