"""Tuning: the same answers, the choice kept and found again without measuring, and never a slower kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import CPU, model_of, programs
from tilewright.backend.cpu.leaf.candidates import feasible_plans, predict
from tilewright.errors import OptionError
from tilewright.options import Options
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tune import tuner
from tilewright.tune.groups import calls_of, find_groups, with_choices

N1 = machine("neoverse_n1")
RNG = np.random.default_rng(11)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / 8).astype(np.float32)


@pytest.fixture(scope="module")
def model() -> ModelProto:
    """Two equal products and another, with something between them."""
    steps = [
        ("MatMul", ["x", "a"], "p", {}),
        ("Relu", ["p"], "q", {}),
        ("MatMul", ["q", "b"], "r", {}),
        ("Softmax", ["r"], "s", {"axis": 1}),
        ("MatMul", ["s", "c"], "y", {}),
    ]
    constants = {"a": weights(64, 64), "b": weights(64, 64), "c": weights(64, 40)}
    return model_of(steps, {"x": [48, 64]}, {"y": [48, 40]}, constants)


def options(cache: Path, **more: Any) -> Options:
    return Options(cache_dir=cache, threads=2, **more)


def test_same_answers_and_kept(model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": RNG.standard_normal((48, 64)).astype(np.float32)}
    plain = tilewright.compile(model, options=options(tmp_path))
    tuned = tilewright.compile(model, tune=3, options=options(tmp_path))
    np.testing.assert_allclose(tuned.run(inputs)["y"], plain.run(inputs)["y"], rtol=1e-5, atol=1e-6)
    assert any("plans measured" in k.estimate.reason for k in tuned.artifact.plan.kernels)
    assert "tune" in tuned.artifact.stage_seconds and "tune" not in plain.artifact.stage_seconds

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(tuner, "_profiles", refuse)
    again = tilewright.compile(model, tune=3, options=options(tmp_path))
    assert again.artifact.plan == tuned.artifact.plan
    fewer = tilewright.compile(model, tune=2, options=options(tmp_path))
    assert fewer.artifact.plan == tuned.artifact.plan, "more was measured than is asked for"
    with pytest.raises(AssertionError, match="measured again"):
        tilewright.compile(model, tune=4, options=options(tmp_path))
    untuned = tilewright.compile(model, options=options(tmp_path))
    assert untuned.artifact.plan == plain.artifact.plan, "what is in the cache must not change a plain compilation"


def test_never_slower_by_its_own_numbers(model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that are made up, exactly the kernels that measured faster change."""
    program = programs(model)["layout"]
    plan = make_plan(program, CPU)
    rng = np.random.default_rng(0)

    def made_up(_program: object, models: list[Any], _seconds: float) -> list[np.ndarray]:
        calls = len(models[0].loops.calls)
        return [np.full(calls, 1e-5), rng.uniform(0.5e-5, 1.5e-5, calls)][: len(models)]

    monkeypatch.setattr(tuner, "_profiles", made_up)
    tuned = tuner.tune_plan(program, plan, CPU, options(tmp_path, tune=4))
    for before, after in zip(plan.kernels, tuned.kernels, strict=True):
        told = re.search(r"tuned: ([\d.]+) us measured against ([\d.]+) us", after.estimate.reason)
        if told is None:
            assert (after.leaves, after.cut) == (before.leaves, before.cut)
        else:
            assert float(told[1]) <= float(told[2])
            assert (after.leaves, after.cut) != (before.leaves, before.cut)


