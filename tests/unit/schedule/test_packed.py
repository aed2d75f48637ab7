"""Plans that share constants with another one read them as that has them packed, where it costs little."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu_stages import model_of, programs
from tests.trees import loops_agree
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.tensor import Layout
from tilewright.schedule.planner import make_plan
from tilewright.target import machine

WEIGHTS = np.random.default_rng(0).standard_normal((64, 384)).astype(np.float32)


def product(rows: int, name: str, weights: np.ndarray = WEIGHTS) -> Program:
    depth, width = weights.shape
    steps = [("MatMul", ["x", "w"], "y", {})]
    model = model_of(steps, {"x": (rows, depth)}, {"y": (rows, width)}, {"w": weights})
    return programs(model, machine(name))["layout"]


@pytest.mark.parametrize("name", ["emerald_rapids_avx512", "avx2_desktop", "neoverse_n1"])
def test_one_row_reads_the_panels_of_many(name: str) -> None:
    target = machine(name)
    many, one = product(96, name), product(1, name)
    packed = dict(make_plan(many, target).layouts)
    own, shared = make_plan(one, target), make_plan(one, target, packed=packed)
    assert dict(own.layouts)["w"] != packed["w"] and dict(shared.layouts)["w"] == packed["w"]
    (leaf,) = (leaf for kernel in shared.kernels for leaf in kernel.leaves if leaf.core == "y")
    (panel,) = (part.size for part in packed["w"].order if part.size is not None)
    width = dict(leaf.register)[leaf.vector or ""]
    assert width % panel == 0 or panel % width == 0  # no register tile begins inside a panel and ends in another
    loops_agree(one, shared, target)


def test_not_where_it_costs_much() -> None:
    """Rows of dot products are not what a large product reads."""
    target, program = machine("emerald_rapids_avx512"), product(96, "emerald_rapids_avx512")
    given = {"w": Layout.permuted((1, 0))}
    assert make_plan(program, target, packed=given) == make_plan(program, target)


def test_a_layout_of_another_shape_is_not_taken() -> None:
    target = machine("emerald_rapids_avx512")
    packed = dict(make_plan(product(96, "emerald_rapids_avx512"), target).layouts)
    narrow = product(1, "emerald_rapids_avx512", WEIGHTS[:, :20].copy())
    assert make_plan(narrow, target, packed=packed) == make_plan(narrow, target)
