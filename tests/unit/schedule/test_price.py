"""A plan as it stands is told what the search would say of it, whoever wrote it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright import Options
from tilewright.backend.seconds import price
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.schedule.price import priced, wholly_priced
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Tile


def _weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def convolutions() -> ModelProto:
    """Two of them over many rows, so that a window moves over the first one's."""
    nodes = [("Conv", ["x", "a"], "p", {"pads": [1] * 4}), ("Relu", ["p"], "q", {}),
             ("Conv", ["q", "b"], "y", {"pads": [1] * 4})]  # fmt: skip
    constants = {"a": _weights(8, 3, 3, 3), "b": _weights(8, 8, 3, 3)}
    return model_of(nodes, {"x": (1, 3, 256, 256)}, {"y": (1, 8, 256, 256)}, constants)


def rows() -> ModelProto:
    """A product over weights, a normalisation of its rows, and another product."""
    nodes = [("MatMul", ["x", "w"], "p", {}), ("Softmax", ["p"], "s", {"axis": -1}), ("MatMul", ["s", "v"], "y", {})]
    return model_of(nodes, {"x": (197, 65)}, {"y": (197, 48)}, {"w": _weights(65, 130), "v": _weights(130, 48)})


MODELS = {"convolutions": convolutions, "rows": rows}


def planned(name: str, target: str, *overrides: tuple[str, Path]) -> Artifact:
    return build(load(MODELS[name]()), machine(target), Options(stop_after="plan", overrides=overrides))


@pytest.mark.parametrize("target", ["neoverse_n1", "emerald_rapids", "avx2_desktop", "h200"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_the_search_is_told_what_the_search_found(name: str, target: str) -> None:
    artifact = planned(name, target)
    assert artifact.program is not None and artifact.plan is not None
    silent = artifact.plan.with_kernels({k.name: _saying(k, 0.0) for k in artifact.plan.kernels})
    found = priced(artifact.program, silent, machine(target))
    for kernel, own in zip(found.kernels, artifact.plan.kernels, strict=True):
        assert kernel.estimate.seconds == pytest.approx(own.estimate.seconds, rel=1e-6), kernel.name


def test_windows_are_among_them() -> None:
    plan = planned("convolutions", "emerald_rapids").plan
    assert plan is not None
    assert any(h.mode == "rolling" for k in plan.kernels for t in k.walk() if isinstance(t, Tile) for h in t.holds)


def test_an_edited_tile_has_its_own_price(tmp_path: Path) -> None:
    """Smaller tiles take longer than the ones that were chosen, whatever the file says of them."""
    artifact = planned("rows", "neoverse_n1")
    assert artifact.plan is not None
    (first, *_) = artifact.plan.kernels
    smaller = replace(_saying(first, 1.0), sizes=tuple((name, max(1, size // 8)) for name, size in first.sizes))
    file = tmp_path / "plan.json"
    file.write_text(artifact.plan.with_kernels({first.name: smaller}).to_json(), encoding="utf-8")
    assert json.loads(file.read_text(encoding="utf-8"))
    edited = planned("rows", "neoverse_n1", ("plan", file)).plan
    assert edited is not None
    assert first.estimate.seconds < edited.kernels[0].estimate.seconds < 0.01


def recurrence() -> Artifact:
    constants = {"w": _weights(1, 64, 16), "r": _weights(1, 64, 16)}
    nodes = [("LSTM", ["x", "w", "r"], "y", {"hidden_size": 16})]
    model = model_of(nodes, {"x": (5, 2, 16)}, {"y": (5, 1, 2, 16)}, constants)
    return build(load(model), machine("neoverse_n1"), Options(stop_after="plan"))


def test_steps_keep_what_they_say() -> None:
    artifact = recurrence()
    assert artifact.program is not None and artifact.plan is not None
    inside = [kernel.name for kernel, steps in artifact.plan.launches() if steps is not None]
    changed = artifact.plan.with_kernels({k.name: _saying(k, 1.0) for k in artifact.plan.kernels})
    found = priced(artifact.program, changed, machine("neoverse_n1"))
    assert inside
    assert {k.name for k in found.kernels if k.estimate.seconds == 1.0} == set(inside)


def test_a_plan_of_a_user_is_priced_wholly() -> None:
    """Steps by the fold over their trees, each step by itself; all else as the search would say."""
    artifact, target = recurrence(), machine("neoverse_n1")
    assert artifact.program is not None and artifact.plan is not None
    inside = [kernel.name for kernel, steps in artifact.plan.launches() if steps is not None]
    changed = artifact.plan.with_kernels({k.name: _saying(k, 1.0) for k in artifact.plan.kernels})
    found = {k.name: k.estimate.seconds for k in wholly_priced(artifact.program, changed, target).kernels}
    searched = {k.name: k.estimate.seconds for k in priced(artifact.program, changed, target).kernels}
    folded = price(artifact.program, artifact.plan, target).kernels
    for name, seconds in found.items():
        if name in inside:
            own = sum(float(t.seconds) for part, t in folded.items() if part.partition(".")[0] == name)
            assert seconds == pytest.approx(own / 5, abs=1e-9)
        else:
            assert seconds == searched[name]


def _saying(kernel: Tile, seconds: float) -> Tile:
    return replace(kernel, estimate=replace(kernel.estimate, seconds=seconds))
