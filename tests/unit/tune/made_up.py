"""Models that answer and take as long as a test says, for tuning without building or measuring anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune import tuner
from tilewright.tune.groups import calls_of
from tilewright.tune.models import Builder, Built, Times

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
        def sat(_program: Any, own: Built, other: Built, _seconds: float) -> Times:
            if self.interrupted_after is not None and self.sittings > self.interrupted_after:
                raise KeyboardInterrupt
            self.sittings += 1
            return self._times(_program, own, other)

        made_up = self

        @contextmanager
        def built(self: Builder, plan: Plan, meanwhile: Callable[[], None] = lambda: None) -> Iterator[Built]:
            made_up.plans.append(plan)
            meanwhile()
            yield Built(plan, self.lowered(plan), _Answering(made_up.answer(plan)))

        def measured(program: Any, plans: tuple[Plan, Plan], target: Any, options: Any, *_seconds: float) -> Times:
            self.again += 1
            builder = Builder(program, target, options)
            own, other = (Built(plan, builder.lowered(plan), None) for plan in plans)
            return self._times(program, own, other)

        def profiled(program: Any, own: Built, _seconds: float) -> tuple[np.ndarray, float]:
            return self._times(program, own, own).anchors[0], 1e-4

        monkeypatch.setattr(Builder, "built", built)
        monkeypatch.setattr(tuner, "sat", sat)
        monkeypatch.setattr(tuner, "profiled", profiled)
        monkeypatch.setattr(tuner, "measured", measured)

    def refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on nothing may be built."""

        def built(*_: Any) -> Any:
            pytest.fail("measured again")

        monkeypatch.setattr(Builder, "built", built)

    def _times(self, program: Any, own: Built, other: Built) -> Times:
        rng = np.random.default_rng(self.sittings)

        def rows(model: Built, count: int) -> np.ndarray:
            seconds = np.full(len(model.loops.calls), 1e-6)
            for kernel in model.plan.kernels:
                seconds[calls_of([kernel], program, model.loops)] = self.seconds(kernel)
            return seconds * np.exp(self.noise * rng.standard_normal((count, len(seconds))))

        return Times(rows(own, ROUNDS + 1), rows(other, ROUNDS))
