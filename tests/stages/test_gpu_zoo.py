"""The zoo's small models through the GPU's Loops and on the emulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the zoo needs torch, a development extra")

from bench import zoo
from tests.gpu_stages import compiled, on_emulator, on_loops

EVERY_TIME = ("mobilenet_v2", "bert_base", "lstm", "mmoe")
NAMES = [n if n in EVERY_TIME else pytest.param(n, marks=pytest.mark.slow) for n in zoo.MODELS]


@pytest.fixture(scope="module", params=NAMES)
def exported(request: pytest.FixtureRequest, zoo_file: Callable[..., Path]) -> tuple[Path, Any, Any]:
    """The model's file, its inputs and float64 outputs."""
    module, inputs = zoo.build(request.param, "small")
    return zoo_file(request.param), inputs, zoo.reference(module, inputs)


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", ("none", "connected"))
def test_model(exported: tuple[Path, Any, Any], schedule: str, kernel_cache: Path) -> None:
    path, inputs, reference = exported
    artifact = compiled(path, schedule, kernel_cache)
    assert zoo.relative_error(on_loops(artifact, inputs), reference) < 1e-5
    assert zoo.relative_error(on_emulator(artifact, inputs), reference) < 1e-5


@pytest.mark.sample(2)
def test_connecting_makes_fewer_kernels(exported: tuple[Path, Any, Any], kernel_cache: Path) -> None:
    counts = {}
    for schedule in ("none", "connected"):
        plan = compiled(exported[0], schedule, kernel_cache, stop_after="plan").plan
        assert plan is not None
        counts[schedule] = len(plan.kernels)
    assert counts["connected"] < counts["none"]


@pytest.mark.sample(4)
def test_runs_agree_to_the_bit(exported: tuple[Path, Any, Any], kernel_cache: Path) -> None:
    path, inputs, _ = exported
    artifact = compiled(path, "connected", kernel_cache)
    first, second = on_emulator(artifact, inputs), on_emulator(artifact, inputs)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
