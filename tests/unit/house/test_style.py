"""The code is linted and typed: the checks a contributor runs by hand, held here too."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def complaints(tool: str, *arguments: str) -> str:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    assert complaints("ruff", "check", "--no-cache", "tilewright", "bench", "tests") == ""


@pytest.mark.slow
def test_mypy_finds_nothing() -> None:
    assert complaints("mypy", "tilewright") == ""
