"""Stages one behind the other, each on devices of its own: which layers, and how many devices (Alpa, section 5).

A batch goes through in parts: the first takes the sum of all stages, each further one as long as the slowest stage. For
each bound on the slowest the least sum is found by dynamic programming from the last layer back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.schedule.constants import ALIKE_STAGES

Seconds = Callable[[int, int, int], float]
"""Of the layers from the first up to but not with the last on one of the meshes; infinite where they do not fit."""

Fits = Callable[[int, int, int, int], bool]
"""Whether the layers from the first up to but not with the last may be a stage on one of the meshes with so many stages
behind it."""

Table = NDArray[Any]


@dataclass(frozen=True)
class StagePlan:
    """Layers from `first` up to `last`, on the mesh of this number: by its own ranks, which follow those of the stage
    before, or by those of a group that may have several stages."""

    first: int
    last: int
    mesh: int
    group: int | None = None


Found = tuple[float, tuple[StagePlan, ...]]


def best_stages(
    layers: int, devices: int, meshes: Sequence[int], seconds: Seconds, parts: int = 1,
    order: Sequence[int] | None = None, fits: Fits | None = None, fewer: bool = False,
) -> Found | None:  # fmt: skip
    """The stages that take least for a batch in so many parts, on all of the devices, or on as many as they take where
    `fewer` will do. `meshes` has the devices of each mesh that a stage may have, and `order` the numbers of those that
    they have one after the other, where that is said. None where there are no such stages."""
    known = np.full((len(meshes), layers, layers + 1), inf)
    for mesh in range(len(meshes)):
        for first in range(layers):
            for last in range(first + 1, layers + 1):
                known[mesh, first, last] = seconds(first, last, mesh)
    search = _Search(known, devices, meshes, order, fits, fewer)
    best = search.least_sum(inf)
    if best is None or parts == 1:
        return best
    floor = best[0]
    best = search.in_parts(best, parts)
    bounds = _bounds(known[known < inf].tolist())
    possible = bisect_left(bounds, True, key=lambda slowest: search.least_sum(slowest) is not None)
    for slowest in bounds[possible:]:
        if floor + (parts - 1) * slowest >= best[0]:
            break
        found = search.least_sum(slowest)
        if found is not None:
            best = min(best, search.in_parts(found, parts), key=lambda each: each[0])
    return best


def _bounds(values: Iterable[float]) -> list[float]:
    """What the slowest stage may have, in order; of nearly equal ones the most."""
    kept: list[float] = []
    for each in sorted(set(values), reverse=True):
        if not kept or each < kept[-1] * (1 - ALIKE_STAGES):
            kept.append(each)
    return kept[::-1]


@dataclass
class _Search:
    """`known` has the seconds by mesh, first layer and the one behind the last."""

    known: Table
    devices: int
    meshes: Sequence[int]
    order: Sequence[int] | None
    fits: Fits | None
    fewer: bool
    fitting: dict[int, Table] = field(default_factory=dict)  # by how many stages are behind, what may be one

    @property
    def layers(self) -> int:
        return int(self.known.shape[1])

    def in_parts(self, found: Found, parts: int) -> Found:
        """The same stages, with what all parts of a batch take."""
        times = [float(self.known[p.mesh, p.first, p.last]) for p in found[1]]
        return sum(times) + (parts - 1) * max(times), found[1]

    def least_sum(self, slowest: float) -> Found | None:
        """The least sum of stages of which none takes longer than a bound."""
        tables = [np.full((self.layers + 1, self.devices + 1), inf)]  # by first layer and devices, of so many stages
        tables[0][self.layers, 0] = 0.0
        if self.order is None and self.fits is None:
            return self._walked(slowest, [self._any_number(slowest)], 0)
        counts = range(1, min(self.layers, self.devices) + 1) if self.order is None else range(1, len(self.order) + 1)
        for count in counts:
            table = np.full_like(tables[0], inf)
            table[:-1] = np.min(self._sums(slowest, count - 1, tables[-1], slice(None)), axis=(0, 2))
            tables.append(table)
        wanted = counts if self.order is None else [len(self.order)]
        found = [each for n in wanted if (each := self._walked(slowest, tables, n)) is not None]
        return min(found, key=lambda each: each[0], default=None)

    def _any_number(self, slowest: float) -> Table:
        """The same of stages however many."""
        table = np.full((self.layers + 1, self.devices + 1), inf)
        table[self.layers, 0] = 0.0
        for first in reversed(range(self.layers)):
            table[first] = np.min(self._sums(slowest, 0, table, slice(first, first + 1)), axis=(0, 2))[0]
        return table

    def _sums(self, slowest: float, behind: int, after: Table, firsts: slice) -> Table:
        """By mesh that a stage may have, first layer, the one behind the last, and devices: the stage and what comes
        behind it."""
        able = self._able(behind)
        own = self.known[able, firsts]
        own = np.where(own <= slowest, own, inf)
        if self.fits is not None:
            own = np.where(self._fitting(behind)[able, firsts], own, inf)
        moved = np.full((len(able), *after.shape), inf)
        for place, size in enumerate(self.meshes[mesh] for mesh in able):
            if size <= self.devices:
                moved[place, :, size:] = after[:, : self.devices + 1 - size]
        sums: Table = own[..., None] + moved[:, None]
        return sums

    def _able(self, behind: int) -> list[int]:
        """Meshes of a stage with so many behind it."""
        return list(range(len(self.meshes))) if self.order is None else [self.order[len(self.order) - 1 - behind]]

    def _fitting(self, behind: int) -> Table:
        if behind not in self.fitting:
            assert self.fits is not None
            fits = self.fits
            found = np.zeros(self.known.shape, np.bool_)
            for mesh, first, last in np.argwhere(self.known < inf).tolist():
                found[mesh, first, last] = fits(first, last, mesh, behind)
            self.fitting[behind] = found
        return self.fitting[behind]

    def _walked(self, slowest: float, tables: Sequence[Table], count: int) -> Found | None:
        """The stages that a table was made of, of `count` stages, or of any number where there is one table."""
        left = self.devices
        if self.fewer:
            left = int(np.argmin(tables[count][0]))
        total = float(tables[count][0, left])
        if total == inf:
            return None
        plans: list[StagePlan] = []
        first = 0
        while first < self.layers:
            after = tables[max(0, count - 1)]
            sums = self._sums(slowest, max(0, count - 1), after, slice(first, first + 1))[:, 0, :, left]
            place, last = (int(n) for n in np.unravel_index(np.argmin(sums), sums.shape))
            mesh = self._able(max(0, count - 1))[place]
            plans.append(StagePlan(first, last, mesh))
            first, left, count = last, left - self.meshes[mesh], count - 1
        return total, tuple(plans)
