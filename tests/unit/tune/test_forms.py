"""What is decided of a whole model before there are kernels is measured too, and taken where it is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tests.unit.tune.made_up import MadeUp
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import OptionError
from tilewright.frontend.onnx.model import load
from tilewright.options import Options, Tuning
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune import forms

N1 = machine("neoverse_n1")
COPY = "operands are read where they lie"


def window() -> ModelProto:
    """A convolution whose input is copied into a padded place first."""
    weights = (np.random.default_rng(0).standard_normal((32, 32, 3, 3)) / 8).astype(np.float32)
    return model_of([("Conv", ["x", "w"], "y", {"pads": [1] * 4})], {"x": (1, 32, 56, 56)}, {"y": (1, 32, 56, 56)},
                    {"w": weights})  # fmt: skip


def long_sum() -> ModelProto:
    return model_of([("ReduceSum", ["x"], "y", {"keepdims": 0})], {"x": (1, 1 << 20)}, {"y": ()}, {})


def options(folder: Path, **more: Any) -> Options:
    given = {"cache_dir": folder, "threads": 2, "convolution": "direct", "contraction": "direct", **more}
    return Options(target="neoverse_n1", tune=6000.0, tune_trials=1, **given)


def stored(kernel: Tile) -> tuple[str, ...]:
    return tuple(leaf.tensor for leaf in kernel.leaves)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelProto, Options], Artifact]:
    """Compiles as far as tuning goes: code for the machine that is described may not run here."""

    def built(model: Any, target: Any, given: Options, tuner: Any) -> Artifact:
        return build(model, target, replace(given, stop_after="tune"), tuner)

    monkeypatch.setattr(forms, "build_within", built)
    return lambda model, given: forms.build_tuned(load(model, {}), N1, given)


def planned(model: ModelProto, **more: Any) -> Artifact:
    return build(load(model, {}), N1, Options(target="neoverse_n1", stop_after="plan", **more))


def kernels(plan: Plan | None) -> list[tuple[str, ...]]:
    assert plan is not None
    return [stored(kernel) for kernel in plan.kernels]


def test_copies_of_operands_are_left_out_where_that_measures_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: Callable[[ModelProto, Options], Artifact]
) -> None:
    """With times that are made up: a kernel takes as long as the copy does, and the sum no longer without it."""
    model = window()
    own = planned(model, convolution="direct")
    assert own.program is not None and own.program.staged and len(kernels(own.plan)) == 2
    clock = MadeUp(lambda _: 1e-5)
    clock.put_in_place(monkeypatch)
    told: list[Tuning] = []
    given = options(tmp_path, tune_arithmetic=True)
    found = tuned(model, given.override(tune_watch=told.append))
    assert found.program is not None and not found.program.staged
    assert any(f"tuned: {COPY}, 2.00 times as fast" in remark for remark in found.program.remarks)
    assert clock.again >= 1, "what is faster is measured once more, in another process"
    assert any(COPY in now.said for now in told) and all(now.left <= now.whole == 6000 for now in told)
    assert told[-1].gain == pytest.approx(2.0) and told[-1].said == f"{COPY}, 2.00 times as fast; nothing is faster"
    clock.refuse(monkeypatch)
    again = tuned(model, given)
    assert again.plan == found.plan and again.program.remarks == found.program.remarks  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["slower", "wrong"])
def test_a_form_that_is_slower_or_answers_otherwise_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: Callable[[ModelProto, Options], Artifact], way: str
) -> None:
    model = window()
    plan = planned(model, convolution="direct", contraction="direct").plan
    assert plan is not None
    own = [kernel.leaves for kernel in plan.kernels]
    other = 3e-5 if way == "slower" else 1e-5
    clock = MadeUp(lambda kernel: 1e-5 if kernel.leaves in own else other,
                   lambda plan: 1.5 if way == "wrong" and len(plan.kernels) < len(own) else 1.0)  # fmt: skip
    clock.put_in_place(monkeypatch)
    found = tuned(model, options(tmp_path, tune_arithmetic=True))
    assert found.program is not None and found.program.staged and kernels(found.plan) == kernels(plan)


def test_interrupting_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: Callable[[ModelProto, Options], Artifact]
) -> None:
    """The form that was being measured is measured the next time."""
    clock = MadeUp(lambda _: 1e-5, interrupted_after=-1)
    clock.put_in_place(monkeypatch)
    given = options(tmp_path, tune_arithmetic=True)
    first = tuned(window(), given)
    assert first.program is not None and first.program.staged
    clock.interrupted_after = None
    second = tuned(window(), given)
    assert second.program is not None and not second.program.staged


@pytest.mark.slow
def test_a_form_that_may_take_too_long_waits_for_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: Callable[[ModelProto, Options], Artifact]
) -> None:
    clock = MadeUp(lambda _: 1e-5)
    clock.put_in_place(monkeypatch)
    for tune, is_taken in ((6.0, False), (6000.0, True)):  # a sitting and one more take 1.6 s, forms have a quarter
        found = tuned(window(), options(tmp_path, tune_arithmetic=True).override(tune=tune))
        assert found.program is not None and bool(found.program.staged) != is_taken


def test_sums_are_taken_otherwise_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: Callable[[ModelProto, Options], Artifact]
) -> None:
    """A long sum in one; a product without the copy, which runs over its window in another order."""
    MadeUp(lambda _: 1e-5).put_in_place(monkeypatch)
    for model in (long_sum(), window()):
        own = planned(model, convolution="direct").program
        assert own is not None and len(own.computes) == 2
        for arithmetic, count in ((False, 2), (True, 1)):
            found = tuned(model, options(tmp_path, tune_arithmetic=arithmetic))
            assert found.program is not None and len(found.program.computes) == count


def test_what_the_user_decided_is_not_looked_at(tmp_path: Path) -> None:
    def open_forms(given: Options) -> set[str]:
        return {name for name, form in forms._FORMS.items() if form.is_open(given)}

    plain = Options(cache_dir=tmp_path, tune="2m")
    assert open_forms(plain) == {"alike computes stay apart", COPY}
    assert open_forms(plain.override(merging="off", without=("staging",))) == set()
    asked = plain.override(tune_arithmetic=True)
    assert open_forms(asked) == set(forms._FORMS)
    assert not any("windows" in name for name in open_forms(asked.override(convolution="direct")))
    with pytest.raises(OptionError, match="what is in without cannot be 'merging': it is one of splits, staging"):
        Options(without=("merging",))
