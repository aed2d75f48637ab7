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


def test_fractions_that_planning_is_by_are_in_one_place() -> None:
    """Prices, margins and shares are fractions; counts that are part of a form stay where it is."""
    found = {
        f"{file.name}: {ast.unparse(node)}"
        for folder in ("backend/cpu", "backend/gpu", "schedule")
        for file in (ROOT / "tilewright" / folder).rglob("*.py")
        if file.relative_to(ROOT / "tilewright" / folder) != Path("constants.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign)
        and any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in ast.walk(node.value))
    }
    assert found == {
        # mathematics
        "variants.py: _GOLDEN = 0.618034",
        "lower.py: _LOG2_E = 1.4426950408889634",
        # numbers that are as good as none, or that float32 still has beside others
        "plan.py: NEVER = 1000000000000000.0",
        "nest.py: _SMALL = 1e-30",
        "lower.py: _LARGE = 1e+18",
        "visible.py: _LOWEST = -1e+30",
        "visible.py: _SAMPLES = (1.0, -2.5)",
    }


def test_no_two_classes_have_one_name() -> None:
    """One word a concept: what is met in a message or an import is one thing. Examples stand by themselves."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tilewright").rglob("*.py")):
        if "examples" not in file.parts:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
