"""Seeded random feasible plans of small operators: each passes the check of plans and gives what the interpreter gives.

A failure prints its seed; `pytest tests/fuzz/test_plans.py -k "NAME and SEED"` runs that one again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import CPU, error, evaluated, lowered, model_of, programs, random_inputs
from tests.fuzz.programs import random_arrays
from tests.fuzz.seeds import seeds
from tests.fuzz.test_programs import compare, prepared
from tilewright.ir.forms.compute import Program
from tilewright.schedule.planner import make_plan
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.plan.text import plan_text
from tilewright.tune.groups import find_groups, with_choices

RNG = np.random.default_rng(5)


def weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def conv(
    channels: int, outputs: int, size: tuple[int, int], window: int, groups: int = 1, **more: object
) -> ModelProto:
    pads = [window // 2] * 4
    step = ("Conv", ["x", "w"], "y", {"kernel_shape": [window] * 2, "pads": pads, "group": groups, **more})
    relu = ("Relu", ["y"], "z", {})
    shape = [1, channels, *size]
    stride = more.get("strides", [1, 1])
    result = [1, outputs, *(-(-n // s) for n, s in zip(size, stride, strict=True))]  # type: ignore[call-overload]
    kernel = weights(outputs, channels // groups, window, window)
    return model_of([step, relu], {"x": shape}, {"z": result}, {"w": kernel})


MODELS: dict[str, ModelProto] = {
    "matmul": model_of([("MatMul", ["x", "w"], "y", {})], {"x": [13, 37]}, {"y": [13, 29]}, {"w": weights(37, 29)}),
    "vector": model_of([("MatMul", ["x", "w"], "y", {})], {"x": [1, 67]}, {"y": [1, 31]}, {"w": weights(67, 31)}),
    "batched": model_of([("MatMul", ["x", "w"], "y", {})], {"x": [3, 7, 11], "w": [3, 11, 17]}, {"y": [3, 7, 17]}),
    "transposed": model_of([("Gemm", ["x", "w"], "y", {"transA": 1, "transB": 1})], {"x": [19, 11], "w": [13, 19]},
                           {"y": [11, 13]}),
    "conv": conv(5, 11, (7, 13), 3),
    "strided": conv(3, 8, (13, 9), 3, strides=[2, 2]),
    "grouped": conv(6, 10, (7, 5), 3, groups=2),
    "depthwise": conv(13, 13, (7, 11), 3, groups=13),
    "softmax": model_of([("Softmax", ["x"], "y", {"axis": 1})], {"x": [5, 17, 7]}, {"y": [5, 17, 7]}),
    "mean": model_of([("ReduceMean", ["x"], "y", {"axes": [0, 2]})], {"x": [5, 19, 11]}, {"y": [1, 19, 1]}),
    "move": model_of([("Transpose", ["x"], "y", {"perm": [2, 0, 1]}), ("Tanh", ["y"], "z", {})], {"x": [7, 13, 5]},
                     {"z": [5, 7, 13]}),
}  # fmt: skip
SEEDS, OFTEN = 12, 6
QUICK = 3


def random_plan(program: Program, plan: Plan, rng: np.random.Generator) -> Plan:
    """Every kernel of the plan run some other way."""
    choices = []
    for group in find_groups(program, plan, CPU):
        drawn = group.variants[0].random(1, rng)
        choices += [(group, kernel) for kernel in drawn]
    assert choices
    return with_choices(program, plan, choices)


def cases() -> list[object]:
    return [
        pytest.param(name, *seed.values, marks=seed.marks, id=f"{name}-{seed.values[0]}")
        for name in MODELS
        for seed in seeds(SEEDS, OFTEN, range(QUICK))
    ]


@pytest.mark.parametrize(("name", "seed"), cases())
def test_random_plans_on_loops(name: str, seed: int) -> None:
    program = programs(MODELS[name])["layout"]
    schedule = "register" if seed % 2 else "connected"
    plan = random_plan(program, make_plan(program, CPU, schedule), np.random.default_rng(seed))
    check_plan(plan, program)
    inputs = random_inputs(program, seed)
    wanted = evaluated(program, inputs)
    found = lowered(program, plan=plan).on_loops(inputs)
    for output, array in wanted.items():
        assert error(found[output], array) < 1e-5, plan_text(plan)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_as_machine_code(name: str, kernel_cache: Path) -> None:
    program = programs(MODELS[name])["layout"]
    plan = random_plan(program, make_plan(program, CPU, "register"), np.random.default_rng(100))
    inputs = random_inputs(program, 1)
    wanted = evaluated(program, inputs)
    found = lowered(program, plan=plan).natively(inputs, kernel_cache)
    for output, array in wanted.items():
        assert error(found[output], array) < 1e-5, plan_text(plan)


@pytest.mark.parametrize("seed", seeds(60, 24, range(6)))
def test_random_plans_of_random_programs(seed: int) -> None:
    program = prepared(seed)
    plan = random_plan(program, make_plan(program, CPU, "connected"), np.random.default_rng([seed, 3]))
    check_plan(plan, program)
    inputs = random_arrays(program, seed)
    compare(program, inputs, lowered(program, plan=plan).on_loops(inputs))
