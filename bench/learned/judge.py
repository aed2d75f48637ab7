"""Predictions beside those that a forest corrects, on tasks that it was not fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from statistics import fmean

import numpy as np

from bench.judge.figures import TaskFigures, fallen, noise, summed, task_figures
from bench.judge.judge import ALL
from bench.learned.forest import Array, Forest, fitted
from bench.learned.rows import Row
from bench.support import number_text, table

_FOLDS = 5
_MOST = 2.0  # doublings that a row may be off by, as the forest is told it
_TOLD = ("time", "compute", "waits")  # and what begins with `moved`: what a forest that predicts alone is not told

SAID = (
    "DLBCM, x86: speedups of sequences of transformations over the plain program, 16% mean error.",
    "LPM, TPU: better than a carefully made analytical model at choosing tiles and what to fuse.",
)
WAYS = ("fold", "corrected", "where better", "learned alone")


def report(rows: Sequence[Row], split: str, networks: bool = False) -> str:
    prices = predictions(rows, split)
    ways = WAYS
    if networks:  # torch is needed for them alone
        from bench.learned.networks import believed

        prices |= believed(rows, _parts(rows, split))
        ways = tuple(prices)
    lines: list[str] = []
    for machine in dict.fromkeys(row.machine for row in rows):
        own = [i for i, row in enumerate(rows) if row.machine == machine]
        found = {way: _by_class(rows, own, prices[way]) for way in ways}
        kinds = sorted(found["fold"], key=lambda kind: (kind == ALL, kind))
        cells = [[kind, str(len(found["fold"][kind])), *(_cell(found[way][kind]) for way in ways)] for kind in kinds]
        header = ["rank, loss, near", "tasks", *ways]
        lines += [f"## {machine}, by {split}", "", *table(header, cells), ""]
        errors = ", ".join(f"{way} {number_text(speedup_error(rows, own, prices[way]), '.0%')}" for way in ways)
        lines += [f"mean error of speedups over a task's first plan: {errors}", ""]
        lines += [f"{way}, {kind}: {name} {was:.3f} to {now:.3f}, worse beyond noise"
                  for way in ways if way not in ("fold", "learned alone") for kind in kinds
                  for name, (was, now) in fallen(found["fold"][kind], found[way][kind]).items()]  # fmt: skip
        lines += [""]
    return "\n".join((*lines, *(SAID if networks else ())))


def predictions(rows: Sequence[Row], split: str) -> dict[str, Array]:
    """Microseconds of every row, by way; those that were learned come from rows of other parts alone."""
    parts = _parts(rows, split)
    fold = np.array([row.predicted for row in rows])
    corrected, alone = fold.copy(), fold.copy()
    for part in sorted(set(parts)):
        seen, unseen = np.flatnonzero(parts != part), np.flatnonzero(parts == part)
        corrected[unseen] = _corrected([rows[i] for i in seen], [rows[i] for i in unseen])
        alone[unseen] = _alone([rows[i] for i in seen], [rows[i] for i in unseen])
    better = fold.copy()
    for part in sorted(set(parts)):
        seen = np.flatnonzero(parts != part)
        trusted = _trusted(rows, seen, fold, corrected)
        for i in np.flatnonzero(parts == part):
            better[i] = corrected[i] if rows[i].measured.kind in trusted else fold[i]
    return dict(zip(WAYS, (fold, corrected, better, alone), strict=True))


def _parts(rows: Sequence[Row], split: str) -> Array:
    if split == "machine":
        names = list(dict.fromkeys(row.machine for row in rows))
        return np.array([names.index(row.machine) for row in rows])
    tasks = sorted({row.measured.task for row in rows})
    places = np.random.default_rng(0).permutation(len(tasks)) % _FOLDS
    part = dict(zip(tasks, places.tolist(), strict=True))
    return np.array([part[row.measured.task] for row in rows])


def _corrected(seen: Sequence[Row], unseen: Sequence[Row]) -> Array:
    """Every kernel's prediction times what a forest makes of its numbers."""
    names = sorted(seen[0].kernels[0].numbers)
    wanted = [log2(row.measured.microseconds / row.predicted) for row in seen]
    forest = _forest(seen, names, wanted)
    return np.array([1e6 * sum(k.seconds * f for k, f in zip(row.kernels, _factors(forest, row, names), strict=True))
                     for row in unseen])  # fmt: skip


