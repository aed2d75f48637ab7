"""What memory holds before a run, and the order in which tiles run, reach no result: not one bit of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import (
    CPU,
    DIALECT,
    Lowered,
    Step,
    error,
    evaluated,
    lowered,
    model_of,
    output_names,
    programs,
    random_inputs,
    run_native,
)
from tests.native_models import SIGNATURE, Builder, builder, kernel
from tests.plans import map_leaves, resized, with_kernels
from tilewright import Options
from tilewright.backend import renderable
from tilewright.backend.cpu import machine_code
from tilewright.compiler.pipeline import build as compile_graph
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.tensor import elements
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.lower.memory import arena
from tilewright.runtime import BufferRef, Cache, CpuModel, KernelStage, ModelImage
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands

Shape = Sequence[int]
CONTENTS = (0xFF, 0x7F)  # nothing that is a number, and numbers whose products overflow
LANES = CPU.lanes(4)
UNTOUCHED = 0xA5A5A5A5  # what results hold before they are stored


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(np.float32)


def layers(*shapes: Shape) -> ModelProto:
    """Products with what follows them, one after the other: the first shape is the input's."""
    (rows, *_), *matrices = shapes
    steps: list[Step] = []
    constants = {}
    last = "x"
    for number, shape in enumerate(matrices):
        weight, bias, product, total, result = (f"{kind}{number}" for kind in "wbpst")
        constants |= {weight: weights(*shape), bias: weights(shape[1])}
        steps += [("MatMul", [last, weight], product, {}), ("Add", [product, bias], total, {}),
                  ("Tanh", [total], result, {})]  # fmt: skip
        last = result
    return model_of(steps, {"x": tuple(shapes[0])}, {last: (rows, matrices[-1][1])}, constants)


def products(batch: int, rows: int, inner: int, columns: int) -> ModelProto:
    steps: list[Step] = [("Sigmoid", ["a"], "p", {}), ("Tanh", ["b"], "q", {}), ("MatMul", ["p", "q"], "y", {})]
    return model_of(steps, {"a": (batch, rows, inner), "b": (batch, inner, columns)}, {"y": (batch, rows, columns)})


