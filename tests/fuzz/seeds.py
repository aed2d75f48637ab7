"""Which seeds of a random test run: some always, some more with --all, and every one of them with --every-seed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def seeds(every: int, often: int, quick: Collection[int]) -> list[Any]:
    """The seeds below `every`: those in `quick` always, those below `often` with --all, the rest take hours."""
    marks = [() if s in quick else pytest.mark.slow if s < often else pytest.mark.every_seed for s in range(every)]
    return [pytest.param(s, marks=mark) for s, mark in enumerate(marks)]
