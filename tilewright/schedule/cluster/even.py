"""Stages that are even in time and in weights: which layers each of some alike groups of ranks has.

One run of layers for every group cannot be even in both where time is at the front and weights are at the back. So a
group may have two stages, before and behind those of others. With two cuts for every group but one a chain can always
be shared out alike by two measures, where it is fine enough (a necklace with beads of two kinds: Alon, 1987). Where
these cuts are is found by dynamic programming over runs and numbers of groups:

    stages of k groups = those of i behind those of k - i, or one group at both ends and those of k - 1 between

What is too large for one group, in time or in weights, may be shared out to the ranks of all of them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np

from tilewright.schedule.cluster.layers import Runs, Table
from tilewright.schedule.constants import EVEN_STAGES, LARGE_LAYER, LESS_EVEN, STAGES_WORTH, TWO_STAGES

_BETWEEN = 15  # groups that there may be between two stages of one
_LARGE = 8  # layers that are looked at as shared by all ranks


@dataclass(frozen=True)
class Shared:
    """Layers that all ranks share, with their seconds and the bytes of their weights on a rank; and the runs of all
    others as stages."""

    layers: AbstractSet[int]
    seconds: float
    held: float
    runs: Runs


class EvenSplit(NamedTuple):
    """By layer which of the groups has it, None where all ranks share it; the seconds of a batch in all its parts, and
    the bytes that a rank may hold for that."""

    groups: tuple[int | None, ...]
    seconds: float
    room: float


class Found(NamedTuple):
    """A split, and one that is much quicker, where a rank may hold more than its share for that."""

    split: EvenSplit
    quicker: EvenSplit | None = None


def even_stages(
    alone: Runs, sharing: Callable[[AbstractSet[int]], Shared], count: int, parts: int = 1, most: float = inf
) -> Found | None:
    """The quickest split between `count` groups, for a batch in so many parts, in which no rank holds more than `most`;
    where nothing is said, than about an even share, if that is possible: else one with the least product of seconds and
    of what a rank may hold. None where none will do. `sharing` tells what it is to share some layers out to all
    ranks."""
    layers = len(alone.held) - 1
    if layers < count:
        return None
    whole = float(alone.held[0, layers])
    share = max(1.0, whole / count)
    enough = EVEN_STAGES * share if most == inf else most
    search = _Search([sharing(frozenset(each)) for each in _shared_layers(alone, count, enough)], count, parts)
    even = search.quickest(enough)
    if most < inf or (even is not None and even.seconds <= STAGES_WORTH * search.least):
        return None if even is None else Found(even)
    other: EvenSplit | None = None
    room = enough
    while room < LESS_EVEN * max(whole, enough) and search.least * room < _product(other):
        room *= LESS_EVEN
        found = search.quickest(room)
        other = found if _product(found) < _product(other) else other
    if even is None or other is None:
        return None if other is None else Found(other)
    return Found(even, other if even.seconds > STAGES_WORTH * other.seconds else None)


def _product(split: EvenSplit | None) -> float:
    return inf if split is None else split.seconds * split.room


def _shared_layers(alone: Runs, count: int, enough: float) -> Iterator[list[int]]:
    """None, and more and more of the layers that are large, the largest first."""
    seconds = float(alone.computing[0, -1]) / count
    weights, times = np.diagonal(alone.held, 1) / enough, np.diagonal(alone.computing, 1) / (seconds or 1.0)
    sizes = np.maximum(weights, times)
    large = [int(n) for n in np.argsort(-sizes, kind="stable") if sizes[n] > LARGE_LAYER][:_LARGE]
    for number in range(len(large) + 1):
        yield large[:number]


class _Search:
    """Splits with some layers shared by all ranks or none, those that may be quickest first."""

    def __init__(self, known: Sequence[Shared], count: int, parts: int) -> None:
        self.count, self.parts = count, parts
        self.known = sorted(((self._least(each), each) for each in known), key=lambda pair: pair[0])

    @property
    def least(self) -> float:
        """What no split takes less than."""
        return self.known[0][0]

    def _least(self, each: Shared) -> float:
        total, largest = float(each.runs.computing[0, -1]), float(np.diagonal(each.runs.computing, 1).max())
        return self._in_parts(each, total, max(total / self.count, largest))

    def _in_parts(self, each: Shared, total: float, slowest: float) -> float:
        """The first part of a batch goes through all stages, each further one is as late as the slowest group."""
        return each.seconds + total + (self.parts - 1) * (each.seconds + slowest)

    def quickest(self, room: float) -> EvenSplit | None:
        """Of those in which no rank holds more than there is room for."""
        best: EvenSplit | None = None
        cost = inf
        for least, each in self.known:
            left = room - each.held
            if max(float(np.diagonal(each.runs.held, 1).max()), float(each.runs.held[0, -1]) / self.count) > left:
                continue
            for between, worth in ((0, 1.0), (_BETWEEN, TWO_STAGES)):
                if worth * least >= cost:
                    break
                found = _Splits(each.runs, self.count, left, between)
                if found.slowest_of_all == inf:
                    continue
                seconds = self._in_parts(each, found.total, found.slowest_of_all)
                if worth * seconds < cost:
                    owners = (None if n in each.layers else group for n, group in enumerate(found.groups))
                    best, cost = EvenSplit(tuple(owners), seconds, room), worth * seconds
        return best


class _Splits:
    """The slowest group of the best split of every run between every number of groups, none of which holds more than
    there is room for, or has a stage before and behind more than so many others."""

    def __init__(self, runs: Runs, count: int, room: float, between: int) -> None:
        self.runs, self.count, self.room, self.between = runs, count, room, between
        self.layers = len(runs.held) - 1
        self.slowest = np.full((count + 1, self.layers + 1, self.layers + 1), inf)
        self.slowest[1] = np.where(runs.held <= room, runs.seconds, inf)
        for length in range(2, self.layers + 1):
            for first in range(self.layers + 1 - length):
                self._fill(first, first + length)

    @property
    def slowest_of_all(self) -> float:
        return float(self.slowest[self.count, 0, self.layers])

    @cached_property
    def groups(self) -> list[int]:
        """By layer, numbered as they come."""
        found = [0] * self.layers
        self._walk(self.count, 0, self.layers, found, iter(range(self.count)))
        return found

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        seconds, begin = 0.0, 0
        for group, alike in groupby(self.groups):
            end = begin + sum(1 for _ in alike)
            seconds += float(self.runs.seconds[begin, end] - (0 if group else self.runs.results[begin, end]))
            begin = end
        return seconds

    def _fill(self, first: int, last: int) -> None:
        slowest = self.slowest
        most = min(self.count, last - first)
        for count in range(2, most + 1):
            ends = np.maximum(slowest[1:count, first, first + 1 : last],
                              slowest[count - 1 : 0 : -1, first + 1 : last, last])  # fmt: skip
            slowest[count, first, last] = ends.min()
        if last - first > 2 and self.between:
            inner = slowest[1 : min(most, self.between + 1), first + 1 : last - 1, first + 2 : last]
            around = np.maximum(self._ends(first, last), inner).min(axis=(1, 2))
            filled = slowest[2 : 2 + len(around), first, last]
            np.minimum(filled, around, out=filled)

    def _ends(self, first: int, last: int) -> Table:
        """Of one group with the layers from `first` up to each, and from each up to `last`."""
        runs, befores, behinds = self.runs, slice(first + 1, last - 1), slice(first + 2, last)
        # the first group has the first rank, which is where results are to be
        seconds = runs.seconds if first else runs.computing + runs.taking
        held = runs.held[first, befores, None] + runs.held[None, behinds, last]
        if runs.several:
            held = held - runs.both_held(befores, first, behinds, last)
        total: Table = runs.seconds[first, befores, None] + seconds[None, behinds, last]
        return np.where(held <= self.room, total, inf)

    def _walk(self, count: int, first: int, last: int, found: list[int], fresh: Iterator[int]) -> None:
        slowest = self.slowest
        best = slowest[count, first, last]
        if count == 1:
            found[first:last] = [next(fresh)] * (last - first)
            return
        ends = np.maximum(slowest[1:count, first, first + 1 : last],
                          slowest[count - 1 : 0 : -1, first + 1 : last, last])  # fmt: skip
        if ends.min() <= best:
            before, place = (int(n) for n in np.unravel_index(np.argmin(ends), ends.shape))
            self._walk(before + 1, first, first + 1 + place, found, fresh)
            self._walk(count - before - 1, first + 1 + place, last, found, fresh)
            return
        around = np.maximum(self._ends(first, last), slowest[count - 1, first + 1 : last - 1, first + 2 : last])
        begin, end = (int(n) for n in np.unravel_index(np.argmin(around), around.shape))
        begin, end = first + 1 + begin, first + 2 + end
        own = next(fresh)
        found[first:begin] = [own] * (begin - first)
        found[end:last] = [own] * (last - end)
        self._walk(count - 1, begin, end, found, fresh)
