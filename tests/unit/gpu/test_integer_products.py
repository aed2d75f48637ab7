"""Products and convolutions of bytes on tensor cores: the integers that the model says, in every spelling of ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.gpu_launch import source_of
from tests.gpu_stages import on_emulator, on_loops
from tests.plans import map_leaves, map_tiles
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import Instruction, statements
from tilewright.ir.meaning.interpret import evaluate
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.runtime import nvrtc
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import COPIES, Leaf, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm

FLOAT, INT8, UINT8, INT32 = TensorProto.FLOAT, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32
Node = tuple[str, Sequence[str], str, dict[str, object]]
_RNG = np.random.default_rng(5)


def bytes_of(*shape: int, signed: bool = True) -> np.ndarray:
    low = -128 if signed else 0
    return _RNG.integers(low, low + 256, shape).astype(np.int8 if signed else np.uint8)


def model(
    nodes: Sequence[Node], inputs: Mapping[str, tuple[int, Sequence[int]]], output: int, known: Mapping[str, np.ndarray]
) -> ModelProto:
    made = [helper.make_node(op, list(given), [out], **attributes) for op, given, out, attributes in nodes]
    ports = [helper.make_tensor_value_info(n, kind, list(shape)) for n, (kind, shape) in inputs.items()]
    result = helper.make_tensor_value_info("y", output, None)
    initial = [numpy_helper.from_array(a, n) for n, a in known.items()]
    graph = helper.make_graph(made, "bytes", ports, [result], initial)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def product(m: int, k: int, n: int, signed: bool = False) -> ModelProto:
    """Weights with a zero point of their own, operands with one for all."""
    zero = np.array(-7 if signed else 131, np.int8 if signed else np.uint8)
    known = {"w": bytes_of(k, n), "zx": zero, "zw": np.array(3, np.int8)}
    return model([("MatMulInteger", ["x", "w", "zx", "zw"], "y", {})],
                 {"x": (INT8 if signed else UINT8, (m, k))}, INT32, known)  # fmt: skip


def of_inputs(count: int, m: int, k: int, n: int) -> ModelProto:
    """No weights: the second operand lies across the sum."""
    return model([("MatMulInteger", ["x", "w"], "y", {})], {"x": (INT8, (count, m, k)), "w": (INT8, (count, k, n))},
                 INT32, {})  # fmt: skip


def window(channels: int, size: int, results: int, stride: int = 1) -> ModelProto:
    known = {"w": bytes_of(results, channels, 3, 3), "zx": np.array(100, np.uint8)}
    attributes = {"pads": [1, 1, 1, 1], "strides": [stride, stride]}
    return model([("ConvInteger", ["x", "w", "zx"], "y", attributes)], {"x": (UINT8, (1, channels, size, size))},
                 INT32, known)  # fmt: skip


def scale(*values: float) -> np.ndarray:
    return np.array(values if len(values) > 1 else values[0], np.float32)


def linear_product(m: int, k: int, n: int) -> ModelProto:
    known = {
        "w": bytes_of(k, n),
        "sx": scale(0.02),
        "zx": np.array(120, np.uint8),
        "zw": np.zeros(n, np.int8),
        "sw": (0.01 + _RNG.random(n) / 50).astype(np.float32),
        "sy": scale(1.7),
        "zy": np.array(90, np.uint8),
    }
    return model([("QLinearMatMul", ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"], "y", {})],
                 {"x": (UINT8, (m, k))}, UINT8, known)  # fmt: skip


def linear_window(channels: int, size: int, results: int, taps: int = 3, stride: int = 1) -> ModelProto:
    known = {
        "w": bytes_of(results, channels, taps, taps),
        "sx": scale(0.02),
        "zx": np.array(0, np.uint8),
        "sw": (0.01 + _RNG.random(results) / 50).astype(np.float32),
        "zw": np.zeros(results, np.int8),
        "sy": scale(1.9),
        "zy": np.array(128, np.uint8),
        "b": _RNG.integers(-999, 999, results).astype(np.int32),
    }
    attributes = {"pads": [taps // 2] * 4, "strides": [stride] * 2}
    return model([("QLinearConv", ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy", "b"], "y", attributes)],
                 {"x": (UINT8, (2, channels, size, size))}, UINT8, known)  # fmt: skip


def dynamic(m: int, k: int, n: int) -> ModelProto:
    """The scale and the zero point of what is multiplied are found as the model runs."""
    known = {"w": bytes_of(k, n), "zw": np.array(0, np.int8), "sw": scale(0.013)}
    nodes: list[Node] = [("MatMulInteger", ["q", "w", "zq", "zw"], "p", {}), ("Cast", ["p"], "f", {"to": FLOAT}),
                         ("Mul", ["sq", "sw"], "s", {}), ("Mul", ["f", "s"], "y", {})]  # fmt: skip
    made = model(nodes, {"x": (FLOAT, (m, k))}, FLOAT, known)
    first = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "sq", "zq"])
    made.graph.node.insert(0, first)
    return made


def around(m: int, k: int, n: int) -> ModelProto:
    """Quantised and dequantised around two products, as tools for it write models."""
    known = {"w": bytes_of(k, n), "v": bytes_of(n, k), "s": scale(0.03), "z": np.array(117, np.uint8),
             "sw": scale(0.011), "zw": np.array(0, np.int8)}  # fmt: skip
    nodes: list[Node] = [
        ("QuantizeLinear", ["x", "s", "z"], "qx", {}), ("DequantizeLinear", ["qx", "s", "z"], "dx", {}),
        ("DequantizeLinear", ["w", "sw", "zw"], "dw", {}), ("MatMul", ["dx", "dw"], "p", {}), ("Relu", ["p"], "r", {}),
        ("QuantizeLinear", ["r", "s", "z"], "qr", {}), ("DequantizeLinear", ["qr", "s", "z"], "dr", {}),
        ("DequantizeLinear", ["v", "sw", "zw"], "dv", {}), ("MatMul", ["dr", "dv"], "y", {}),
    ]  # fmt: skip
    return model(nodes, {"x": (FLOAT, (m, k))}, FLOAT, known)


# a model, and products that run on tensor cores
CASES: Mapping[str, tuple[ModelProto, int]] = {
    "whole": (product(32, 128, 64), 1),
    "odd": (product(19, 75, 21), 1),
    "signed": (product(24, 48, 32, signed=True), 1),
    "of_inputs": (of_inputs(2, 17, 64, 32), 1),
    "window": (window(32, 7, 24), 1),
    "odd_window": (window(13, 9, 19, stride=2), 1),
    "linear": (linear_product(24, 64, 48), 1),
    "linear_window": (linear_window(16, 5, 32), 1),
    "first_layer": (linear_window(3, 21, 16, taps=7, stride=2), 1),
    "dynamic": (dynamic(20, 96, 40), 1),
    "around": (around(24, 64, 32), 2),
}
SLOW = ("signed", "odd_window", "linear_window")  # what others show as well


@cache
def compiled(name: str) -> Artifact:
    options = Options(target="cuda-emulated", stop_after="loops")
    return build(load(CASES[name][0], {}), machine("cuda-emulated"), options)


def inputs_of(artifact: Artifact) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    floats = {p.name: rng.standard_normal(p.shape).astype(np.float32) for p in artifact.inputs if p.dtype.kind == "f"}
    others = {p.name: rng.integers(0, 256, p.shape).astype(np.uint8).view(p.dtype.numpy)
              for p in artifact.inputs if p.name not in floats}  # fmt: skip
    return floats | others


def meant(name: str) -> np.ndarray:
    """What the model says, before anything is done to it."""
    options = Options(target="cuda-emulated", stop_after="program")
    plain = build(load(CASES[name][0], {}), machine("cuda-emulated"), options)
    assert plain.program is not None
    means = evaluate(plain.program, inputs_of(compiled(name)))
    return np.asarray(means[plain.program.outputs[0].name])


def assert_meant(name: str, found: np.ndarray) -> None:
    """Integers exactly; where they are scaled and rounded to bytes again, a tie may go to either side, and what is
    multiplied with such a byte moves by a weight's part."""
    expected = meant(name)
    if expected.dtype == np.int32:
        np.testing.assert_array_equal(found, expected)
    elif expected.dtype == np.uint8:
        apart = np.abs(found.astype(int) - expected)
        assert apart.max() <= 1 and np.count_nonzero(apart) <= expected.size // 200
    else:
        apart = np.abs(found - expected) / float(np.abs(expected).max())
        assert np.quantile(apart, 0.9) < 1e-5 and apart.max() < 0.01


