"""Commands about several processes: how a model would be shared out is told without any other process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cpu_stages import model_of
from tilewright.cli.main import main

pytest.importorskip("scipy", reason="integer programs are scipy's")


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    steps = [("MatMul", ["x", "w"], "h", {}), ("Relu", ["h"], "g", {}), ("MatMul", ["g", "v"], "y", {})]
    constants = {"w": rng.standard_normal((64, 256)).astype(np.float32),
                 "v": rng.standard_normal((256, 64)).astype(np.float32)}  # fmt: skip
    path = tmp_path / "layers.onnx"
    onnx.save(model_of(steps, {"x": (32, 64)}, {"y": (32, 64)}, constants), path)
    return path


def test_explain_tells_shards_and_bytes_on_links(layers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", str(layers), "--mesh", "tp=4", "--cluster", "h200_8"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "4 ranks, 1 stage" in told and "weights on a rank: at most 32.0 KiB, 25.0% of all" in told
    assert "over tp: 1 all-reduce; a rank sends at most 12.0 KiB" in told
    assert main([*arguments, "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert stage["mesh"] == [["tp", 4]]
    assert [s.get("exchange") for s in stage["steps"]] == [None, None, None, "all-reduce"]


def test_a_cluster_has_a_mesh_of_its_own(layers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(layers), "--cluster", "h200_8"]) == 0
    assert "mesh nvlink=8" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["--mesh", "tp"], "mesh cannot be 'tp': it is names and sizes of axes, as in 'tp=2' or 'dp=2,tp=4'"),
    (["--cluster", "moon"], "unknown cluster 'moon': choose one of a100_2x8, a100_8x8, h200_8, processes, or a"),
    (["--mesh", "pp=9", "--cluster", "h200_8"], "9 stages were asked for along 'pp': take fewer"),
    (["--mesh", "tp=2", "--measure"], "leave out --html and --measure"),
])  # fmt: skip
def test_what_cannot_be_shared_out(
    layers: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(layers), *arguments]) == 2
    assert message in capsys.readouterr().err
