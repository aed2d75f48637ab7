"""A described machine whose warps have 64 threads is planned, lowered and written out; what it computes is right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto

from tests.gpu_stages import attention, gemm, on_loops, random_inputs, reduction
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.meaning.interpret import evaluate
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.tile_graph.plan.text import plan_text

WARP = 64
# tensor cores are instructions of warps of 32
PLAIN = tuple(r for r in machine("h200").rates if r[0].startswith("fma"))
WIDE = replace(machine("h200"), name="wide", warp=WARP, max_threads=1024, rates=PLAIN)


def made(model: ModelProto) -> Artifact:
    return build(load(model), WIDE, Options(stop_after="source"))


def lanes(plan: Plan) -> list[Tile]:
    return [n for kernel in plan.kernels for n in kernel.walk() if isinstance(n, Tile) and n.over == "lanes"]


@pytest.mark.parametrize(
    "model",
    [reduction("ReduceMax", (5, 300), (1,)), reduction("ReduceMax", (3, 5000), (1,)),
     reduction("ReduceMax", (700, 6), (0,)), gemm(30, 70, 50), attention(33, 20)],
    ids=["rows", "long rows", "columns", "product", "attention"],
)  # fmt: skip
def test_results_are_those_of_the_program(model: ModelProto) -> None:
    artifact = made(model)
    assert artifact.plan is not None and artifact.program is not None and artifact.sources
    assert all(tile.warp == WARP and tile.count % WARP == 0 for tile in lanes(artifact.plan))
    inputs = random_inputs(artifact)
    expected = evaluate(artifact.program, inputs)
    for name, value in on_loops(artifact, inputs).items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=2e-5)


def test_a_row_is_shared_by_a_whole_warp() -> None:
    """Sixty-four threads take one row and meet by exchanges up to 32 lanes apart."""
    artifact = made(reduction("ReduceMax", (5, 300), (1,)))
    assert artifact.plan is not None
    (leaf,) = artifact.plan.kernels[0].leaves
    assert leaf.options(ThreadForm).split == WARP
    (text,) = artifact.sources.values()
    assert "shuffle_xor" in text and ", 32);" in text
    assert f"in warps of {WARP}" in plan_text(artifact.plan)
    assert Plan.from_json(artifact.plan.to_json()) == artifact.plan


def test_warps_of_another_machine_are_refused() -> None:
    artifact = made(reduction("ReduceMax", (5, 300), (1,)))
    assert artifact.plan is not None and artifact.program is not None
    with pytest.raises(InternalError, match=f"threads run in warps of {WARP}, the target's are of 32"):
        check_plan(artifact.plan, artifact.program, machine("h200"))
