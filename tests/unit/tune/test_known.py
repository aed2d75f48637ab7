"""What records have of kernels stands beside what is predicted of them, and corrects it by families."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.options import Options
from tilewright.report.explain import explain_text
from tilewright.report.explain_html import explain_html
from tilewright.report.facts import explain_json
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.plan.text import plan_text
from tilewright.tune.families import family
from tilewright.tune.features import features
from tilewright.tune.known import with_records
from tilewright.tune.records import Anchor, Machine, Measurement, Records, digest
from tilewright.tune.subjects import TunedModel, find_subjects

N1 = machine("neoverse_n1")
LONGER = 3.0  # than predicted, that all kernels take
UNTOLD = "y"  # what the kernel stores that no record has


def small() -> ModelProto:
    """Two equal products, another, and two reductions between them."""
    rng = np.random.default_rng(5)
    shapes = {"a": (64, 64), "b": (64, 64), "c": (64, 40)}
    weights = {name: (rng.standard_normal(shape) / 8).astype(np.float32) for name, shape in shapes.items()}
    steps = [("MatMul", ["x", "a"], "p", {}), ("Softmax", ["p"], "q", {"axis": 1}), ("MatMul", ["q", "b"], "r", {}),
             ("Softmax", ["r"], "s", {"axis": 1}), ("MatMul", ["s", "c"], "y", {})]  # fmt: skip
    return model_of(steps, {"x": [48, 64]}, {"y": [48, 40]}, weights)


def options(folder: Path) -> Options:
    return Options(cache_dir=folder, target="neoverse_n1", schedule="register", threads=1, stop_after="tune")


def recorded(program: Program, plan: Plan, given: Options, processor: str | None = None) -> Records:
    """Of every group of equal kernels but one, as it is planned."""
    measuring = backend_for(N1).measuring(N1, given)
    here = Machine.of(N1, measuring.processor, processor or measuring.microarchitecture)
    found = Records(targets={here.digest: here})
    for subject in find_subjects(TunedModel(program, plan, N1, False)):
        part = subject.part
        if len(part.kernels) > 1 or UNTOLD in part.tensors:
            continue
        (told,) = features(part.program, part.own, N1)
        found.programs[digest(part.text)] = part.text
        found.measurements.append(Measurement(
            digest(part.text), here.digest, json.loads(part.own.to_json()), part.task, subject.kind, "tuned", 1,
            "thread", "model", 1e6 * LONGER * told.seconds, 0.01, 9, Anchor(1.0, 1.0),
        ))  # fmt: skip
    return found


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """The model as it is planned, and with records of this machine and of another."""
    given = options(tmp_path_factory.mktemp("cache"))
    model = load(small(), {})

    def made(tuner: Callable[[Program, Plan], Plan]) -> Artifact:
        return build(model, N1, given, lambda program, plan, *_: tuner(program, plan))

    def by(processor: str | None) -> Callable[[Program, Plan], Plan]:
        return lambda program, plan: with_records(program, plan, N1, given, recorded(program, plan, given, processor))

    return {"plain": made(lambda _, plan: plan), "here": made(by(None)), "elsewhere": made(by("another"))}


def test_kernels_say_what_records_have_of_them(artifacts: dict[str, Artifact]) -> None:
    program, plan = artifacts["here"].program, artifacts["here"].plan
    assert program is not None and plan is not None
    groups = [s for s in find_subjects(TunedModel(program, plan, N1, False)) if len(s.part.kernels) == 1]
    assert sorted(len(s.kernels) for s in groups) == [1, 2, 2, 2, 2, 2], "one has no equal"
    told = {s.part.task: features(s.part.program, s.part.own, N1) for s in groups}
    measured = {s.part.task for s in groups if UNTOLD not in s.tensors}
    assert len(measured) == 5
    for subject in groups:
        task = subject.part.task
        others = measured - {task}
        kin = [other for other in others if family(told[other]) == family(told[task])]
        of_all = log(LONGER) * len(others) / (len(others) + 1)
        factor = exp(of_all + (log(LONGER) - of_all) * len(kin) / (len(kin) + 1))
        for kernel in (k for k in plan.kernels if k.name in subject.kernels):
            own, about = told[task][0].seconds, kernel.estimate
            assert about.measured == pytest.approx(LONGER * own if task in measured else 0.0, abs=1e-9)
            assert about.corrected == pytest.approx(factor * own, abs=1e-9) and own < about.corrected < LONGER * own
        assert kin or task in measured, "one product says something of the other"


def test_records_of_another_machine_say_nothing(artifacts: dict[str, Artifact]) -> None:
    assert artifacts["elsewhere"].plan == artifacts["plain"].plan


def test_explain_shows_predicted_corrected_and_measured_beside_each_other(artifacts: dict[str, Artifact]) -> None:
    plain, here = artifacts["plain"], artifacts["here"]
    facts = explain_json(here)
    for kernel in facts["kernels"]:
        is_untold = kernel["root"] == UNTOLD
        assert kernel["predicted_us"] and kernel["corrected_us"] and (kernel["recorded_us"] is None) == is_untold
        assert kernel["measured_us"] is None, "that is what a profile of this run says"
    lines = explain_text(here, width=120).splitlines()
    (head,) = [line.split() for line in lines if line.startswith("kernel ")]
    assert head[-5:] == ["each", "all", "corrected", "measured", "traffic"]
    details = [line for line in lines if line.strip().startswith("records ")]
    assert len(details) == len(facts["kernels"])
    assert sum("corrected" in d and "measured" in d for d in details) == len(details) - 1
    page = explain_html(here)
    assert '"recorded_us":null' in page and "measured in records, a call" in page
    assert here.plan is not None and ", corrected " in plan_text(here.plan)
    text = explain_text(plain, width=120)
    assert "corrected" not in text and "records" not in text
