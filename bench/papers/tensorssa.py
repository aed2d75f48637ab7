"""TensorSSA (DAC 2024): programs made functional across their control, and as PyTorch alone makes them functional.

PyTorch's own way has straight code: loops of a known length are written out, and what data decide cuts a program into
pieces with Python between them, each made functional by itself. The compiler behind both ways is the same, so that what
differs is what a piece reaches over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from bench.imperative_programs import CONTROLLED, PROGRAMS
from tilewright.api import compile_whole
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options
from tilewright.pytorch.backend import compile_for_dynamo
from tilewright.pytorch.module import compile_module

ALL = {**PROGRAMS, **CONTROLLED}
ALONE, ACROSS = "PyTorch's alone", "across control"
_FEWEST, _WARM = 5, 3  # rounds; calls in front of them
SAID = (
    "TensorSSA, eight programs (four heads of detectors, four recurrences), CUDA: 1.34x of the best of Inductor, "
    "nvFuser and NNC on average, 1.79x at most. Inductor stands there for PyTorch's own functionalisation, which cuts "
    "programs at their control or writes loops out; behind it is another compiler, here it is the same.",
)


@dataclass(eq=False)
class Pieces:
    """What one way compiles of a program, and how often a run of that calls it."""

    options: Options
    kernels: int = 0
    count: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def build(self, graph: Graph) -> Any:
        model = compile_whole(graph, self.options)
        self.count += 1
        self.kernels += len(getattr(model, "calls", ()))
        return _Counted(model, self.calls)


class _Counted:
    """A model that tells how often it was called."""

    def __init__(self, model: Any, calls: Counter[str]) -> None:
        self._model, self._calls = model, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, /, *args: Any) -> Any:
        self._calls["all"] += 1
        return self._model(*args)

    def address_caller(self) -> Callable[..., None] | None:
        call, calls = self._model.address_caller(), self._calls

        def counted(*args: Any) -> None:
            calls["all"] += 1
            call(*args)

        return None if call is None else counted


@dataclass(frozen=True)
class Row:
    """A program one way."""

    program: str
    way: str
    pieces: int  # Graphs that were compiled
    calls: int  # of them in one run, each from Python
    kernels: int  # calls of kernels that are written in them; those of a loop once
    compiled: float  # seconds of processor time
    seconds: float | None = None
    gain: float | None = None  # of the other way's seconds


def rows(names: Sequence[str], options: Options, seconds: float) -> Iterator[Row]:
    """Both ways of every program, timed in turns where there are seconds for it."""
    for name in names:
        with torch.no_grad():
            torch.manual_seed(0)
            module, inputs = ALL[name]()
            made = [_made(name, way, module.eval(), inputs, options) for way in (ALONE, ACROSS)]
            times = _timed([run for _, run in made], seconds, options.threads == 1) if seconds > 0 else [None, None]
            for (row, _), taken in zip(made, times, strict=True):
                gain = times[0] / taken if taken is not None and times[0] is not None else None
                yield Row(**{**vars(row), "seconds": taken, "gain": gain})


def _made(
    name: str, way: str, module: torch.nn.Module, inputs: Sequence[Any], options: Options
) -> tuple[Row, Callable[[], Any]]:
    pieces = Pieces(options)
    start = time.process_time()
    if way == ACROSS:
        fast: Any = compile_module(module, tuple(inputs), pieces.build)
    else:
        torch._dynamo.reset()
        fast = torch.compile(module, backend=lambda graph, given: compile_for_dynamo(graph, given, pieces.build))
    fast(*inputs)
    compiled = time.process_time() - start
    pieces.calls.clear()
    found, expected = fast(*inputs), module(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    row = Row(name, way, pieces.count, pieces.calls["all"], pieces.kernels, compiled)
    return row, lambda: fast(*inputs)


def _timed(runs: Sequence[Callable[[], Any]], seconds: float, is_alone: bool) -> list[float]:
    """Seconds that each takes: medians of rounds in which all take turns, of one thread in processor time."""
    clock = time.thread_time if is_alone else time.perf_counter
    taken: list[list[float]] = [[] for _ in runs]
    for run in (r for r in runs for _ in range(_WARM)):
        run()
    end = time.perf_counter() + seconds * len(runs)
    while len(taken[-1]) < _FEWEST or time.perf_counter() < end:
        for run, times in zip(runs, taken, strict=True):
            run()
            start = clock()
            run()
            times.append(clock() - start)
    return [median(times) for times in taken]


Cell = Callable[[Row], str]
COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("program", lambda r: r.program),
    ("made functional", lambda r: r.way),
    ("pieces", lambda r: str(r.pieces)),
    ("calls from Python", lambda r: str(r.calls)),
    ("kernel calls", lambda r: str(r.kernels)),
    ("compiled, CPU s", lambda r: f"{r.compiled:.1f}"),
    ("ms", lambda r: "" if r.seconds is None else f"{1e3 * r.seconds:.3f}"),
    ("gain", lambda r: "" if r.gain is None or r.way == ALONE else f"{r.gain:.2f}x"),
)
