"""Register tiles fill the registers a machine has, and their text reads operands so that no accumulator is moved."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.cpu_stages import model_of, programs
from tilewright import Options
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.schedule.planner import make_plan
from tilewright.target import MemoryLevel, Target, machine
from tilewright.transform.layout.choose import choose_layouts

LEVELS = (
    MemoryLevel("registers", 512, 16, 4e11), MemoryLevel("L1", 65536, 64, 8e10), MemoryLevel("L2", 1 << 20, 64, 4.3e10),
    MemoryLevel("DRAM", 1 << 40, 64, 2e10),
)  # fmt: skip
# 32 registers of four lanes, multiplication by a lane
BY_LANES = Target("by hand", "cpu", "aarch64", 2, 16, 32, 2e10, LEVELS, 4e-7, lane_multiply=True, fma_chains=4)


@pytest.mark.parametrize("rows, inner, columns", [(100, 256, 1024), (50, 384, 384), (35, 64, 640)])
def test_a_vector_meets_all_rows_before_the_next_is_read(rows: int, inner: int, columns: int) -> None:
    """20 accumulators and 5 rows leave registers for two vectors, not for four."""
    weight = {"w": np.zeros((inner, columns), np.float32)}
    model = model_of([("MatMul", ["x", "w"], "y", {})], {"x": (rows, inner)}, {"y": (rows, columns)}, weight)
    made = build(load(model, {}), BY_LANES, Options(stop_after="source"))
    assert made.plan is not None
    (kernel,) = made.plan.kernels
    assert dict(kernel.leaves[0].register) == {"o0": 5, "o1": 16}
    (text,) = made.sources.values()
    products = re.findall(r"acc_\d_\d = \(acc_\d_\d \+ .*(x_\d+)\)\);", text)
    assert len(products) >= 4 * 4 * 5
    runs = [products[i : i + 5] for i in range(0, 4 * 4 * 5, 5)]
    assert all(len(set(run)) == 1 for run in runs) and len({run[0] for run in runs}) == len(runs)


def test_a_short_run_takes_a_whole_line() -> None:
    """Positions of 512 channels side by side in fours: a line of each is 32 KB, beside which a panel must fit."""
    weight = {"w": np.zeros((2048, 512, 1, 1), np.float32)}
    model = model_of([("Conv", ["x", "w"], "y", {})], {"x": (1, 512, 7, 7)}, {"y": (1, 2048, 7, 7)}, weight)
    (kernel,) = make_plan(choose_layouts(programs(model)["fold"], BY_LANES), BY_LANES).kernels
    (nest,) = kernel.leaves
    assert nest.vector == "o1"
    assert 512 * (64 + 4 * dict(nest.register)["o1"]) <= LEVELS[1].capacity


@pytest.mark.parametrize("name", ["emerald_rapids", "avx2_desktop", "neoverse_n1"])
@pytest.mark.parametrize("columns", [1000, 500, 1004])
def test_tiles_of_a_mean_do_not_cut_vectors_of_the_sums_before_it(name: str, columns: int) -> None:
    """1000 channels in four even parts are 250 each: their vectors would be put together of two panels of weights."""
    weight = {"w": np.zeros((columns, 512, 1, 1), np.float32)}
    steps = [("Conv", ["x", "w"], "c", {}), ("Relu", ["c"], "r", {}), ("GlobalAveragePool", ["r"], "y", {})]
    model = model_of(steps, {"x": (1, 512, 13, 13)}, {"y": (1, columns, 1, 1)}, weight)
    made = build(load(model, {}), machine(name), Options(stop_after="plan"))
    assert made.plan is not None
    (kernel,) = [k for k in made.plan.kernels if any(leaf.tensor == "r" for leaf in k.leaves)]
    (sums,) = [leaf for leaf in kernel.leaves if leaf.tensor == "r"]
    assert sums.vector == "o1"
    size = dict(kernel.sizes).get("t1", columns)
    assert size == columns or size % sums.lanes == 0
