"""What is learned from records: a forest of whole numbers, and trials that beliefs save."""

from __future__ import annotations

import numpy as np
import pytest

from bench.learned.forest import UNIT, Split, fitted
from bench.learned.judge import predictions, speedup_error
from bench.learned.rows import Row
from bench.tuning.families import WAYS, Known, trials_needed
from tilewright.tune.families import CHANGES
from tilewright.tune.features import Told
from tilewright.tune.records import Anchor, Measurement


def test_a_forest_finds_what_doubles_the_time() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 16, (400, 6))
    slow = rows[:, 2] >= 9
    forest = fitted(rows, np.where(slow, 1.0, 0.0), np.ones(len(rows)))
    factors = forest.factors(rows)
    assert np.all(np.abs(factors[slow] - 2) < 0.2) and np.all(np.abs(factors[~slow] - 1) < 0.1)
    assert forest == fitted(rows, np.where(slow, 1.0, 0.0), np.ones(len(rows))), "the same every time"
    assert forest.total(rows).dtype == np.int64 and abs(int(forest.total(rows).max()) - UNIT) < UNIT // 8
    first = forest.trees[0]
    assert isinstance(first, Split) and all(isinstance(n, int) for n in (first.feature, first.threshold))


def told(kind: str, microseconds: float, lanes: int) -> Told:
    numbers = {"time": 1, "compute": 1, "waits": 1, "moved 0": 1, "lanes": lanes}
    return Told(kind, microseconds * 1e-6, numbers)


def measured(task: str, kind: str, microseconds: float) -> Measurement:
    return Measurement("", "", {}, task, kind, "outside", 1, "thread", "swept", microseconds, 0.0, 9,
                       Anchor(1.0, 1.0))  # fmt: skip


@pytest.mark.parametrize("is_wrong", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_correction_is_taken_where_it_was_better(is_wrong: bool) -> None:
    """Maps of few lanes take four times as long as predicted, or everything takes what is predicted."""
    rows = []
    for number in range(20):
        kind = "map" if number % 2 else "product"
        for lanes in (1, 4, 8, 16):
            predicted = 10.0 + lanes * (1 + number % 3)
            factor = 4.0 if is_wrong and kind == "map" and lanes < 8 else 1.0
            kernels = (told(kind, predicted, lanes),)
            rows.append(Row(measured(f"task {number}", kind, factor * predicted), "one", kernels))
    found = predictions(rows, "program")
    is_map = np.array([row.measured.kind == "map" for row in rows])
    np.testing.assert_array_equal(found["where better"][~is_map], found["fold"][~is_map])
    assert np.array_equal(found["where better"][is_map], found["fold"][is_map]) == (not is_wrong)


def test_errors_of_speedups_are_over_the_first_plan_of_a_task() -> None:
    """What is the same for all plans of a task is no error."""
    tasks = {"one": (8.0, 4.0, 2.0), "other": (3.0, 3.0), "single": (1.0,)}
    rows = [Row(measured(task, "map", us), "one", (told("map", us, 1),)) for task, all_us in tasks.items()
            for us in all_us]  # fmt: skip
    everything = range(len(rows))
    right = np.array([row.measured.microseconds for row in rows])
    assert speedup_error(rows, everything, 7 * right) == 0
    wrong = right.copy()
    wrong[1] /= 1.5
    assert speedup_error(rows, everything, wrong) == pytest.approx(0.5 / 3)
    assert speedup_error(rows, [5], right) is None


def test_beliefs_save_trials() -> None:
    """Of plans that are predicted alike, one kind of change is faster in all tasks of a family."""

    def task(number: int) -> Known:
        changes = np.eye(1 + len(CHANGES))[1:]
        others = tuple((c, 0.7 if place == 5 else 1.1) for place, c in enumerate(changes))
        return Known(f"task {number}", "product", 10.0, others)

    model = [(task(number), 1) for number in range(6)]
    needed = {way: trials_needed(model, way, np.random.default_rng(0)) for way in WAYS}
    assert needed["families"] < 0.5 * min(needed["alone"], needed["predictions"], needed["chance"])
