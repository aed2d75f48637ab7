"""Several mesh axes: which ways of every compute are looked at together.

The ways of a compute are those along each mesh axis times each other, and the tables between computes the squares of
that. Where this is too many, one mesh axis after the other is decided, with the cuts along the others as they are. What
no such step reaches, since two axes would have to change at a time, is found among the ways of all outcomes so far, and
the same with two mesh axes in each other's place. The number of steps is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from tilewright.ir.forms.compute import Compute
from tilewright.schedule.constants import PASS_GAIN
from tilewright.tile_graph.sharding.strategies import Cut

_PASSES = 2  # over all mesh axes after the first; most problems are through after one
_MET = 8  # ways of a compute, about as many as along one mesh axis

Cuts = tuple[Cut, ...]  # by mesh axis
Choices = Mapping[Compute, Sequence[Sequence[Cut]]]  # by mesh axis, what may be cut along it
Admitted = Mapping[Compute, Sequence[Cuts]]


@dataclass(frozen=True)
class AxesOutcome:
    """How every compute is cut: bytes of weights that are not shared out as asked, and seconds."""

    over: int
    seconds: float
    cuts: Mapping[Compute, Cuts]
    is_least: bool  # of what was looked at
    sections: tuple[float, ...] = ()  # the seconds of each

    def is_better(self, other: AxesOutcome, gain: float = 0.0) -> bool:
        return (self.over, self.seconds) < (other.over, other.seconds * (1 - gain))


Solve = Callable[[Admitted, Sequence[int]], AxesOutcome]
"""The best of some ways of every compute, with weights shared out along some mesh axes."""


def at_a_time(choices: Choices) -> Admitted:
    """All there are."""
    return {compute: tuple(product(*each)) for compute, each in choices.items()}


def one_by_one(choices: Choices, axes: Sequence[int], solve: Solve) -> AxesOutcome:
    """One mesh axis after the other in both orders, and then from the better one on."""
    found: list[AxesOutcome] = []
    ended: list[AxesOutcome] = []
    for order in (tuple(axes), tuple(reversed(axes))):
        now: Mapping[Compute, Cuts] = {compute: (None,) * len(each) for compute, each in choices.items()}
        for number, axis in enumerate(order):
            found.append(solve(_along(axis, choices, now), order[: number + 1]))
            now = found[-1].cuts
        ended.append(found[-1])
    best = ended[1] if ended[1].is_better(ended[0]) else ended[0]
    for _ in range(_PASSES):
        before = best
        for admitted in (_met(choices, found), *(_along(axis, choices, best.cuts) for axis in axes)):
            found.append(solve(admitted, axes))
            best = found[-1] if found[-1].is_better(best) else best
        if not best.is_better(before, PASS_GAIN):
            break
    return best


def _along(axis: int, choices: Choices, now: Mapping[Compute, Cuts]) -> Admitted:
    """Every cut along one mesh axis, along the others as it is now."""
    return {compute: tuple((*now[compute][:axis], cut, *now[compute][axis + 1 :]) for cut in each[axis])
            for compute, each in choices.items()}  # fmt: skip


def _met(choices: Choices, found: Collection[AxesOutcome]) -> Admitted:
    """What some outcome has, and that with two mesh axes in each other's place: those of the best outcomes, if many."""
    admitted: dict[Compute, tuple[Cuts, ...]] = {}
    best_first = sorted(found, key=lambda outcome: (outcome.over, outcome.seconds))
    for compute, each in choices.items():
        met = dict.fromkeys(outcome.cuts[compute] for outcome in best_first)
        swapped = [_swapped(cuts, *pair) for cuts in met for pair in combinations(range(len(each)), 2)]
        able = [cuts for cuts in swapped if all(cut in among for cut, among in zip(cuts, each, strict=True))]
        admitted[compute] = tuple(dict.fromkeys((*met, *able)))[:_MET]
    return admitted


def _swapped(cuts: Cuts, first: int, second: int) -> Cuts:
    places = list(range(len(cuts)))
    places[first], places[second] = second, first
    return tuple(cuts[place] for place in places)
