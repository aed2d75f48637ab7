"""Reductions, windows and maps at sizes that fill nothing, for vectors of every width, against the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import CPU, Step, evaluated, lowered, model_of, programs, random_inputs
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Reduce
from tilewright.ir.forms.loops import Alloc, For, ForKind, statements
from tilewright.options import Options
from tilewright.target import machine
from tilewright.transform.layout.staging import stage_operands

Shape = tuple[int, ...]


def one(kind: str, shape: Shape, out: Shape, types: dict[str, int] | None = None, **attributes: object) -> ModelProto:
    steps: list[Step] = [(kind, ["x"], "y", attributes)]
    return model_of(steps, {"x": shape}, {"y": out}, types=types)


def pooled(kind: str, shape: Shape, out: Shape, kernel: list[int], stride: int, pad: int, **more: object) -> ModelProto:
    rank = len(kernel)
    strides, pads = [stride] * rank, [pad] * 2 * rank
    return one(kind, shape, out, kernel_shape=kernel, strides=strides, pads=pads, **more)


def mean(shape: Shape, axes: list[int]) -> ModelProto:
    out = tuple(1 if a in axes else n for a, n in enumerate(shape))
    return one("ReduceMean", shape, out, axes=axes)


INT = {"y": TensorProto.INT64}
CASES = {
    "halved": pooled("MaxPool", (1, 5, 14, 38), (1, 5, 7, 19), [2, 2], 2, 0),
    "overlapping": pooled("MaxPool", (2, 3, 17, 21), (2, 3, 9, 11), [3, 3], 2, 1),
    "hanging over": pooled("MaxPool", (1, 9, 13, 14), (1, 9, 13, 14), [5, 5], 1, 2),
    "along a line": pooled("MaxPool", (1, 3, 101), (1, 3, 50), [3], 2, 0),
    "cubes": pooled("MaxPool", (1, 3, 6, 8, 10), (1, 3, 3, 4, 5), [2, 2, 2], 2, 0),
    "averages": pooled("AveragePool", (1, 7, 15, 23), (1, 7, 8, 12), [3, 3], 2, 1),
    "averages of padding": pooled("AveragePool", (1, 7, 9, 13), (1, 7, 9, 13), [5, 5], 1, 2, count_include_pad=1),
    "planes": mean((2, 5, 13, 11), [2, 3]),
    "planes and channels": mean((2, 5, 3, 17), [1, 2, 3]),
    "apart": mean((5, 7, 11), [0, 2]),
    "far rows": mean((203, 521), [0]),
    "all": mean((37, 41), [0, 1]),
    "largest": one("ReduceMax", (9, 33), (9, 1), axes=[1]),
    "places": one("ArgMax", (7, 61), (7, 1), INT, axis=1),
    "places across": one("ArgMax", (19, 37), (1, 37), INT, axis=0),
    "last places": one("ArgMin", (3, 5, 23), (3, 1, 23), INT, axis=1, select_last_index=1),
    "logarithms": one("LogSoftmax", (7, 61), (7, 61), axis=-1),
    "shares": one("Softmax", (5, 13, 17), (5, 13, 17), axis=1),
    "leaking": one("LeakyRelu", (3, 5, 7, 11), (3, 5, 7, 11), alpha=0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_loops_agree(name: str) -> None:
    program = programs(CASES[name])["layout"]
    inputs = random_inputs(program)
    np.testing.assert_allclose(
        lowered(program).on_loops(inputs)["y"], evaluated(program, inputs, wide=True)["y"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (16, 32)), 64])
def test_every_width(size: int, kernel_cache: Path) -> None:
    target = replace(machine("cpu"), vector_bytes=size, lane_multiply=False)
    for name in ("overlapping", "hanging over", "averages", "far rows", "places", "places across", "logarithms"):
        model = CASES[name]
        artifact = build(load(model, {}), target, Options(cache_dir=kernel_cache, threads=1))
        assert artifact.program is not None
        inputs = random_inputs(artifact.program, seed=size)
        found = [np.full(p.shape, 77, p.dtype.numpy) for p in artifact.outputs]
        artifact.runner.run([inputs[p.name] for p in artifact.inputs], found)
        wanted = evaluated(artifact.program, inputs, wide=True)["y"]
        np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["Max", "Min"])
def test_extremes_hand_nan_on(kind: str, kernel_cache: Path) -> None:
    """Wherever it is: in a vector, in what is left over, on either side."""
    steps: list[Step] = [(kind, ["a", "b"], "m", {}), (f"Reduce{kind}", ["a"], "r", {"axes": [1], "keepdims": 0})]
    shape = (9, 23)
    model = model_of(steps, {"a": shape, "b": shape}, {"m": shape, "r": shape[:1]})
    a, b = np.random.default_rng(5).standard_normal((2, *shape)).astype(np.float32)
    a[2, 3] = a[5, 22] = b[4, 17] = b[7, 21] = np.nan
    artifact = build(load(model, {}), machine("cpu"), Options(cache_dir=kernel_cache, threads=1))
    given = {"a": a, "b": b}
    found = {p.name: np.empty(p.shape, np.float32) for p in artifact.outputs}
    artifact.runner.run([given[p.name] for p in artifact.inputs], list(found.values()))
    pick, over = (np.maximum, np.max) if kind == "Max" else (np.minimum, np.min)
    np.testing.assert_array_equal(found["m"], pick(a, b))
    np.testing.assert_array_equal(found["r"], over(a, axis=1))


@pytest.mark.parametrize(("name", "axes"), [("planes", [143]), ("planes and channels", [255]), ("apart", [5, 11])])
def test_contiguous_axes_are_summed_as_one(name: str, axes: list[int]) -> None:
    program = programs(CASES[name])["layout"]
    (total,) = [c for c in program.computes if isinstance(c, Reduce)]
    assert [a.extent for a in total.reduce_axes] == axes


def test_maps_walk_rows_as_one_run() -> None:
    """One loop over all vectors, where a loop for each row would leave part of one over at every end."""
    (kernel,) = lowered(programs(CASES["leaking"])["layout"]).loops.kernels
    loops = [s for s in statements(kernel.body) if isinstance(s, For) and s.kind is ForKind.SERIAL]
    assert len(loops) == 1 and int(loops[0].axis.extent) * CPU.lanes(4) > 7 * 11  # type: ignore[arg-type]


def test_costly_parts_are_computed_once_a_row() -> None:
    """The logarithm of a row's sum stands before the loop over the row."""
    (kernel,) = lowered(programs(CASES["logarithms"])["layout"]).loops.kernels
    assert any(isinstance(s, Alloc) and s.buffer.name.startswith("held") for s in statements(kernel.body))


def test_windows_over_the_end_read_a_padded_copy() -> None:
    assert programs(CASES["hanging over"])["staging"].staged
    assert not programs(CASES["halved"])["staging"].staged


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "kernel", "pad"), [(14, 3, 1), (14, 5, 2), (15, 5, 2), (33, 7, 3), (9, 2, 1)])
def test_padding_is_never_the_largest(size: int, kernel: int, pad: int, kernel_cache: Path) -> None:
    """What hangs over the border of an image of negative numbers must not win, copied or checked."""
    out = size + 2 * pad - kernel + 1
    model = pooled("MaxPool", (1, 128, size, size), (1, 128, out, out), [kernel, kernel], 1, pad)
    stages = programs(model)
    x = -np.random.default_rng(size).uniform(1, 2, (1, 128, size, size)).astype(np.float32)
    wanted = evaluated(stages["program"], {"x": x})["y"]
    assert wanted.max() < 0
    for program in (stages["layout"], stage_operands(stages["fold"], CPU, always=True)):
        found = lowered(program).natively({"x": x}, kernel_cache)["y"]
        np.testing.assert_array_equal(found, wanted)
