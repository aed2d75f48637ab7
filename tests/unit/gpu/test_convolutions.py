"""Convolutions on tensor cores: windows, strides, dilations, odd channels and dimensions, against PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import prod

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.gpu_launch import source_of
from tests.gpu_stages import no_plan_fails, on_emulator, on_loops
from tilewright.backend.gpu.threads import window_plan
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.loops import Instruction, Kernel, Memory, Store, statements
from tilewright.options import Options
from tilewright.runtime import nvrtc
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Tile

Layer = dict[str, object]


def layer(channels: int, kernel: tuple[int, ...], **more: object) -> Layer:
    return {"channels": channels, "kernel": kernel, **more}


# the shape of the input and the layers, each with a ReLU behind it
CASES: Mapping[str, tuple[tuple[int, ...], tuple[Layer, ...]]] = {
    "window": ((2, 16, 9, 11), (layer(32, (3, 3), pads=1), layer(24, (3, 3), pads=1))),
    "first": ((2, 3, 20, 20), (layer(16, (7, 7), pads=3, strides=2),)),
    "patches": ((2, 3, 32, 32), (layer(16, (16, 16), strides=16),)),
    "odd_channels": ((5, 13, 9, 10), (layer(21, (3, 3), pads=1), layer(19, (3, 3), pads=1))),
    "dilated": ((2, 16, 14, 13), (layer(20, (3, 3), pads=2, dilations=2), layer(16, (3, 3), dilations=3, pads=3))),
    "stride_3": ((3, 24, 16, 17), (layer(16, (5, 5), pads=2, strides=3), layer(32, (1, 1), strides=2))),
    "groups": ((2, 32, 9, 9), (layer(32, (3, 3), pads=1, group=2),)),
    "narrow_groups": ((2, 32, 9, 9), (layer(64, (3, 3), pads=1, group=8), layer(32, (3, 3), strides=2, group=4))),
    "line": ((2, 12, 50), (layer(16, (5,), pads=2), layer(24, (3,), strides=2))),
    "cube": ((1, 3, 6, 8, 9), (layer(16, (3, 3, 3), pads=1), layer(16, (2, 3, 1), strides=2))),
    "depthwise": ((6, 16, 14, 15), (layer(96, (1, 1)), layer(96, (7, 7), pads=3, group=96), layer(16, (1, 1)))),
    "strided": (
        (12, 16, 13, 15),
        (layer(64, (1, 1)), layer(64, (3, 3), pads=2, strides=2, dilations=2, group=64), layer(16, (1, 1))),
    ),
    "one_row": ((2, 24, 1, 30), (layer(16, (1, 3), pads=0),)),
}
COPIED = ("window", "first", "patches", "odd_channels", "dilated", "stride_3")


def model(name: str) -> ModelProto:
    shape, layers = CASES[name]
    rng, nodes, weights, x = np.random.default_rng(0), [], [], "x"
    channels, dimensions = shape[1], len(shape) - 2
    for number, each in enumerate(layers):
        made, kernel, group = each["channels"], each["kernel"], each.get("group", 1)
        assert isinstance(made, int) and isinstance(kernel, tuple) and isinstance(group, int)
        sizes = (made, channels // group, *kernel)
        weight = rng.standard_normal(sizes) / np.sqrt(np.prod(sizes[1:]))
        bias = rng.standard_normal(made)
        named = {f"w{number}": weight, f"b{number}": bias}
        weights += [numpy_helper.from_array(array.astype(np.float32), key) for key, array in named.items()]
        attributes = {k: [v] * dimensions * (2 if k == "pads" else 1) for k, v in each.items()
                      if k in ("pads", "strides", "dilations")}  # fmt: skip
        nodes.append(helper.make_node("Conv", [x, f"w{number}", f"b{number}"], [f"c{number}"], group=group,
                                      kernel_shape=kernel, **attributes))  # fmt: skip
        x = f"y{number}"
        nodes.append(helper.make_node("Relu", [f"c{number}"], [x]))
        channels = made
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], [
        helper.make_tensor_value_info(x, TensorProto.FLOAT, None)]  # fmt: skip
    graph = helper.make_graph(nodes, name, *ports, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


def reference(name: str, given: np.ndarray) -> np.ndarray:
    """By PyTorch in float64."""
    shape, layers = CASES[name]
    arrays = {w.name: numpy_helper.to_array(w) for w in model(name).graph.initializer}
    weights = {key: torch.from_numpy(array.copy()).double() for key, array in arrays.items()}
    convolve = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[len(shape) - 2]
    x = torch.from_numpy(given).double()
    for number, each in enumerate(layers):
        strides, pads, dilations = (each.get(k, n) for k, n in (("strides", 1), ("pads", 0), ("dilations", 1)))
        x = convolve(x, weights[f"w{number}"], weights[f"b{number}"], strides, pads, dilations, each.get("group", 1))
        x = x.relu()
    return x.numpy()


@cache
def compiled(
    name: str, target: str = "h200", precision: str = "float16", stop: str = "loops", schedule: str = "connected"
) -> Artifact:
    options = Options(target=target, precision=precision, stop_after=stop, schedule=schedule)
    return build(load(model(name), {}), machine(target), options)


def inputs_of(artifact: Artifact) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {p.name: rng.standard_normal(p.shape).astype(p.dtype.numpy) for p in artifact.inputs}


def assert_near(found: np.ndarray, expected: np.ndarray, most: float) -> None:
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - expected) <= most * np.linalg.norm(expected)


def products(artifact: Artifact) -> list[Kernel]:
    assert artifact.loops is not None
    return [k for k in artifact.loops.kernels
            if any(isinstance(s, Instruction) and s.name in FORMS for s in statements(k.body))]  # fmt: skip


def sampled(names: Iterable[str], *often: str) -> list[object]:
    """Names as parameters of a test, all but some of them left to --all: the interpreter takes its time."""
    return [name if name in often else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sampled(CASES, "first", "patches", "narrow_groups", "line", "one_row"))
def test_loops_mean_the_convolutions(name: str) -> None:
    artifact = compiled(name)
    given = inputs_of(artifact)
    (found,) = on_loops(artifact, given).values()
    assert_near(found, reference(name, given["x"]), 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("depthwise", "strided"))
def test_threads_keep_windows_in_registers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_plan, "busy_threads", lambda _: 64)  # of a device that few threads keep busy
    options = Options(target="h200", precision="float16", stop_after="loops", schedule="register")
    artifact = build(load(model(name), {}), machine("h200"), options)
    assert artifact.plan is not None
    (leaf,) = [x for k in artifact.plan.kernels for x in k.leaves if x.lanes == 8 and x.instruction is None]
    assert leaf.vector == "o1" and (name == "strided" or leaf.register == (("o3", 4),))
    given = inputs_of(artifact)
    (found,) = on_loops(artifact, given).values()
    assert_near(found, reference(name, given["x"]), 2e-3)


@pytest.mark.parametrize("name", sampled(("window", "first", "odd_channels"), "first"))
def test_tf32_takes_the_same_way(name: str) -> None:
    artifact = compiled(name, precision="tf32")
    assert products(artifact)
    given = inputs_of(artifact)
    (found,) = on_loops(artifact, given).values()
    assert_near(found, reference(name, given["x"]), 2e-3)


@pytest.mark.parametrize("name", COPIED)
def test_operands_come_in_asynchronous_packets(name: str) -> None:
    kernels = products(compiled(name, schedule="register"))
    assert len(kernels) == len(CASES[name][1])
    for kernel in kernels:
        body = list(statements(kernel.body))
        stored = {s.buffer.name for s in body if isinstance(s, Store) and s.buffer.memory is Memory.SHARED}
        assert not any(n.startswith("ring") for n in stored), stored
        assert any(isinstance(s, Instruction) and s.name.startswith("copy_async") for s in body)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(("window", "first", "odd_channels"), "odd_channels"))
def test_the_emulator_agrees(name: str) -> None:
    artifact = compiled(name, "cuda-emulated", stop="machine")
    given = inputs_of(artifact)
    (found,) = on_emulator(artifact, given).values()
    assert_near(found, reference(name, given["x"]), 2e-3)


@pytest.mark.parametrize(("architecture", "target"), (("sm_80", "a100"), ("sm_90a", "h200")))
def test_kernels_compile_without_spills(architecture: str, target: str) -> None:
    for name in ("window", "first", "cube"):
        for kernel in products(compiled(name, target)):
            (resources,) = nvrtc.compile_to_cubin(source_of(kernel), architecture).resources.values()
            assert resources.spill_bytes == resources.stack_bytes == 0 and resources.registers <= 255


def test_packets_that_a_window_moves_by_single_places_are_not_copied_as_they_lie() -> None:
    """Rows of 34 places, of which products take 32 from every third place on: no packet of them begins with one."""
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT16, (4, 64, 34, 34))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, (4, 128, 32, 32))
    weight = helper.make_tensor_value_info("w", TensorProto.FLOAT16, (128, 64, 3, 3))
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "valid", [given, weight], [result])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for name in ("h200", "a100"):
        with no_plan_fails():
            build(load(made, {}), machine(name), Options(target=name, stop_after="loops"))


@pytest.mark.parametrize(("sides", "kind"), [((33, 33), TensorProto.FLOAT16), ((130, 260), TensorProto.FLOAT)])
def test_sides_of_images_are_cut_evenly(sides: tuple[int, int], kind: int) -> None:
    """Rows of products are whole fragments: of those that tiles of 33 x 33 places take, or of rows of 260, few are
    empty."""
    shape = (32, 64, *sides)
    given = helper.make_tensor_value_info("x", kind, shape)
    result = helper.make_tensor_value_info("y", kind, shape)
    ones = np.ones((64, 64, 3, 3), helper.tensor_dtype_to_np_dtype(kind))
    weight = numpy_helper.from_array(ones, "w")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[2] * 4, dilations=[2, 2])
    graph = helper.make_graph([node], "odd", [given], [result], [weight])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    plan = build(load(made, {}), machine("h200"), Options(target="h200", stop_after="plan")).plan
    assert plan is not None
    (kernel,) = [k for k in plan.kernels if any(x.instruction for x in k.leaves)]
    (rows,) = [t.axes[0].extent for t in kernel.walk() if isinstance(t, Tile) and t.over == "warps"]
    cut = dict(kernel.cut)
    turns = -(-cut.get("o0", 32) * cut.get("o2", sides[0]) * cut.get("o3", sides[1]) // rows)
    assert 32 * prod(sides) / (kernel.tiles * turns * rows) > 0.8
