"""The code is linted and typed: the checks a contributor runs by hand, held here too."""

from __future__ import annotations

import ast
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


def test_fractions_that_planning_for_cpus_is_by_are_in_one_place() -> None:
    """Prices, margins and shares are fractions; counts that are part of a form stay where it is."""
    folders = ((ROOT / "tilewright/backend/cpu").rglob("*.py"), (ROOT / "tilewright/schedule").glob("*.py"))
    found = {
        f"{file.name}: {ast.unparse(node)}"
        for files in folders
        for file in files
        if file.name != "constants.py"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign)
        and any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in ast.walk(node.value))
    }
    assert found == {"variants.py: _GOLDEN = 0.618034"}  # mathematics
