"""A better plan that turns out to be none: the one before it is kept, told, and gives the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import model_of
from tilewright.backend.cpu.kernel.variants import CpuVariants
from tilewright.compiler.pipeline import build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.lower.kernel import KernelLowering
from tilewright.options import Options
from tilewright.schedule import planner
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Tile

SHAPE = (1, 8, 24, 24)


@pytest.fixture(scope="module")
def model() -> ModelProto:
    """Two convolutions that a window connects, and a product behind them."""
    rng = np.random.default_rng(0)
    steps = [
        ("Conv", ["x", "w0"], "a", {}), ("Relu", ["a"], "b", {}),
        ("Conv", ["b", "w1"], "c", {"pads": [1] * 4, "group": 16}), ("Relu", ["c"], "d", {}),
        ("MatMul", ["d", "w2"], "y", {}),
    ]  # fmt: skip
    shapes = {"w0": (16, 8, 1, 1), "w1": (16, 1, 3, 3), "w2": (24, 40)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return model_of(steps, {"x": SHAPE}, {"y": (1, 16, 24, 40)}, weights)


def fail_in_joined_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = KernelLowering.binding

    def binding(self: KernelLowering) -> Any:
        if len(self.nests) > 1:
            raise InternalError("a fault for this test")
        return lowered(self)

    monkeypatch.setattr(KernelLowering, "binding", binding)


def test_kernels_that_cannot_be_lowered_are_kernels_of_one_nest(
    model: ModelProto, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    options = Options(cache_dir=kernel_cache, threads=2)
    joined = tilewright.compile(model, options=options)
    assert len(joined.artifact.plan.kernels) < 3 and not caplog.records
    fail_in_joined_kernels(monkeypatch)
    apart = tilewright.compile(model, options=Options(cache_dir=kernel_cache, threads=2, seed=1))
    assert len(apart.artifact.plan.kernels) == 3
    np.testing.assert_allclose(apart(x)[0], joined(x)[0], rtol=1e-4, atol=1e-4)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "runs one kernel each instead, with the same answers" in record.getMessage()
    assert "a fault for this test" in record.getMessage()


def test_only_what_failed_is_taken_apart(model: ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    target = machine("neoverse_n1")
    before = build(load(model, {}), target, Options(stop_after="loops"))
    lowered = KernelLowering.binding

    def binding(self: KernelLowering) -> Any:
        if len(self.nests) > 1 and any(n.tensor.name == "y" for n in self.nests):
            raise InternalError("a fault for this test")
        return lowered(self)

    monkeypatch.setattr(KernelLowering, "binding", binding)
    after = build(load(model, {}), target, Options(stop_after="loops"))
    assert after.plan is not None and before.plan is not None and after.loops is not None
    spared = {k.leaves for k in before.plan.kernels if all(leaf.tensor != "y" for leaf in k.leaves)}
    assert spared <= {k.leaves for k in after.plan.kernels}
    assert all(len(k.leaves) == 1 for k in after.plan.kernels if k.leaves not in spared)


def test_refinement_that_fails_leaves_the_plan_as_it_was(
    model: ModelProto, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = machine("neoverse_n1")
    plain = planner.make_plan

    def failing(*args: Any, **more: Any) -> Any:
        if args[4]:
            raise InternalError("a fault for this test")
        return args[0]

    monkeypatch.setattr(planner, "tiled_again", failing)
    artifact = build(load(model, {}), target, Options(stop_after="loops"))
    assert artifact.plan == plain(artifact.program, target, whole=False)
    assert ["without refinement" in r.getMessage() for r in caplog.records] == [True]


def test_what_no_plan_can_do_is_still_an_error(model: ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    def binding(self: KernelLowering) -> Any:
        raise InternalError("a fault for this test")

    monkeypatch.setattr(KernelLowering, "binding", binding)
    with pytest.raises(InternalError, match="a fault for this test"):
        build(load(model, {}), machine("neoverse_n1"), Options(stop_after="loops"))


@pytest.mark.slow
def test_the_tuner_leaves_out_what_is_no_plan(
    model: ModelProto, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A variant whose tiles are not whole steps of what walks them, beside sound ones."""
    sound = CpuVariants.ranked

    def ranked(self: CpuVariants, admits: Any, prefer: Any = None) -> Iterator[Tile]:
        own = self.kernel
        inner = Tile(own.level, (("nothing", 2),), "order", own.body)
        yield Tile(own.level, own.sizes, own.over, (inner,), axes=own.axes, name=own.name, holds=own.holds)
        yield from sound(self, admits, prefer)

    monkeypatch.setattr(CpuVariants, "ranked", ranked)
    x = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    options = Options(cache_dir=kernel_cache, threads=2)
    tuned = tilewright.compile(model, options=options.override(tune="1m", tune_trials=1))
    plain = tilewright.compile(model, options=options)
    np.testing.assert_array_equal(tuned(x)[0], plain(x)[0])
    told = [r.getMessage() for r in caplog.records]
    assert told and all("is left out" in text and "it cuts axis 'nothing'" in text for text in told)
