"""What runs of a plan say beside runs of another: each between two of the other's, the anchors, round after round.

A plan takes its ratio to the anchors around it, and ratios count where those two agree best: what else runs on the
machine comes and goes in between. Every anchor lies between two anchors as well, and its ratio to those is what equal
plans differ by here and now: where that is more than a twentieth, nothing is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

DRIFT = 1.05  # of a plan beside itself: what differs by more was disturbed
STEADY = 1.08  # of the anchors around a run
FEWEST = 7  # runs that count, between anchors that agree best
_DRAWS = 400  # of a bootstrap
_TAIL = 0.025  # on either side of what is held to be so


@dataclass(frozen=True)
class Ratio:
    """The time of a plan over that of the anchor, and the bounds that it is within 19 times of 20."""

    middle: float
    low: float
    high: float
    spread: float  # between the quartiles, as a part of the middle
    rounds: int  # that count


def steady(table: Array) -> Array:
    """By round and plan of a table of (anchor, plan, anchor), whether the anchors agree."""
    before, after = table[:, :, 0], table[:, :, 2]
    return np.asarray(np.maximum(before, after) <= STEADY * np.minimum(before, after))


def ratio(before: Array, taken: Array, after: Array, fewest: int = FEWEST) -> Ratio:
    """What the steadiest of some rounds say."""
    apart, anchors = np.abs(np.log(after / before)), np.sqrt(before * after)
    agree = int(np.sum(np.maximum(before, after) <= STEADY * np.minimum(before, after)))
    count = min(len(taken), max(agree, fewest))
    ratios = (taken / anchors)[np.argsort(apart, kind="stable")[:count]]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    least, most = _bounds(ratios)
    return Ratio(middle, least, most, (high - low) / middle, count)


def _bounds(ratios: Array) -> tuple[float, float]:
    """Of the median, by drawing rounds again; seeded, so that the same times give the same choice."""
    drawn = np.random.default_rng(len(ratios)).integers(0, len(ratios), (_DRAWS, len(ratios)))
    least, most = np.quantile(np.median(ratios[drawn], axis=1), (_TAIL, 1 - _TAIL)).tolist()
    return least, most


@dataclass(frozen=True)
class Beside:
    """A plan beside the anchor in one sitting, in seconds, and the anchor beside itself."""

    ratio: Ratio
    anchor: float  # seconds
    itself: Ratio

    @property
    def is_disturbed(self) -> bool:
        return not 1 / DRIFT <= self.itself.middle <= DRIFT

    @property
    def seconds(self) -> float:
        return self.anchor * self.ratio.middle


def beside(anchors: Array, taken: Array) -> Beside:
    """One more run of the anchor than of the plan: each run of the plan is between two of them."""
    before, after = anchors[:-1], anchors[1:]
    settled = np.maximum(before, after) <= STEADY * np.minimum(before, after)
    base = np.sqrt(before * after)
    own = ratio(before, taken, after)
    itself = ratio(anchors[:-2], anchors[1:-1], anchors[2:])
    return Beside(own, float(np.median(base[settled] if settled.any() else base)), itself)
