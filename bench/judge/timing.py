"""Plans of one task timed side by side: each between two runs of the first plan, the anchor, round after round.

A plan takes its ratio to the anchors around it, and ratios count where those two agree best: what else runs on the
machine comes and goes in between. The anchor's own plan has its turn like the others, which tells what noise is left.

On a CPU plans of one form share the arrays of a call, and each has just run twice untimed, so that what it alone uses
lies where its runs leave it: the anchor, which runs before every other, would find in the outer cache what the others
would not. Then inputs are written and all else is swept out of the tile level, as a kernel in a model finds it. On one
thread its processor time is read, which others on the machine disturb least; on several the clock on the wall. On a GPU
a graph of copies runs between two events, inputs and results as the copy before left them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.judge.programs import random_array
from tilewright.compiler.pipeline import machine_code
from tilewright.ir.forms.compute import Program
from tilewright.options import Options
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.records import Anchor
from tilewright.tune.timing import DRIFT, FEWEST, steady
from tilewright.tune.timing import ratio as ratio_of

_ENOUGH = 15  # runs of a plan between anchors that agree
_MOST_ROUNDS = 200
_AGREE, _AGREE_16 = 1e-2, 5e-2  # of the answers' norm, which other orders of sums may change
_COPIES = 20  # of a model in one graph of a GPU
_UNTIMED = 2  # runs of a plan before each that is timed
_SWEPT = 2  # times the tile level's capacity

Timer = Callable[[], float]  # one run, in microseconds


@dataclass(frozen=True)
class Timed:
    """What one plan took in a sitting."""

    microseconds: float
    spread: float
    agrees: bool


@dataclass(frozen=True)
class Sitting:
    timed: tuple[Timed, ...]
    anchor: Anchor
    rounds: int
    clock: str
    caches: str

    @property
    def is_disturbed(self) -> bool:
        ratio = self.anchor.beside / self.anchor.around
        return not 1 / DRIFT <= ratio <= DRIFT


class CpuTimer:
    """Times plans through the product's own runtime."""

    caches = "swept"

    def __init__(self, target: Target, threads: int) -> None:
        self.clock = "thread" if threads == 1 else "wall"
        self.now = time.thread_time_ns if threads == 1 else time.perf_counter_ns
        self.sweep = np.zeros(_SWEPT * target.local.capacity * threads, np.uint8)

    def timer(self, runner: Any, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> Timer:
        def run() -> float:
            for _ in range(_UNTIMED):
                runner.run(inputs, outputs)
            np.add(self.sweep, 1, out=self.sweep)
            for array in inputs:
                np.copyto(array, array.copy())
            begin = self.now()
            runner.run(inputs, outputs)
            return (self.now() - begin) * 1e-3

        return run

    def sizes(self, runner: Any) -> tuple[Sequence[int], Sequence[int]]:
        return runner.input_bytes, runner.output_bytes


class GpuTimer:
    """Times plans as graphs of copies, each graph made once."""

    caches = "warm"
    clock = "device"

    def timer(self, runner: Any, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> Timer:
        from cuda.bindings import driver

        from tilewright.runtime.cuda_device import check

        (stream,) = check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        launch = runner.launcher(inputs, int(stream))
        launches = sum(0 not in call.grid for call in runner.image.calls)
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            for _ in range(_COPIES):
                for number in range(launches):
                    launch(number)
        finally:
            captured = driver.cuStreamEndCapture(stream)
        (graph,) = check(captured)
        (executable,) = check(driver.cuGraphInstantiate(graph, 0))
        begin, end = (check(driver.cuEventCreate(0))[0] for _ in range(2))

        def run() -> float:
            check(driver.cuEventRecord(begin, stream))
            check(driver.cuGraphLaunch(executable, stream))
            check(driver.cuEventRecord(end, stream))
            check(driver.cuStreamSynchronize(stream))
            return float(check(driver.cuEventElapsedTime(begin, end))[0]) * 1e3 / _COPIES

        return run

    def sizes(self, runner: Any) -> tuple[Sequence[int], Sequence[int]]:
        return runner.image.input_bytes, runner.image.output_bytes


def sit(
    programs: Sequence[Program], plans: Sequence[tuple[int, Plan]], target: Target, options: Options, seconds: float,
    rng: np.random.Generator,
) -> Sitting | None:  # fmt: skip
    """Plans, each of one of the programs, by number; rounds until there are enough, or the seconds are over."""
    timer = GpuTimer() if target.kind == "gpu" else CpuTimer(target, options.threads or 1)
    with _loaded(programs, plans, target, options) as runners:
        keys = [(form, timer.sizes(runner)) for (form, _), runner in zip(plans, runners, strict=True)]
        shared = {repr(key): _ports(programs[key[0]], key[1]) for key in keys}
        ports = [shared[repr(key)] for key in keys]
        answers = [_answer(runner, *port) for runner, port in zip(runners, ports, strict=True)]
        firsts = {form: answers[i] for i, (form, _) in reversed(list(enumerate(plans)))}
        agree = [_agree(firsts[form], answers[i]) for i, (form, _) in enumerate(plans)]
        timers = [timer.timer(runner, *port) for runner, port in zip(runners, ports, strict=True)]
        table = _rounds(timers, seconds, rng)
    return summed(table, agree, timer.clock, timer.caches)


def _rounds(timers: Sequence[Timer], seconds: float, rng: np.random.Generator) -> np.ndarray:
    """By round and plan: the anchor before, the plan, the anchor after."""
    for timer in timers:
        timer()
    rows: list[np.ndarray] = []
    end = time.perf_counter() + seconds
    while len(rows) < FEWEST or (
        time.perf_counter() < end and len(rows) < _MOST_ROUNDS and steady(np.array(rows)).sum(0).min() < _ENOUGH
    ):
        row = np.zeros((len(timers), 3))
        before = timers[0]()
        for place in rng.permutation(len(timers)):
            taken, after = timers[place](), timers[0]()
            row[place] = before, taken, after
            before = after
        rows.append(row)
    return np.array(rows)


def summed(table: np.ndarray, agree: Sequence[bool], clock: str, caches: str) -> Sitting | None:
    """What a table of rounds, plans and (anchor, plan, anchor) says; None where the anchor differs from itself."""
    before, taken, after = (table[:, :, i] for i in range(3))
    settled, anchors = steady(table), np.sqrt(before * after)
    base = float(np.median(anchors[settled])) if settled.any() else float(np.median(anchors))
    found = [ratio_of(before[:, place], taken[:, place], after[:, place]) for place in range(len(agree))]
    timed = [Timed(base * r.middle, r.spread, agrees) for r, agrees in zip(found, agree, strict=True)]
    rounds = min(r.rounds for r in found)
    sitting = Sitting(tuple(timed), Anchor(base, timed[0].microseconds), rounds, clock, caches)
    return None if sitting.is_disturbed else sitting


@contextmanager
def _loaded(
    programs: Sequence[Program], plans: Sequence[tuple[int, Plan]], target: Target, options: Options
) -> Iterator[list[Any]]:
    runners: list[Any] = []
    with TemporaryDirectory(prefix="tilewright-judge-") as folder:  # for packed weights, which nobody needs again
        weights = Path(folder) if target.kind == "cpu" else None
        try:
            for form, plan in plans:
                runners.append(machine_code(programs[form], plan, target, options, weights)[1])
            yield runners
        finally:
            for runner in runners:
                runner.close()


def _ports(program: Program, sizes: tuple[Sequence[int], Sequence[int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random inputs and places for outputs, flat: layouts may fill them up."""
    rng = np.random.default_rng(0)
    inputs = [random_array(rng, t.dtype, (size // t.dtype.bytes,))
              for t, size in zip(program.inputs, sizes[0], strict=True)]  # fmt: skip
    outputs = [np.zeros(size // t.dtype.bytes, t.dtype.numpy)
               for t, size in zip(program.outputs, sizes[1], strict=True)]  # fmt: skip
    return inputs, outputs


def _answer(runner: Any, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    runner.run(inputs, outputs)
    return [array.copy() for array in outputs]


def _agree(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return all(_alike(a, b) for a, b in zip(one, other, strict=True))


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype.kind in "iub":
        return float(np.mean(one != other)) <= _AGREE  # an index may change with the last bit of what it is made from
    a, b = one.astype(np.float64), other.astype(np.float64)
    whole = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    apart, size = np.linalg.norm((a - b)[whole]), np.linalg.norm(a[whole])
    return bool(apart <= (_AGREE if one.dtype.itemsize > 2 else _AGREE_16) * size)
