"""What planning keeps for later: a plan is the same whatever was planned before with the same memo."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of, programs
from tilewright.ir.forms.compute import Program
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.algebra.memo import Memo

RNG = np.random.default_rng(5)
FIRST = RNG.standard_normal((64, 96)).astype(np.float32)


def product(then: int = 0) -> ModelProto:
    """A product with few weights, and one with many after it where there is one."""
    steps = [("MatMul", ["x", "w"], "p", {})]
    if not then:
        return model_of(steps, {"x": (32, 64)}, {"p": (32, 96)}, {"w": FIRST})
    more = RNG.standard_normal((96, then)).astype(np.float32)
    steps += [("Softmax", ["p"], "s", {"axis": -1}), ("MatMul", ["s", "v"], "y", {})]
    return model_of(steps, {"x": (32, 64)}, {"y": (32, then)}, {"w": FIRST, "v": more})


def program_of(model: ModelProto, name: str) -> Program:
    return programs(model, machine(name))["layout"]


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids"])
@pytest.mark.parametrize("schedule", ["register", "connected"])
def test_a_plan_does_not_depend_on_what_was_planned_before(name: str, schedule: str) -> None:
    target = machine(name)
    memo = Memo()
    small, large = program_of(product(), name), program_of(product(12000), name)
    for program in (small, large, small):  # weights that a cache holds from run to run, and weights that none does
        assert make_plan(program, target, schedule, memo=memo) == make_plan(program, target, schedule)
