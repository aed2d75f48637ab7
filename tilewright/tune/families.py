"""What measured trials say about those that wait: predictions corrected by families of kernels.

A family is what kernels compute, whatever their extents. The logarithm of how long another plan takes over the
planner's own is what was predicted, plus a weighted sum of that and of what changed. A weight has a part that all
kernels share, one of the family and one of the group of equal kernels alone; all are believed to be near 0, normally
distributed, until trials say otherwise. So a trial of one member ranks what waits for all of them, most of all for its
own group, then for its family (FamilySeer, with families that also learn from each other).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import erf, exp, log, pi, sqrt
from typing import Any

import numpy as np

from tilewright.tune.features import Told

Array = np.ndarray[Any, np.dtype[np.float64]]

# What changed between two plans of a kernel, each as the binary logarithm of its ratio.
CHANGES = (
    "register", "along the vector", "across the vector", "lanes", "tile", "innermost part", "trips", "in passes",
    "near rows", "summed loops", "together", "leaves", "held", "instruction",
)  # fmt: skip
# As the judge's records of one x86 core are explained best; replayed, few trials are then needed on it.
_PREDICTION = 0.3  # how much of the prediction may be missing or too much
_CHANGE = 0.03  # by how much a doubling may change the time
_NOISE = 0.2  # of a trial that neither explains

_SCALES = np.array([_PREDICTION, *(_CHANGE for _ in CHANGES)])

Key = tuple[object, str]  # family and group
Shares = tuple[float, float, float]  # of a weight's variance: for all kernels, for the family, for the group
POOLED: Shares = (0.2, 0.4, 0.4)


@dataclass(frozen=True)
class GainEstimate:
    """The logarithm of a ratio to the planner's own: its mean, and how far it may be from it."""

    mean: float
    apart: float

    def gain(self, best: float = 1.0) -> float:
        """How much less than the best ratio so far is to be expected, counting nothing where it is more."""
        z = (log(best) - self.mean) / self.apart
        below = 0.5 * (1 + erf(z / sqrt(2)))
        more = exp(-0.5 * z * z) / sqrt(2 * pi)
        return best * self.apart * (z * below + more)


@dataclass
class Beliefs:
    """What trials have said so far."""

    shares: Shares = POOLED
    keys: list[Key] = field(default_factory=list)
    changes: list[Array] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)  # logarithms of measured over predicted

    def learn(self, key: Key, change: Array, ratio: float) -> None:
        self.keys.append(key)
        self.changes.append(change * _SCALES)
        self.surprises.append(log(ratio) - float(change[0]))

    def expected(self, waiting: Sequence[tuple[Key, Array]]) -> list[GainEstimate]:
        """Of every trial that waits."""
        if not waiting:
            return []
        keys, scaled = [key for key, _ in waiting], np.array([change * _SCALES for _, change in waiting])
        means = np.array([change[0] for _, change in waiting])
        apart = (scaled * scaled).sum(1) * sum(self.shares)
        if self.keys:
            known = np.array(self.changes)
            among = self._alike(self.keys, self.keys) * (known @ known.T) + _NOISE**2 * np.eye(len(known))
            across = self._alike(keys, self.keys) * (scaled @ known.T)
            solved = np.linalg.solve(among, across.T)
            means = means + solved.T @ np.array(self.surprises)
            apart = apart - (across * solved.T).sum(1)
        return [GainEstimate(float(m), sqrt(max(0.0, float(v)) + _NOISE**2)) for m, v in zip(means, apart, strict=True)]

    def _alike(self, some: Sequence[Key], others: Sequence[Key]) -> Array:
        """How much of a weight's variance trials have in common."""
        numbers: dict[object, int] = {}
        families = [[numbers.setdefault(f, len(numbers)) for f, _ in side] for side in (some, others)]
        groups = [[numbers.setdefault(key, len(numbers)) for key in side] for side in (some, others)]
        for_all, for_family, for_group = self.shares
        same_family = np.equal.outer(np.array(families[0]), np.array(families[1]))
        same_group = np.equal.outer(np.array(groups[0]), np.array(groups[1]))
        return np.asarray(for_all + for_family * same_family + for_group * same_group, np.float64)


def family(own: Sequence[Told]) -> object:
    """What kernels compute, whatever their extents: by the class of the longest of them, and its elements."""
    longest = max(own, key=lambda t: t.seconds)
    return longest.kind, longest.numbers["bytes an element"]


def change(own: Sequence[Told], other: Sequence[Told]) -> Array:
    """What another plan changes: the logarithm of the ratio predicted, and of the numbers of its longest kernel."""
    predicted = log(sum(t.seconds for t in other) / sum(t.seconds for t in own))
    before, after = (max(some, key=lambda t: t.seconds).numbers for some in (own, other))
    return np.array([predicted, *(_doublings(before, after, name) for name in CHANGES)])


def unchanged() -> Array:
    """Where nothing is predicted."""
    return np.zeros(1 + len(CHANGES))


def _doublings(before: Mapping[str, int], after: Mapping[str, int], name: str) -> float:
    return log((1 + after[name]) / (1 + before[name]), 2)
