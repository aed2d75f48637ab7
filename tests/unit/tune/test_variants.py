"""Every variant that the tuner would measure is a plan: it is checked and lowered, without being measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from bench import zoo
from bench.policies.polybench import program
from bench.tuning.legal import Checked, count
from tests.cpu_stages import model_of
from tilewright.backend import backend_for
from tilewright.backend.cpu.kernel.variants import CpuVariants
from tilewright.compiler.pipeline import build
from tilewright.examples import mobilenet
from tilewright.frontend.onnx.model import load
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.schedule.tree import in_tree
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Tile
from tilewright.tune.arithmetic import sums_of_plan
from tilewright.tune.groups import find_groups, with_choices
from tilewright.tune.pairs import beside
from tilewright.tune.parts import edited, kernels_of, units_of
from tilewright.tune.subjects import TunedModel, find_subjects


def tokens(height: int, width: int) -> ModelProto:
    """A product at every token and a window over the image that they are: one kernel, with a window."""
    rng = np.random.default_rng(0)
    steps = [
        ("MatMul", ["x", "w0"], "wide", {}), ("Transpose", ["wide"], "turned", {"perm": [0, 2, 1]}),
        ("Reshape", ["turned", "shape"], "pixels", {}), ("Conv", ["pixels", "w1"], "y", {"pads": [1] * 4, "group": 64}),
    ]  # fmt: skip
    weights = {"w0": (rng.standard_normal((32, 64)) / 32).astype(np.float32), "shape": np.array([1, 64, height, width]),
               "w1": rng.standard_normal((64, 1, 3, 3)).astype(np.float32)}  # fmt: skip
    return model_of(steps, {"x": (1, height * width, 32)}, {"y": (1, 64, height, width)}, weights)


def check_variants(model: ModelProto | Path, name: str, count: int) -> tuple[int, int]:
    """How many variants there are, and of kernels with windows."""
    target = machine(name)
    made = build(load(model, {}), target, Options(stop_after="plan"))
    assert made.program is not None and made.plan is not None
    rng = np.random.default_rng(0)
    found = moving = 0
    for group in find_groups(made.program, made.plan, target):
        own = group.variants[0]
        drawn = own.random(2, rng) if hasattr(own, "random") else []
        lazily = islice(own.ranked(lambda _: True), count)
        for kernel in (*group.alternatives(count), *lazily, *drawn):
            plan = with_choices(made.program, made.plan, [(group, kernel)])
            check_plan(plan, made.program, target)
            lower_program(made.program, plan, backend_for(target).lower_kernel)
            found += 1
            moving += any(h.mode == "rolling" for t in kernel.walk() if isinstance(t, Tile) for h in t.holds)
    return found, moving


@pytest.mark.parametrize("name", ["emerald_rapids", pytest.param("neoverse_n1", marks=pytest.mark.slow)])
def test_variants_of_kernels_with_windows(name: str) -> None:
    """Steps fill tiles of some sizes alone."""
    found, moving = check_variants(tokens(64, 64), name, 3)
    assert moving == found > 3


def test_variants_come_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is there before all nest plans are predicted, and none comes twice."""
    made = build(load(tokens(32, 32), {}), machine("neoverse_n1"), Options(stop_after="plan"))
    assert made.program is not None and made.plan is not None
    (group, *_) = find_groups(made.program, made.plan, machine("neoverse_n1"))
    looked: list[object] = []
    least = CpuVariants._least
    monkeypatch.setattr(CpuVariants, "_least", lambda self, plans: looked.append(plans) or least(self, plans))
    own = group.variants[0]
    ranked = own.ranked(lambda _: True)
    first = next(ranked)
    assert first != group.own and len(looked) <= 16 < len(own.choices())
    some = [first, *islice(ranked, 12)]
    assert len({(k.leaves, k.cut, k.body) for k in some}) == len(some)


def test_plans_of_parts_are_plans_of_the_model() -> None:
    """Variants, kernels apart and neighbours as one: checked and lowered in the whole model."""
    steps = [("MatMul", ["x", "a"], "p", {}), ("Softmax", ["p"], "q", {"axis": 1}), ("MatMul", ["q", "b"], "r", {}),
             ("Relu", ["r"], "s", {}), ("Add", ["s", "q"], "y", {})]  # fmt: skip
    rng = np.random.default_rng(3)
    weights = {name: (rng.standard_normal((48, 48)) / 8).astype(np.float32) for name in "ab"}
    proto = model_of(steps, {"x": (64, 48)}, {"y": (64, 48)}, weights)
    for name in ("emerald_rapids", "h200"):
        target = machine(name)
        made = build(load(proto, {}), target, Options(target=name, schedule="register", stop_after="plan"))
        assert made.program is not None and made.plan is not None
        found = count(TunedModel(made.program, made.plan, target, arithmetic=True), 4)
        assert found.plans > 8 and found.structures and not found.illegal and not found.refused, found


