"""Sums of products in float32 on a GPU: some steps are copied while others are used, and mean what they should."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.gpu_launch import grid_of, source_of
from tests.gpu_stages import convolution, gemm, graph, matmul, on_emulator, on_loops, random_inputs
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.meaning.interpret import evaluate
from tilewright.options import Options
from tilewright.render.cuda import launch_shape, written_params
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import Contract, EmulatedModule
from tilewright.target import machine
from tilewright.tile_graph.plan.form import PADDED, Tile
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.tile_graph.plan.text import plan_text


def halves(m: int, k: int, n: int) -> ModelProto:
    """Operands that are converted as they are read: nothing to copy by itself."""
    kinds = {"a": TensorProto.FLOAT16, "b": TensorProto.FLOAT16}
    nodes = [("Cast", ["a"], "x", {"to": TensorProto.FLOAT}), ("Cast", ["b"], "y", {"to": TensorProto.FLOAT}),
             ("Mul", ["x", "x"], "z", {}), ("MatMul", ["z", "y"], "o", {})]  # fmt: skip
    return graph(nodes, [("a", (m, k)), ("b", (k, n))], [("o", (m, n))], kinds)


# what is asked of them: whole steps, ends of rows and sums, operands that lie either way, several rounds of threads
CASES: dict[str, ModelProto] = {
    "whole": matmul(64, 96, 64),
    "cut": matmul(40, 90, 37),
    "turned": gemm(33, 75, 50),
    "windows": convolution((1, 8, 9, 9), 16, 3),
    "computed": halves(32, 80, 32),
}


def compiled(name: str, cache_dir: Path) -> Artifact:
    return build(load(CASES[name]), machine("cuda-emulated"), Options(target="cuda-emulated", cache_dir=cache_dir))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_steps_mean_the_product(name: str, kernel_cache: Path) -> None:
    artifact = compiled(name, kernel_cache)
    assert artifact.program is not None
    inputs = random_inputs(artifact)
    (expected,) = (evaluate(artifact.program, inputs)[t.name] for t in artifact.program.outputs)
    for found in (on_loops(artifact, inputs), on_emulator(artifact, inputs)):
        (value,) = found.values()
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))


def test_several_steps_are_under_way(kernel_cache: Path) -> None:
    artifact = compiled("whole", kernel_cache)
    assert artifact.plan is not None
    (leaf,) = artifact.plan.kernels[0].leaves
    options = leaf.options(ThreadForm)
    assert options.step and options.at_once == 3 and " 3 at once" in plan_text(artifact.plan)
    (text,) = artifact.sources.values()
    loop = text[text.index("for (int step") :]
    # the copies of a later step, then the products of this one; one barrier
    assert loop.index("copy_async") < loop.index("acc(") and loop.count("tw::barrier()") == 1
    plan = compiled("computed", kernel_cache).plan
    assert plan is not None
    (computed,) = (o for k in plan.kernels for o in (x.options(ThreadForm) for x in k.leaves) if o.step)
    assert computed.at_once == 1


@pytest.mark.parametrize(("what", "instead"), [(r"tw::wait<1>\(\);", "tw::wait<2>();"), (r"tw::barrier\(\);", "")])
def test_faults_are_reported(what: str, instead: str, kernel_cache: Path) -> None:
    artifact = compiled("whole", kernel_cache)
    assert artifact.loops is not None
    (kernel,) = artifact.loops.kernels
    text, found = re.subn(what, instead, source_of(kernel))
    assert found
    module = EmulatedModule({kernel.name: text}, Cache(kernel_cache), optimise=0)
    arrays = [np.ones([int(e) for e in p.shape], np.float32) for p in kernel.params]
    contract = Contract(writes_all=tuple(p.name for p in written_params(kernel)))
    assert module.inspect(kernel.name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes,
                          arrays, contract)  # fmt: skip


def streamed(rows: int, width: int) -> ModelProto:
    """Attention: tiles of rows are multiplied, reduced and multiplied again."""
    nodes = [("Transpose", ["k"], "kt", {"perm": [0, 2, 1]}), ("MatMul", ["q", "kt"], "s", {}),
             ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})]  # fmt: skip
    shape = (2, rows, width)
    return graph(nodes, [("q", shape), ("k", shape), ("v", shape)], [("o", shape)])


@pytest.mark.parametrize(("rows", "width"), [(160, 32), pytest.param(256, 64, marks=pytest.mark.slow)])
def test_threads_that_read_rows_of_a_tile_find_them_in_other_banks(rows: int, width: int, kernel_cache: Path) -> None:
    """Rows of whole bank lines are a packet longer, and the answers the same."""
    options = Options(target="cuda-emulated", cache_dir=kernel_cache, schedule="connected")
    artifact = build(load(streamed(rows, width)), machine("cuda-emulated"), options)
    assert artifact.plan is not None and artifact.loops is not None and artifact.program is not None
    padded = {h.tensor for k in artifact.plan.kernels for t in k.walk() if isinstance(t, Tile) for h in t.holds
              if h.layout == PADDED}  # fmt: skip
    assert padded
    inputs = random_inputs(artifact)
    (expected,) = (evaluate(artifact.program, inputs)[t.name] for t in artifact.program.outputs)
    for found in (on_loops(artifact, inputs), on_emulator(artifact, inputs)):
        (value,) = found.values()
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=5e-5)