def test_a_time_is_kept_to(model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time too short for one round measures the planner's kernels alone."""
    program = programs(model)["layout"]
    plan = make_plan(program, CPU)
    rounds: list[int] = []
    monkeypatch.setattr(tuner._Tuner, "_round", lambda *_: rounds.append(1))
    tuned = tuner.tune_plan(program, plan, CPU, options(tmp_path, tune_seconds=0.5))
    assert not rounds
    assert [k.leaves for k in tuned.kernels] == [k.leaves for k in plan.kernels]


def test_equal_kernels_are_one_group(model: ModelProto) -> None:
    steps = [("MatMul", ["x", "a"], "p", {}), ("MatMul", ["p", "b"], "q", {}), ("MatMul", ["q", "c"], "y", {})]
    constants = {"a": weights(32, 32), "b": weights(32, 32), "c": weights(32, 16)}
    chain = model_of(steps, {"x": [24, 32]}, {"y": [24, 16]}, constants)
    program = programs(chain, N1)["layout"]
    plan = make_plan(program, N1, "register")
    groups = find_groups(program, plan, N1)
    assert sorted(len(g.members) for g in groups) == [1, 2]
    both = next(g for g in groups if len(g.members) == 2)
    width = dict(both.own.leaves[0].register)["o1"]
    variants = both.variants[0]
    wide = next(c for c in variants.choices() if c[0].vector == "o1" and dict(c[0].register)["o1"] not in (width, 32))
    other = variants.tiled(wide)[0]
    changed = with_choices(program, plan, [(both, other)])
    first, second = (changed.kernels[i] for i in both.members)
    assert first.leaves[0].register == second.leaves[0].register == other.leaves[0].register
    assert first.leaves[0].tensor != second.leaves[0].tensor
    packed = dict(changed.layouts)
    assert packed["a"] == packed["b"] != dict(plan.layouts).get("a"), "weights are packed for the register tile"
    assert packed.get("c") == dict(plan.layouts).get("c")


def test_every_call_belongs_to_one_group(model: ModelProto) -> None:
    from tests.cpu_stages import lowered

    program = programs(model)["layout"]
    plan = make_plan(program, CPU, "register")
    loops = lowered(program, plan=plan).loops
    found = [n for g in find_groups(program, plan, CPU) for n in calls_of(g, program, plan, loops)]
    assert sorted(found) == list(range(len(loops.calls)))


def test_the_default_is_a_candidate(model: ModelProto) -> None:
    program = programs(model)["layout"]
    plan = make_plan(program, CPU, "register")
    for group in find_groups(program, plan, CPU):
        (nest,) = group.variants[0].nests
        (own,) = group.own.leaves
        context = group.variants[0].context
        assert own in feasible_plans(nest, context)
        seconds = predict([nest], [own], context, group.variants[0].stored, [group.own.cut, ()])
        assert seconds.shape == (2,) and np.all(seconds > 0)


def test_best_differ_and_are_ranked(model: ModelProto) -> None:
    program = programs(model)["layout"]
    plan = make_plan(program, CPU, "register")
    for group in find_groups(program, plan, CPU):
        best = group.alternatives(5)
        seen = {(k.leaves, k.cut) for k in (group.own, *best)}
        assert len(seen) == len(best) + 1
        times = [k.estimate.seconds for k in best]
        assert times == sorted(times)


@pytest.mark.parametrize("given", [{"tune": -1}, {"tune": True}, {"tune_seconds": 0}, {"tune_seconds": "long"}])
def test_options_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(given))):
        Options(**given)


def test_an_emulator_is_not_tuned(add_model: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'cuda-emulated' cannot: the emulator's times say nothing about a GPU"):
        tilewright.compile(add_model(), target="cuda-emulated", tune=2, options=options(tmp_path))


def test_a_shared_constant_keeps_its_layout() -> None:
    steps = [("MatMul", ["x", "a"], "p", {}), ("Tanh", ["p"], "q", {}), ("MatMul", ["q", "a"], "y", {})]
    tied = model_of(steps, {"x": [24, 32]}, {"y": [24, 32]}, {"a": weights(32, 32)})
    program = programs(tied)["layout"]
    plan = make_plan(program, CPU, "register")
    groups = find_groups(program, plan, CPU)
    choices = [(g, g.variants[0].random(1, np.random.default_rng(i))[0]) for i, g in enumerate(groups)]
    assert with_choices(program, plan, choices).layouts == plan.layouts
