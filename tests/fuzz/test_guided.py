"""Fuzzing of the loaders that is guided by coverage: its corpus, and a little further."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host


def fuzz(*arguments: str, cache: Path) -> str:
    command = [sys.executable, "-m", "tests.fuzz.guided", "--cache", str(cache), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # a signal ends that process alone
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("loader", ["manifest", "model"])
def test_the_corpus_and_some_more(loader: str, kernel_cache: Path) -> None:
    assert "0 finds" in fuzz(loader, "--count", "30", "--seconds", "1", cache=kernel_cache)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["manifest", "model"])
def test_a_minute_of_it(loader: str, kernel_cache: Path) -> None:
    assert "0 finds" in fuzz(loader, "--seconds", "60", "--seed", "7", cache=kernel_cache)
