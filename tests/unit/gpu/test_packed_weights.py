"""Weights of 4 and 8 bits on a GPU: packed in memory, unpacked on the way to the multiply, with the same results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.gpu_launch import source_of
from tests.gpu_stages import on_emulator, on_loops, random_inputs
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import Instruction, statements
from tilewright.ir.meaning.interpret import evaluate
from tilewright.options import Options
from tilewright.runtime import nvrtc
from tilewright.target import machine

HALF = TensorProto.FLOAT16
_RNG = np.random.default_rng(2)


def model(node: object, rows: tuple[int, ...], depth: int, columns: int, known: Mapping[str, np.ndarray]) -> ModelProto:
    nodes = node if isinstance(node, list) else [node]
    given = helper.make_tensor_value_info("x", HALF, [*rows, depth])
    result = helper.make_tensor_value_info("y", HALF, [*rows, columns])
    initial = [numpy_helper.from_array(a, n) for n, a in known.items()]
    graph = helper.make_graph(nodes, "packed", [given], [result], initial)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=10)


def scales(*shape: int) -> np.ndarray:
    return (0.01 + _RNG.random(shape) / 40).astype(np.float16)


def blocked(rows: tuple[int, ...], depth: int, columns: int, bits: int, block: int, zeros: bool = False) -> ModelProto:
    blocks = depth // block
    known = {"w": _RNG.integers(0, 256, (columns, blocks, block * bits // 8)).astype(np.uint8),
             "s": scales(columns * blocks)}  # fmt: skip
    if zeros:
        known["z"] = _RNG.integers(0, 256, columns * -(-blocks * bits // 8)).astype(np.uint8)
    node = helper.make_node("MatMulNBits", ["x", *known], ["y"], domain="com.microsoft", K=depth, N=columns, bits=bits,
                            block_size=block)  # fmt: skip
    return model(node, rows, depth, columns, known)


def by_channel(rows: int, depth: int, columns: int) -> ModelProto:
    """Signed bytes, multiplied out in front of a plain product."""
    known = {"w": _RNG.integers(-128, 128, (depth, columns)).astype(np.int8), "s": scales(columns)}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["v"], axis=1),
             helper.make_node("MatMul", ["x", "v"], ["y"])]  # fmt: skip
    return model(nodes, (rows,), depth, columns, known)


def step_by_step(rows: int, depth: int, columns: int, block: int, lowest: int, turned: bool = False) -> ModelProto:
    """half(code) - zero, times a scale, in 16 bits each, by blocks of the sum: as modules of PyTorch unpack weights."""
    shape = (columns, depth // block, block)
    one_each = (*shape[:2], 1)
    known = {"w": _RNG.integers(lowest, lowest + 16, shape).astype(np.int8), "s": scales(*one_each),
             "z": _RNG.integers(-8, 8, one_each).astype(np.float16), "whole": np.array([columns, depth])}  # fmt: skip
    make = helper.make_node
    nodes = [make("Cast", ["w"], ["halves"], to=HALF), make("Sub", ["halves", "z"], ["less"]),
             make("Mul", ["less", "s"], ["scaled"]), make("Reshape", ["scaled", "whole"], ["v"]),
             *([make("Transpose", ["v"], ["t"]), make("MatMul", ["x", "t"], ["y"])] if turned
               else [make("Gemm", ["x", "v"], ["y"], transB=1)])]  # fmt: skip
    return model(nodes, (rows,), depth, columns, known)


def scaled_behind(rows: int, depth: int, columns: int) -> ModelProto:
    known = {"w": _RNG.integers(-128, 128, (columns, depth)).astype(np.int8), "s": scales(columns)}
    nodes = [helper.make_node("Cast", ["w"], ["v"], to=HALF), helper.make_node("Gemm", ["x", "v"], ["p"], transB=1),
             helper.make_node("Mul", ["p", "s"], ["y"])]  # fmt: skip
    return model(nodes, (rows,), depth, columns, known)


# a model, and bytes of its weights' codes
ON_CORES: Mapping[str, tuple[ModelProto, int]] = {
    "rows": (blocked((16,), 256, 64, 4, 32, zeros=True), 256 * 64 // 2),
    "bytes": (blocked((1,), 256, 40, 8, 32), 256 * 40),
    "one_row": (blocked((1,), 256, 48, 4, 32), 256 * 48 // 2),
    "zeros": (blocked((1, 1), 256, 41, 4, 64, zeros=True), 256 * 41 // 2),
    "bytes_and_zeros": (blocked((5,), 512, 40, 8, 16, zeros=True), 512 * 40),
    "by_channel": (by_channel(12, 512, 57), 512 * 57),
    "steps": (step_by_step(1, 256, 40, 32, -8), 256 * 40 // 2),
    "scaled_behind": (scaled_behind(3, 256, 40), 256 * 40),
    "odd_rows": (blocked((2, 3), 512, 41, 4, 64, zeros=True), 512 * 41 // 2),
    "long_blocks": (blocked((9,), 768, 40, 4, 128), 768 * 40 // 2),
    "many_rows": (blocked((29,), 384, 56, 4, 32), 384 * 56 // 2),
    "steps_turned": (step_by_step(12, 256, 56, 64, 0, turned=True), 256 * 56 // 2),
}
# sums that are no whole parts of such products
ON_THREADS: Mapping[str, tuple[ModelProto, int]] = {
    "short": (blocked((1,), 288, 56, 4, 32), 288 * 56 // 2),
    "short_zeros": (blocked((1, 1), 320, 41, 4, 64, zeros=True), 320 * 41 // 2),
    "short_bytes": (blocked((1,), 288, 40, 8, 32), 288 * 40),
    "short_columns": (by_channel(1, 288, 56), 288 * 56),
    "short_steps": (step_by_step(1, 288, 56, 32, -8), 288 * 56 // 2),
}
EVERY = {**ON_CORES, **ON_THREADS}
COMMON = ("rows", "bytes", "one_row", "by_channel", "short", "short_zeros")
WIDE = {"more_rows": blocked((33,), 128, 64, 4, 32), "odd_sum": blocked((16,), 96, 64, 4, 32)}


@cache
def compiled(name: str) -> Artifact:
    options = Options(target="cuda-emulated", stop_after="loops")
    return build(load(model_of(name), {}), machine("cuda-emulated"), options)


def model_of(name: str) -> ModelProto:
    return WIDE[name.removeprefix("wide_")] if name.startswith("wide_") else EVERY[name][0]


def assert_meant(name: str, found: np.ndarray) -> None:
    """Against the model as it says, every weight written out: sums are taken in another order."""
    options = Options(target="cuda-emulated", stop_after="program")
    plain = build(load(model_of(name), {}), machine("cuda-emulated"), options).program
    assert plain is not None
    expected = np.asarray(evaluate(plain, random_inputs(compiled(name)))[plain.outputs[0].name]).astype(np.float32)
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=2e-3 * float(np.abs(expected).max()))


def marked(name: str) -> object:
    return name if name in COMMON else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [marked(n) for n in EVERY])
def test_packed_weights_mean_the_product(name: str) -> None:
    artifact = compiled(name)
    assert artifact.program is not None and artifact.loops is not None and artifact.plan is not None
    sizes = {t.name: a.nbytes for t, a in artifact.program.constants.items()}
    codes = EVERY[name][1]
    assert codes in sizes.values() and sum(sizes.values()) <= 1.6 * codes, sizes
    unpacking = "unpack_codes" if name in ON_CORES else "unpack8"
    made = [s.name for s in statements(artifact.loops.kernels[0].body) if isinstance(s, Instruction)]
    assert any(n.startswith(unpacking) for n in made)
    on_cores = [leaf.instruction for k in artifact.plan.kernels for leaf in k.leaves] == ["mma_float16"]
    assert on_cores == (name in ON_CORES)
    (found,) = on_loops(artifact, random_inputs(artifact)).values()
    assert_meant(name, found)


@pytest.mark.parametrize("kind", WIDE)
def test_others_read_weights_written_out(kind: str) -> None:
    """Many rows would unpack the same weights again."""
    name = f"wide_{kind}"
    artifact = compiled(name)
    assert artifact.program is not None and artifact.plan is not None
    assert {a.dtype for a in artifact.program.constants.values()} == {np.dtype(np.float16)}
    assert [leaf.instruction for k in artifact.plan.kernels for leaf in k.leaves] == ["mma_float16"]
    (found,) = on_loops(artifact, random_inputs(artifact)).values()
    assert_meant(name, found)


def emulated(name: str, cache_dir: Path) -> None:
    options = Options(target="cuda-emulated", cache_dir=cache_dir)
    artifact = build(load(model_of(name), {}), machine("cuda-emulated"), options)
    (found,) = on_emulator(artifact, random_inputs(artifact)).values()
    assert_meant(name, found)


def test_the_assembler_takes_them_without_spills() -> None:
    for name, arch in (("short", "sm_80"), ("bytes", "sm_90a"), ("rows", "sm_80"), ("rows", "sm_90a")):
        loops = compiled(name).loops
        assert loops is not None
        (resources,) = nvrtc.compile_to_cubin(source_of(loops.kernels[0]), arch).resources.values()
        assert resources.spill_bytes == resources.stack_bytes == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [marked(n) for n in EVERY])
def test_emulated_kernels_unpack_weights(name: str, kernel_cache: Path) -> None:
    emulated(name, kernel_cache)
