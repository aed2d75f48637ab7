"""Columns cut out of wide rows: copied side by side where the first cache could not hold them, composed elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import evaluated, lowered, model_of, programs, random_inputs
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.target.machine import usual_costs

N1 = machine("neoverse_n1")


def with_first_cache(architecture: str, kilobytes: int) -> Target:
    levels = (N1.registers, replace(N1.nearest, capacity=kilobytes * 1024), *N1.levels[2:])
    return replace(N1, architecture=architecture, levels=levels, **usual_costs(architecture, kilobytes * 1024))


FOUR_WAYS = with_first_cache("aarch64", 64)
PAGE_WAYS = with_first_cache("x86_64", 48)


def heads(rows: int, length: int, count: int, size: int) -> ModelProto:
    """Weights over positions times values, the values of each head cut out of rows that hold all heads."""
    shape = np.array([1, length, count, size], np.int64)
    steps = [
        ("Reshape", ["v", "shape"], "r", {}), ("Transpose", ["r"], "t", {"perm": [0, 2, 1, 3]}),
        ("MatMul", ["p", "t"], "o", {}),
    ]  # fmt: skip
    ports = {"p": (1, count, rows, length), "v": (1, length, count * size)}
    return model_of(steps, ports, {"o": (1, count, rows, size)}, {"shape": shape})


@pytest.mark.parametrize("target", [FOUR_WAYS, PAGE_WAYS], ids=["four ways", "ways of a page"])
@pytest.mark.parametrize(
    ("rows", "length", "count", "size", "copied"),
    [
        (128, 128, 12, 64, True),  # lines 3072 bytes apart fall on a sixteenth of four ways
        (90, 120, 8, 64, True),  # 2048 bytes: on an eighth
        (128, 128, 1, 64, False),  # they fill their rows: nothing lies between them
        (33, 24, 12, 64, False),  # so few that they stay
        (128, 40, 5, 67, False),  # 1340 bytes: lines fall everywhere
        (4, 128, 12, 64, False),  # used four times: a copy would cost as much
    ],
)
def test_where_columns_are_copied(
    rows: int, length: int, count: int, size: int, copied: bool, target: Target
) -> None:
    program = programs(heads(rows, length, count, size), N1)["layout"]
    plan = make_plan(program, target, "register")
    assert [n.tensor for k in plan.kernels for n in k.leaves] == (["t", "o"] if copied else ["o"])


def test_copied_columns_give_the_same(kernel_cache: Path) -> None:
    program = programs(heads(37, 130, 8, 32), N1)["layout"]
    inputs = random_inputs(program)
    low = lowered(program, target=N1)
    assert any(n.tensor == "t" for k in low.plan.kernels for n in k.leaves)
    wanted = evaluated(program, inputs, wide=True)["o"]
    np.testing.assert_allclose(low.natively(inputs, kernel_cache)["o"], wanted, rtol=2e-4, atol=2e-5)
