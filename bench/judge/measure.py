"""Measures plans and appends records: goes on wherever it was broken off, on any machine.

Processes beside this one make the plans of the next tasks and compile their kernels into the cache; here they are
loaded and timed. A sitting in which a plan differs from itself by more than 5% is thrown away.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.judge.outside import family_of
from bench.judge.plans import Tried, plans_of
from bench.judge.programs import Form, Task, outside_task, random_array, told, zoo_tasks
from bench.judge.timing import Sitting, sit
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import machine_code
from tilewright.errors import TilewrightError
from tilewright.ir.forms.compute import Program
from tilewright.ir.text.text import program_text
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.report.sidebyside import describe_machine
from tilewright.runtime import Cache
from tilewright.runtime.nvrtc import cached_cubin
from tilewright.target import Target, from_json, machine
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.records import Machine, Measurement, Writer, digest, read_program

_OUTSIDE_AT_A_TIME = 4  # tasks from outside between two models of the zoo
_ZOO_AT_A_TIME = 6
_POLL = 0.05  # seconds


@dataclass(frozen=True)
class Settings:
    seconds: float
    out: Path
    models: tuple[Path, ...]
    plans: int  # a task
    seconds_a_task: float
    jobs: int
    threads: int
    precisions: tuple[str | None, ...]
    first: int  # number of the first task from outside
    families: tuple[str, ...]  # of these tasks
    options: Options


@dataclass(frozen=True)
class Request:
    """What a process beside this one makes: a task from outside by number, or parts of a model."""

    number: int
    model: Path | None
    precision: str | None


@dataclass(frozen=True)
class Made:
    """A task with its plans as texts, which cross between processes."""

    name: str
    kind: str
    source: str
    programs: tuple[str, ...]
    tried: tuple[Tried, ...]


def measure(settings: Settings) -> int:
    """Appends measurements until the time is over; how many."""
    begin = time.perf_counter()
    name = "cuda" if settings.options.target == "cuda" else "cpu"
    target = machine(name, cache_dir=settings.options.cache_dir, tell=tell)
    if target.kind == "cpu" and settings.threads == 1:
        target = one_core(target)
    here = _machine(target)
    writer, rng, written = Writer(settings.out), np.random.default_rng(time.time_ns()), 0
    known = {task for task, measured_on in writer.tasks if measured_on == here.digest}
    for made in _made_ahead(settings, target, begin, known):
        try:
            sitting = _sitting(made, target, settings, rng)
        except TilewrightError as error:
            tell(f"{made.name}: {told(error)}")
            continue
        if sitting is None:
            tell(f"{made.name}: disturbed, left out")
            continue
        for measurement in _measurements(made, sitting, here, settings.threads):
            text = next(t for t in made.programs if digest(t) == measurement.program)
            writer.append(measurement, text, here)
            written += 1
        left = settings.seconds - (time.perf_counter() - begin)
        tell(f"{made.name}, {made.kind}: {len(made.tried)} plans, {sitting.timed[0].microseconds:.1f} us; "
              f"{written} records, {left:.0f} s left")  # fmt: skip
        if left <= 0:
            break
    return written


def one_core(target: Target) -> Target:
    """A machine as one of its cores sees it while the others rest."""
    levels = tuple(replace(level, bandwidth=level.alone or level.bandwidth, capacity=level.capacity * level.shared_by,
                           shared_by=1) for level in target.levels)  # fmt: skip
    return replace(target, units=1, levels=levels, fma_rate=target.fma_alone or target.fma_rate)


def _machine(target: Target) -> Machine:
    if target.kind == "gpu":
        from tilewright.runtime.cuda import device_name

        return Machine.of(target, device_name(), target.architecture)
    processor = str(describe_machine()["processor"])
    return Machine.of(target, processor, " ".join((target.architecture, *target.features)))


def _requests(settings: Settings) -> Iterator[Request]:
    """Tasks from outside without end, parts of the zoo's models in between, precisions in turn."""
    numbers = (n for n in count(settings.first) if family_of(n) in settings.families)
    for turn in count(settings.first // _OUTSIDE_AT_A_TIME):
        precision = settings.precisions[turn % len(settings.precisions)]
        for _ in range(_OUTSIDE_AT_A_TIME):
            yield Request(next(numbers), None, precision)
        if settings.models:
            yield Request(turn, settings.models[turn % len(settings.models)], precision)


def _made_ahead(settings: Settings, target: Target, begin: float, known: Set[str]) -> Iterator[Made]:
    """Tasks in the order they are ready; processes are some requests ahead."""
    requests = _requests(settings)
    description = target.to_json()
    with get_context("spawn").Pool(settings.jobs) as pool:
        waiting: list[AsyncResult[list[Made]]] = []
        while time.perf_counter() - begin < settings.seconds:
            while len(waiting) < 2 * settings.jobs:
                given = (next(requests), description, settings, known)
                waiting.append(pool.apply_async(make, given, error_callback=tell))
            done = next((result for result in waiting if result.ready()), None)
            if done is None:
                time.sleep(_POLL)
                continue
            waiting.remove(done)
            if done.successful():  # a mistake of the compiler's ends one task, and was told
                yield from done.get()


def make(request: Request, description: str, settings: Settings, known: Set[str]) -> list[Made]:
    """In a process beside: tasks that are not known yet, their plans, and their kernels in the cache."""
    target = from_json(description)
    try:
        tasks = _tasks(request, target)
    except TilewrightError as error:
        tell(f"{request}: {told(error)}")
        return []
    found = (_made(task, target, settings) for task in tasks if task.name not in known)
    return [made for made in found if made is not None]


def _tasks(request: Request, target: Target) -> Sequence[Task]:
    if request.model is not None:
        return zoo_tasks(request.model, target, request.precision, _ZOO_AT_A_TIME, request.number)
    task = outside_task(request.number, target, request.precision)
    return [] if task is None else [task]


def _made(task: Task, target: Target, settings: Settings) -> Made | None:
    # as they are read back, so that what is measured is what is recorded
    programs = tuple(program_text(form.program) for form in task.forms)
    forms = [Form(filled(text), form.beside, form.decision) for text, form in zip(programs, task.forms, strict=True)]
    rng = np.random.default_rng([len(task.name), sum(task.name.encode())])
    tried = plans_of(forms, target, settings.plans, rng, task.name)
    kept = [t for t in tried if _compiled(forms[t.form].program, t.plan, target, settings.options)]
    if len(kept) < 2 or kept[0].form != 0:
        return None
    return Made(task.name, task.kind, task.source, programs, tuple(kept))


def filled(text: str) -> Program:
    rng = np.random.default_rng(0)
    return read_program(text, lambda dtype, shape: random_array(rng, dtype, shape))


def _compiled(program: Program, plan: Plan, target: Target, options: Options) -> bool:
    """Kernels into the cache; a GPU is not touched for it."""
    try:
        if target.kind == "cpu":
            with TemporaryDirectory(prefix="tilewright-judge-") as weights:
                machine_code(program, plan, target, options, Path(weights))[1].close()
            return True
        backend = backend_for(target)
        loops = lower_program(program, plan, backend.lower_kernel)
        for source in backend.render(loops, target).values():
            cached_cubin(source, target.architecture, Cache(options.cache_dir))
    except TilewrightError as error:
        tell(told(error))
        return False
    return True


def _sitting(made: Made, target: Target, settings: Settings, rng: np.random.Generator) -> Sitting | None:
    programs = [filled(text) for text in made.programs]
    plans = [(t.form, t.plan) for t in made.tried]
    return sit(programs, plans, target, settings.options, settings.seconds_a_task, rng)


def _measurements(made: Made, sitting: Sitting, here: Machine, threads: int) -> Iterator[Measurement]:
    """Plans whose answers agree; pairs of which both are left."""
    sound = [(tried, timed) for tried, timed in zip(made.tried, sitting.timed, strict=True) if timed.agrees]
    if len(sound) < len(made.tried):
        tell(f"{made.name}: answers of {len(made.tried) - len(sound)} plans differ")
    ids = [pair.id for tried, _ in sound for pair in tried.pairs]
    for tried, timed in sound:
        yield Measurement(
            digest(made.programs[tried.form]), here.digest, json.loads(tried.plan.to_json()), made.name, made.kind,
            made.source, threads, sitting.clock, sitting.caches, round(timed.microseconds, 3), round(timed.spread, 4),
            sitting.rounds, sitting.anchor, tuple(p for p in tried.pairs if ids.count(p.id) == 2),
        )  # fmt: skip


def tell(text: object) -> None:
    print(text, file=sys.stderr, flush=True)
