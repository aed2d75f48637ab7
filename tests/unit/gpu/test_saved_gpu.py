"""Saved models for GPUs: kernels, launches and weights start from a directory without planning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewright
from tests.unit.packages.test_stored import X, dense
from tilewright import ModelError, Options, ToolError
from tilewright.packages.gpu import EMULATED
from tilewright.packages.manifest import sealed
from tilewright.runtime.cuda import devices

pytestmark = pytest.mark.host  # what is saved is for this computer
SCRIPT = """
import sys
import numpy as np
import tilewright
print(tilewright.load(sys.argv[1])(np.ones((3, 4), np.float32))[0].tolist())
print([m for m in ("onnx", "tilewright.schedule.planner", "tilewright.ops.lower") if m in sys.modules])
"""


def saved(target: str, folder: Path, cache: Path) -> tilewright.Model:
    model = tilewright.compile(dense(), target=target, options=Options(cache_dir=cache))
    assert isinstance(model, tilewright.Model)
    model.save(folder)
    return model


@pytest.fixture(autouse=True)
def cache(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    return kernel_cache


def test_an_emulated_model_gives_the_same(cache: Path, tmp_path: Path) -> None:
    model = saved("cuda-emulated", tmp_path / "saved", cache)
    loaded = tilewright.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded(X)[0], model(X)[0])
    assert loaded.explain() == model.explain() and loaded.calls == model.calls and loaded.inputs == model.inputs
    loaded.save(tmp_path / "again")
    np.testing.assert_array_equal(tilewright.load(tmp_path / "again")(X)[0], model(X)[0])
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "saved")], capture_output=True, text=True)
    assert ran.stdout == f"{model(np.ones_like(X))[0].tolist()}\n[]\n", ran.stderr


def test_damage_is_noticed(cache: Path, tmp_path: Path) -> None:
    saved("cuda-emulated", tmp_path / "saved", cache)
    source = next((tmp_path / "saved" / "source").iterdir())
    source.write_text(source.read_text() + " ")
    with pytest.raises(ModelError, match=f"the file source/{source.name} is damaged"):
        tilewright.load(tmp_path / "saved")


@pytest.mark.skipif(bool(devices()), reason="this machine has a GPU")
def test_a_model_for_a_gpu_says_that_there_is_none(cache: Path, tmp_path: Path) -> None:
    saved("cuda-emulated", tmp_path / "saved", cache)
    path = tmp_path / "saved" / "manifest.json"
    row = json.loads(path.read_text())
    assert row["gpu"] == {"architecture": EMULATED}
    row.pop("manifest_sha256")
    path.write_text(sealed({**row, "gpu": {"architecture": "sm_90a"}}))
    with pytest.raises(ToolError, match="is for a GPU of sm_90a, and there is no NVIDIA driver"):
        tilewright.load(tmp_path / "saved")


@pytest.mark.skipif(not devices(), reason="needs a GPU")
def test_a_model_on_the_device_starts_without_compiling(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewright.runtime import cuda

    model = saved("cuda", tmp_path / "saved", cache)
    monkeypatch.setattr(cuda, "cached_cubin", lambda *_: pytest.fail("a kernel is compiled"))
    loaded = tilewright.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded(X)[0], model(X)[0])