def convolutions(channels: int, size: Shape, kernel: int, *, group: int = 1, outputs: int | None = None) -> ModelProto:
    outputs = outputs or channels
    pad = [kernel // 2] * 4
    constants = {"w": weights(outputs, channels // group, kernel, kernel), "v": weights(5, outputs, 1, 1)}
    steps: list[Step] = [("Conv", ["x", "w"], "c", {"group": group, "pads": pad}), ("Relu", ["c"], "r", {}),
                         ("MaxPool", ["r"], "p", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
                         ("Conv", ["p", "v"], "y", {})]  # fmt: skip
    return model_of(steps, {"x": (2, channels, *size)}, {"y": (2, 5, *size)}, constants)


def attention(heads: int, rows: int, width: int) -> ModelProto:
    steps: list[Step] = [
        ("Transpose", ["k"], "t", {"perm": [0, 2, 1]}), ("MatMul", ["q", "t"], "s", {}),
        ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "y", {}),
    ]  # fmt: skip
    shape = (heads, rows, width)
    return model_of(steps, {"q": shape, "k": shape, "v": shape}, {"y": shape})


def normalised(rows: int, width: int) -> ModelProto:
    steps: list[Step] = [
        ("LayerNormalization", ["x", "g", "b"], "n", {"axis": -1}), ("ReduceSum", ["n", "axes"], "s", {}),
        ("Sub", ["n", "s"], "d", {}), ("ReduceMax", ["d"], "y", {"axes": [0]}),
    ]  # fmt: skip
    constants = {"g": weights(width), "b": weights(width), "axes": np.array([0])}
    return model_of(steps, {"x": (rows, width)}, {"y": (1, width)}, constants)


def recurrence(kind: str, gates: int, hidden: int, batch: int) -> ModelProto:
    constants = {"w": 0.3 * weights(2, gates * hidden, 9), "r": 0.1 * weights(2, gates * hidden, hidden)}
    steps: list[Step] = [(kind, ["x", "w", "r"], "y", {"hidden_size": hidden, "direction": "bidirectional"})]
    return model_of(steps, {"x": (6, batch, 9)}, {"y": (6, 2, batch, hidden)}, constants)


def bytes_of(rows: int, inner: int, columns: int) -> ModelProto:
    constants: dict[str, np.ndarray] = {"w": np.random.default_rng(1).integers(-100, 100, (inner, columns), np.int8)}
    constants |= {f"{n}_scale": np.array(s, np.float32) for n, s in (("x", 0.02), ("w", 0.02), ("y", 1.0))}
    constants |= {f"{n}_zero": np.array(z, np.int8) for n, z in (("x", 3), ("w", 0), ("y", 5))}
    x, w, y = ((f"{n}_scale", f"{n}_zero") for n in "xwy")
    steps: list[Step] = [("QuantizeLinear", ["x", *x], "q", {}), ("QLinearMatMul", ["q", *x, "w", *w, *y], "r", {}),
                         ("DequantizeLinear", ["r", *y], "y", {})]  # fmt: skip
    return model_of(steps, {"x": (rows, inner)}, {"y": (rows, columns)}, constants)


def places(rows: int, columns: int) -> ModelProto:
    steps: list[Step] = [("Exp", ["x"], "e", {}), ("ArgMax", ["e"], "y", {"axis": 1, "keepdims": 0})]
    return model_of(steps, {"x": (rows, columns)}, {"y": (rows,)}, types={"y": TensorProto.INT64})


CASES = {
    "layers": layers((67, 45), (45, 131), (131, 77), (77, 3)),
    "narrow layers": layers((203, 7), (7, 5), (5, 9)),
    "one row": layers((1, 301), (301, 517), (517, 33)),
    "products": products(3, 61, 83, 149),
    "far rows": products(1, 130, 600, 515),
    "convolutions": convolutions(6, (19, 23), 3),
    "a wide one": convolutions(3, (41, 37), 5, outputs=13),
    "groups": convolutions(12, (17, 13), 3, group=3, outputs=21),
    "depthwise": convolutions(11, (23, 29), 3, group=11),
    "attention": attention(3, 71, 19),
    "normalised": normalised(53, 77),
    "LSTM": recurrence("LSTM", 4, 37, 1),
    "GRU": recurrence("GRU", 3, 90, 3),
    "bytes": bytes_of(61, 203, 130),
    "places": places(203, 61),
}
PRECISIONS = ("layers", "products", "convolutions")  # at bfloat16 too


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return builder(Cache(tmp_path_factory.mktemp("cache")))


def made(name: str) -> tuple[Program, ModelImage]:
    precision = "bfloat16" if name.endswith(" narrow") else None
    graph = load(CASES[name.removesuffix(" narrow")], {})
    found = compile_graph(graph, CPU, Options(stop_after="loops", precision=precision))
    assert found.loops is not None and found.program is not None and found.plan is not None
    loops = renderable(found.loops, CPU)
    sources = machine_code.render(loops, CPU, DIALECT)
    return found.program, machine_code.model_image(sources, loops, found.program, found.plan)


def outputs_of(program: Program, image: ModelImage, built: Builder, threads: int = 1) -> dict[str, bytes]:
    with CpuModel(built(image), threads) as model:
        found = run_native(model, program, random_inputs(program))
    return {name: array.tobytes() for name, array in found.items()}


def results(program: Program, image: ModelImage, built: Builder, threads: int = 1) -> dict[str, bytes]:
    found = outputs_of(program, image, built, threads)
    for tensor, name in zip(program.outputs, output_names(program), strict=True):
        assert np.isfinite(np.frombuffer(found[name], tensor.dtype.numpy).astype(np.float64)).all()
    return found


def other_tiles(name: str, kernel: str, tile: str) -> str:
    """A kernel whose tiles are other tiles of a kernel there is."""
    call = f"(void)tile; {kernel}(buffers, extents, {tile}, scratch);"
    return f"#include <stdint.h>\nvoid {kernel}{SIGNATURE};\nvoid {name}{SIGNATURE} {{ {call} }}\n"


def spoiled(image: ModelImage, content: int) -> ModelImage:
    """The model with a stage in front that fills the arena and the worker's scratch."""
    scratch = max(s.scratch_bytes for s in image.stages)
    fill = f"memset(buffers[0], {content}, {image.arena_bytes}); memset(scratch, {content}, {scratch});"
    first = KernelStage("spoil", 1, (BufferRef("arena", 0),), scratch)
    stages = (first, replace(image.stages[0], barrier_before=True), *image.stages[1:])
    return replace(image, kernels={**image.kernels, "spoil": kernel("spoil", fill)}, stages=stages)


def backwards(image: ModelImage) -> ModelImage:
    """The model with the tiles of every stage run from the last to the first."""
    kernels = dict(image.kernels)
    for stage in image.stages:
        name = f"back_{stage.kernel}"
        kernels[name] = other_tiles(name, stage.kernel, f"{stage.tiles - 1} - tile")
    return replace(image, kernels=kernels, stages=tuple(replace(s, kernel=f"back_{s.kernel}") for s in image.stages))


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [*CASES, *(f"{name} narrow" for name in PRECISIONS)])
def test_what_memory_holds_and_which_tile_comes_first_reach_no_result(name: str, built: Builder) -> None:
    program, image = made(name)
    wanted = results(program, image, built)
    for content in CONTENTS:
        assert results(program, spoiled(image, content), built) == wanted
    assert results(program, backwards(image), built) == wanted
    for threads in (2, 3):
        assert results(program, image, built, threads) == wanted


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_no_stage_writes_where_it_reads(name: str) -> None:
    """Memory is used again by later stages, never by the one that reads it last."""
    graph = load(CASES[name], {})
    loops = compile_graph(graph, CPU, Options(stop_after="loops")).loops
    assert loops is not None
    offsets, _ = arena(loops)
    sizes = {t.name: elements(t.shape) * t.dtype.bytes for t in loops.tensors}
    for call in loops.calls:
        held = sorted((offsets[a], offsets[a] + sizes[a]) for a in set(call.arguments) if a in offsets)
        assert all(end <= start for (_, end), (start, _) in pairwise(held))


# ---- blocks that begin in the tile before ----


def pool(width: int) -> ModelProto:
    steps: list[Step] = [("AveragePool", ["x"], "y", {"kernel_shape": [3, 3]})]
    return model_of(steps, {"x": (1, 2, 9, width + 2)}, {"y": (1, 2, 7, width)})


def followed(rows: int, inner: int, columns: int) -> ModelProto:
    steps: list[Step] = [("MatMul", ["a", "b"], "m", {}), ("Tanh", ["m"], "t", {}), ("Mul", ["t", "c"], "y", {})]
    shapes = {"a": (rows, inner), "b": (inner, columns), "c": (rows, columns)}
    return model_of(steps, shapes, {"y": (rows, columns)})


def largest(rows: int, columns: int) -> ModelProto:
    return model_of([("ReduceMax", ["x"], "y", {"axes": [0]})], {"x": (rows, columns)}, {"y": (1, columns)})


TILED = {"pool": pool(47), "product": followed(7, 57, 95), "one row": followed(1, 300, 143), "largest": largest(57, 95)}


def cut_along_the_vector(model: ModelProto) -> Lowered:
    """The model in one kernel, its tiles one block long along the vector axis of the last nest."""
    program = programs(model)["layout"]
    plan = lowered(program).plan
    (only,) = plan.kernels
    vector, register = only.leaves[-1].vector, dict(only.leaves[-1].register)
    assert vector is not None
    cut = resized(only, program, {vector: register[vector]})
    return lowered(program, plan=with_kernels(plan, [cut]))


def image_of(made: Lowered) -> ModelImage:
    loops = renderable(made.loops, CPU)
    return machine_code.model_image(machine_code.render(loops, CPU, DIALECT), loops, made.program, made.plan)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", TILED)
def test_what_two_tiles_store_is_the_same(name: str, built: Builder) -> None:
    made = cut_along_the_vector(TILED[name])
    image = image_of(made)
    (stage,) = image.stages
    wanted = results(made.program, image, built)
    assert results(made.program, backwards(image), built) == wanted
    for threads in (2, 3):
        for _ in range(20):
            assert results(made.program, image, built, threads) == wanted
    # the last tile by itself stores whole vectors, more than is its own
    (vector,), (y,) = ([n for _, n in k.cut] for k in made.plan.kernels), made.program.outputs
    columns = int(y.shape[-1])  # type: ignore[arg-type]
    last = replace(image, kernels={**image.kernels, "last": other_tiles("last", stage.kernel, str(stage.tiles - 1))},
                   stages=(replace(stage, kernel="last", tiles=1),))  # fmt: skip
    stored = np.frombuffer(outputs_of(made.program, last, built)["y"], np.uint32) != UNTOUCHED
    assert stored.reshape(-1, columns).sum(axis=1).max() > columns % vector[0]


def test_a_tile_with_operands_of_its_own_begins_where_it_begins() -> None:
    """What lies before it, another tile has in its own scratch."""
    steps: list[Step] = [("Tanh", ["x"], "t", {}), ("AveragePool", ["t"], "y", {"kernel_shape": [3, 3]})]
    made = cut_along_the_vector(model_of(steps, {"x": (1, 2, 9, 49)}, {"y": (1, 2, 7, 47)}))
    (only,) = made.plan.kernels
    assert len(only.leaves) == 2 and 0 < 47 % dict(only.cut)["o3"] < LANES
    inputs = random_inputs(made.program)
    assert error(made.on_loops(inputs)["y"], evaluated(made.program, inputs, wide=True)["y"]) < 1e-6


def test_what_waits_in_the_place_of_a_result_is_added_to_once() -> None:
    """Between passes over a sum a block that began earlier would find there what another block has just added to."""
    program = programs(followed(7, 64, 47))["layout"]
    plan = lowered(program).plan
    assert len(plan.kernels) == 1
    made = lowered(program, plan=map_leaves(plan, lambda leaf: leaf.with_options(VectorForm, cut=(("r0", 16),))))
    inputs = random_inputs(program)
    assert error(made.on_loops(inputs)["y"], evaluated(program, inputs, wide=True)["y"]) < 1e-6


# ---- what fills up panels ----


@pytest.mark.parametrize("along", [None, "o1", "o2"])
def test_the_last_panel_is_filled_up_with_zeros(along: str | None) -> None:
    """By whichever tile stores the end of the rows."""
    program = choose_layouts(stage_operands(programs(products(2, 9, 21, 43))["fold"], CPU, always=True), CPU)
    plan = lowered(program).plan
    panels = {t: layout for t, layout in plan.layouts if layout.order[-1].size is not None}
    assert panels
    kernels = [k if along is None or k.leaves[-1].tensor not in panels else resized(k, program, {along: 16})
               for k in plan.kernels]  # fmt: skip
    made = lowered(program, plan=with_kernels(plan, kernels))
    tensors = {t.name: random_inputs(program)[t.name] for t in program.inputs}
    run_loops(made.loops, tensors)
    shapes = {t.name: t.shape for t in program.tensors()}
    for name, layout in panels.items():
        beyond = layout.pack(np.ones(shapes[name], np.float32)) == 0  # type: ignore[arg-type]
        assert beyond.any() and not tensors[name].reshape(beyond.shape)[beyond].any()
        assert np.isfinite(tensors[name]).all()
