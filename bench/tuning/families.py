"""What a family's correction saves: trials until a model is nearly as fast as it can be, replayed from records.

A made-up model is a draw of the records' tasks, each so many times; the trials are its tasks' measured plans. Nothing
runs: a trial reveals what was measured. What is compared is which trial comes next: by beliefs as tuning has them, by
beliefs of every task alone, one belief for all, predictions alone, tasks in turn by their share, and by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean

import numpy as np

from bench.judge.judge import machines_of
from bench.judge.price import read_all
from bench.support import table
from tilewright.tune.families import POOLED, Array, Beliefs, Key, Shares, change, family
from tilewright.tune.reader import RecordReader
from tilewright.tune.records import Measurement, Records

_TASKS = 40  # of a made-up model
_MOST_TIMES = 6  # that a model has a task
_NEAR = 1.01  # times the least time, that is as fast as it can be
_FEWEST = 3  # other plans of a task

WAYS: Mapping[str, Shares | None] = {
    "families": POOLED, "alone": (0.0, 0.0, 1.0), "one for all": (1.0, 0.0, 0.0), "predictions": None, "in turn": None,
    "chance": None,
}  # fmt: skip

SAID = ("FamilySeer: as fast code as Ansor's in 1/1.2 to 1/7.9 of the time that tuning takes, whole networks, CPU and "
        "GPU.")  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A task with its planner's own time and, of every other plan, what it changes and its ratio to that."""

    name: str
    family: object
    microseconds: float
    others: tuple[tuple[Array, float], ...]

    def trial(self, place: int) -> tuple[Key, Array]:
        return (self.family, self.name), self.others[place][0]

    @property
    def least(self) -> float:
        return min(1.0, *(ratio for _, ratio in self.others))


def known_tasks(records: Records) -> dict[str, list[Known]]:
    """By machine: tasks of which the planner's own plan and some others of the same Program are known."""
    names = machines_of(records)
    by_task: dict[tuple[str, str], list[Measurement]] = {}
    for measured in records.measurements:
        by_task.setdefault((names[measured.target], measured.task), []).append(measured)
    reader = RecordReader(records)
    found: dict[str, list[Known]] = {}
    for (machine, name), (own, *rest) in by_task.items():
        same = [m for m in rest if m.program == own.program]
        first = reader.told(own) if len(same) >= _FEWEST else ()
        if not first:
            continue
        others = [(change(first, made), m.microseconds / own.microseconds) for m in same if (made := reader.told(m))]
        if len(others) >= _FEWEST:
            found.setdefault(machine, []).append(Known(name, family(first), own.microseconds, tuple(others)))
    return found


def trials_needed(model: Sequence[tuple[Known, int]], way: str, rng: np.random.Generator) -> int:
    """Trials until the model takes nearly the least that its tasks' plans take."""
    shares = WAYS[way]
    beliefs = Beliefs(shares or POOLED)
    weights = [task.microseconds * times for task, times in model]
    best, tried = [1.0] * len(model), [0] * len(model)
    goal = _NEAR * sum(weight * task.least for weight, (task, _) in zip(weights, model, strict=True))
    waiting = [(number, place) for number, (task, _) in enumerate(model) for place in range(len(task.others))]
    waiting = [waiting[i] for i in rng.permutation(len(waiting))]
    trials = 0
    expected = beliefs.expected([model[number][0].trial(place) for number, place in waiting])
    while sum(weight * ratio for weight, ratio in zip(weights, best, strict=True)) > goal:
        gains = [weights[n] * e.gain(best[n]) for (n, _), e in zip(waiting, expected, strict=True)]
        if way == "in turn":  # groups by their share, each plan of one making the next less urgent
            gains = [weights[n] / (1 + tried[n]) - 1e-9 * e.mean for (n, _), e in zip(waiting, expected, strict=True)]
        chosen = 0 if way == "chance" else gains.index(max(gains))
        number, place = waiting.pop(chosen)
        expected.pop(chosen)
        task = model[number][0]
        ratio = task.others[place][1]
        best[number] = min(best[number], ratio)
        tried[number] += 1
        if shares is not None:
            beliefs.learn(*task.trial(place), ratio)
            expected = beliefs.expected([model[number][0].trial(place) for number, place in waiting])
        trials += 1
    return trials


def report(files: Iterable[Path], models: int, seeds: int) -> None:
    for machine, tasks in known_tasks(read_all(files)).items():
        plans = sum(len(task.others) for task in tasks)
        print(f"{machine}: {len(tasks)} tasks of {len({t.family for t in tasks})} families, {plans} other plans")
        rows, ratios = [], []
        for number in range(models):
            rng = np.random.default_rng(number)
            drawn = [tasks[i] for i in rng.permutation(len(tasks))[:_TASKS]]
            model = [(task, int(rng.integers(1, _MOST_TIMES + 1))) for task in drawn]
            needed = {way: fmean(trials_needed(model, way, np.random.default_rng(seed)) for seed in range(seeds))
                      for way in WAYS}  # fmt: skip
            ratios.append(needed["families"] / min(needed["alone"], needed["one for all"]))
            rows.append([f"model {number}", str(sum(len(task.others) for task in drawn)),
                         *(f"{n:.0f}" for n in needed.values())])  # fmt: skip
        print("\n".join(table(["", "plans", *WAYS], rows)))
        print(f"families need {exp(fmean(map(log, ratios))):.2f} of the trials of the better of alone and one for all")
    print(SAID)