def test_launches_that_kernels_share_are_tried_apart() -> None:
    steps = [("Softmax", ["x"], "y", {"axis": 1}), ("Tanh", ["z"], "t", {}), ("Softmax", ["t"], "u", {"axis": 0})]
    proto = model_of(steps, {"x": (64, 48), "z": (96, 40)}, {"y": (64, 48), "u": (96, 40)}, {})
    target = machine("h200")
    made = build(load(proto, {}), target, Options(target="h200", stop_after="plan"))
    assert made.program is not None and made.plan is not None
    model = TunedModel(made.program, made.plan, target, arithmetic=True)
    (shared,) = [unit for unit in units_of(made.plan) if unit.is_launch]
    (subject,) = [s for s in find_subjects(model) if s.kernels == {k.name for k in kernels_of(shared)}]
    trial = subject.following(lambda _: False)
    assert trial is not None and Checked(model).why_illegal(trial) is None
    other = edited(made.program, made.plan, target, trial.edits)
    assert len(other.kernels) == len(made.plan.kernels) and not any(unit.is_launch for unit in units_of(other))


def test_kernels_that_wait_for_nothing_of_each_other_are_tried_in_one_launch() -> None:
    steps = [("Softmax", ["x"], "y", {"axis": 1}), ("Tanh", ["z"], "t", {}), ("Softmax", ["t"], "u", {"axis": 0})]
    proto = model_of(steps, {"x": (64, 48), "z": (96, 40)}, {"y": (64, 48), "u": (96, 40)}, {})
    target = machine("h200")
    made = build(load(proto, {}), target, Options(target="h200", stop_after="plan"))
    assert made.program is not None and made.plan is not None
    kernels = [kernel for unit in units_of(made.plan) for kernel in kernels_of(unit)]
    apart = replace(made.plan, body=in_tree(kernels, made.program, target))  # as if that had been predicted to pay
    assert not any(unit.is_launch for unit in units_of(apart))
    model = TunedModel(made.program, apart, target, arithmetic=False)
    (subject,) = [s for s in find_subjects(model) if len(s.kernels) == 2]
    trial = subject.following(lambda _: False)
    assert trial is not None and Checked(model).why_illegal(trial) is None
    other = edited(made.program, apart, target, trial.edits)
    (shared,) = [unit for unit in units_of(other) if unit.is_launch]
    assert {k.leaves for k in kernels_of(shared)} == {k.leaves for k in apart.kernels}
    first, second = ("Softmax", ["x"], "y", {"axis": 1}), ("Softmax", ["y"], "u", {"axis": 0})
    chain = model_of([first, second], {"x": (64, 48)}, {"y": (64, 48), "u": (64, 48)}, {})
    waits = build(load(chain, {}), target, Options(target="h200", schedule="register", stop_after="plan"))
    assert waits.program is not None and waits.plan is not None and len(waits.plan.kernels) > 1
    model = TunedModel(waits.program, waits.plan, target, arithmetic=False)
    assert not list(beside(model.surroundings, {k.name for k in waits.plan.kernels}))


MODELS = ("tokens", "mobilenet", "vit_s32", "swin_t", "lstm", "unet")


def written(model: str, folder: Path) -> ModelProto | Path:
    if model == "tokens":
        return tokens(48, 40)
    if model == "mobilenet":
        return mobilenet.build(size=112, width=0.5)
    zoo.export(model, "small", folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.slow
@pytest.mark.part(5)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids", "emerald_rapids_avx512", "avx2_desktop", "apple_arm",
                                  "h200", "a100", "l40s"])  # fmt: skip
def test_every_variant_is_a_plan(model: str, name: str, tmp_path: Path) -> None:
    found, _ = check_variants(written(model, tmp_path), name, 11)
    assert found > 8


def test_kernels_that_copy_weights_before_their_steps_have_variants(tmp_path: Path) -> None:
    """A leaf that copies a weight computes nothing: it is named after the weight."""
    target = machine("a100")
    made = build(load(written("lstm", tmp_path), {}), target, Options(stop_after="plan"))
    assert made.program is not None and made.plan is not None
    assert any(leaf.part == "copy" for kernel in made.plan.kernels for leaf in kernel.leaves)
    assert find_groups(made.program, made.plan, target)


def test_copies_that_are_read_from_are_tried_without() -> None:
    """The sum reads where the copy would be made from, in the same order: not a bit of the result changes."""
    target = machine("emerald_rapids")
    made = build(program("gemm"), target, Options(target="emerald_rapids", stop_after="plan"))
    assert made.program is not None and made.plan is not None
    (copy,) = (t.name for t in made.program.staged)
    (pair,) = (s for s in find_subjects(TunedModel(made.program, made.plan, target, False)) if len(s.part.kernels) == 2)
    trials = []
    while not pair.is_done:
        trials.append(pair.following(lambda key: False))
    (without,) = (t for t in trials if t is not None and all(leaf.tensor != copy for leaf in t.plan.kernels[0].leaves))
    whole = edited(made.program, made.plan, target, list(without.edits))
    check_plan(whole, made.program, target)
    (kernel,) = whole.kernels
    assert [leaf.composed for leaf in kernel.leaves] == [(copy,)]
    assert sums_of_plan(whole, {copy}) == sums_of_plan(made.plan, {copy})
