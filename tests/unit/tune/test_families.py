"""Families: what one kernel's trial says about those that wait, most of all about its own kind."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tune.families import CHANGES, Array, Beliefs, GainEstimate, change, family
from tilewright.tune.features import features
from tilewright.tune.subjects import TunedModel, find_subjects

PRODUCT, OTHER = ("product", "k0"), ("product", "k1")
MAP = ("map", "k2")


def doubled(name: str, predicted: float = 0.0) -> Array:
    found = np.zeros(1 + len(CHANGES))
    found[0], found[1 + CHANGES.index(name)] = predicted, 1.0
    return found


def test_a_trial_counts_most_for_its_own_then_for_its_family() -> None:
    waiting = [(key, doubled("register")) for key in (PRODUCT, OTHER, MAP)]
    beliefs = Beliefs()
    assert len({e.mean for e in beliefs.expected(waiting)}) == 1
    for _ in range(4):
        beliefs.learn(PRODUCT, doubled("register"), 0.7)
    own, kin, stranger = (e.mean for e in beliefs.expected(waiting))
    assert log(0.7) < own < kin < stranger < 0
    (unrelated,) = beliefs.expected([(OTHER, doubled("tile"))])
    assert abs(unrelated.mean) < 1e-12, "only what changed is learned about"


def test_families_alone_learn_nothing_of_others() -> None:
    beliefs = Beliefs(shares=(0.0, 0.0, 1.0))
    beliefs.learn(PRODUCT, doubled("register"), 0.7)
    own, kin = beliefs.expected([(PRODUCT, doubled("register")), (OTHER, doubled("register"))])
    assert own.mean < kin.mean == 0.0 and own.apart < kin.apart


def test_trials_change_the_order_of_what_waits() -> None:
    """What is predicted to be better loses its place to what turned out better elsewhere in the family."""
    waiting = [(OTHER, doubled("tile", predicted=log(0.97))), (OTHER, doubled("register"))]
    beliefs = Beliefs()
    before = [e.gain() for e in beliefs.expected(waiting)]
    for _ in range(20):
        beliefs.learn(PRODUCT, doubled("register"), 0.6)
    after = [e.gain() for e in beliefs.expected(waiting)]
    assert before[0] > before[1] and after[1] > after[0]


def test_what_is_known_to_be_better_leaves_less_to_gain() -> None:
    one = GainEstimate(log(0.9), 0.1)
    assert one.gain(1.0) > one.gain(0.8) > 0
    assert GainEstimate(log(0.9), 1e-6).gain(1.0) == pytest.approx(log(1 / 0.9), rel=1e-3)


def test_changes_are_between_a_kernels_own_plan_and_another() -> None:
    weights = {"w": np.ones((64, 64), np.float32)}
    proto = model_of([("MatMul", ["x", "w"], "y", {})], {"x": (48, 64)}, {"y": (48, 64)}, weights)
    target = machine("neoverse_n1")
    made = build(load(proto, {}), target, Options(target="neoverse_n1", stop_after="plan"))
    assert made.program is not None and made.plan is not None
    (subject,) = find_subjects(TunedModel(made.program, made.plan, target, arithmetic=False))
    own = features(subject.part.program, subject.part.own, target)
    assert family(own) == ("product", 4) and not change(own, own).any()
    trial = next(t for t in (subject.following(lambda _: False) for _ in range(8)) if t is not None)
    other = features(subject.part.program, trial.plan, target)
    found = change(own, other)
    assert found.any() and found[0] == pytest.approx(log(other[0].seconds / own[0].seconds))
    assert all(isinstance(number, int) for told in own for number in told.numbers.values())
