"""Roller (OSDI 2022): how many aligned programs are constructed, how long that takes, and what measuring ten of them
brings over taking the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.arithmetic import Contraction, Convolution
from bench.kernel_cases import Problem
from bench.papers.operators import graph_of
from bench.papers.steps import Step, planned, timed
from tilewright.options import Options
from tilewright.target import Target
from tilewright.tune.groups import find_groups, with_choices

PROBLEMS: tuple[Problem, ...] = (
    Contraction(1, 128, 3072, 768, True),
    Contraction(12, 128, 128, 64, False),
    Convolution((1, 64, 56, 56), (64, 64, 3, 3), pads=(1, 1, 1, 1)),
    Convolution((1, 256, 28, 28), (512, 256, 1, 1)),
    Convolution((1, 144, 56, 56), (144, 1, 3, 3), pads=(1, 1, 1, 1), groups=144),
)
MEASURED = 10
SAID = (
    "Roller, V100: the first of its programs in 0.41 s an operator without a measurement, the best of ten measured in "
    "13.3 s; Ansor 2380 s. Of 119 operators 59.7% are faster than the CUDA libraries, 81.5% within 10%;",
    "weak there: depthwise convolutions (0.52x TVM), products (0.76x cuBLAS).",
)


@dataclass(frozen=True)
class Row:
    problem: str
    programs: int  # that differ and fit the machine, at most as many as were asked for
    seconds: float  # of processor time until the first is chosen
    predicted: float  # seconds of it
    first: float | None  # seconds as measured
    best: float | None  # of those measured
    place: int | None  # of the best in the predicted order, from 1


def rows(
    target: Target, options: Options, problems: Sequence[Problem] = PROBLEMS, seconds: float = 0.0
) -> Iterator[Row]:
    for problem in problems:
        graph = graph_of(problem)
        begin = time.process_time()
        chosen = planned(problem.describe(), graph, target, options)
        took = time.process_time() - begin
        ways = [chosen, *_others(chosen, target)]
        times = timed(ways, target, options, seconds) if seconds > 0 else []
        estimate = sum(kernel.estimate.seconds for kernel in chosen.plan.kernels)
        yield Row(chosen.name, len(ways), took, estimate, times[0] if times else None, min(times, default=None),
                  times.index(min(times)) + 1 if times else None)  # fmt: skip


def _others(step: Step, target: Target) -> Iterator[Step]:
    """The programs that are predicted to come next, of the kernel that takes longest."""
    group = max(find_groups(step.program, step.plan, target), key=lambda g: g.own.estimate.seconds)
    for kernel in group.alternatives(MEASURED - 1):
        yield replace(step, plan=with_choices(step.program, step.plan, [(group, kernel)]))


Cell = Callable[[Row], str]
COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("operator", lambda r: r.problem),
    ("programs", lambda r: str(r.programs)),
    ("s to the first", lambda r: f"{r.seconds:.2f}"),
    ("predicted us", lambda r: f"{1e6 * r.predicted:.0f}"),
    ("first us", lambda r: "" if r.first is None else f"{1e6 * r.first:.0f}"),
    ("best us", lambda r: "" if r.best is None else f"{1e6 * r.best:.0f}"),
    ("first / best", lambda r: "" if r.best is None or r.first is None else f"{r.first / r.best:.2f}"),
    ("place of the best", lambda r: "" if r.place is None else str(r.place)),
)
