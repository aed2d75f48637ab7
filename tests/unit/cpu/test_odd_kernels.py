"""Plans of odd shapes on machines given by hand: what a vector leaves over, when a copy pays, who gets how much."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.cpu_stages import Step, model_of
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.target import MemoryLevel, Target, machine
from tilewright.tile_graph.plan.form import Plan

X86 = machine("emerald_rapids")
AVX2 = machine("avx2_desktop")
NEON = Target(
    "cpu", "cpu", "aarch64", units=2, vector_bytes=16, vector_registers=32, fma_rate=2e10,
    levels=(
        MemoryLevel("registers", 512, 16, 4e11),
        MemoryLevel("L1", 64 << 10, 64, 8e10),
        MemoryLevel("L2", 1 << 20, 64, 4.3e10),
        MemoryLevel("L3", 16 << 20, 64, 3.1e10, shared_by=2),
        MemoryLevel("DRAM", 1 << 40, 64, 2e10),
    ),
    kernel_cost=2e-7, lane_multiply=True, features=("asimd",), rates=(("fma_float32", 2e10),), fma_chains=4,
)  # fmt: skip


def planned(model: object, target: Target) -> Plan:
    plan = build(load(model, {}), target, Options(stop_after="plan")).plan  # type: ignore[arg-type]
    assert plan is not None
    return plan


def alone(image: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], **attributes: object) -> object:
    """A convolution whose input and result are the user's own."""
    steps: list[Step] = [("Conv", ["x", "w"], "y", attributes)]
    return model_of(steps, {"x": image}, {"y": out}, {"w": np.ones(weight, np.float32)})


@pytest.mark.parametrize("target", [NEON, X86, AVX2], ids=lambda t: t.name)
@pytest.mark.parametrize("channels, outputs, stride", [(17, 5, 2), (199, 3, 3)])
def test_no_vector_along_a_window_that_does_not_fill_it(
    target: Target, channels: int, outputs: int, stride: int
) -> None:
    """All of the window would be what is left over, and summed element by element."""
    size = (-(-33 // stride), -(-47 // stride))
    model = alone((1, channels, 33, 47), (outputs, channels, 3, 3), (1, outputs, *size), strides=[stride] * 2,
                  pads=[1, 1, 1, 1])  # fmt: skip
    nest = planned(model, target).kernels[-1].leaves[-1]
    assert nest.vector not in (None, "r1", "r2")


@pytest.mark.parametrize("kernel_cost", [2e-7, 5e-7, 1e-6])
def test_a_copy_that_is_predicted_to_pay_is_made(kernel_cost: float) -> None:
    """Few output channels over a padded image: also where the rule is undecided, and though Winograd's way would be
    faster than the sum without a copy."""
    model = alone((1, 17, 33, 47), (5, 17, 3, 3), (1, 5, 33, 47), pads=[1, 1, 1, 1])
    plan = planned(model, replace(NEON, kernel_cost=kernel_cost))
    assert [leaf.tensor for k in plan.kernels for leaf in k.leaves] == ["x_staged", "y"]


@pytest.mark.parametrize(("batch", "rows", "inner", "columns"), [(11, 96, 300, 160), (9, 509, 97, 67)])
def test_a_batch_that_does_not_divide_is_shared_out_evenly(batch: int, rows: int, inner: int, columns: int) -> None:
    """Another axis is cut as well: of tiles that are nearly whole, every unit gets as many as the others."""
    steps: list[Step] = [("MatMul", ["a", "b"], "y", {})]
    shapes = {"a": (batch, rows, inner), "b": (batch, inner, columns)}
    kernel = planned(model_of(steps, shapes, {"y": (batch, rows, columns)}), NEON).kernels[-1]
    tile = dict(kernel.cut)
    parts = []
    for axis, extent in enumerate((batch, rows, columns)):
        size = tile.get(f"o{axis}", extent)
        parts.append([min(size, extent - start) for start in range(0, extent, size)])
    points = [b * r * c for b, r, c in product(*parts)]
    first = sum(points[: len(points) // 2])
    assert max(first, sum(points) - first) < 1.01 * sum(points) / 2


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_few_rows_side_by_side_where_they_come_from_main_memory(columns: int) -> None:
    """Rows share what they are multiplied by; from main memory they are one stream, or slower streams."""
    heights = []
    for rows in (300, 100_000):
        steps: list[Step] = [("MatMul", ["a", "b"], "y", {})]
        constants = {"b": np.ones((128, columns), np.float32)}
        model = model_of(steps, {"a": (rows, 128)}, {"y": (rows, columns)}, constants)
        heights.append(dict(planned(model, NEON).kernels[-1].leaves[-1].register).get("o0", 1))
    assert heights[0] >= 4 and heights[1] <= 4 and heights[1] < heights[0]
