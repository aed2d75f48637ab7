"""How well prices order measured plans: rank within a task, what the cheapest loses, pairs decided rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from tilewright.tune.records import Measurement

NEAR = 1.10  # times the best measured, that counts as near it
_LEAST_RANKED = 4  # plans of a task that a rank is taken of
_UNTOLD = 1e-3  # predictions nearer to each other than this do not decide a pair
_NOISE_QUANTILE = 0.9  # of plans beside themselves
_DRAWS = 1000
_BOUND = 0.025
_LEAST_TASKS = 6  # that a fall of a figure is told of

# By name, whether more is better; a difference is taken of logarithms where less is.
FIGURES: Mapping[str, bool] = {"rank": True, "loss": False, "near": True, "pairs": True}


@dataclass(frozen=True)
class TaskFigures:
    """One task under one predictor; None and 0 where there is nothing to tell."""

    rank: float | None
    loss: float | None  # measured time of the plan predicted best, over the best measured
    right: int  # pairs
    wrong: int
    untold: int  # of the wrong ones, those whose predictions are equal


@dataclass(frozen=True)
class Figures:
    """Tasks of one machine and class under one predictor."""

    tasks: int
    plans: int
    unpriced: int
    rank: float | None
    loss: float | None
    near: float | None
    pairs: float | None
    decided: int  # pairs that noise leaves
    untold: int


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side is all the same."""
    a, b = _ranks(one), _ranks(other)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, np.float64)
    below = (array[:, None] > array[None, :]).sum(1)
    equal = (array[:, None] == array[None, :]).sum(1)
    return np.asarray(below + (equal - 1) / 2)


def noise(measurements: Sequence[Measurement]) -> float:
    """The factor within which nearly all plans are beside themselves."""
    sittings = {(m.task, m.target, m.anchor.around, m.anchor.beside) for m in measurements}
    apart = [abs(log(beside / around)) for _, _, around, beside in sittings]
    return exp(float(np.quantile(apart, _NOISE_QUANTILE))) if apart else 1.0


def task_figures(measured: Sequence[Measurement], prices: Sequence[float | None], factor: float) -> TaskFigures:
    """Plans of one task, and what each is predicted to take; times within `factor` of each other count as equal."""
    known = [(m.microseconds, p) for m, p in zip(measured, prices, strict=True) if p is not None]
    rank = spearman(*zip(*known, strict=True)) if len(known) >= _LEAST_RANKED else None
    loss = None
    if len(known) > 1:
        least = min(p for _, p in known)
        # of several that are predicted alike, what one may expect
        cheapest = [us for us, p in known if p <= least * (1 + _UNTOLD)]
        loss = exp(sum(map(log, cheapest)) / len(cheapest)) / min(us for us, _ in known)
    right = wrong = untold = 0
    for one, other in pairs_of(measured, prices):
        ratio, predicted = log(one[0] / other[0]), log(one[1] / other[1])
        if abs(ratio) <= log(factor):
            continue
        if abs(predicted) <= _UNTOLD:
            untold += 1
        right, wrong = (right + 1, wrong) if ratio * predicted > 0 and abs(predicted) > _UNTOLD else (right, wrong + 1)
    return TaskFigures(rank, loss, right, wrong, untold)


def pairs_of(
    measured: Sequence[Measurement], prices: Sequence[float | None], decision: str | None = None
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Measured and predicted time of both plans of each pair that has prices."""
    found: dict[str, list[tuple[float, float]]] = {}
    for m, price in zip(measured, prices, strict=True):
        for pair in m.pairs:
            if price is not None and decision in (None, pair.decision):
                found.setdefault(f"{m.target} {pair.id}", []).append((m.microseconds, price))
    return [(some[0], some[1]) for some in found.values() if len(some) == 2]


def summed(tasks: Sequence[TaskFigures], plans: int, unpriced: int) -> Figures:
    values = {name: _figure(name, tasks) for name in FIGURES}
    decided = sum(t.right + t.wrong for t in tasks)
    return Figures(len(tasks), plans, unpriced, **values, decided=decided, untold=sum(t.untold for t in tasks))


def _figure(name: str, tasks: Sequence[TaskFigures]) -> float | None:
    if name == "rank":
        ranks = [t.rank for t in tasks if t.rank is not None]
        return sum(ranks) / len(ranks) if ranks else None
    if name == "pairs":
        decided = sum(t.right + t.wrong for t in tasks)
        return sum(t.right for t in tasks) / decided if decided else None
    losses = [t.loss for t in tasks if t.loss is not None]
    if not losses:
        return None
    if name == "near":
        return sum(loss <= NEAR for loss in losses) / len(losses)
    return exp(sum(map(log, losses)) / len(losses))


def fallen(before: Sequence[TaskFigures], after: Sequence[TaskFigures]) -> dict[str, tuple[float, float]]:
    """Figures of the same tasks that are worse than before beyond noise, with both values: tasks are drawn again and
    again, and nearly every draw says so."""
    found = {}
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(after), len(after)) for _ in range(_DRAWS)] if len(after) >= _LEAST_TASKS else []
    for name, more_is_better in FIGURES.items():
        was, now = _figure(name, before), _figure(name, after)
        if was is None or now is None or was == now or (now > was) == more_is_better:
            continue
        worse = []
        for draw in draws:
            one, two = (_figure(name, [side[i] for i in draw]) for side in (before, after))
            if one is not None and two is not None:
                worse.append((one - two) if more_is_better else (two - one))
        if worse and float(np.quantile(worse, _BOUND)) > 0:
            found[name] = (was, now)
    return found
