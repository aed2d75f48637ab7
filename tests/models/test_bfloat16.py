"""The zoo in bfloat16: relative error against float64 at most 1.5 times that of PyTorch in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright import Options

QUICK = ("lstm", "mmoe")


def parameters() -> list:
    zoo = pytest.importorskip("bench.zoo", reason="the zoo needs torch, a development extra", exc_type=ImportError)
    small = [pytest.param(n, "small", marks=() if n in QUICK else pytest.mark.slow) for n in zoo.MODELS]
    return [*small, pytest.param("mobilenet_v2", "full", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "size"), parameters())
def test_error_is_at_most_half_more_than_pytorchs(name: str, size: str, kernel_cache: Path) -> None:
    from bench.precision import LIMIT, measure

    row = measure(name, size, Options(cache_dir=kernel_cache))
    assert row.ratio <= LIMIT
    assert row.bfloat16 > 10 * row.float32  # it did round
