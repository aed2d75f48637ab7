"""The benchmark of chosen plans beside others, as far as it goes without a GPU: what is tried, and in which order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench import gpu_best
from bench.gpu_best import Case, cases, plans_of
from tilewright.target import machine

H200 = machine("h200")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_best.nvrtc, "compile_to_cubin", lambda source: SimpleNamespace(code=source.encode()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [Case("sum", (64, 1024)), Case("chain", (64, 512)), Case("product", (64, 256, 64))])
def test_the_chosen_plan_is_first_and_no_other_is_the_same(case: Case) -> None:
    plans = plans_of(case, H200)
    assert plans is not None and 1 < len(plans.made) <= 20
    assert len({(m.code, m.grid, m.threads) for m in plans.made}) == len(plans.made)
    others = [m.predicted for m in plans.made[1:]]
    assert others == sorted(others)
    assert set(plans.made[0].order) == set(plans.shapes) and plans.result == "o"
    assert (plans.single is not None) == (case.kind == "product")
    if plans.single is not None:
        assert "stages" in plans.made[plans.staged].plan and "stages" not in plans.single.plan


def test_one_stage_changes_nothing_else() -> None:
    plans = plans_of(Case("product", (64, 256, 64)), H200)
    assert plans is not None and plans.single is not None
    assert plans.single.grid == plans.made[plans.staged].grid
    assert plans.single.shared_bytes < plans.made[plans.staged].shared_bytes


def test_there_are_enough_kernels_of_several_kinds() -> None:
    found = cases([(384, 768, 768, 1, False), (384, 64, 384, 12, True)])
    assert len({case.name for case in found}) == len(found)
    assert {case.kind for case in found} == {"softmax", "norm", "sum", "chain", "attention", "product", "packed"}
