"""Layers: runs of computes, about alike in time and weights, behind any of which a stage may end; and what each run of
layers takes and holds on a mesh. All that passes where a stage ends is sent, however many tensors these are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.ir.forms.compute import Compute, reads
from tilewright.ir.forms.mesh import Spread
from tilewright.ir.forms.tensor import Tensor
from tilewright.schedule.cluster.planner import Decided, MeshPlanner
from tilewright.schedule.constants import LITTLE_LAYER, WEIGHTS_NOTHING
from tilewright.target import Link

Layer = tuple[Compute, ...]
Table = NDArray[Any]
"""By the first layer of a run and the one behind its last."""


@dataclass(frozen=True)
class Runs:
    """Of runs of layers as a stage: seconds of computing and of what the ranks of the stage exchange, infinite where no
    layer is; seconds of what it takes from other stages; and of sending results on, where it is not on the first ranks.
    Bytes of weights on a rank, each once, and of those that several layers read, by which of them."""

    computing: Table
    taking: Table
    results: Table
    held: Table
    several: tuple[tuple[int, NDArray[np.bool_]], ...] = ()

    @cached_property
    def seconds(self) -> Table:
        return self.computing + self.taking + self.results

    def both_held(self, firsts: slice, first: int, lasts: slice, last: int) -> Table:
        """Bytes that two runs of one rank both hold: from `first` up to each, and from each up to `last`."""
        found = np.zeros((firsts.stop - firsts.start, lasts.stop - lasts.start))
        for size, read in self.several:
            before = np.logical_or.accumulate(read[first:last])  # by the layer before the one up to which
            behind = np.logical_or.accumulate(read[first:last][::-1])[::-1]
            found += size * np.outer(before[firsts.start - first - 1 : firsts.stop - first - 1],
                                     behind[lasts.start - first : lasts.stop - first])  # fmt: skip
        return found


def in_layers(
    computes: Sequence[Compute], seconds: Mapping[Compute, float], weights: Mapping[Compute, int], most: int
) -> list[Layer]:
    """At most so many, each of about as much of the seconds and weights together. A layer ends where least passes of
    the places behind which little follows."""
    parts = [_parts([each[c] for c in computes]) for each in (seconds, weights)]
    costs = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
    passing = _passing(computes)
    found: list[Layer] = []
    begin = 0
    while begin < len(computes):
        end, total = begin, 0.0
        while end < len(computes) and total < 1 / most:
            total, end = total + costs[end], end + 1
        more = [end + n for n, cost in enumerate(accumulate(costs[end:]), 1) if cost < LITTLE_LAYER / most]
        end = min((end, *more), key=lambda place: passing[place - 1])
        found.append(tuple(computes[begin:end]))
        begin = end
    return found


def grouped(seconds: Sequence[float], most: int) -> list[tuple[int, int]]:
    """Sections as layers: one each, or neighbouring short ones together where there are more than so many."""
    if len(seconds) <= most:
        return [(i, i + 1) for i in range(len(seconds))]
    enough = sum(seconds) / most
    found: list[tuple[int, int]] = []
    begin, total = 0, 0.0
    for i, each in enumerate(seconds):
        total += each
        if total >= enough or i == len(seconds) - 1:
            found.append((begin, i + 1))
            begin, total = i + 1, 0.0
    return found


def _parts(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [each / total if total else 1 / len(values) for each in values]


def _passing(computes: Sequence[Compute]) -> list[int]:
    """Behind each compute the bytes of what those before make for those behind."""
    last = {t: number for number, c in enumerate(computes) for t in reads(c)}
    changes = [0] * (len(computes) + 1)
    for number, compute in enumerate(computes):
        for tensor in compute.outputs:
            if last.get(tensor, number) > number:
                changes[number] += tensor.most_bytes
                changes[last[tensor]] -= tensor.most_bytes
    return list(accumulate(changes))[:-1]


@dataclass
class PricedLayers:
    """Layers over one mesh as it was decided: what each run of them takes and holds there."""

    planner: MeshPlanner
    decided: Decided
    layers: Sequence[Layer]
    along: Link | None  # between stages

    def __post_init__(self) -> None:
        self.made = {t: n for n, layer in enumerate(self.layers) for c in layer for t in c.outputs}  # by which layer
        self.last = {t: n for n, layer in enumerate(self.layers) for c in layer for t in reads(c)}
        self.outputs = set(self.planner.program.outputs)

    def runs(self, shared: AbstractSet[int] = frozenset()) -> Runs:
        """Without those layers that all ranks share: what these make is whole on every rank."""
        size = len(self.layers) + 1
        computing, taking, results = np.full((size, size), inf), np.zeros((size, size)), np.zeros((size, size))
        for first in range(size - 1):
            run = LayerRun(self, shared)
            taken = sent = 0.0
            for last in range(first + 1, size):
                makes = () if last - 1 in shared else [t for c in self.layers[last - 1] for t in c.outputs]
                taken += sum(map(self.sent, run.add(last - 1)))
                sent += sum(self.sent(t) for t in makes if t in self.outputs)
                computing[first, last] = run.seconds + run.whole_again(last)
                taking[first, last], results[first, last] = taken, sent if first else 0.0
        return Runs(computing, taking, results, *self._held(shared))

    def runs_of_sections(self, sections: Sequence[tuple[int, int]]) -> Runs:
        """Of layers that are sections: one tensor comes to the first of a run."""
        before = np.array([0.0, *accumulate(self.decided.seconds)])
        begins = np.array([*(begin for begin, _ in sections), sections[-1][1]])
        computing = before[begins][None] - before[begins][:, None]
        comes = [self.decided.sections[begin].comes for begin, _ in sections]
        taking = np.zeros_like(computing)
        taking[:-1] += np.array([0.0, *(0.0 if t is None else self.sent(t) for t in comes[1:])])[:, None]
        computing[np.tril_indices(len(computing))] = inf
        return Runs(computing, taking, np.zeros_like(computing), *self._held(frozenset()))

    def together(self, shared: Collection[int]) -> tuple[float, int]:
        """Seconds and bytes on a rank of layers that all ranks share, beside what stages have."""
        total = 0.0
        for first in sorted(n for n in shared if n - 1 not in shared):
            run, last = LayerRun(self), first
            while last in shared:
                takes, last = run.add(last), last + 1
                total += sum(self.sent(t, self.planner.mesh.ranks - 1) for t in takes if self.made[t] not in shared)
            total += run.seconds + run.whole_again(last)
        return total, sum(self.planner.costs.bytes_of(*each) for each in self._read(shared))

    def sent(self, tensor: Tensor, times: int = 1) -> float:
        """Seconds until a stage has it from another, or so many ranks have it."""
        if self.along is None:
            return 0.0
        return self.along.latency + times * tensor.most_bytes / self.along.bandwidth

    def _read(self, layers: Iterable[int]) -> dict[tuple[Tensor, Spread], list[int]]:
        """Weights as these layers read them, with which of them do."""
        found: dict[tuple[Tensor, Spread], list[int]] = {}
        for number in layers:
            for compute in self.layers[number]:
                for tensor, needs in self.decided.ways[compute].strategy.needs.items():
                    if tensor in self.planner.kept:
                        spread = min(needs, key=lambda each: self.planner.costs.bytes_of(tensor, each))
                        found.setdefault((tensor, spread), []).append(number)
        return found

    def _held(self, shared: AbstractSet[int]) -> tuple[Table, tuple[tuple[int, NDArray[np.bool_]], ...]]:
        size = len(self.layers)
        within = np.zeros((size + 1, size + 1))
        several: list[tuple[int, NDArray[np.bool_]]] = []
        for (tensor, spread), numbers in self._read(n for n in range(size) if n not in shared).items():
            read = np.zeros(size, np.bool_)
            read[numbers] = True
            before = np.array([0, *accumulate(read.tolist())])
            taken = self.planner.costs.bytes_of(tensor, spread)
            within += taken * (before[None] > before[:, None])
            if before[-1] > 1 and taken >= WEIGHTS_NOTHING * self.planner.all_weights:
                several.append((taken, read))
        return within, tuple(several)


@dataclass
class LayerRun:
    """Layers of one stage, added one after the other; those that all ranks share are left out."""

    priced: PricedLayers
    shared: AbstractSet[int] = frozenset()
    seconds: float = 0.0  # of computing, and of what the ranks of the stage exchange on the way
    made: dict[Tensor, Spread] = field(default_factory=dict)
    taken: set[Tensor] = field(default_factory=set)
    exchanged: set[tuple[Tensor, tuple[Spread, ...]]] = field(default_factory=set)

    def add(self, number: int) -> list[Tensor]:
        """What it takes more from other stages with one more layer."""
        priced, more = self.priced, []
        if number in self.shared:
            return []
        for compute in priced.layers[number]:
            way = priced.decided.ways[compute]
            self.seconds += way.seconds
            for tensor, needs in way.strategy.needs.items():
                if tensor in self.made:
                    if (tensor, needs) not in self.exchanged:
                        self.exchanged.add((tensor, needs))
                        self.seconds += priced.planner.costs.routed(tensor, self.made[tensor], needs)
                elif tensor in priced.made and priced.made[tensor] not in self.shared and tensor not in self.taken:
                    self.taken.add(tensor)
                    more.append(tensor)
            self.made.update(dict.fromkeys(compute.outputs, way.strategy.gives))
        return more

    def whole_again(self, last: int) -> float:
        """Seconds to have whole what is read behind this stage, or outside of it."""
        priced = self.priced
        whole = (Spread.whole(priced.planner.mesh),)
        parts = [t for t, lies in self.made.items() if not lies.is_whole and (t, whole) not in self.exchanged]
        return sum(priced.planner.costs.routed(t, self.made[t], whole) for t in parts
                   if priced.last.get(t, -1) >= last or t in priced.outputs or self._read_by_all(t))  # fmt: skip

    def _read_by_all(self, tensor: Tensor) -> bool:
        return any(tensor in reads(c) for n in self.shared for c in self.priced.layers[n])
