"""What tuning gains, and what it takes for a gain where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.support import table
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tune.fresh import measured
from tilewright.tune.models import CallTimes, TrialBuilder, calls_within, sat
from tilewright.tune.subjects import TunedModel, find_subjects
from tilewright.tune.tuner import LEAST_GAIN, tune_plan

_SECONDS = 3.0  # of a sitting


def planned(path: Path, options: Options) -> TunedModel:
    target = machine(options.target, options.threads, cache_dir=options.cache_dir)
    made = build(load(path, {}), target, options.override(stop_after="plan"))
    assert made.program is not None and made.plan is not None
    return TunedModel(made.program, made.plan, target, options.tune_arithmetic)


def gain(paths: Mapping[str, Path], options: Options) -> int:
    """Models tuned, then timed beside the planner's own in a process of its own; how many became slower."""
    rows, slower = [], 0
    for name, path in paths.items():
        model = planned(path, options)
        tuned = tune_plan(model.program, model.plan, model.target, options)
        times = measured(((model.program, model.plan), (model.program, tuned)), model.target, options, _SECONDS)
        if times is None:
            raise SystemExit(f"{name}: no process could be started to measure it once more")
        found = times.whole
        changed = sum("times as fast as" in k.estimate.reason for k in tuned.kernels)
        slower += found.ratio.low > 1
        rows.append([name, f"{1e3 * found.anchor:.2f}", f"{1 / found.ratio.middle:.3f}",
                     f"{1 / found.ratio.high:.3f} to {1 / found.ratio.low:.3f}", f"{changed} of {len(tuned.kernels)}",
                     f"{found.itself.middle:.3f}"])  # fmt: skip
        print("\t".join(rows[-1]), flush=True)
    print("\n".join(table(["model", "planned, ms", "times as fast", "19 of 20", "kernels changed", "A/A"], rows)))
    return slower


@dataclass
class Changed:
    """Subjects that equal plans were measured of, and those taken for faster: at first, and once more elsewhere."""

    subjects: int = 0
    disturbed: int = 0
    first: int = 0
    again: int = 0


def beside_itself(path: Path, options: Options, sittings: int) -> Changed:
    """The planner's own plan as if it were another."""
    model = planned(path, options)
    builder = TrialBuilder(model.program, model.target, options)
    subjects = list(find_subjects(model))
    found = Changed()
    with builder.built(model.plan) as own:
        calls = [calls_within(subject.tensors, model.program, own) for subject in subjects]
    for _ in range(sittings):
        with builder.built(model.plan) as own, builder.built(model.plan) as other:
            first = _faster(sat(model.program, own, other, _SECONDS), calls, found)
        found.subjects += len(subjects)
        found.first += len(first)
        if first:
            again = measured(((model.program, model.plan),) * 2, model.target, options, _SECONDS)
            found.again += 0 if again is None else len(_faster(again, first, Changed()))
    return found


def _faster(times: CallTimes, calls: list[list[int]], found: Changed) -> list[list[int]]:
    faster = []
    for some in calls:
        each = times.beside(some, some)
        found.disturbed += each.is_disturbed
        if not each.is_disturbed and each.ratio.high < 1 and each.ratio.middle < 1 - LEAST_GAIN:
            faster.append(some)
    return faster


def aa(paths: Mapping[str, Path], options: Options, sittings: int) -> int:
    """How many groups in a hundred are changed for plans that are equal."""
    rows = []
    whole = Changed()
    for name, path in paths.items():
        found = beside_itself(path, options, sittings)
        for part in ("subjects", "disturbed", "first", "again"):
            setattr(whole, part, getattr(whole, part) + getattr(found, part))
        rows.append([name, *map(str, (found.subjects, found.disturbed, found.first, found.again))])
        print("\t".join(rows[-1]), flush=True)
    print("\n".join(table(["model", "subjects", "disturbed", "faster at first", "and once more"], rows)))
    share = 100 * whole.again / max(1, whole.subjects)
    print(f"{share:.1f}% of equal plans are taken for faster")
    return round(share)
