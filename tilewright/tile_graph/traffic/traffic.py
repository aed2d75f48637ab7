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
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import numpy as np

from tilewright.ir.forms.expr import Axis
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.traffic.touch import Touch, chosen, least, most

Bytes = dict[Hashable, Size]  # by buffer

_UNEVEN = 0.05  # by which share parts differ from each other at least
_SAME = 1.02  # times as many bytes at most: the same, but for where lines begin


@dataclass(frozen=True)
class SimulatedCache:
    capacity: int
    line: int


@dataclass(frozen=True, eq=False)
class LeafTrace:
    """The loops of a leaf on its tile: the sizes of its axes in part after part, the innermost first."""

    parts: Sequence[Mapping[Axis, Size]]
    trips: Sequence[Size]  # how often a part runs in the one around it
    touches: Sequence[tuple[Touch, int]]  # with the innermost part that holds them
    grows: Mapping[Hashable, Mapping[Axis, Size]]  # by loops around the leaf: how far an axis moves in all of one
    blocks: Mapping[Axis, int] = field(default_factory=dict)  # from one block to the next inside the leaf; else 1
    origins: Mapping[Axis, int] = field(default_factory=dict)  # from one tile to the next
    mixes: Mapping[Axis, Sequence[tuple[int, float]]] = field(default_factory=dict)  # sizes of blocks that differ
    loaded: Bytes = field(default_factory=dict)  # bytes between registers and what is next to them, exactly
    stored: Bytes = field(default_factory=dict)
    busy: Size = 0.0  # seconds of a unit on the leaf's tile, all that it touches being next to its registers
    alone: Size = 0.0  # seconds from its first read to its last store, one tile at a time: what others may hide
    resident: int = 0  # tiles that a unit has room for at a time; 0: as many as others allow
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False)  # footprints, which many levels ask for

    def footprint(self, part: int, line: int) -> tuple[Bytes, Size]:
        """Distinct bytes of each buffer in one of the parts, and by which share of them parts differ to either side."""
        if (part, line) not in self.known:
            self.known[part, line] = self._footprint(part, line)
        return self.known[part, line]

    def _footprint(self, part: int, line: int) -> tuple[Bytes, Size]:
        inside = {a for a, n in self.parts[part].items() if np.any(n < self.parts[-1][a])}
        own = {a: self.blocks.get(a, 1) for a in inside}
        all_steps = {a: gcd(own.get(a, 0), self.origins.get(a, 0)) for a in (*own, *self.origins)}
        held = [t for t, first in self.touches if first <= part]
        found: Bytes = {}
        uneven: Size = 0.0
        totals = []
        for share, sizes in self._mixed(part):
            each = [(t, *t.bytes(sizes, line, own if t.follows else all_steps)) for t in held]
            here = _together([(t, n) for t, n, _ in each], line)
            found = _sum([found, {b: share * n for b, n in here.items()}])
            uneven = uneven + share * sum((n for _, _, n in each), 0.0)
            totals.append((share, _total(here)))
        mean = _total(found)
        uneven = uneven + sum((share * abs(total - mean) for share, total in totals), 0.0)
        return found, uneven / most(mean, 1.0)

    def _mixed(self, part: int) -> list[tuple[float, Mapping[Axis, Size]]]:
        """A part with blocks of every size there is, and how often each comes."""
        result: list[tuple[float, Mapping[Axis, Size]]] = [(1.0, self.parts[part])]
        for axis, mix in self.mixes.items():
            if self.parts[part][axis] is self.parts[0][axis]:
                result = [(share * each, {**sizes, axis: size}) for share, sizes in result for size, each in mix]
        return result

    def footprint_in(self, loops: frozenset[Hashable], line: int) -> Bytes:
        """Distinct bytes of each buffer in all of the leaf's tile and of some loops around it."""
        if (loops, line) not in self.known:
            self.known[loops, line] = self._footprint_in(loops, line)
        found: Bytes = self.known[loops, line]
        return found

    def _footprint_in(self, loops: frozenset[Hashable], line: int) -> Bytes:
        result = []
        for touch, _ in self.touches:
            sizes = dict(self.parts[-1])
            steps = {} if touch.follows else dict(self.origins)
            for loop in loops - touch.follows:
                for axis, more in self.grows.get(loop, {}).items():
                    sizes[axis] = least(sizes.get(axis, 1) + more, extent_of(axis.extent))
                    steps.pop(axis, None)
            result.append((touch, touch.bytes(sizes, line, steps)[0]))
        return _together(result, line)

    def runs(self, line: int, streams: int) -> Bytes:
        """Of each buffer the longest stretch that is walked on end, so many of them side by side at most; no less than
        one block has of it, or a line."""
        found: Bytes = {}
        for touch, first in self.touches:
            own, _, _ = touch.stretches(self.parts[first], line)
            longest = most(own, line)
            for sizes in self.parts[first + 1 :]:
                run, side_by_side, _ = touch.stretches(sizes, line)
                longest = most(longest, chosen(side_by_side <= streams, run, 0.0))
            found[touch.buffer] = most(found.get(touch.buffer, 0.0), longest)
        return found

    @property
    def written(self) -> frozenset[Hashable]:
        return frozenset(t.buffer for t, _ in self.touches if t.is_store)