def instructions(artifact: Artifact) -> list[str]:
    assert artifact.loops is not None
    return [s.name for k in artifact.loops.kernels for s in statements(k.body) if isinstance(s, Instruction)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_loops_mean_the_integers(name: str) -> None:
    artifact = compiled(name)
    assert artifact.plan is not None
    on_cores = [leaf for k in artifact.plan.kernels for leaf in k.leaves if leaf.instruction == "mma_int8"]
    assert len(on_cores) == CASES[name][1] and "mma_int8" in instructions(artifact)
    (found,) = on_loops(artifact, inputs_of(artifact)).values()
    assert_meant(name, found)


def test_bytes_are_rounded_by_adding() -> None:
    loops = compiled("linear").loops
    assert loops is not None
    text = source_of(loops.kernels[-1])
    assert "tw::rounded_byte<" in text and "tw::round(" not in text


def emulated(name: str, cache_dir: Path) -> None:
    options = Options(target="cuda-emulated", cache_dir=cache_dir)
    artifact = build(load(CASES[name][0], {}), machine("cuda-emulated"), options)
    (found,) = on_emulator(artifact, inputs_of(artifact)).values()
    assert_meant(name, found)


def test_emulated_kernels_compute_the_integers(kernel_cache: Path) -> None:
    emulated("linear", kernel_cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if n != "linear"])
