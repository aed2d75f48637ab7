"""The zoo's Plans for every machine are those that are committed, whatever this computer is: each is chosen by costs
that come out the same everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.plans import MODELS, changes, committed, digest, sample, simd, text_of
from tilewright.target import stored_machines

ROOT = Path(__file__).resolve().parents[2]
MEANT = (
    "A change of what is planned shows here, and only on some hosts where a choice hangs on a float's last bit. "
    "Meant? then: python -m tests.golden.update_plans, and say in the commit which Plans are others and why"
)
CASES = [(model, name) for model in MODELS for name in stored_machines()]


def test_there_is_a_digest_of_every_model_on_every_machine() -> None:
    assert [(model, name) for model, found in committed().items() for name in found] == CASES, MEANT


@pytest.mark.parametrize(
    ("model", "name"), [pytest.param(*case, marks=() if case in sample() else pytest.mark.slow) for case in CASES]
)
def test_plans_are_those_that_are_committed(model: str, name: str, zoo_file: Callable[..., Path]) -> None:
    found = {model: {name: digest(text_of(zoo_file(model), name))}}
    assert changes({model: {name: committed()[model][name]}}, found) == [], MEANT


@pytest.mark.parametrize("cases", [pytest.param(sample()[::2], id="some"),
                                   pytest.param(CASES, id="all", marks=pytest.mark.slow)])  # fmt: skip
def test_plans_do_not_hang_on_numpys_instructions(cases: list[tuple[str, str]], zoo_file: Callable[..., Path]) -> None:
    """In a process in which NumPy uses nothing but what every processor of this architecture has."""
    pairs = [f"{zoo_file(model)}@{name}" for model, name in cases]
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.plans", *pairs], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(simd()), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["simd"] == []
    found = {(model, name): answer["plans"][str(zoo_file(model))][name] for model, name in cases}
    assert found == {(model, name): committed()[model][name] for model, name in cases}, MEANT


def test_what_changed_is_told() -> None:
    before = {"one": {"here": "a", "there": "b"}, "gone": {"here": "c"}}
    after = {"one": {"here": "a", "there": "x", "new": "y"}}
    assert changes(before, after) == [
        "the Plan of one for there is another, x in place of b", "the Plan of gone for here is gone",
        "the Plan of one for new is new",
    ]  # fmt: skip
