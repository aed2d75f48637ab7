"""Measures the plans of stored records once more, on the machine they were measured on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.judge.measure import filled, tell
from bench.judge.programs import told
from bench.judge.timing import Sitting, sit
from tilewright.errors import TilewrightError
from tilewright.options import Options
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.records import Measurement, Records, Writer, read


def measure_again(source: Path, out: Path, seconds: float, seconds_a_task: float, options: Options) -> int:
    """Appends measurements of tasks that the file to write does not have yet, until the time is over; how many."""
    end, records, writer = time.perf_counter() + seconds, read(source), Writer(out)
    rng, written = np.random.default_rng(time.time_ns()), 0
    for task, target in dict.fromkeys((m.task, m.target) for m in records.measurements):
        if (task, target) in writer.tasks or time.perf_counter() > end:
            continue
        own = [m for m in records.measurements if (m.task, m.target) == (task, target)]
        try:
            sitting = _sitting(records, own, seconds_a_task, options, rng)
        except TilewrightError as error:
            tell(f"{task}: {told(error)}")
            continue
        if sitting is None:
            tell(f"{task}: disturbed, left out")
            continue
        for measurement in _measurements(own, sitting):
            writer.append(measurement, records.programs[measurement.program], records.targets[target])
            written += 1
        tell(f"{task}: {len(own)} plans, {sitting.timed[0].microseconds:.1f} us; {written} records")
    return written


def _sitting(
    records: Records, own: Sequence[Measurement], seconds: float, options: Options, rng: np.random.Generator
) -> Sitting | None:
    digests = list(dict.fromkeys(m.program for m in own))
    programs = [filled(records.programs[digest]) for digest in digests]
    plans = [(digests.index(m.program), Plan.from_json(json.dumps(m.plan))) for m in own]
    return sit(programs, plans, records.targets[own[0].target].target(), options, seconds, rng)


def _measurements(own: Sequence[Measurement], sitting: Sitting) -> Iterator[Measurement]:
    """The same with what they take now; plans whose answers differ are left out, and the pairs they are in."""
    sound = [(m, timed) for m, timed in zip(own, sitting.timed, strict=True) if timed.agrees]
    ids = [pair.id for m, _ in sound for pair in m.pairs]
    for m, timed in sound:
        yield replace(
            m, microseconds=round(timed.microseconds, 3), spread=round(timed.spread, 4), rounds=sitting.rounds,
            anchor=sitting.anchor, clock=sitting.clock, caches=sitting.caches,
            pairs=tuple(p for p in m.pairs if ids.count(p.id) == 2),
        )  # fmt: skip
