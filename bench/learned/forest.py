"""Trees that add up to a correction: they compare whole numbers, and their leaves are whole numbers too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

UNIT = 1024  # of a leaf: so many are a doubling
_TREES, _DEPTH = 120, 4
_RATE = 0.08  # of what a tree finds that it adds
_FEWEST = 8  # rows of a leaf
_SHRINK = 4.0  # rows without an effect that every leaf has besides its own
_ROWS, _FEATURES = 0.7, 0.5  # of them that a tree sees
_CUTS = 24  # of a feature, at most


@dataclass(frozen=True)
class Split:
    """Rows whose feature is below the threshold go one way, the others the other; a leaf is a number."""

    feature: int
    threshold: int
    below: Split | int
    above: Split | int


@dataclass(frozen=True)
class Forest:
    trees: tuple[Split | int, ...]

    def total(self, rows: Array) -> Array:
        """The logarithm of the correction, in units of a doubling."""
        return np.asarray(sum((_applied(tree, rows) for tree in self.trees), np.zeros(len(rows), np.int64)))

    def factors(self, rows: Array) -> Array:
        return np.asarray(2.0 ** (self.total(rows) / UNIT))


def _applied(tree: Split | int, rows: Array) -> Array:
    if not isinstance(tree, Split):
        return np.full(len(rows), tree, np.int64)
    below = rows[:, tree.feature] < tree.threshold
    found = np.empty(len(rows), np.int64)
    found[below], found[~below] = _applied(tree.below, rows[below]), _applied(tree.above, rows[~below])
    return found


def fitted(rows: Array, wanted: Array, weights: Array) -> Forest:
    """Trees one after the other, each on what those before leave of the logarithms that are wanted; seeded."""
    rng = np.random.default_rng(0)
    cuts = [_cuts(rows[:, feature]) for feature in range(rows.shape[1])]
    bins = np.stack([np.searchsorted(c, rows[:, f], side="right") for f, c in enumerate(cuts)], axis=1)
    left = wanted * UNIT
    trees: list[Split | int] = []
    for _ in range(_TREES):
        seen = np.flatnonzero(rng.random(len(rows)) < _ROWS)
        some = rng.permutation(len(cuts))[: max(1, int(_FEATURES * len(cuts)))]
        trees.append(_grown(bins, cuts, left, weights, seen, [int(f) for f in some], _DEPTH))
        left = left - _applied(trees[-1], rows)
    return Forest(tuple(trees))


def _cuts(values: Array) -> Array:
    known = np.unique(values)
    if len(known) <= _CUTS:
        return known
    return np.unique(np.quantile(known, np.linspace(0, 1, _CUTS + 1)[:-1]).astype(np.int64))


def _grown(
    bins: Array, cuts: Sequence[Array], left: Array, weights: Array, seen: Array, features: Sequence[int], depth: int
) -> Split | int:
    pulls, mass = left[seen] * weights[seen], weights[seen]
    leaf = round(_RATE * float(pulls.sum()) / (float(mass.sum()) + _SHRINK))
    if depth == 0 or len(seen) < 2 * _FEWEST:
        return leaf
    best, chosen = 0.0, None
    for feature in features:
        gains = _gains(bins[seen, feature], len(cuts[feature]) + 1, pulls, mass)
        if gains is not None and float(gains.max()) > best:
            best, chosen = float(gains.max()), (feature, int(np.argmax(gains)))
    if chosen is None:
        return leaf
    feature, place = chosen
    below = bins[seen, feature] <= place
    parts = [_grown(bins, cuts, left, weights, seen[side], features, depth - 1) for side in (below, ~below)]
    return Split(feature, int(cuts[feature][place]), parts[0], parts[1])


def _gains(bins: Array, count: int, pulls: Array, mass: Array) -> Array | None:
    """By cut, how much two leaves explain that one does not; None where every cut leaves too few on a side."""
    pulled, weighed, counted = (np.cumsum(np.bincount(bins, each, count))[:-1] for each in (pulls, mass, mass * 0 + 1))
    able = (counted >= _FEWEST) & (len(bins) - counted >= _FEWEST)
    if not able.any():
        return None
    total, whole = float(pulls.sum()), float(mass.sum())
    found = pulled**2 / (weighed + _SHRINK) + (total - pulled) ** 2 / (whole - weighed + _SHRINK)
    return np.asarray(np.where(able, found - total**2 / (whole + _SHRINK), 0.0))
