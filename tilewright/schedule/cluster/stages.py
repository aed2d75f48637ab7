"""Stages one behind the other, each on devices of its own: which layers, and how many devices (Alpa, section 5).

A batch goes through in parts: the first takes the sum of all stages, each further one as long as the slowest stage. For
each bound on the slowest the least sum is found by dynamic programming from the last layer back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

Seconds = Callable[[int, int, int], float]
"""Of the layers from the first up to but not with the last on one of the meshes; infinite where they do not fit."""

Fits = Callable[[int, int, int, int], bool]
"""Whether the layers from the first up to but not with the last may be the stage of a number on one of the meshes."""

_ALIKE = 1e-3  # bounds on the slowest stage that differ by less than this part of it are looked at as one


@dataclass(frozen=True)
class StagePlan:
    """Layers from `first` up to `last`, on the mesh of this number."""

    first: int
    last: int
    mesh: int


Found = tuple[float, tuple[StagePlan, ...]]


def best_stages(
    layers: int, devices: int, meshes: Sequence[int], seconds: Seconds, parts: int = 1,
    order: Sequence[int] | None = None, fits: Fits | None = None,
) -> Found | None:  # fmt: skip
    """The stages that take least for a batch in so many parts, on all of the devices. `meshes` has the devices of each
    mesh that a stage may have, and `order` the numbers of those that they have one after the other, where that is said:
    then `fits` may rule out layers by the number of the stage too. None where there are no such stages."""
    ends = [(i, j) for i in range(layers) for j in range(i + 1, layers + 1)]
    known = {(i, j, mesh): seconds(i, j, mesh) for i, j in ends for mesh in range(len(meshes))}
    search = _Search(layers, devices, meshes, known, order, fits)
    best = search.least_sum(inf)
    if best is None or parts == 1:
        return best
    floor = best[0]
    best = search.in_parts(best, parts)
    bounds = _bounds(known.values())
    possible = bisect_left(bounds, True, key=lambda slowest: search.least_sum(slowest) is not None)
    for slowest in bounds[possible:]:
        if floor + (parts - 1) * slowest >= best[0]:
            break
        found = search.least_sum(slowest)
        if found is not None:
            best = min(best, search.in_parts(found, parts), key=lambda each: each[0])
    return best


def _bounds(seconds: Iterable[float]) -> list[float]:
    """Times that the slowest stage may take, in order; of nearly equal ones the longest."""
    kept: list[float] = []
    for each in sorted({s for s in seconds if s < inf}, reverse=True):
        if not kept or each < kept[-1] * (1 - _ALIKE):
            kept.append(each)
    return kept[::-1]


@dataclass(frozen=True)
class _Search:
    layers: int
    devices: int
    meshes: Sequence[int]
    known: Mapping[tuple[int, int, int], float]
    order: Sequence[int] | None
    fits: Fits | None

    def in_parts(self, found: Found, parts: int) -> Found:
        """The same stages, with what all parts of a batch take."""
        times = [self.known[p.first, p.last, p.mesh] for p in found[1]]
        return sum(times) + (parts - 1) * max(times), found[1]

    def least_sum(self, slowest: float) -> Found | None:
        """The least sum of stages of which none takes longer than a bound."""

        @cache
        def rest(first: int, left: int, number: int) -> Found | None:
            if first == self.layers:
                return (0.0, ()) if left == 0 else None
            best: Found | None = None
            for mesh in self._able(left, number):
                for last in range(first + 1, self.layers + 1):
                    own = self.known[first, last, mesh]
                    if own > slowest or own == inf:
                        continue
                    if self.fits is not None and not self.fits(first, last, mesh, number):
                        continue
                    after = rest(last, left - self.meshes[mesh], number if self.order is None else number + 1)
                    if after is not None and (best is None or own + after[0] < best[0]):
                        best = own + after[0], (StagePlan(first, last, mesh), *after[1])
            return best

        return rest(0, self.devices, 0)

    def _able(self, left: int, number: int) -> list[int]:
        """Meshes that the next stage may have."""
        if self.order is None:
            return [mesh for mesh, size in enumerate(self.meshes) if size <= left]
        return list(self.order[number : number + 1])
