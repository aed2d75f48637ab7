"""Leaves planned again for the shapes that the tiles of a chosen kernel give them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import error, evaluated, lowered, model_of, random_inputs
from tests.stages.test_search_oracle import graph
from tilewright import ops
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.schedule.planner import make_plan, plan_seconds
from tilewright.schedule.price import priced
from tilewright.target import Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts

DESKTOP = machine("avx2_desktop")


def products(rows: int, first: int, inner: int, last: int) -> ModelProto:
    """Two products, the first one's result kept in tiles."""
    rng = np.random.default_rng(0)
    weights = {name: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
               for name, shape in (("v", (first, inner)), ("w", (inner, last)))}  # fmt: skip
    steps = [("MatMul", ["x", "v"], "h", {}), ("Relu", ["h"], "g", {}), ("MatMul", ["g", "w"], "y", {})]
    return model_of(steps, {"x": (rows, first)}, {"y": (rows, last)}, weights)


def program_of(model: ModelProto, target: Target) -> Program:
    return choose_layouts(fold_constants(ops.lower(load(model, {}))), target)


def seconds(plan: Plan, program: Program) -> float:
    return plan_seconds(plan, program)


@pytest.mark.parametrize("shape", [(196, 96, 384, 96), (3136, 24, 72, 24)])
def test_register_tile_for_the_rows_of_a_tile(shape: tuple[int, int, int, int]) -> None:
    """Tiles of the two products have fewer rows than the products: another register tile fills them better, and the
    weights lie in panels of its width."""
    program = program_of(products(*shape), DESKTOP)
    plan, before = make_plan(program, DESKTOP), make_plan(program, DESKTOP, whole=False)
    (kernel,), (first,) = plan.kernels, before.kernels
    assert [leaf.register for leaf in kernel.leaves] != [leaf.register for leaf in first.leaves]
    assert kernel.estimate.seconds < 0.995 * first.estimate.seconds
    assert "planned again for the tile" in kernel.estimate.reason
    layouts, weights = dict(plan.layouts), {"g": "v", "y": "w"}
    for leaf, columns in zip(kernel.leaves, shape[2:], strict=True):
        width = dict(leaf.register)["o1"]
        if width < columns:
            assert layouts[weights[leaf.tensor]].order[-1].size == width
        else:
            assert weights[leaf.tensor] not in layouts  # one panel, as it is


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["avx2_desktop", "emerald_rapids", "neoverse_n1"])
def test_never_slower_and_priced_alike(name: str) -> None:
    """Over graphs of products, sums and maps: no plan gets slower, some get faster, and the prediction that decided is
    what the finished plan is predicted to take."""
    target, gained = machine(name), 0
    for seed in range(10):
        program = program_of(graph(seed), target)
        plan, before = make_plan(program, target), make_plan(program, target, whole=False)
        check_plan(plan, program, target)
        assert seconds(plan, program) <= seconds(before, program)
        gained += seconds(plan, program) < seconds(before, program)
        silent = Plan.from_json(re.sub(r'"seconds": [0-9.e-]+', '"seconds": 0.0', plan.to_json()))
        assert seconds(priced(program, silent, target), program) == pytest.approx(seconds(plan, program), abs=2e-9)
    assert gained


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [0, 4, 12, 23])
def test_agrees_with_the_interpreter(seed: int, tmp_path: Path) -> None:
    program = program_of(graph(seed), DESKTOP)
    plan = make_plan(program, DESKTOP)
    assert any("planned again" in k.estimate.reason for k in plan.kernels)
    inputs = random_inputs(program)
    found = lowered(program, plan=plan, target=DESKTOP).natively(inputs, tmp_path)
    for name, wanted in evaluated(program, inputs).items():
        assert error(found[name], wanted) < 1e-5


def test_weights_that_others_read_stay() -> None:
    """A constant that another product reads too keeps the layout that both were planned with."""
    rng = np.random.default_rng(0)
    shared = (rng.standard_normal((96, 96)) / 10).astype(np.float32)
    steps = [("MatMul", ["x", "w"], "h", {}), ("Relu", ["h"], "g", {}), ("MatMul", ["g", "w"], "y", {})]
    model = model_of(steps, {"x": (196, 96)}, {"y": (196, 96)}, {"w": shared})
    program = program_of(model, DESKTOP)
    assert dict(make_plan(program, DESKTOP).layouts) == dict(make_plan(program, DESKTOP, whole=False).layouts)
