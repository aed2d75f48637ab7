"""Small graphs through the GPU's stages: Loops and the emulated kernels mean what the Program means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from tests.cpu_stages import model_of
from tests.gpu_stages import (
    GRAPHS,
    attention,
    compiled,
    graph,
    on_emulator,
    on_loops,
    random_inputs,
    softmax_of_matmul,
)
from tilewright.backend import backend_for
from tilewright.backend.gpu import machine_code
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import Alloc, Barrier, For, ForKind, Memory, statements
from tilewright.ir.meaning.interpret import evaluate
from tilewright.lower.program import lower_program
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.runtime import nvrtc
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.transform.clean.fold import fold_constants

SCHEDULES = ("none", "connected")


@pytest.mark.sample(8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", GRAPHS)
def test_graph(name: str, schedule: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "cache"
    artifact = compiled(GRAPHS[name], schedule, cache)
    inputs = random_inputs(artifact)
    assert artifact.program is not None
    means = evaluate(artifact.program, inputs)
    loops, emulated = on_loops(artifact, inputs), on_emulator(artifact, inputs)
    for tensor, port in zip(artifact.program.outputs, artifact.outputs, strict=True):
        expected = means[tensor.name]
        scale = float(np.abs(expected).max()) or 1.0
        np.testing.assert_allclose(loops[port.name], expected, rtol=2e-5, atol=2e-6 * scale, err_msg="Loops")
        np.testing.assert_allclose(emulated[port.name], expected, rtol=2e-5, atol=2e-6 * scale, err_msg="emulator")


@pytest.mark.parametrize("kind", (TensorProto.FLOAT16, TensorProto.DOUBLE))
def test_other_types(kind: int, kernel_cache: Path) -> None:
    model = graph(
        [("MatMul", ["a", "b"], "s", {}), ("Softmax", ["s"], "o", {"axis": -1})],
        [("a", (33, 40)), ("b", (40, 24))], [("o", (33, 24))], dict.fromkeys("abso", kind),
    )  # fmt: skip
    artifact = compiled(model, "connected", kernel_cache)
    inputs = random_inputs(artifact)
    assert artifact.program is not None
    expected = evaluate(artifact.program, inputs)[artifact.program.outputs[0].name]
    scale = 2e-3 if kind == TensorProto.FLOAT16 else 1e-12
    np.testing.assert_allclose(on_emulator(artifact, inputs)["o"], expected, rtol=scale, atol=scale)


def test_a_division_by_a_number_is_rounded_as_divisions_are(kernel_cache: Path) -> None:
    """In a few instructions, of infinities and of what is no number too."""
    by = {"c": np.float32(np.sqrt(2)), "d": np.float32(-3e-5), "e": np.float32(4)}
    steps = [("Div", ["a", "c"], "p", {}), ("Div", ["a", "d"], "q", {}), ("Div", ["a", "e"], "r", {})]
    model = model_of(steps, {"a": (4099,)}, dict.fromkeys("pqr", (4099,)), {n: np.array(v) for n, v in by.items()})
    artifact = compiled(model, "connected", kernel_cache)
    sizes = 10.0 ** (np.arange(4099) % 60 - 30)
    given = (np.random.default_rng(0).standard_normal(4099) * sizes).astype(np.float32)
    given[:5] = [np.inf, -np.inf, np.nan, 0.0, 3e38]
    with np.errstate(over="ignore"):
        expected = [given / by[name] for name in "cde"]
    found = on_emulator(artifact, {"a": given})
    for name, wanted in zip("pqr", expected, strict=True):
        np.testing.assert_array_equal(found[name], wanted)
    text = "".join(artifact.sources.values())
    assert text.count("tw::divided(") == 2 and "/ 4.0f" in text


def test_what_an_epilogue_reads_is_asked_for_before_the_sum() -> None:
    """A bias once, by as many threads as it has packets; what differs from row to row line by line."""
    weights = {"w": np.ones((256, 128), np.float32), "c": np.ones(128, np.float32)}
    steps = [("MatMul", ["a", "w"], "m", {}), ("Add", ["m", "c"], "n", {}), ("Add", ["n", "z"], "o", {})]
    model = model_of(steps, {"a": (96, 256), "z": (96, 128)}, {"o": (96, 128)}, weights)
    options = Options(target="h200", precision="float16", stop_after="source")
    (source,) = build(load(model, {}), machine("h200"), options).sources.values()
    assert source.count("tw::prefetch(") == 2 and source.index("tw::prefetch(") < source.index("tw::copy_async")


@pytest.mark.parametrize("length", (77, 300))
def test_streamed_attention(length: int, kernel_cache: Path) -> None:
    """Blocks of the keys, the last one cut; the state carried in shared memory."""
    program = fold_constants(lower(load(attention(length, 40, 1), {})))
    target = machine("cuda-emulated")
    plan = make_plan(program, target, "connected", streaming="always")
    assert plan.kernels[-1].stream is not None
    loops = lower_program(program, plan, backend_for(target).lower_kernel)
    sources = machine_code.render(loops, target)
    runner = machine_code.load(
        sources, loops, program, plan, target, Options(target="cuda-emulated", cache_dir=kernel_cache)
    )
    rng = np.random.default_rng(0)
    arrays = {t.name: rng.standard_normal([int(e) for e in t.shape]).astype(np.float32) for t in program.inputs}
    expected = evaluate(program, arrays)[program.outputs[0].name]
    output = np.empty_like(expected)
    runner.run(list(arrays.values()), [output])
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-6)


# in float32, 1000 rows of 64 are two kernels, which took 50 us on an H200 where one took 55
@pytest.mark.parametrize(("length", "head"), ((77, 40), (77, 64), (128, 40), (128, 64), (1000, 40)))
def test_attention_is_one_kernel(length: int, head: int, kernel_cache: Path) -> None:
    artifact = compiled(attention(length, head), "connected", kernel_cache, stop_after="loops")
    assert artifact.plan is not None and artifact.loops is not None
    assert len(artifact.plan.kernels) == 1
    kernel = artifact.loops.kernels[0]
    found = list(statements(kernel.body))
    assert any(isinstance(s, Alloc) and s.buffer.memory is Memory.SHARED for s in found)
    assert any(isinstance(s, Barrier) for s in found)
    assert [s.kind for s in found if isinstance(s, For) and s.kind in (ForKind.BLOCK, ForKind.THREAD)] == [
        ForKind.BLOCK, ForKind.THREAD,
    ]  # fmt: skip


@pytest.mark.parametrize("size", (77, 128, 1000))
def test_softmax_of_matmul_is_one_kernel(size: int, kernel_cache: Path) -> None:
    artifact = compiled(softmax_of_matmul(size, 64, size), "connected", kernel_cache, stop_after="plan")
    assert artifact.plan is not None and len(artifact.plan.kernels) == 1


def test_a_contraction_is_staged_and_a_row_reduction_is_shared(kernel_cache: Path) -> None:
    plan = compiled(softmax_of_matmul(512, 64, 512), "none", kernel_cache, stop_after="plan").plan
    assert plan is not None
    nests = {n.tensor: n for k in plan.kernels for n in k.leaves}
    product, largest = nests["s"], next(n for t, n in nests.items() if "max" in t)
    assert product.options(ThreadForm).step > 0 and product.register and product.vector == "o1"
    assert largest.options(ThreadForm).split == 32 and largest.vector == "r0"


def test_two_compilations_give_the_same_text(kernel_cache: Path) -> None:
    first = compiled(attention(13, 5), "connected", kernel_cache, stop_after="source").sources
    assert first == compiled(attention(13, 5), "connected", kernel_cache, stop_after="source").sources


@pytest.mark.parametrize("name", ("matmul", "attention_77", "argmax_row", "convolution"))
def test_nvrtc_takes_the_source(name: str, kernel_cache: Path) -> None:
    for source in compiled(GRAPHS[name], "connected", kernel_cache, stop_after="source").sources.values():
        for architecture in ("sm_80", "sm_90"):
            assert nvrtc.compile_to_cubin(source, architecture).code[:4] == b"\x7fELF"
