"""The comparison of two revisions' Plans and sources: what counts as a difference, and a small model made by both."""

import subprocess
import sys

import pytest

from bench.replay import Case, cases, compare, shown
from bench.support import ROOT

CASE = Case("some", 1, "float32", "neoverse_n1")
SIDE = {"plan": {"kernels": ["a", "b"]}, "sources": {"k0": "one", "k1": "two"}, "seconds": 2.0}


def test_equal_sides_are_equal() -> None:
    assert not compare(CASE, SIDE, dict(SIDE)).any
    assert compare(CASE, SIDE, SIDE).line().endswith(": equal")


def test_a_kernel_that_one_side_has_alone_is_counted_on_both() -> None:
    other = {**SIDE, "sources": {"k0": "one", "k1": "three"}, "seconds": 1.0}
    found = compare(CASE, SIDE, other)
    assert (found.kernels, found.of, found.plans_differ, found.ratio) == (2, 2, False, 0.5)
    assert "+three" in shown(CASE, SIDE, other)


def test_the_same_kernels_in_another_order_differ() -> None:
    assert compare(CASE, SIDE, {**SIDE, "sources": {"k0": "two", "k1": "one"}}).any


def test_a_plan_alone_may_differ() -> None:
    found = compare(CASE, SIDE, {**SIDE, "plan": {"kernels": ["a"]}})
    assert found.plans_differ and found.kernels == 0 and found.any


def test_errors_differ_where_they_are_not_the_same() -> None:
    assert not compare(CASE, {"error": "E"}, {"error": "E"}).any
    assert "this: compiles" in compare(CASE, {"error": "E"}, SIDE).line()


def test_every_model_machine_batch_and_precision_is_a_case() -> None:
    assert len({case.name for case in cases(["a", "b"], ["m", "n"], [1, 8])}) == 16


@pytest.mark.slow
def test_a_revision_is_equal_to_itself() -> None:
    command = [sys.executable, "-m", "bench.replay", "HEAD", "--size", "small", "--models", "mmoe", "--batches", "1",
               "--machines", "neoverse_n1,h200", "--jobs", "1"]  # fmt: skip
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    clean = not subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "4/4" in told.stdout, told.stderr
    assert not clean or (told.returncode == 0 and "4 of 4 cases equal" in told.stdout)
