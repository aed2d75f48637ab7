"""Seeded random ONNX models agree with ONNX's reference evaluator: `pytest tests/fuzz/test_graphs.py -k "[SEED]"`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import tilewright
from tests.fuzz.graphs import EPSILON, Case, random_case
from tests.fuzz.seeds import seeds
from tilewright import Options

QUICK = (1, 3, 5, 8, 10, 156)
ROUNDINGS = 300  # of the least precise type on the way, as a share of the largest value anywhere


def check(case: Case, options: Options) -> None:
    model = tilewright.compile(case.model, options=options)
    results = model.run(case.inputs)
    for wanted in case.outputs:
        found = results[wanted.name]
        assert found.dtype == wanted.array.dtype and found.shape == wanted.array.shape, wanted.name
        if not wanted.is_float:
            np.testing.assert_array_equal(found, wanted.array, wanted.name)
            continue
        least = max(wanted.epsilon, EPSILON[wanted.kind])
        room = ROUNDINGS * least * max(1.0, case.scale if wanted.epsilon else 1.0)
        got, want = (a.astype(np.float64) for a in (found, wanted.array))
        np.testing.assert_allclose(got, want, 1e-3 if least < 1e-5 else 0.0, room, err_msg=wanted.name)


@pytest.mark.parametrize("seed", seeds(2000, 100, QUICK))
def test_random_models_agree_with_the_reference(seed: int, kernel_cache: Path) -> None:
    case = random_case(seed)
    schedule = ("connected", "connected", "register", "none")[seed % 4]
    options = Options(cache_dir=kernel_cache, threads=1 + seed % 2, schedule=schedule,
                      target="cuda-emulated" if seed % 11 == 10 else "cpu")  # fmt: skip
    try:
        check(case, options)
    except BaseException:
        print(f"\nseed {seed}\n{onnx.printer.to_text(case.model)}")
        raise