@dataclass(frozen=True, eq=False)
class Repeat:
    """A loop around leaves: tiles of a kernel, parts walked in order, steps."""

    loop: Hashable
    trips: Size
    body: Sequence[LeafTrace | Repeat]

    def footprint_in(self, loops: frozenset[Hashable], line: int) -> Bytes:
        return _union([item.footprint_in(loops | {self.loop}, line) for item in self.body])


Node = LeafTrace | Repeat


@dataclass(frozen=True)
class Moved:
    """What part of a tree touches, and what of it a cache has to fetch and to write back."""

    touched: Bytes
    fetched: Bytes
    written: Bytes
    # by buffer: bytes of every buffer in the smallest part that touches all that the whole does of this one
    within: Mapping[Hashable, Bytes]
    # of other buffers, bytes at both ends of the way from one such part to the next
    twice: Mapping[Hashable, Bytes] = field(default_factory=dict)
    step: Bytes | None = None  # touched in one run of the outermost loop inside
    uneven: Mapping[Hashable, Size] = field(default_factory=dict)  # by which share such parts differ from each other

    def renamed(self, names: Mapping[Hashable, Hashable]) -> Moved:
        """The same of a part that is alike, its buffers being others."""

        def other(found: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
            return {names.get(b, b): n for b, n in found.items()}

        twice = {names.get(b, b): other(n) for b, n in self.twice.items()}
        step = None if self.step is None else other(self.step)
        within = {names.get(b, b): other(n) for b, n in self.within.items()}
        return Moved(other(self.touched), other(self.fetched), other(self.written), within, twice, step,
                     other(self.uneven))  # fmt: skip


def moved(node: Node, cache: SimulatedCache) -> Moved:
    """One run of a leaf or loop, nothing in the cache before."""
    if isinstance(node, LeafTrace):
        return _leaf(node, cache)
    inner = sequence([moved(item, cache) for item in node.body], cache)
    touched = node.footprint_in(frozenset(), cache.line)
    once = Moved(_union([m.touched for m in inner]), _sum([m.fetched for m in inner]), _sum([m.written for m in inner]),
                 inner[0].within if len(inner) == 1 else {}, inner[0].twice if len(inner) == 1 else {},
                 inner[0].step if len(inner) == 1 else None, inner[0].uneven if len(inner) == 1 else {})  # fmt: skip
    moving = {b: chosen(n > once.touched[b] * _SAME, 1.0, 0.0) for b, n in touched.items()}
    kept = {b: _kept_around(inner, b, touched, moving, node.trips, cache) for b in touched}
    return _repeated(once, touched, node.trips, kept)


def _repeated(
    once: Moved, touched: Bytes, trips: Size, kept: Bytes, ends: Bytes | None = None, differ: Size = 0.0
) -> Moved:
    """A part that runs several times: of what it touches again, so much is kept."""
    fetched: Bytes = {}
    written: Bytes = {}
    within: dict[Hashable, Bytes] = {}
    uneven: Bytes = {}
    twice: dict[Hashable, Bytes] = {}
    for buffer, size in touched.items():
        before: Size = once.touched.get(buffer, size)
        again = most(0.0, trips * before - size) * kept.get(buffer, 0.0)
        fetched[buffer] = most(trips * once.fetched.get(buffer, size) - again, size)
        if buffer in once.written:
            written[buffer] = most(trips * once.written[buffer] - again, size)
        same = size <= before * _SAME
        within[buffer] = _either(same, once.within.get(buffer, once.touched), touched)
        uneven[buffer] = chosen(same, once.uneven.get(buffer, 0.0), differ)
        twice[buffer] = _either(same, once.twice.get(buffer, {}), ends or {})
    step = once.touched if np.any(trips > 1) else once.step
    return Moved(touched, fetched, written, within, twice, step, uneven)


def _moved_on(found: Moved, around: Bytes, trips: Size, buffer: Hashable) -> Size:
    """Bytes at both ends of the way from one use of a buffer to the next, beside those of one part: of what has moved
    on in between, the old part and the new one."""
    total: Size = 0.0
    for other, size in found.twice.get(buffer, {}).items():
        if other is not buffer and other in found.touched and other in around:
            before = found.touched[other]
            new = (around[other] - before) / most((trips - 1) * before, 1e-9)
            total = total + size * least(most(new, 0.0), 1.0)
    return total


def held(node: Node, cache: SimulatedCache) -> float:
    """Distinct bytes of the largest part of a tree that a cache holds."""
    found: list[float] = []

    def below(inner: Node) -> None:
        if isinstance(inner, Repeat):
            found.append(float(_total(inner.footprint_in(frozenset(), cache.line))))
            for item in inner.body:
                below(item)
        else:
            found.extend(float(_total(inner.footprint(part, cache.line)[0])) for part in range(len(inner.parts)))

    below(node)
    return max((size for size in found if size <= cache.capacity), default=0.0)


def sequence(alone: Sequence[Moved], cache: SimulatedCache) -> list[Moved]:
    """What each of several nodes fetches, one after the other: what is left of an earlier one is not fetched again."""
    result: list[Moved] = []
    last: dict[Hashable, int] = {}  # who touched a buffer last
    dirty: set[Hashable] = set()
    for number, found in enumerate(alone):
        fetched, written = dict(found.fetched), dict(found.written)
        since = _Since(alone[:number], cache)
        for buffer, size in found.touched.items():
            if buffer in last:
                before = alone[last[buffer]]
                between = since(last[buffer])
                share = _kept(_with(between, before, buffer), _with(between, found, buffer), cache.capacity)
                kept = share * least(size, before.touched[buffer])
                fetched[buffer] = fetched[buffer] - kept
                if buffer in written and buffer in dirty:
                    written[buffer] = written[buffer] - kept
            last[buffer] = number
        dirty |= set(found.written)
        result.append(replace(found, fetched=fetched, written=written))
    return result


class _Since:
    """All that the last of some nodes touch together; where that is more than a cache holds, no more than is needed to
    know it: nothing is found again after that."""

    def __init__(self, nodes: Sequence[Moved], cache: SimulatedCache) -> None:
        self._nodes = nodes
        self._capacity = cache.capacity
        self._grown: list[Bytes] = [{}]  # by how many nodes
        self._is_more = False

    def __call__(self, place: int) -> Bytes:
        """Those behind a place."""
        count = len(self._nodes) - 1 - place
        while len(self._grown) <= count and not self._is_more:
            grown = _union([self._grown[-1], self._nodes[-len(self._grown)].touched])
            self._grown.append(grown)
            self._is_more = bool(np.min(_total(grown)) * (1 - _UNEVEN) > self._capacity)
        return self._grown[min(count, len(self._grown) - 1)]


def _with(between: Bytes, node: Moved, buffer: Hashable) -> Size:
    """Distinct bytes of what lies between and of the part of a node that touches all of a buffer."""
    total = _total(between)
    both = total + sum((most(n - between[b], 0.0) if b in between else n for b, n in node.touched.items()), 0.0)
    return least(both, total + _total(node.within[buffer]))


def _leaf(walk: LeafTrace, cache: SimulatedCache) -> Moved:
    written = walk.written
    touched, differ = walk.footprint(0, cache.line)
    ends = dict(touched)  # what a part touches all along: next to its end it is all there, and so is the next one's
    found = Moved(touched, touched, {b: n for b, n in touched.items() if b in written},
                  dict.fromkeys(touched, touched), dict.fromkeys(touched, ends),
                  uneven=dict.fromkeys(touched, differ))  # fmt: skip
    for number, trips in enumerate(walk.trips):
        around, differ = walk.footprint(number + 1, cache.line)
        kept = {b: _kept_on(found, around, trips, b, cache) for b in found.within}
        late = {b: n for b, n in around.items() if b not in found.touched}  # what the parts inside do not hold
        ends = {b: chosen((n > found.touched[b] * _SAME) | (trips <= 1), ends[b], n) if b in ends else 0.0
                for b, n in around.items()}  # fmt: skip
        grown = _repeated(found, around, trips, kept, ends, differ)
        step = found.touched if np.any(trips > 1) else found.step
        back = {**grown.written, **{b: n for b, n in late.items() if b in written}}
        found = replace(grown, fetched={**grown.fetched, **late}, written=back, step=step)
    return found


def _kept_on(found: Moved, around: Bytes, trips: Size, buffer: Hashable, cache: SimulatedCache) -> Size:
    """The part of what a leaf touches again in the next run of a loop that the cache still holds."""
    distance, more = _total(found.within[buffer]), _moved_on(found, around, trips, buffer)
    # the first element is met again before anything new is, the last one after all of it
    share = _kept(distance, distance + more, cache.capacity, found.uneven.get(buffer, 0.0))
    if found.step is None:
        return share
    # what one run has in common with the next alone, where it is no more than one step of the loop inside touches, is
    # the last of one and the first of the other
    before, last = found.touched[buffer], found.step.get(buffer, 0.0)
    common = (trips * before - around[buffer]) / most(trips - 1, 1e-9)
    beside = (before > last * _SAME) & (common <= last)
    near = _total(found.step)
    return chosen(beside, most(share, _kept(near, near, cache.capacity)), share)


def _kept_around(
    inner: Sequence[Moved], buffer: Hashable, touched: Bytes, moving: Bytes, trips: Size, cache: SimulatedCache
) -> Size:
    """The part of what the next run of a loop's body touches again that the cache still holds. What the loop moves on
    is another part of its buffer then."""
    users = [i for i, m in enumerate(inner) if buffer in m.touched]
    first, last = users[0], users[-1]
    if len(inner) == 1:
        return _kept_on(inner[0], touched, trips, buffer, cache)
    before, after = (_union([m.touched for m in part]) for part in (inner[last + 1 :], inner[:first]))
    start = _around(_with(before, inner[last], buffer), _union([before, inner[last].within[buffer]]), after, moving)
    end = _around(_with(after, inner[first], buffer), _union([after, inner[first].within[buffer]]), before, moving)
    return _kept(start, end, cache.capacity)


def _around(size: Size, here: Bytes, there: Bytes, moving: Bytes) -> Size:
    """Distinct bytes on both sides of the end of a loop's body, `size` of them here."""
    shared = sum((least(here[b], n) * (1 - moving[b]) for b, n in there.items() if b in here), 0.0)
    return size + _total(there) - least(shared, size)


def _kept(start: Size, end: Size, capacity: int, uneven: Size = 0.0) -> Size:
    """The part of a buffer that is found again where so many bytes are touched from its first element to its first,
    and from its last to its last: in between the distance changes evenly. Parts are not all of one size, nor do they
    begin alike in a line: near the capacity some fit and others do not."""
    differ = least(most(uneven, _UNEVEN), 0.9)
    low, high = least(start, end) * (1 - differ), most(start, end) * (1 + differ)
    return least(most((capacity - low) / most(high - low, 1e-9), 0.0), 1.0) * (low <= capacity)


def _together(found: Sequence[tuple[Touch, Size]], line: int) -> Bytes:
    """Bytes by buffer; reads that move unlike each other count each, to the whole buffer at most."""
    result: Bytes = {}
    whole: Bytes = {}
    for touch, size in found:
        result[touch.buffer] = result.get(touch.buffer, 0.0) + size
        whole[touch.buffer] = touch.storage
    return {b: least(n, -(-whole[b] // line) * line) for b, n in result.items()}


def _either(condition: Size, one: Bytes, other: Bytes) -> Bytes:
    return {b: chosen(condition, one.get(b, 0.0), other.get(b, 0.0)) for b in dict.fromkeys((*one, *other))}


def _union(found: Sequence[Bytes]) -> Bytes:
    result: Bytes = {}
    for each in found:
        for buffer, size in each.items():
            result[buffer] = most(result[buffer], size) if buffer in result else size
    return result


def _sum(found: Sequence[Bytes]) -> Bytes:
    result: Bytes = {}
    for each in found:
        for buffer, size in each.items():
            result[buffer] = result.get(buffer, 0.0) + size
    return result


def _total(found: Bytes) -> Size:
    return sum(found.values(), 0.0)
