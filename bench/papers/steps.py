"""A model with some of a paper's steps: what its Plan counts, what it is predicted to take, and what it takes here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

from tilewright.backend import backend_for
from tilewright.backend.seconds import price
from tilewright.backend.traffic import traffic_of
from tilewright.compiler.pipeline import build
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.meaning.traffic import count_traffic
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.target import Target
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.answers import ports
from tilewright.tune.models import TrialBuilder

_FEWEST = 5  # rounds


@dataclass(frozen=True)
class Step:
    """A model with the steps up to one of them."""

    name: str
    program: Program
    plan: Plan


@dataclass(frozen=True)
class Counts:
    """Of one run of a model: what needs no hardware to be known."""

    kernels: int  # distinct
    launches: int
    between: float  # bytes of intermediates that kernels store and read, counted in the Loops
    levels: dict[str, float]  # bytes that every level but the registers reads and writes, as predicted
    predicted: float  # seconds


def planned(name: str, graph: Graph, target: Target, options: Options) -> Step:
    """A model planned under some options."""
    made = build(graph, target, replace(options, stop_after="plan"))
    assert made.program is not None and made.plan is not None
    return Step(name, made.program, made.plan)


def lowered(step: Step, target: Target) -> LoopProgram:
    """What is wrong with a plan is told here."""
    backend = backend_for(target)
    check_plan(step.plan, step.program, target)
    loops = lower_program(step.program, step.plan, backend.lower_kernel)
    backend.check_limits(loops, target)
    return loops


def counted(step: Step, target: Target) -> Counts:
    loops = lowered(step, target)
    moved = traffic_of(step.program, step.plan, target).values()
    levels = {
        level.name: float(sum(k.by_level[place].read + k.by_level[place].written for k in moved))
        for place, level in enumerate(target.levels) if place
    }  # fmt: skip
    seconds = sum(float(k.seconds) for k in price(step.program, step.plan, target).kernels.values())
    return Counts(len(loops.kernels), len(loops.calls), count_traffic(loops).intermediate, levels, seconds)


def timed(steps: Sequence[Step], target: Target, options: Options, seconds: float) -> list[float]:
    """Seconds that each takes on this machine: medians of rounds in which all take turns. One thread is timed by what
    the processor spends on it, which other programs disturb less than the clock on the wall."""
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    with ExitStack() as opened:
        runs = []
        for step in steps:
            made = opened.enter_context(TrialBuilder(step.program, target, options).built(step.plan))
            runs.append((made.runner, *ports(step.program)))
        taken: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + seconds * len(runs)
        while len(taken[-1]) < _FEWEST or time.perf_counter() < end:
            for (runner, inputs, outputs), times in zip(runs, taken, strict=True):
                runner.run(inputs, outputs)  # the caches and threads are its own again
                start = clock()
                runner.run(inputs, outputs)
                times.append(clock() - start)
        return [median(times) for times in taken]
