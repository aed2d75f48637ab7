"""What this code's predictors say of stored plans, without any hardware: the target's description is in the records.

    python -m bench.judge.price FILES...     a line a measurement: JSON of its prices in microseconds by predictor

`search` is the price that the search compares, `fold` the fold over the Plan's tree (tilewright/backend/seconds.py). A
plan with a kernel that a predictor does not know has no price.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tilewright.backend.seconds import price
from tilewright.errors import TilewrightError
from tilewright.ir.forms.compute import Program
from tilewright.schedule.planner import plan_seconds
from tilewright.schedule.price import priced
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.reader import RecordReader
from tilewright.tune.records import Records, read

Predictor = Callable[[Program, Plan, Target], float | None]
Prices = Mapping[str, float | None]  # microseconds by predictor


def by_search(program: Program, plan: Plan, target: Target) -> float | None:
    made = priced(program, plan, target)
    if any(not launch.estimate.seconds for launch, _ in made.calls()):
        return None
    return plan_seconds(made, program)


def by_fold(program: Program, plan: Plan, target: Target) -> float | None:
    return float(price(program, plan, target).seconds)


PREDICTORS: Mapping[str, Predictor] = {"search": by_search, "fold": by_fold}


def _microseconds(predictor: Predictor, program: Program, plan: Plan, target: Target) -> float | None:
    try:
        seconds = predictor(program, plan, target)
    except TilewrightError:
        return None  # it is not a plan that this code knows how to price
    return None if seconds is None else 1e6 * seconds


def read_all(files: Iterable[Path]) -> Records:
    found = Records()
    for file in files:
        found.add(read(file))
    return found


def all_prices(records: Records) -> list[Prices]:
    reader = RecordReader(records)  # what is read once is kept
    given = map(reader.parts, records.measurements)
    return [{name: _microseconds(predictor, *parts) for name, predictor in PREDICTORS.items()} for parts in given]


def main(files: Sequence[str]) -> None:
    for prices in all_prices(read_all(map(Path, files))):
        print(json.dumps(prices))


if __name__ == "__main__":
    main(sys.argv[1:])
