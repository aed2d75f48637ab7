"""TopK, Unique and scatters of so many elements that a network sorts them: against NumPy, by the interpreter and as
machine code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tilewright
from tilewright import Options, UnsupportedError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Scan, Scatter, Sort
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops.lower import lower

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda old, new: new, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


def model_of(node: onnx.NodeProto, inputs: dict[str, np.ndarray], **constants: np.ndarray) -> onnx.ModelProto:
    ports = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(n) for n in node.output]
    given = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph([node], "g", ports, outputs, given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def interpreted(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    program = lower(load(model))
    assert any(isinstance(c, Scan) and c.finals != (None,) for c in program.computes)  # it is sorted
    assert not any(isinstance(c, Scatter | Sort) for c in program.computes)
    return list(evaluate(program, inputs).values())


def top_case(dtype: Any, axis: int, largest: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (1500, 2) if axis == 0 else (2, 1500)
    x = rng.integers(0, 200, shape).astype(dtype)  # with many that are equal
    if np.dtype(dtype).kind == "i":
        x = (x - 100) * np.array(max(np.iinfo(dtype).max // 128, 1), dtype)
    elif np.dtype(dtype).kind == "f":
        x = x - np.array(100, dtype)
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"], axis=axis, largest=largest)
    keys = x.astype(object)
    places = np.argsort(-keys if largest else keys, axis, kind="stable").take(np.arange(1400), axis)
    wanted = [np.take_along_axis(x, places, axis), places]
    return model_of(node, {"x": x}, k=np.array([1400])), {"x": x}, wanted


@pytest.mark.parametrize(("dtype", "axis", "largest"), [
    (np.float32, -1, 1), (np.float32, 0, 0), (np.float64, -1, 1), (np.float16, 0, 1), (np.int64, -1, 0),
    (np.uint64, -1, 1), (np.int8, 0, 1), (np.uint32, -1, 0),
])  # fmt: skip
def test_top_k(dtype: Any, axis: int, largest: int) -> None:
    model, inputs, wanted = top_case(dtype, axis, largest)
    for got, want in zip(interpreted(model, inputs), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def elements_case(dtype: Any, axis: int, reduction: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(axis)
    shape, given = ((3, 1100), (2, 1000)) if axis else ((1100, 3), (1000, 2))
    inputs = {
        "x": rng.integers(0, 4, shape).astype(dtype),
        "i": rng.integers(-1100, 1100, given),
        "u": rng.integers(0, 3, given).astype(dtype),
    }
    wanted = inputs["x"].copy()
    for at in np.ndindex(*given):
        place = list(at)
        place[axis] = inputs["i"][at]
        wanted[tuple(place)] = COMBINE[reduction](wanted[tuple(place)], inputs["u"][at])
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=axis, reduction=reduction)
    return model_of(node, inputs), inputs, wanted


def places_case(dtype: Any, reduction: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    inputs = {
        "x": rng.integers(0, 4, (40, 30, 2)).astype(dtype),
        "i": np.stack([rng.integers(-40, 40, (900, 2)), rng.integers(-30, 30, (900, 2))], -1),
        "u": rng.integers(0, 3, (900, 2, 2)).astype(dtype),
    }
    wanted = inputs["x"].copy()
    for at in np.ndindex(900, 2):
        place = tuple(inputs["i"][at])
        wanted[place] = COMBINE[reduction](wanted[place], inputs["u"][at])
    return model_of(helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction), inputs), inputs, wanted


@pytest.mark.parametrize("reduction", COMBINE)
@pytest.mark.parametrize(("dtype", "axis"), [(np.float32, 1), (np.int64, 0), (np.uint8, 1), (ml_dtypes.bfloat16, 0)])
def test_scatter_elements(dtype: Any, axis: int, reduction: str) -> None:
    model, inputs, wanted = elements_case(dtype, axis, reduction)
    (found,) = interpreted(model, inputs)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("reduction", COMBINE)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_scatter_by_places(dtype: Any, reduction: str) -> None:
    model, inputs, wanted = places_case(dtype, reduction)
    (found,) = interpreted(model, inputs)
    np.testing.assert_array_equal(found, wanted)


def test_the_sorted_as_machine_code(kernel_cache: Path) -> None:
    model, inputs, wanted = top_case(np.float32, -1, 1)
    found = tilewright.compile(model, options=Options(cache_dir=kernel_cache, threads=2))(**inputs)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "cuda-emulated"])
def test_as_machine_code(target: str, kernel_cache: Path) -> None:
    options = Options(cache_dir=kernel_cache, threads=2, target=target)
    for dtype in (np.float64, np.int32):
        model, inputs, wanted = top_case(dtype, 0, 0)
        for got, want in zip(tilewright.compile(model, options=options)(**inputs), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    for case in (elements_case(np.float32, 1, "none"), places_case(np.float32, "add")):
        (found,) = tilewright.compile(case[0], options=options)(**case[1])
        np.testing.assert_array_equal(found, case[2])


def test_what_would_take_too_long_is_refused() -> None:
    large = {"x": np.broadcast_to(np.float32(0), (1 << 26,))}
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"])
    with pytest.raises(UnsupportedError, match="TopK node 'y': it would take 23555211264 comparisons"):
        lower(load(model_of(node, large, k=np.array([1 << 26]))))
    inputs = {"x": large["x"], "i": np.broadcast_to(np.int64(0), (1 << 26, 1)), "u": large["x"]}
    with pytest.raises(UnsupportedError, match="ScatterND node 'y': it would take"):
        lower(load(model_of(helper.make_node("ScatterND", ["x", "i", "u"], ["y"]), inputs)))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "axis", "in_order"), [
    (np.float32, None, 1), (np.int64, None, 0), (np.int8, 0, 1), (np.int8, 0, 0),
])  # fmt: skip
def test_unique(dtype: Any, axis: int | None, in_order: int, kernel_cache: Path) -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(-30, 30, 2500).astype(dtype) if axis is None else rng.integers(-2, 3, (2500, 3)).astype(dtype)
    about = {} if axis is None else {"axis": axis}
    node = helper.make_node("Unique", ["x"], ["y", "i", "inverse", "counts"], sorted=in_order, **about)
    model: Any = tilewright.compile(model_of(node, {"x": x}), options=Options(cache_dir=kernel_cache, fallback="error"))
    values, places, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not in_order:
        by_place = np.argsort(places)
        inverse, values = np.argsort(by_place)[inverse], np.take(values, by_place, axis or 0)
        places, counts = places[by_place], counts[by_place]
    for got, want in zip(model(x), (values, places, inverse, counts), strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(model.calls) > 10  # a network, whose steps may run inside kernels


@pytest.mark.slow
def test_unique_of_more_than_can_be_compared(kernel_cache: Path) -> None:
    """Each with each they would be 40 thousand million comparisons, and as many numbers in memory."""
    x = np.random.default_rng(4).integers(0, 90_000, 200_000)
    node = helper.make_node("Unique", ["x"], ["y", "i", "inverse", "counts"])
    model: Any = tilewright.compile(model_of(node, {"x": x}), options=Options(cache_dir=kernel_cache))
    found = np.unique(x, True, True, True)
    for got, want in zip(model(x), found, strict=True):
        np.testing.assert_array_equal(got, want)
