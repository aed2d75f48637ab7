"""How near the best of a kernel's few plans by policies comes to the best that a wide search finds, on PolyBench."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, nan
from pathlib import Path

import numpy as np

from bench.policies.nests import Study, others, policies
from bench.policies.polybench import SIZES, program
from tilewright.compiler.pipeline import build
from tilewright.options import Options
from tilewright.schedule.policies import policy_plans
from tilewright.target import Target

MUST, REACH = 1.05, 1.02


@dataclass(frozen=True)
class Found:
    """A Program: what the best of few takes over the best of all, and what the planner's own takes over it."""

    name: str
    kernels: int
    few: int  # plans of the kernel that has most, the planner's own counted
    many: int
    own: float
    together: float | None  # measured once more, all kernels at once
    low: float
    high: float

    def row(self) -> list[str]:
        shown = ["-"] * 2 if self.together is None else [f"{self.together:.3f}", f"{self.low:.3f} to {self.high:.3f}"]
        return [self.name, str(self.kernels), str(self.few), str(self.many), f"{self.own:.3f}", *shown]


HEADER = ["kernel", "nests", "few", "of", "planner's own", "best of few", "19 of 20"]


def search(names: Sequence[str], count: int, target: Target, options: Options, out: Path) -> Iterator[Found]:
    """The few beside all plans that policies of any order lead to and so many others of each kernel, half of them
    predicted to be fastest, half random. What the file has of a Program is not measured again."""
    known = _read(out)
    for number, name in enumerate(names):
        made = build(program(name, SIZES[name]), target, options.override(stop_after="plan"))
        assert made.program is not None and made.plan is not None
        study = Study(made.program, made.plan, target, options)
        for nests in study.nests:
            nests.know(known.get(name, {}).get(nests.group.own.name, {}))
        few = [policy_plans(nests.kernels) for nests in study.nests]
        rng = np.random.default_rng(number)
        wide = [[*map(nests.kernels.preferred, policies()), *others(nests, count, rng)] for nests in study.nests]
        wanted = [dict.fromkeys((*some, *more)) for some, more in zip(few, wide, strict=True)]
        study.measure([[p for p in some if p not in nests.ratios]
                       for nests, some in zip(study.nests, wanted, strict=True)])  # fmt: skip
        with out.open("a") as file:
            file.write(json.dumps([name, {nests.group.own.name: nests.told for nests in study.nests}]) + "\n")
        best = {id(nests): nests.best(list(nests.ratios)) for nests in study.nests}
        near = {id(nests): nests.best(some) for nests, some in zip(study.nests, few, strict=True)}
        ratio, own = study.beside(near, best), study.beside({}, best)
        yield Found(
            name, len(made.plan.kernels), 1 + max(map(len, few), default=0),
            max((len(nests.ratios) for nests in study.nests), default=1), own.middle if own is not None else nan,
            None if ratio is None else ratio.middle, ratio.low if ratio else nan, ratio.high if ratio else nan,
        )  # fmt: skip


def _read(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Ratios by Program, kernel and number of the plan."""
    return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def mean(found: Sequence[Found]) -> float:
    """What the few lose; what is faster than the best of many, by chance, counts as equal to it."""
    known = [log(max(1.0, f.together)) for f in found if f.together is not None]
    return exp(sum(known) / max(1, len(known)))