def _alone(seen: Sequence[Row], unseen: Sequence[Row]) -> Array:
    """The same without what is predicted."""
    names = sorted(n for n in seen[0].kernels[0].numbers if n not in _TOLD and not n.startswith("moved"))
    forest = _forest(seen, names, [log2(row.measured.microseconds) for row in seen])
    return np.array([float(_factors(forest, row, names).sum()) for row in unseen])


def _forest(seen: Sequence[Row], names: Sequence[str], wanted: Sequence[float]) -> Forest:
    """A row stands for its longest kernel; tasks are compared within themselves, and weigh the root of their size."""
    tasks = [f"{row.machine} {row.measured.task}" for row in seen]
    count = {task: tasks.count(task) for task in set(tasks)}
    sums: dict[str, float] = dict.fromkeys(count, 0.0)
    for task, one in zip(tasks, wanted, strict=True):
        sums[task] += one
    apart = [one - sums[task] / count[task] for task, one in zip(tasks, wanted, strict=True)]
    numbers = np.array([_numbers(max(row.kernels, key=lambda k: k.seconds).numbers, names) for row in seen], np.int64)
    weights = np.array([count[task] ** -0.5 for task in tasks])
    return fitted(numbers, np.clip(np.array(apart), -_MOST, _MOST), weights)


def _factors(forest: Forest, row: Row, names: Sequence[str]) -> Array:
    return forest.factors(np.array([_numbers(kernel.numbers, names) for kernel in row.kernels], np.int64))


def _numbers(given: Mapping[str, int], names: Sequence[str]) -> list[int]:
    return [given[name] for name in names]


def _trusted(rows: Sequence[Row], seen: Array, fold: Array, corrected: Array) -> set[str]:
    """Classes in which the correction was better beyond noise, and nothing worse, on these rows."""
    before, after = (_by_class(rows, seen.tolist(), prices) for prices in (fold, corrected))
    return {kind for kind in before if fallen(after[kind], before[kind]) and not fallen(before[kind], after[kind])}


def _by_class(rows: Sequence[Row], chosen: Sequence[int], prices: Array) -> dict[str, list[TaskFigures]]:
    found: dict[str, list[TaskFigures]] = {}
    for kind, figures in _of_tasks(rows, chosen, prices):
        for name in (kind, ALL):
            found.setdefault(name, []).append(figures)
    return found


def _of_tasks(rows: Sequence[Row], chosen: Sequence[int], prices: Array) -> Iterator[tuple[str, TaskFigures]]:
    factor = noise([rows[i].measured for i in chosen])
    tasks: dict[tuple[str, str], list[int]] = {}
    for i in chosen:
        tasks.setdefault((rows[i].machine, rows[i].measured.task), []).append(i)
    for places in tasks.values():
        measured = [rows[i].measured for i in places]
        yield measured[0].kind, task_figures(measured, [float(prices[i]) for i in places], factor)


def speedup_error(rows: Sequence[Row], chosen: Sequence[int], prices: Array) -> float | None:
    """By how much predicted speedups are off, as a part of those measured: of all plans of tasks but the first."""
    first: dict[tuple[str, str], int] = {}
    off = []
    for i in chosen:
        base = first.setdefault((rows[i].machine, rows[i].measured.task), i)
        if base != i:
            measured = rows[base].measured.microseconds / rows[i].measured.microseconds
            off.append(abs(float(prices[base] / prices[i]) / measured - 1))
    return fmean(off) if off else None


def _cell(tasks: Sequence[TaskFigures]) -> str:
    f = summed(tasks, 0, 0)
    return f"{number_text(f.rank, '.2f')} {number_text(f.loss, '.3f')} {number_text(f.near, '.0%')}"
