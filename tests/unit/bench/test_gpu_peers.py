"""Peers of a GPU benchmark, by a script in their place: one that takes too long or breaks does not take the others
with it, and while one is timed the others stand still."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from bench import gpu_models, gpu_peers

PEER = """
import json, sys, time
runtime, name, size, batch, precision, path = sys.argv[1:]
if name == "broken":
    raise SystemExit("it has no such operator")
if name == "slow":
    time.sleep(60)
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps({"microseconds": 12.5}))
"""


OWN = """
import numpy as np, torch
def build():
    return torch.nn.Linear(3, 5).eval(), {"x": np.ones((4, 3), np.float32)}
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    monkeypatch.setattr(gpu_peers, "__file__", str(path))
    return tmp_path


def started(folder: Path, runtimes: Mapping[str, Sequence[str]], seconds: float = 0.0) -> gpu_peers.Peers:
    return gpu_peers.Peers(gpu_peers.of_models(runtimes, ("full", 1, "float16"), folder), seconds)


@pytest.mark.slow
def test_what_is_ready_counts(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three at a time: the last is started when another has gone."""
    monkeypatch.setattr(gpu_peers, "_AT_ONCE", 3)
    peers = started(script, dict.fromkeys(("slow", "good", "broken", "fine"), ("compile",)), 8.0)
    processes = [peer._process for peer in peers.alive]
    assert len(processes) == 3
    peers.finish()
    assert peers.found == {("compile", "good"): 12.5, ("compile", "fine"): 12.5}
    assert peers.failed[("compile", "broken")] == "it has no such operator"
    said = capsys.readouterr().out
    assert "compile: broken: it has no such operator" in said
    assert "compile: slow: not compiled in time" in said
    assert all(process.poll() is not None for process in processes), "nothing is left running"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_the_others_stand_still(script: Path) -> None:
    peers = started(script, {"slow": ("compile",)})
    (peer,) = peers.alive

    def state() -> str:
        return Path(f"/proc/{peer._process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    with peers.quiet():
        assert state() == "T"
    until = time.monotonic() + 5
    while state() == "T" and time.monotonic() < until:
        time.sleep(0.01)
    assert state() != "T"
    peers.finish()
    assert peers.found == {}


def test_errors_are_taken_over_inputs_of_the_same_kind() -> None:
    given = {"ids": np.arange(12).reshape(2, 6), "scalar": np.array(3.0)}
    made = list(gpu_models.variations(given, 5))
    assert len({row["ids"].tobytes() for row in made}) == 5
    for row in made:
        np.testing.assert_array_equal(np.sort(row["ids"], axis=-1), given["ids"])
        assert row["scalar"] == 3.0
    again = list(gpu_models.variations(given, 5))
    assert all(np.array_equal(a["ids"], b["ids"]) for a, b in zip(made, again, strict=True))
    assert gpu_models.root_mean_square([3.0, 4.0]) == pytest.approx(12.5**0.5)


def test_peers_are_those_that_can_run_a_model(script: Path) -> None:
    """A model file has no module that PyTorch could run."""
    wanted = {"good": ("eager", "compile"), str(script / "own.onnx"): ()}
    peers = started(script, wanted)
    assert {(p.runtime, p.name) for p in peers.alive} == {("eager", "good"), ("compile", "good")}
    peers.finish()
    assert gpu_peers.file_of(str(script / "own.onnx")) == "own.onnx"
    assert gpu_peers.file_of("package.module:build") == "package.module.build.onnx"


def test_models_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that gives a module, and a file, which is given inputs of its shapes."""
    (tmp_path / "own_model.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    module, inputs = gpu_models.built("own_model:build", "full")
    assert inputs["x"].shape == (4, 3)
    gpu_models.export_module(module, inputs, tmp_path / "own.onnx")
    found = gpu_models.random_inputs(tmp_path / "own.onnx")
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == {"x": ((4, 3), np.float32)}
    copied = gpu_models.export(str(tmp_path / "own.onnx"), "full", 1, tmp_path / "copy.onnx")
    assert copied.read_bytes() == (tmp_path / "own.onnx").read_bytes()
    np.testing.assert_array_equal(np.load(tmp_path / "copy.npz")["x"], found["x"])
