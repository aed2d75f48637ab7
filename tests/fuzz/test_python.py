"""Random modules of what Python does between tensors, compiled by the interpreter: right, or refused in a line."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.fuzz.imperative import WAYS, judge
from tests.fuzz.python import python
from tests.fuzz.seeds import seeds

QUICK = (0,)


@pytest.mark.parametrize("seed", seeds(200, 1, QUICK))
def test_python_between_tensors(seed: int) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict, why = judge(python(seed), seed, WAYS[False]["compile"])
    assert verdict in ("right", "refused", "passed over"), f"seed {seed}: {verdict}: {why}"