def test_emulated_kernels_of_all_kinds_of_integers(name: str, kernel_cache: Path) -> None:
    emulated(name, kernel_cache)


def in_groups(name: str) -> Artifact:
    """The product of a case, planned for an H200, with 64 x 64 of its results for four warps as one."""
    target = machine("h200")
    artifact = build(load(CASES[name][0], {}), target, Options(target="h200", stop_after="plan"))
    assert artifact.plan is not None and artifact.program is not None

    def tiles(tile: Tile) -> Tile:
        if tile.over == "lanes":
            return replace(tile, count=128)
        if tile.over == "warps":
            return replace(tile, sizes=(("m", 16), ("n", 64)), axes=tuple(replace(a, extent=64) for a in tile.axes))
        return replace(tile, holds=tuple(replace(h, stages=3, layout="swizzled") if h.fill in COPIES else h
                                         for h in tile.holds))  # fmt: skip

    def leaves(leaf: Leaf) -> Leaf:
        on_cores = leaf.instruction is not None
        return replace(leaf, form=FragmentForm("wgmma_int8", step=128)) if on_cores else leaf

    plan = map_leaves(map_tiles(artifact.plan, tiles), leaves)
    check_plan(plan, artifact.program, target)
    loops = lower_program(artifact.program, plan, backend_for(target).lower_kernel)
    return replace(artifact, plan=plan, loops=loops)


@pytest.mark.parametrize("name", ["whole", pytest.param("linear_window", marks=pytest.mark.slow)])
def test_groups_of_warps_mean_the_integers(name: str) -> None:
    artifact = in_groups(name)
    assert "wgmma_int8" in instructions(artifact)
    (found,) = on_loops(artifact, inputs_of(artifact)).values()
    assert_meant(name, found)


def test_the_assembler_takes_them_without_spills() -> None:
    for artifact, arch in ((compiled("linear"), "sm_80"), (in_groups("whole"), "sm_90a")):
        assert artifact.loops is not None
        for kernel in artifact.loops.kernels:
            (resources,) = nvrtc.compile_to_cubin(source_of(kernel), arch).resources.values()
            assert resources.spill_bytes == resources.stack_bytes == 0
