"""Models that answer and take as long as a test says, for tuning without building or measuring anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune import forms, tuner
from tilewright.tune.fresh import Planned
from tilewright.tune.groups import calls_of
from tilewright.tune.models import BuiltTrials, CallTimes, TrialBuilder

ROUNDS = 12


@dataclass
class _Answering:
    answer: float

    def run(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        for output in outputs:
            output.fill(self.answer)


@dataclass
class MadeUp:
    """Seconds by kernel and answers by plan; keeps the plans that were built, and the sittings."""

    seconds: Callable[[Tile], float]
    answer: Callable[[Plan], float] = lambda _: 1.0
    noise: float = 0.0
    interrupted_after: int | None = None  # sittings
    plans: list[Plan] = field(default_factory=list)
    sittings: int = 0
    again: int = 0  # sittings in other processes

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def sat(_program: Any, own: BuiltTrials, other: BuiltTrials, _seconds: float) -> CallTimes:
            if self.interrupted_after is not None and self.sittings > self.interrupted_after:
                raise KeyboardInterrupt
            self.sittings += 1
            return self._times(own, other, _program)

        made_up = self

        @contextmanager
        def built(
            self: TrialBuilder, plan: Plan, meanwhile: Callable[[], None] = lambda: None
        ) -> Iterator[BuiltTrials]:
            made_up.plans.append(plan)
            meanwhile()
            yield BuiltTrials(plan, self.lowered(plan), _Answering(made_up.answer(plan)))

        def measured(models: tuple[Planned, Planned], target: Any, options: Any, *_seconds: float) -> CallTimes:
            self.again += 1
            builders = [TrialBuilder(program, target, options) for program, _ in models]
            own, other = (
                BuiltTrials(plan, b.lowered(plan), None) for b, (_, plan) in zip(builders, models, strict=True)
            )
            return self._times(own, other, *(program for program, _ in models))

        def profiled(program: Any, own: BuiltTrials, _seconds: float) -> tuple[np.ndarray, float]:
            return self._times(own, own, program).anchors[0], 1e-4

        monkeypatch.setattr(TrialBuilder, "built", built)
        for place in (tuner, forms):
            monkeypatch.setattr(place, "sat", sat)
            monkeypatch.setattr(place, "profiled", profiled)
            monkeypatch.setattr(place, "measured", measured)

    def refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on nothing may be built."""

        def built(*_: Any) -> Any:
            pytest.fail("measured again")

        monkeypatch.setattr(TrialBuilder, "built", built)

    def _times(self, own: BuiltTrials, other: BuiltTrials, program: Any, others: Any = None) -> CallTimes:
        """`others` is the Program of the other, where it has one of its own."""
        rng = np.random.default_rng(self.sittings)

        def rows(model: BuiltTrials, count: int, program: Any) -> np.ndarray:
            seconds = np.full(len(model.loops.calls), 1e-6)
            for kernel in model.plan.kernels:
                seconds[calls_of([kernel], program, model.loops)] = self.seconds(kernel)
            return seconds * np.exp(self.noise * rng.standard_normal((count, len(seconds))))

        return CallTimes(rows(own, ROUNDS + 1, program), rows(other, ROUNDS, others or program))
