"""Whole models by one plan or another, ready to be timed kernel by kernel."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.backend import backend_for, renderable
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.loops import Kernel, LoopProgram
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.kernel import Binding, ScanView
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune.answers import ports
from tilewright.tune.groups import calls_of
from tilewright.tune.timing import FEWEST, STEADY, Beside, beside

Array = np.ndarray[Any, np.dtype[np.float64]]
_MOST_ROUNDS = 60
_FEWEST_RUNS = 4  # the first finds nothing where it will be
_PATIENCE = 1.0  # times the seconds of a sitting that it may take longer


@dataclass(frozen=True)
class BuiltTrials:
    """A model as one plan makes it."""

    plan: Plan
    loops: LoopProgram
    runner: Any


@dataclass(frozen=True)
class CallTimes:
    """Seconds of every call: of the anchor in one run more than of the other, whose runs lie between."""

    anchors: Array
    taken: Array

    def beside(self, own: Sequence[int], other: Sequence[int]) -> Beside:
        """Some calls of the other against some of the anchor."""
        return beside(self.anchors[:, list(own)].sum(1), self.taken[:, list(other)].sum(1))

    @property
    def whole(self) -> Beside:
        return beside(self.anchors.sum(1), self.taken.sum(1))


class TrialBuilder:
    """Makes models of one Program by plans that have most of their kernels in common."""

    def __init__(self, program: Program, target: Target, options: Options) -> None:
        self.program, self.target, self.options = program, target, options
        self.backend = backend_for(target)
        self._bindings: dict[tuple[Tile, tuple[Layout, ...]], Binding] = {}
        # by name and identity of what it does, which is kept
        self._texts: dict[tuple[str, int], tuple[Kernel, tuple[Kernel, dict[str, str]]]] = {}

    @contextmanager
    def built(self, plan: Plan, meanwhile: Callable[[], None] = lambda: None) -> Iterator[BuiltTrials]:
        """The model by a plan; `meanwhile` is called once compilers are at work on all of its kernels."""
        # packed weights of a plan that is only tried are not worth a place in the cache
        with tempfile.TemporaryDirectory(prefix="tilewright-tune-") as folder:
            loops = self.lowered(plan)
            with self.backend.early(self.target, self.options) as early:
                rendered = [self._rendered(loops, kernel, early) for kernel in loops.kernels]
                sources = {name: text for _, texts in rendered for name, text in texts.items()}
                meanwhile()
                written = replace(loops, kernels=tuple(kernel for kernel, _ in rendered))
                runner = self.backend.load(sources, written, self.program, plan, self.target, self.options,
                                           weights_dir=Path(folder), early=early)  # fmt: skip
            try:
                yield BuiltTrials(plan, loops, runner)
            finally:
                runner.close()

    def lowered(self, plan: Plan) -> LoopProgram:
        check_plan(plan, self.program, self.target)
        loops = lower_program(self.program, plan, self._bound)
        self.backend.check_limits(loops, self.target)
        return loops

    def _bound(
        self, tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None
    ) -> Binding:
        if scan is not None:
            return self.backend.lower_kernel(tile, nests, layout, scan)
        tensors = (t for nest in nests for t in (*nest.reads(), *nest.stores))
        key = (tile, tuple(layout(t) for t in tensors))
        if key not in self._bindings:
            self._bindings[key] = self.backend.lower_kernel(tile, nests, layout, scan)
        return self._bindings[key]

    def _rendered(self, loops: LoopProgram, kernel: Kernel, early: Any) -> tuple[Kernel, dict[str, str]]:
        """As it is rendered, and its text. Each by itself: the text of one that stays must not stand on one that
        changes."""
        key = (kernel.name, id(kernel.body))  # a kernel that is bound again has another name at most
        if key not in self._texts:
            alone = renderable(replace(loops, kernels=(kernel,)), self.target)
            text = self.backend.render(alone, self.target, early=early)
            self._texts[key] = (kernel, (alone.kernels[0], text))
        return self._texts[key][1]


def profiled(program: Program, model: BuiltTrials, seconds: float) -> tuple[Array, float]:
    """Seconds of every call, of some runs in the middle: enough to tell what takes most of the time. And those that go
    by in a run, which are more where other programs run: a clock of the processor does not count them."""
    inputs, outputs = ports(program)
    begin = time.perf_counter()
    runs: list[Array] = []
    while len(runs) < _FEWEST_RUNS or (len(runs) < _MOST_ROUNDS and time.perf_counter() < begin + seconds):
        runs.append(np.asarray(model.runner.profile(inputs, outputs), np.float64) * 1e-9)
    return np.maximum(np.median(runs[1:], axis=0), 1e-9), (time.perf_counter() - begin) / len(runs)


def sat(program: Program, own: BuiltTrials, other: BuiltTrials, seconds: float) -> CallTimes:
    """Rounds of both in turn: as many as the seconds hold, and longer where the anchors of too few of them agree."""
    inputs, outputs = ports(program)

    def run(model: BuiltTrials) -> Array:
        return np.asarray(model.runner.profile(inputs, outputs), np.float64) * 1e-9

    for model in (own, other):
        run(model)
    anchors = [run(own)]
    taken: list[Array] = []
    end = time.perf_counter() + seconds
    patience = end + _PATIENCE * seconds
    steady = 0
    while len(taken) < FEWEST + 2 or (
        len(taken) < _MOST_ROUNDS and time.perf_counter() < (end if steady > FEWEST else patience)
    ):
        taken.append(run(other))
        anchors.append(run(own))
        before, after = anchors[-2].sum(), anchors[-1].sum()
        steady += max(before, after) <= STEADY * min(before, after)
    return CallTimes(np.maximum(np.array(anchors), 1e-9), np.maximum(np.array(taken), 1e-9))


def calls_within(tensors: frozenset[str], program: Program, model: BuiltTrials) -> list[int]:
    """The calls of kernels whose leaves store nothing but these."""
    kernels = [k for k in model.plan.kernels if all(leaf.tensor in tensors for leaf in k.leaves)]
    return calls_of(kernels, program, model.loops)
