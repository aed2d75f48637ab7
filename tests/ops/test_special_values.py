"""Operators at the edges: nothing to sum, NaN among what is compared, indices from the end and out of range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import tilewright
from tests.cpu_stages import model_of
from tilewright import Options

WAYS = [("cpu", "none"), ("cpu", "register"), ("cpu", "connected"), ("cuda-emulated", "connected")]
NAN = float("nan")


def run(model: object, *inputs: np.ndarray, way: tuple[str, str], cache: Path) -> np.ndarray:
    options = Options(target=way[0], schedule=way[1], denormals="keep", cache_dir=cache)
    return tilewright.compile(model, options=options)(*inputs)[0]  # type: ignore[arg-type]


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_extremes_among_nan(op: str, last: int, way: tuple[str, str], kernel_cache: Path) -> None:
    rows = [[NAN] * 5, [1, NAN, 3, NAN, 2], [1, 3, 3, 1, 1], [-np.inf] * 5, [np.inf, NAN, 0, 0, 0], [0, -1, -1, 5, 5]]
    x = np.array(rows, np.float32)
    model = model_of([(op, ["x"], "y", {"axis": 1, "keepdims": 0, "select_last_index": last})], {"x": x.shape},
                     {"y": (6,)}, types={"y": TensorProto.INT64})  # fmt: skip
    function = np.argmax if op == "ArgMax" else np.argmin
    wanted = 4 - function(x[:, ::-1], axis=1) if last else function(x, axis=1)
    np.testing.assert_array_equal(run(model, x, way=way, cache=kernel_cache), wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_a_product_over_nothing_is_zeros(op: str, way: tuple[str, str], kernel_cache: Path) -> None:
    model = model_of([(op, ["x", "w"], "y", {})], {"x": (2, 0), "w": (0, 3)}, {"y": (2, 3)})
    got = run(model, np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32), way=way, cache=kernel_cache)
    np.testing.assert_array_equal(got, np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("way", WAYS[2:])
@pytest.mark.parametrize("backwards", [0, 1])
def test_sums_along_nothing_are_nothing(backwards: int, way: tuple[str, str], kernel_cache: Path) -> None:
    model = model_of([("CumSum", ["x", "axis"], "y", {"reverse": backwards})], {"x": (3, 0, 2)}, {"y": (3, 0, 2)},
                     {"axis": np.array(1, np.int64)})  # fmt: skip
    assert run(model, np.zeros((3, 0, 2), np.float32), way=way, cache=kernel_cache).shape == (3, 0, 2)


@pytest.mark.parametrize("way", WAYS)
def test_indices_out_of_range_are_brought_inside(way: tuple[str, str], kernel_cache: Path) -> None:
    """As documented: negative ones count from the end, wrong ones read the nearest element, never beside the tensor."""
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    limits = np.iinfo(np.int64)
    places = np.array([0, 3, -1, -4, 4, 99, -5, -99, limits.max, limits.min, limits.min + 3])
    model = model_of([("Gather", ["x", "i"], "y", {"axis": 0})], {"x": (4, 3), "i": (11,)}, {"y": (11, 3)},
                     types={"i": TensorProto.INT64})  # fmt: skip
    got = run(model, x, places, way=way, cache=kernel_cache)
    np.testing.assert_array_equal(got, x[[0, 3, 3, 0, 3, 3, 0, 0, 3, 0, 0]])


def softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def mish(x: np.ndarray) -> np.ndarray:
    return x * np.tanh(softplus(x))


def elu(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.expm1(np.minimum(x, 0)), x)


def selu(x: np.ndarray) -> np.ndarray:
    alpha, gamma = np.float32(1.67326319217681884765625), np.float32(1.05070102214813232421875)
    return np.where(x < 0, np.expm1(np.minimum(x, 0)) * alpha, x) * gamma


def softsign(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), np.sign(x), x / (1 + np.abs(x)))


FUNCTIONS = {
    "Sinh": np.sinh, "Cosh": np.cosh, "Asinh": np.arcsinh, "Acosh": np.arccosh, "Atanh": np.arctanh, "Atan": np.arctan,
    "Asin": np.arcsin, "Acos": np.arccos, "Softplus": softplus, "Mish": mish,
    "Elu": elu, "Celu": elu, "Selu": selu, "Softsign": softsign,
}  # fmt: skip


def samples() -> np.ndarray:
    """Floats of every size, many near 0 and near 1, and the ends of what functions take and give."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 20000, np.uint32).view(np.float32)
    near = np.concatenate([rng.uniform(-100, 100, 8000), rng.uniform(-2, 2, 8000), 1 + rng.exponential(1e-3, 4000)])
    ends = [0.0, -0.0, 1, -1, np.inf, -np.inf, NAN, 1e-30, -1e-40, 1e19, 2e19, 3e38, -80, -87, -91, 88.8, 89.3, 89.5]
    return np.concatenate([bits, near.astype(np.float32), np.array(ends, np.float32)])


@pytest.mark.sample(3)
@pytest.mark.parametrize("target", ["cpu", "cuda-emulated"])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_functions_to_the_last_places(op: str, target: str, kernel_cache: Path) -> None:
    x = samples()[:: 1 if target == "cpu" else 7]
    model = model_of([(op, ["x"], "y", {})], {"x": x.shape}, {"y": x.shape})
    model.opset_import[0].version = 18  # which brought Mish
    got = run(model, x, way=(target, "connected"), cache=kernel_cache)
    with np.errstate(all="ignore"):
        exact = FUNCTIONS[op](x.astype(np.float64))
        exact[~np.isfinite(x)] = FUNCTIONS[op](x[~np.isfinite(x)])
        wanted = exact.astype(np.float32)
        if op == "Mish":
            wanted[x == -np.inf] = got[x == -np.inf]  # -inf times 0
        normal = np.isfinite(wanted) & (np.abs(wanted) >= np.finfo(np.float32).tiny)
        error = np.abs(got.astype(np.float64) - exact) / np.spacing(np.abs(wanted))
    assert error[normal].max() <= 4
    special = ~normal & ~np.isfinite(wanted)
    np.testing.assert_array_equal(got[special], wanted[special])
    signed = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got[signed]), np.signbit(wanted[signed]))


@pytest.mark.parametrize("way", WAYS[:3])
def test_a_tensor_without_elements(way: tuple[str, str], kernel_cache: Path) -> None:
    model = model_of([("Trilu", ["x"], "y", {"upper": 0})], {"x": (3, 0, 5)}, {"y": (3, 0, 5)})
    got = run(model, np.zeros((3, 0, 5), np.float32), way=way, cache=kernel_cache)
    assert got.shape == (3, 0, 5)
