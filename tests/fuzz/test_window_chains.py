"""Random chains of windows, products over channels, sums and views of one image as rows of pixels, in sizes that make
windows move: planned for some machine and lowered as planned, small ones run and compared."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import error, evaluated, lowered, model_of, programs, random_inputs
from tests.fuzz.seeds import seeds
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.schedule.planner import make_plan
from tilewright.target import machine, stored_machines

QUICK = (3, 17, 28)


class Chain:
    """An image that goes through steps; as channels of pixels, or as tokens."""

    def __init__(self, rng: np.random.Generator, is_small: bool) -> None:
        self.rng = rng
        self.steps: list[tuple[str, list[str], str, dict[str, Any]]] = []
        self.weights: dict[str, np.ndarray] = {}
        low, high = (6, 14) if is_small else (24, 72)
        self.height, self.width = (int(n) for n in rng.integers(low, high, 2))
        self.channels = self.given = int(rng.choice([3, 5] if is_small else [16, 24, 40]))
        self.most = 8 if is_small else 160
        self.now = "x"
        self.shape = (1, self.channels, self.height, self.width)

    def step(self, operator: str, *others: str, **attributes: Any) -> None:
        made = f"t{len(self.steps)}"
        self.steps.append((operator, [self.now, *others], made, attributes))
        self.now = made

    def constant(self, value: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        return name

    def random(self, *shape: int) -> str:
        scale = np.sqrt(max(1, int(np.prod(shape[1:]))))
        return self.constant((self.rng.standard_normal(shape) / scale).astype(np.float32))

    def window(self) -> None:
        kernel = int(self.rng.choice([1, 3, 3, 5, 7]))
        stride = int(self.rng.choice([1, 1, 1, 2]))
        dilation = int(self.rng.choice([1, 1, 2])) if kernel > 1 else 1
        pad = int(self.rng.choice([0, dilation * (kernel // 2)]))
        sizes = [(n + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for n in (self.height, self.width)]
        if min(sizes) < 4:
            return
        by_channel = self.rng.random() < 0.6
        made = self.channels if by_channel else int(self.rng.integers(4, min(64, self.most) + 1))
        weight = self.random(made, 1 if by_channel else self.channels, kernel, kernel)
        self.step("Conv", weight, pads=[pad] * 4, strides=[stride] * 2, dilations=[dilation] * 2,
                  group=self.channels if by_channel else 1)  # fmt: skip
        self.channels, (self.height, self.width) = made, sizes

    def pooled(self) -> None:
        if min(self.height, self.width) < 8:
            return
        self.step(str(self.rng.choice(["MaxPool", "AveragePool"])), kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)

    def tokens(self) -> None:
        """Over to rows of pixels, through a product and perhaps a sum over each, and back."""
        self.step("Reshape", self.constant(np.array([1, self.channels, self.height * self.width])))
        self.step("Transpose", perm=[0, 2, 1])
        if self.rng.random() < 0.5:
            ones = self.constant(np.ones(self.channels, np.float32))
            self.step("LayerNormalization", ones, axis=-1)
        if self.rng.random() < 0.8:
            made = int(self.rng.integers(4, self.most + 1))
            self.step("MatMul", self.random(self.channels, made))
            self.channels = made
        if self.rng.random() < 0.4:
            self.step("Erf")
        self.step("Transpose", perm=[0, 2, 1])
        self.step("Reshape", self.constant(np.array([1, self.channels, self.height, self.width])))

    def map(self) -> None:
        self.step(str(self.rng.choice(["Relu", "Sigmoid", "Tanh"])))

    def added(self) -> None:
        """A window beside what goes through it."""
        before = self.now
        self.step("Conv", self.random(self.channels, 1, 3, 3), pads=[1] * 4, group=self.channels)
        self.step("Add", before)

    def model(self) -> ModelProto:
        for _ in range(int(self.rng.integers(3, 7))):
            kinds = (self.window, self.window, self.tokens, self.map, self.added, self.pooled)
            kinds[int(self.rng.integers(len(kinds)))]()
        self.map()
        ends = {self.now: (1, self.channels, self.height, self.width)}
        return model_of(self.steps, {"x": self.shape}, ends, self.weights)


def told(model: ModelProto, target: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tilewright"):
        made = build(load(model, {}), machine(target), Options(stop_after="loops"))
    assert made.loops is not None
    assert not [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize("seed", seeds(400, 40, QUICK))
def test_random_windows_are_lowered_as_planned(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    names = stored_machines("cpu")
    model = Chain(np.random.default_rng([seed, 21]), is_small=False).model()
    for offset in (0, 2):
        told(model, names[(seed + offset) % len(names)], caplog)


@pytest.mark.parametrize("seed", seeds(120, 16, QUICK))
def test_random_windows_give_the_same(seed: int) -> None:
    target = machine(stored_machines("cpu")[seed % 5])
    program = programs(Chain(np.random.default_rng([seed, 22]), is_small=True).model(), target)["layout"]
    inputs = random_inputs(program, seed)
    (wanted,) = evaluated(program, inputs, wide=True).values()
    (found,) = lowered(program, plan=make_plan(program, target), target=target).on_loops(inputs).values()
    assert error(found, wanted) < 1e-5
