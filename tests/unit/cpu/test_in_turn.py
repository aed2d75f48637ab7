"""Long epilogues run in a loop over a few vectors at a time; short ones are written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import CPU, model_of
from tilewright.backend import renderable
from tilewright.backend.cpu.machine_code import render
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import Alloc, Memory, statements
from tilewright.options import Options
from tilewright.runtime.source_files import files
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.text import plan_text

AVX512 = machine("emerald_rapids")


def product(function: str, rows: int = 29, columns: int = 48) -> ModelProto:
    weights = np.random.default_rng(0).standard_normal((40, columns)).astype(np.float32)
    steps = [("MatMul", ["x", "w"], "s", {}), (function, ["s"], "f", {}), ("Mul", ["f", "s"], "y", {})]
    return model_of(steps, {"x": (rows, 40)}, {"y": (rows, columns)}, {"w": weights})


def made(model: ModelProto, target: Target, **options: object) -> Artifact:
    return build(load(model, {}), target, Options(**options))  # type: ignore[arg-type]


def left(artifact: Artifact) -> list[str]:
    assert artifact.loops is not None
    found = [s.buffer for k in artifact.loops.kernels for s in statements(k.body) if isinstance(s, Alloc)]
    return [b.name for b in found if b.memory is Memory.SCRATCH and b.name.startswith("sums")]


def test_a_long_epilogue_is_written_once() -> None:
    artifact = made(product("Sigmoid"), AVX512, stop_after="source")
    assert artifact.plan is not None and "results 4 at a time" in plan_text(artifact.plan) and left(artifact)
    (text,) = artifact.sources.values()
    assert text.count("tw_sigmoid_") < 29 * 48 // 16


def test_a_short_one_is_written_out() -> None:
    assert not left(made(product("Relu"), AVX512, stop_after="source"))


@pytest.mark.parametrize("rows", [1, 5, 29, 64])
@pytest.mark.parametrize("columns", [7, 48, 50])
def test_results(rows: int, columns: int) -> None:
    made(product("Sigmoid", rows, columns), CPU, stop_after="loops", verify=True)


def test_kernels_share_files_of_some_length() -> None:
    kernels = [("a", "12"), ("b", "345"), ("c", "6"), ("d", "7")]
    assert list(files(kernels, 4)) == [("a", "12345"), ("c", "67")]
    assert list(files(kernels, 0)) == kernels


def test_a_function_that_is_called_all_over_is_called() -> None:
    steps = [("Sigmoid" if i % 2 else "Abs", [f"t{i}"], f"t{i + 1}", {}) for i in range(100)]
    artifact = made(model_of(steps, {"t0": (4, 64)}, {"t100": (4, 64)}, {}), AVX512, stop_after="source")
    assert "tw_call_sigmoid_4_v16f32(" in "".join(artifact.sources.values())


def test_equal_kernels_are_compiled_once() -> None:
    artifact = made(product("Relu"), AVX512, stop_after="source")
    assert artifact.loops is not None
    (kernel,) = artifact.loops.kernels
    twice = replace(artifact.loops, kernels=(kernel, replace(kernel, name="again")))
    assert f"{kernel.name}(buffers, extents, tile, scratch)" in render(renderable(twice, AVX512), AVX512)["again"]
