"""Tensors without elements, anywhere in a model: results of the right shape, and no plan that divides by nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright
from tests.cpu_stages import CPU, model_of, programs
from tilewright import Options, UnsupportedError
from tilewright.ir.forms.compute import Map, reads

CASES = {
    "map": ([("Relu", ["x"], "y", {})], {"x": (0, 3)}, (0, 3)),
    "transpose": ([("Transpose", ["x"], "y", {"perm": [1, 0]})], {"x": (0, 3)}, (3, 0)),
    "product": ([("MatMul", ["x", "w"], "y", {})], {"x": (0, 3), "w": (3, 4)}, (0, 4)),
    "sum of nothing": ([("MatMul", ["x", "w"], "y", {})], {"x": (2, 0), "w": (0, 4)}, (2, 4)),
    "softmax": ([("Softmax", ["x"], "y", {})], {"x": (3, 0)}, (3, 0)),
    "concat": (
        [("Relu", ["x"], "a", {}), ("Concat", ["a", "w"], "y", {"axis": 0})],
        {"x": (0, 3), "w": (2, 3)},
        (2, 3),
    ),
    "flatten": ([("Flatten", ["x"], "y", {})], {"x": (0, 3, 4)}, (0, 12)),
    "convolution": (
        [("Conv", ["x", "w"], "y", {"pads": [1] * 4})],
        {"x": (0, 2, 6, 6), "w": (3, 2, 3, 3)},
        (0, 3, 6, 6),
    ),
    "chain": (
        [("Relu", ["x"], "a", {}), ("Softmax", ["a"], "b", {}), ("MatMul", ["b", "w"], "y", {})],
        {"x": (0, 3), "w": (3, 4)},
        (0, 4),
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", ["connected", "none"])
def test_nothing_is_computed_of_nothing(name: str, schedule: str, kernel_cache: Path) -> None:
    steps, inputs, shape = CASES[name]
    options = Options(cache_dir=kernel_cache, threads=2, schedule=schedule)
    model = tilewright.compile(model_of(steps, inputs, {"y": shape}), options=options)
    (found,) = model(*(np.ones(s, np.float32) for s in inputs.values()))
    assert found.shape == shape
    np.testing.assert_array_equal(found, np.zeros(shape) if name == "sum of nothing" else np.ones(shape))


@pytest.mark.parametrize("name", ["product", "concat", "chain"])
def test_a_gpu_takes_tensors_without_elements(name: str, kernel_cache: Path) -> None:
    steps, inputs, shape = CASES[name]
    options = Options(cache_dir=kernel_cache, target="cuda-emulated")
    model = tilewright.compile(model_of(steps, inputs, {"y": shape}), options=options)
    (found,) = model(*(np.ones(s, np.float32) for s in inputs.values()))
    np.testing.assert_array_equal(found, np.ones(shape))


def test_empty_results_read_nothing() -> None:
    steps, inputs, shape = CASES["chain"]
    folded = programs(model_of(steps, inputs, {"y": shape, "a": (0, 3)}), CPU)["fold"]
    assert all(isinstance(c, Map) and reads(c) == [] for c in folded.computes)
    assert len(folded.computes) == 2


def test_an_axis_of_nothing_does_not_hide_a_huge_one() -> None:
    with pytest.raises(UnsupportedError, match="elements; 1099511627776 are supported"):
        tilewright.compile(model_of([("Relu", ["x"], "y", {})], {"x": (0, 1 << 62)}, {"y": (0, 1 << 62)}))
