"""Mutated files through the whole compiler: a sample here, all 20,000 by `python -m tests.fuzz.mutations`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.mutations import mutation, run_mutations


def test_a_mutation_is_its_number() -> None:
    assert mutation(7) == mutation(7) != mutation(8)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 100), *(pytest.param(n, 1000, marks=pytest.mark.slow) for n in range(1000, 20_000, 1000))]
)
def test_mutated_files_end_in_an_answer_or_a_line(first: int, count: int, kernel_cache: Path) -> None:
    results = run_mutations(first, count, 1, kernel_cache)
    assert [f"mutation {r.name}: {r.reason}" for r in results if r.reason] == []
    assert {r.how for r in results} >= {"refused", "compiled"}
