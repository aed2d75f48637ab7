"""Plans by what they are wanted for: objectives in an order, at most eight plans, and the quickest where nothing is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import model_of
from tilewright.cli.common import parse_policy
from tilewright.compiler.pipeline import build
from tilewright.errors import OptionError
from tilewright.frontend.onnx.model import load
from tilewright.options import OBJECTIVES, POLICIES, Options
from tilewright.schedule import objectives
from tilewright.schedule.constants import OBJECTIVE_PLANS
from tilewright.schedule.objectives import MEASURES, Looked, one_of_many, preferred
from tilewright.target import machine


def widening(rows: int, wide: int, blocks: int = 2) -> ModelProto:
    """Products that make rows wide and narrow again: what is wide need not be stored."""
    rng = np.random.default_rng(5)
    steps, weights, last = [], {}, "x"
    for i in range(blocks):
        weights[f"a{i}"] = (rng.standard_normal((64, wide)) / 8).astype(np.float32)
        weights[f"b{i}"] = (rng.standard_normal((wide, 64)) / 32).astype(np.float32)
        given = "y" if i == blocks - 1 else f"y{i}"
        steps += [("MatMul", [last, f"a{i}"], f"p{i}", {}), ("Relu", [f"p{i}"], f"q{i}", {}),
                  ("MatMul", [f"q{i}", f"b{i}"], given, {})]  # fmt: skip
        last = given
    return model_of(steps, {"x": [rows, 64]}, {"y": [rows, 64]}, weights)


def planned(name: str, optimize: Any) -> Looked:
    options = Options(target=name, optimize=optimize, stop_after="plan")
    made = build(load(widening(512, 2048), {}), machine(name), options)
    assert made.program is not None and made.plan is not None
    return Looked(made.program, made.plan, machine(name))


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids"])
def test_memory_is_spared_for_little_time(name: str) -> None:
    quick, small = planned(name, "latency"), planned(name, "memory")
    assert small.memory < 0.5 * quick.memory
    assert small.seconds <= 1.05 * quick.seconds


def test_objectives_lead_their_way() -> None:
    quick = planned("emerald_rapids", "latency")
    joined = planned("emerald_rapids", ("latency", "fusion"))
    assert len(joined.loops.calls) < len(quick.loops.calls)
    assert planned("emerald_rapids", ("reuse",)).moved <= quick.moved
    assert planned("emerald_rapids", "compile").plan.schedule == "register"
    own = planned("neoverse_n1", "latency")
    for name, measure in MEASURES.items():
        assert measure(planned("neoverse_n1", (name,))) <= measure(own), name


def test_few_plans_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = objectives.make_plan
    monkeypatch.setattr(objectives, "make_plan", lambda *given, **more: made.append(given) or make(*given, **more))
    planned("neoverse_n1", ("fusion", "reuse", "footprint", "parallelism", "compile", "latency"))
    assert 0 < len(made) < OBJECTIVE_PLANS
    made.clear()
    planned("neoverse_n1", "latency")
    assert not made, "what is quickest is found without"


def test_every_objective_but_the_last_has_slack() -> None:
    plans: Any = [SimpleNamespace(seconds=s, memory=m) for s, m in ((1.0, 100), (1.04, 60), (1.2, 10), (1.03, 60))]
    assert preferred(("latency", "footprint"), plans) is plans[3], "of equal ones the quicker"
    assert preferred(("footprint", "latency"), plans) is plans[2]
    assert preferred(("latency",), plans) is plans[0]


def test_one_of_many_has_its_part_of_the_machine() -> None:
    whole = machine("neoverse_n1")
    one = one_of_many(whole)
    assert whole.units > one.units == 1
    assert all(level.alone == level.bandwidth and level.shared_by == 1 for level in one.levels)
    assert one.main.bandwidth == whole.main.bandwidth and one.fma_alone == whole.fma_rate


def test_names_and_orders_are_understood() -> None:
    assert set(MEASURES) == set(OBJECTIVES) and {n for order in POLICIES.values() for n in order} <= set(OBJECTIVES)
    assert Options(optimize=["latency", "fusion"]).objectives == ("latency", "fusion")
    assert Options(optimize="memory").objectives == ("latency", "footprint")
    assert Options(optimize="throughput").threads == 1 and Options(optimize="compile").effort == "fast"
    assert parse_policy("memory") == "memory" and parse_policy("latency, reuse") == ("latency", "reuse")


@pytest.mark.parametrize(("given", "said"), [
    ({"optimize": "speed"}, "optimize cannot be 'speed': it is one of latency, throughput, memory, compile, or some"),
    ({"optimize": ("latency", "space")}, "an objective of optimize cannot be 'space': it is one of latency, footprint"),
    ({"optimize": ()}, "it is one objective or more, none of them twice"),
    ({"optimize": ("fusion", "fusion")}, "none of them twice"),
    ({"optimize": "throughput", "threads": 4}, "on one thread each, not threads=4"),
    ({"optimize": "throughput", "target": "cuda"}, "is for CPUs: on a GPU, compile for a larger batch"),
    ({"optimize": "compile", "effort": "adaptive"}, "leave one of them out"),
])  # fmt: skip
def test_wrong_ones_are_told(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**given)
    assert said in str(caught.value)


def test_answers_are_the_same(kernel_cache: Path) -> None:
    model = widening(96, 256, blocks=1)
    x = np.random.default_rng(1).standard_normal((96, 64)).astype(np.float32)
    expected = tilewright.compile(model, options=Options(cache_dir=kernel_cache, threads=1))(x)[0]
    for optimize in ("memory", "throughput"):
        found = tilewright.compile(model, options=Options(cache_dir=kernel_cache, optimize=optimize, threads=1))(x)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("text", "said"), [
    ("memory", "memory"), ("fusion", ("fusion",)), ("latency, fusion", ("latency", "fusion")), ("speed", "speed"),
])  # fmt: skip
def test_one_name_on_the_command_line_is_a_policy_unless_it_is_an_objective_alone(text: str, said: object) -> None:
    assert parse_policy(text) == said
