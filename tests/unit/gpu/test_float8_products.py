"""Products and convolutions of 8-bit floats on tensor cores: scales outside the sum, sums that begin anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.gpu_launch import source_of
from tests.gpu_stages import on_emulator, on_loops
from tests.plans import map_leaves, map_tiles, resized, with_kernels
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.meaning.interpret import evaluate
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.runtime import nvrtc
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Leaf, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm

FLOAT, E4M3 = TensorProto.FLOAT, TensorProto.FLOAT8E4M3FN
Node = tuple[str, Sequence[str], str, dict[str, object]]
_RNG = np.random.default_rng(3)
_ZERO = np.zeros((), ml_dtypes.float8_e4m3fn)


def codes(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)


def constant(name: str, value: np.ndarray) -> TensorProto:
    if value.dtype != ml_dtypes.float8_e4m3fn:
        return numpy_helper.from_array(value, name)
    return helper.make_tensor(name, E4M3, value.shape, value.tobytes(), raw=True)


def model(nodes: Sequence[Node], inputs: Mapping[str, tuple[int, Sequence[int]]], known: Mapping[str, np.ndarray],
          ) -> ModelProto:  # fmt: skip
    made = [helper.make_node(op, list(given), [out], **attributes) for op, given, out, attributes in nodes]
    ports = [helper.make_tensor_value_info(n, kind, list(shape)) for n, (kind, shape) in inputs.items()]
    result = helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph(made, "float8", ports, [result], [constant(n, a) for n, a in known.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def around(m: int, k: int, n: int, relu: bool = False) -> ModelProto:
    """An operand that is rounded on the way, by weights with a scale a column."""
    known = {"s": np.float32(0.05), "z": _ZERO, "w": codes(k, n), "sw": (0.01 + _RNG.random(n)).astype(np.float32),
             "zw": np.zeros(n, ml_dtypes.float8_e4m3fn)}  # fmt: skip
    nodes: list[Node] = [
        ("QuantizeLinear", ["x", "s", "z"], "q", {}), ("DequantizeLinear", ["q", "s", "z"], "d", {}),
        ("DequantizeLinear", ["w", "sw", "zw"], "dw", {"axis": 1}), ("MatMul", ["d", "dw"], "p" if relu else "y", {}),
    ]  # fmt: skip
    return model([*nodes, ("Relu", ["p"], "y", {})] if relu else nodes, {"x": (FLOAT, (m, k))}, known)


def of_inputs(m: int, k: int, n: int, turned: bool) -> ModelProto:
    known = {"s": np.float32(0.25), "z": _ZERO}
    second = (n, k) if turned else (k, n)
    nodes: list[Node] = [
        ("DequantizeLinear", ["x", "s", "z"], "d", {}),
        ("DequantizeLinear", ["w", "s", "z"], "e" if turned else "dw", {}), ("MatMul", ["d", "dw"], "y", {}),
    ]  # fmt: skip
    if turned:
        nodes.insert(2, ("Transpose", ["e"], "dw", {"perm": [1, 0]}))
    return model(nodes, {"x": (E4M3, (m, k)), "w": (E4M3, second)}, known)


def window(channels: int, size: int, results: int) -> ModelProto:
    known = {"s": np.float32(0.05), "z": _ZERO, "w": codes(results, channels, 3, 3)}
    nodes: list[Node] = [
        ("QuantizeLinear", ["x", "s", "z"], "q", {}), ("DequantizeLinear", ["q", "s", "z"], "d", {}),
        ("DequantizeLinear", ["w", "s", "z"], "dw", {}), ("Conv", ["d", "dw"], "y", {"pads": [1, 1, 1, 1]}),
    ]  # fmt: skip
    return model(nodes, {"x": (FLOAT, (1, channels, size, size))}, known)


def in_blocks(m: int, k: int, n: int) -> ModelProto:
    """Weights whose scales change along the sum."""
    known = {"s": np.float32(0.05), "z": _ZERO, "w": codes(k, n), "sw": _RNG.random((k // 32, n)).astype(np.float32)}
    nodes: list[Node] = [
        ("QuantizeLinear", ["x", "s", "z"], "q", {}), ("DequantizeLinear", ["q", "s", "z"], "d", {}),
        ("DequantizeLinear", ["w", "sw"], "dw", {"axis": 0, "block_size": 32}), ("MatMul", ["d", "dw"], "y", {}),
    ]  # fmt: skip
    return model(nodes, {"x": (FLOAT, (m, k))}, known)


CASES: Mapping[str, ModelProto] = {
    "around": around(24, 160, 40),
    "relu": around(19, 75, 21, relu=True),
    "of_inputs": of_inputs(32, 320, 48, turned=True),
    "across": of_inputs(17, 64, 32, turned=False),
    "window": window(32, 7, 24),
}
SLOW = ("across",)  # "relu" is the one whose sum is a single part


def options(stop: str | None = "loops") -> Options:
    return Options(target="cuda-emulated", stop_after=stop)


@cache
def compiled(name: str) -> Artifact:
    return build(load(CASES[name], {}), machine("cuda-emulated"), options())


def inputs_of(artifact: Artifact) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {p.name: rng.standard_normal(p.shape).astype(p.dtype.numpy) for p in artifact.inputs}


def assert_meant(source: ModelProto, artifact: Artifact, found: np.ndarray) -> None:
    """What the model says, before anything is done to it; scales are applied to whole sums."""
    plain = build(load(source, {}), machine("cuda-emulated"), options("program"))
    assert plain.program is not None
    (expected,) = evaluate(plain.program, inputs_of(artifact)).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(np.abs(expected).max()))


def on_cores(artifact: Artifact) -> list[Leaf]:
    assert artifact.plan is not None
    return [leaf for k in artifact.plan.kernels for leaf in k.leaves if (leaf.instruction or "").endswith("mma_e4m3")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_loops_mean_the_numbers(name: str) -> None:
    artifact = compiled(name)
    (leaf,) = on_cores(artifact)
    assert leaf.options(FragmentForm).anew == 128
    (found,) = on_loops(artifact, inputs_of(artifact)).values()
    assert_meant(CASES[name], artifact, found)


def test_scales_that_change_along_the_sum_stay_in_it() -> None:
    artifact = build(load(in_blocks(24, 64, 32), {}), machine("cuda-emulated"), options("plan"))
    assert not on_cores(artifact)


def test_older_devices_multiply_the_numbers() -> None:
    artifact = build(load(CASES["around"], {}), machine("a100"), Options(target="a100", stop_after="plan"))
    assert not on_cores(artifact)


@pytest.mark.parametrize("name", ["around", "relu"])  # with rows of whole packets, and with longer ones made
def test_emulated_kernels_compute_the_numbers(name: str, kernel_cache: Path) -> None:
    emulated(name, kernel_cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("around", "relu")])
def test_emulated_kernels_of_all_kinds(name: str, kernel_cache: Path) -> None:
    emulated(name, kernel_cache)


def emulated(name: str, cache_dir: Path) -> None:
    made = Options(target="cuda-emulated", cache_dir=cache_dir)
    artifact = build(load(CASES[name], {}), machine("cuda-emulated"), made)
    (found,) = on_emulator(artifact, inputs_of(artifact)).values()
    assert_meant(CASES[name], artifact, found)


# --- four warps as one


def in_groups(columns: int, summed: int = 256) -> tuple[ModelProto, Artifact]:
    """64 rows by so many columns, planned for an H200, for four warps as one."""
    target, source = machine("h200"), of_inputs(64, summed, columns, turned=True)
    artifact = build(load(source, {}), target, Options(target="h200", stop_after="plan"))
    assert artifact.plan is not None and artifact.program is not None
    (kernel,) = artifact.plan.kernels
    plan = with_kernels(artifact.plan, [resized(kernel, artifact.program, {"o0": 64, "o1": columns})])

    def tiles(tile: Tile) -> Tile:
        if tile.over == "lanes":
            return replace(tile, count=128)
        if tile.over == "warps":
            axes = tuple(replace(a, extent=n) for a, n in zip(tile.axes, (64, columns), strict=True))
            return replace(tile, sizes=(("m", 16), ("n", columns)), axes=axes)
        return replace(tile, holds=tuple(replace(h, stages=3, layout="swizzled") for h in tile.holds))

    def leaves(leaf: Leaf) -> Leaf:
        return replace(leaf, lanes=1, form=FragmentForm("wgmma_e4m3", step=128, anew=128))

    plan = map_leaves(map_tiles(plan, tiles), leaves)
    check_plan(plan, artifact.program, target)
    loops = lower_program(artifact.program, plan, backend_for(target).lower_kernel)
    return source, replace(artifact, plan=plan, loops=loops)


@pytest.mark.parametrize("columns", [64, pytest.param(192, marks=pytest.mark.slow)])
def test_groups_of_warps_mean_the_numbers(columns: int) -> None:
    source, artifact = in_groups(columns)
    (found,) = on_loops(artifact, inputs_of(artifact)).values()
    assert_meant(source, artifact, found)


def test_sums_of_many_columns_begin_anew_in_two_turns() -> None:
    _, artifact = in_groups(256)
    assert artifact.loops is not None
    (kernel,) = artifact.loops.kernels
    text = source_of(kernel)
    assert "tw::wgmma_e4m3<128, 0, 0, 16384, 0>" in text and "tw::wgmma_e4m3<256" not in text
    (resources,) = nvrtc.compile_to_cubin(text, "sm_90a").resources.values()
    assert resources.spill_bytes == 0


@pytest.mark.parametrize("name", ["around", "relu"])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_the_compiler_takes_them(name: str, arch: str) -> None:
    loops = compiled(name).loops
    assert loops is not None
    for kernel in loops.kernels:
        nvrtc.compile_to_cubin(source_of(kernel), arch)


def test_every_code_is_the_number_that_it_stands_for(kernel_cache: Path) -> None:
    """Through the type that kernels have for it: there, back, and a constant of it."""
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    nodes: list[Node] = [("Pad", ["x", "pads", "one"], "p", {}), ("Cast", ["p"], "y", {"to": FLOAT})]
    known = {"pads": np.array([0, 1], np.int64), "one": np.ones((), ml_dtypes.float8_e4m3fn)}
    source = model(nodes, {"x": (E4M3, (256,))}, known)
    made = Options(target="cuda-emulated", cache_dir=kernel_cache)
    artifact = build(load(source, {}), machine("cuda-emulated"), made)
    (found,) = on_emulator(artifact, {"x": every}).values()
    np.testing.assert_array_equal(found, np.append(every.astype(np.float32), np.float32(1)))
