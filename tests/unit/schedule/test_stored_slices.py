"""A result that others want whole is written whole, also by a kernel that goes on with a part of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu_stages import evaluated, lowered, model_of, programs
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan


@pytest.mark.parametrize("name", ["neoverse_n1", "avx2_desktop", "emerald_rapids"])
def test_columns_that_only_others_read_are_written(name: str) -> None:
    """The next node reads eight columns of twenty-four, through two slices that begin apart by a clamped index."""
    target, rng = machine(name), np.random.default_rng(0)
    ends = {"a0": np.array([8]), "a1": np.array([10]), "b1": np.array([16]), "axis": np.array([1])}
    model = model_of(
        [
            ("MatMul", ["x", "w"], "h", {}),
            ("Relu", ["h"], "y", {}),
            ("Slice", ["y", "a0", "a1", "axis"], "first", {}),
            ("Neg", ["first"], "turned", {}),
            ("Slice", ["y", "a1", "b1", "axis"], "second", {}),
            ("Concat", ["turned", "second"], "c", {"axis": 1}),
        ],
        {"x": (11, 16)},
        {"y": (11, 24), "c": (11, 8)},
        {"w": rng.standard_normal((16, 24)).astype(np.float32), **ends},
    )
    program = programs(model, target)["layout"]
    inputs = {"x": rng.standard_normal((11, 16)).astype(np.float32)}
    found, expected = lowered(program, target=target).on_loops(inputs), evaluated(program, inputs)
    for output in ("y", "c"):
        np.testing.assert_allclose(found[output], expected[output], rtol=1e-5, atol=1e-5)


def test_a_part_of_a_concat_needs_the_others_not() -> None:
    """A kernel goes on with the first rows of a Concat, all of one product; it does not wait for the other one."""
    target, rng = machine("neoverse_n1"), np.random.default_rng(1)
    ends = {"a0": np.array([0]), "a1": np.array([8]), "b1": np.array([16]), "axis": np.array([0])}
    model = model_of(
        [
            ("MatMul", ["x", "v"], "a", {}),
            ("MatMul", ["x", "w"], "b", {}),
            ("Concat", ["a", "b"], "c", {"axis": 0}),
            ("Slice", ["c", "a0", "a1", "axis"], "first", {}),
            ("Slice", ["c", "a1", "b1", "axis"], "second", {}),
            ("Softmax", ["first"], "y", {"axis": 0}),
            ("Sigmoid", ["second"], "z", {}),
        ],
        {"x": (8, 32)},
        {"y": (8, 40), "z": (8, 40)},
        {n: rng.standard_normal((32, 40)).astype(np.float32) for n in ("v", "w")} | ends,
    )
    program = programs(model, target)["layout"]
    plan = make_plan(program, target)
    check_plan(plan, program, target)
    readers = [k for k, _ in plan.launches() if any("c" in leaf.composed for leaf in k.leaves)]
    assert [("a" in k.held, "b" in k.held) for k in readers] == [(True, False), (False, True)]
