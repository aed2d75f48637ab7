"""One ranking of a convolution's plans over all algorithms, and which of them are measured."""

from __future__ import annotations

import numpy as np
import pytest

from bench import convolutions
from bench.convolutions import LAYERS, Layer, drawn, ranking
from bench.judge.programs import forms_of
from tilewright.backend import backend_for
from tilewright.frontend.onnx.model import load
from tilewright.lower.program import lower_program
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan


@pytest.mark.slow
def test_plans_of_all_algorithms_are_ranked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_NEST_PLANS", 4)
    target = machine("neoverse_n1")
    forms = forms_of(load(Layer("small", 16, 16, 14, 3).model()), target, None)
    ranked = ranking(forms, target)
    assert len(forms) > 1 and {c.form for c in ranked} == set(range(len(forms)))
    assert [c.seconds for c in ranked] == sorted(c.seconds for c in ranked) and ranked[0].seconds > 0
    for candidate in ranked[:5]:
        check_plan(candidate.plan, candidate.program, target)
        lower_program(candidate.program, candidate.plan, backend_for(target).lower_kernel)


def test_the_first_are_measured_and_some_of_the_others() -> None:
    places = drawn([None] * 40, 12, np.random.default_rng(0))  # type: ignore[list-item]
    assert places[:6] == list(range(6)) and len(set(places)) == 12 and max(places) < 40
    assert drawn([None] * 3, 12, np.random.default_rng(0)) == [0, 1, 2]  # type: ignore[list-item]


def test_there_are_ten_layers_of_two_networks() -> None:
    assert len(LAYERS) == len({layer.name for layer in LAYERS}) == 10
    assert {layer.network for layer in LAYERS} == {"ResNet-18", "YOLO-9000"}
