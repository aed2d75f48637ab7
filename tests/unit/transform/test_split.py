"""Long reductions in parts: the same result however many threads run, enough tiles for every unit, odd lengths too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import evaluated, model_of, random_inputs
from tilewright import Options, ops
from tilewright import compile as compile_model
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, Reduce
from tilewright.schedule.planner import make_plan, predicted_seconds
from tilewright.target import machine
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.reductions.split import Split, split_reductions

MACHINES = ("neoverse_n1", "emerald_rapids", "h200")


def model(kind: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> ModelProto:
    kept = tuple(n for d, n in enumerate(shape) if d not in axes)
    if kind == "ArgMax":
        return model_of([(kind, ["x"], "y", {"axis": axes[0], "keepdims": 0})], {"x": shape}, {"y": kept},
                        types={"y": TensorProto.INT64})  # fmt: skip
    if kind == "ReduceSum":  # its axes are an input already
        return model_of([(kind, ["x", "axes"], "y", {"keepdims": 0})], {"x": shape}, {"y": kept},
                        {"axes": np.array(axes, np.int64)})  # fmt: skip
    return model_of([(kind, ["x"], "y", {"keepdims": 0, "axes": axes})], {"x": shape}, {"y": kept})


def reduction(kind: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> Program:
    return fold_constants(ops.lower(load(model(kind, shape, axes), {})))


def split_for(program: Program, name: str) -> Program:
    target = machine(name)
    return split_reductions(program, target, lambda p: predicted_seconds(p, target, "connected"))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("shape", [(2048, 2048), (2003, 2003), (70, 9, 64, 128)])
def test_a_sum_of_everything_has_a_tile_for_every_unit(name: str, shape: tuple[int, ...]) -> None:
    target = machine(name)
    plan = make_plan(split_for(reduction("ReduceSum", shape, tuple(range(len(shape)))), name), target)
    assert plan.kernels[0].tiles >= target.units
    assert len(plan.kernels) == 2


@pytest.mark.parametrize("name", MACHINES)
def test_short_reductions_and_many_results_stay_whole(name: str) -> None:
    for shape, axes in (((50, 60), (0, 1)), ((4096 * 64, 128), (1,))):
        program = reduction("ReduceSum", shape, axes)
        assert split_for(program, name) is program


@pytest.mark.parametrize(
    ("kind", "shape", "axes", "size"),
    [
        ("ReduceSum", (37, 41), (0, 1), 5), ("ReduceMax", (3, 100), (1,), 7), ("ReduceMean", (64, 9), (0,), 16),
        ("ReduceProd", (2, 31), (1,), 31), ("ArgMax", (5, 103), (1,), 10), ("ReduceLogSumExp", (4, 77), (1,), 13),
        ("ReduceL2", (7, 50), (0, 1), 3),
    ],
)  # fmt: skip
def test_parts_combine_to_the_whole(kind: str, shape: tuple[int, ...], axes: tuple[int, ...], size: int) -> None:
    program = reduction(kind, shape, axes)
    inputs = random_inputs(program, 3)
    wanted = evaluated(program, inputs, wide=True)
    computes = []
    for compute in program.computes:
        if isinstance(compute, Reduce):
            cut = Split(compute, compute.reduce_axes[0], size)
            computes.extend(cut.computes({t.name for t in program.tensors()}))
        else:
            computes.append(compute)
    found = evaluated(program.with_computes(tuple(computes)), inputs, wide=True)
    for output, value in wanted.items():
        np.testing.assert_allclose(found[output], value, rtol=1e-12)


@pytest.mark.parametrize("leads", [False, True])
def test_parts_of_every_element_of_outer_axes_combine_too(leads: bool) -> None:
    program = reduction("ReduceSum", (4, 5, 7, 11), (0, 2, 3))
    inputs = random_inputs(program, 3)
    (compute,) = program.computes
    assert isinstance(compute, Reduce)
    outer, middle, _ = compute.reduce_axes
    cut = Split(compute, middle, 3, leads, around=(outer,))
    parts, whole = cut.computes({t.name for t in program.tensors()})
    assert parts.outputs[0].shape == ((4, 3, 5) if leads else (5, 4, 3)) and len(whole.reduce_axes) == 2
    (wanted,), (found,) = (tuple(evaluated(p, inputs, wide=True).values())
                           for p in (program, program.with_computes((parts, whole))))  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("name", MACHINES)
def test_sums_of_very_many_floats_are_parts_whatever_that_costs(name: str) -> None:
    target = machine(name)
    for kind, count in (("ReduceSum", 2), ("ReduceMean", 2), ("ReduceMax", 1)):
        program = reduction(kind, (5_000_000, 2000), (0,))
        reduces = [c for c in split_reductions(program, target, lambda _: 1.0).computes if isinstance(c, Reduce)]
        assert len(reduces) == count, kind


def test_what_is_added_last_still_counts(kernel_cache: Path) -> None:
    squares = model_of([("ReduceSumSquare", ["x"], "y", {"keepdims": 0, "axes": [0, 1, 2]})],
                       {"x": (6, 5, 1 << 20)}, {"y": ()})  # fmt: skip
    x = np.random.default_rng(2).random((6, 5, 1 << 20), dtype=np.float32)
    found = np.asarray(compile_model(squares, options=Options(cache_dir=kernel_cache))(x)[0])
    np.testing.assert_allclose(found, np.square(x, dtype=np.float64).sum(), rtol=1e-6)  # of any vectors


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["ReduceSum", "ArgMax", "ReduceMax"])
def test_the_same_bits_at_any_number_of_threads(kind: str, kernel_cache: Path) -> None:
    axes = (1,) if kind == "ArgMax" else (0, 1)
    shape = (3, 1_000_003) if kind == "ArgMax" else (1021, 1999)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 8):
        options = Options(threads=threads, cache_dir=kernel_cache)
        results.append(np.asarray(compile_model(model(kind, shape, axes), options=options)(x)[0]))
    assert all(np.array_equal(results[0], other) for other in results[1:])
    if kind != "ReduceSum":
        assert np.array_equal(results[0], x.argmax(1) if kind == "ArgMax" else x.max())
    else:
        np.testing.assert_allclose(results[0], x.astype(np.float64).sum(), rtol=1e-4, atol=1e-2)
