"""Stages one behind the other, each on devices of its own: which layers, and how many devices (Alpa, section 5).

A batch goes through in parts: the first takes the sum of all stages, each further one as long as the slowest stage. For
each bound on the slowest the least sum is found by dynamic programming from the last layer back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

Seconds = Callable[[int, int, int], float]
"""Of the layers from the first up to but not with the last on so many devices; infinite where they do not fit."""


@dataclass(frozen=True)
class StagePlan:
    """Layers from `first` up to `last`, on so many devices."""

    first: int
    last: int
    devices: int


def best_stages(
    layers: int, devices: int, sizes: Sequence[int], seconds: Seconds, parts: int = 1, count: int | None = None
) -> tuple[float, tuple[StagePlan, ...]] | None:
    """The stages that take least for a batch in so many parts, on all of the devices, in groups of these sizes; `count`
    of them where that is said. None where there are no such stages."""
    ends = [(i, j) for i in range(layers) for j in range(i + 1, layers + 1)]
    known = {(i, j, size): seconds(i, j, size) for i, j in ends for size in sizes}
    best: tuple[float, tuple[StagePlan, ...]] | None = None
    for slowest in sorted({s for s in known.values() if s < inf}):
        if best is not None and (parts - 1) * slowest >= best[0]:
            break
        found = _least_sum(layers, devices, sizes, known, slowest, count)
        if found is None:
            continue
        plans = found[1]
        total = found[0] + (parts - 1) * max(known[p.first, p.last, p.devices] for p in plans)
        if best is None or total < best[0]:
            best = total, plans
    return best


def _least_sum(
    layers: int, devices: int, sizes: Sequence[int], known: dict[tuple[int, int, int], float], slowest: float,
    count: int | None,
) -> tuple[float, tuple[StagePlan, ...]] | None:  # fmt: skip
    """The least sum of stages of which none takes longer than a bound."""

    @cache
    def rest(first: int, left: int, stages: int | None) -> tuple[float, tuple[StagePlan, ...]] | None:
        if first == layers:
            return (0.0, ()) if left == 0 and not stages else None
        if stages == 0:
            return None
        best: tuple[float, tuple[StagePlan, ...]] | None = None
        for last in range(first + 1, layers + 1):
            for size in sizes:
                own = known[first, last, size]
                if size > left or own > slowest:
                    continue
                after = rest(last, left - size, None if stages is None else stages - 1)
                if after is not None and (best is None or own + after[0] < best[0]):
                    best = own + after[0], (StagePlan(first, last, size), *after[1])
        return best

    return rest(0, devices, count)
