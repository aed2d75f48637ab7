"""A wheel holds all that an installation needs, and works where there is no C compiler but the ziglang package's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.packages.test_stored import dense

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.host, pytest.mark.slow]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the sources, unpacked as pip would."""
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("setuptools or pip is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "tilewright", source / "tilewright", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(folder), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0 and "setuptools" in done.stderr:
        pytest.skip("the build needs a newer setuptools, and there is none to be had")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_every_file_of_the_package_is_there(unpacked: Path) -> None:
    def names(root: Path) -> set[str]:
        found = (p for p in (root / "tilewright").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {p.relative_to(root).as_posix() for p in found}

    assert names(unpacked) == names(ROOT)


def test_it_works_without_a_system_compiler(unpacked: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the ziglang package is not installed")
    (tmp_path / "m.onnx").write_bytes(dense().SerializeToString())
    script = """
import shutil, sys
import numpy as np
import tilewright
assert not any(map(shutil.which, ("cc", "gcc", "clang")))
model = tilewright.compile("m.onnx", threads=1)
model.save("saved")
print(tilewright.__file__, tilewright.load("saved")(np.ones((3, 4), np.float32))[0].tolist())
"""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(unpacked), **kept}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{unpacked}/tilewright/__init__.py {[[30.0, 34.0, 38.0, 42.0, 46.0]] * 3}"
