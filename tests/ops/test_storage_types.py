"""Types of a byte or less: every code, rounding and saturation to the letter, and that they move unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tests.ops.running import interpret_model
from tilewright import Options
from tilewright.ir.forms import dtypes

WAYS = ["interpreted", "cpu", "cuda-emulated"]
FLOATS = ["float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz", "float4e2m1"]
INTEGERS = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}


def one_node(node: onnx.NodeProto, x: np.ndarray, result: int, constants: dict[str, np.ndarray] | None = None):
    values = [helper.make_tensor_value_info("x", dtypes.by_numpy(x.dtype).onnx, x.shape)]
    given = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", result, None)], given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)


def run(model: onnx.ModelProto, x: np.ndarray, way: str, cache: Path) -> np.ndarray:
    if way == "interpreted":
        return interpret_model(model, {"x": x})["y"]
    return tilewright.compile(model, options=Options(target=way, cache_dir=cache))(x)[0]


def codes(name: str) -> np.ndarray:
    dtype = dtypes.by_name(name)
    bits = {"int4": 4, "uint4": 4, "float4e2m1": 4, "int2": 2, "uint2": 2}.get(name, 8)
    return np.arange(1 << bits, dtype=np.uint8).view(dtype.numpy)


def numbers() -> np.ndarray:
    """Floats of every size, the halves between neighbours among them, and the special ones."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(3000) * 2.0 ** rng.integers(-24, 24, 3000)
    short = np.round(rng.standard_normal(2000) * 64) / 64 * 2.0 ** rng.integers(-16, 14, 2000)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 6, 7, 0.25, 0.75]
    special += [448, 464, 465, 480, 57344, 61440, 61441, 240, 248, 249]  # the largest numbers, and halves beyond them
    return np.concatenate([wide, short, special, -np.array(special)]).astype(np.float32)


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [d.name for d in dtypes.STORAGE])
def test_every_code_is_its_number(name: str, way: str, kernel_cache: Path) -> None:
    x = codes(name)
    model = one_node(helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT), x, TensorProto.FLOAT)
    np.testing.assert_array_equal(run(model, x, way, kernel_cache), x.astype(np.float32))


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_as_ml_dtypes_does(name: str, saturate: int, way: str, kernel_cache: Path) -> None:
    dtype, x = dtypes.by_name(name), numbers()
    if name == "float4e2m1":
        x = x[np.isfinite(x)]  # it has neither infinity nor NaN
    node = helper.make_node("Cast", ["x"], ["y"], to=dtype.onnx, saturate=saturate)
    found = run(one_node(node, x, dtype.onnx), x, way, kernel_cache)
    values = codes(name).astype(np.float32)
    most = values[np.isfinite(values)].max()
    wanted = (np.clip(x, -most, most) if saturate else x).astype(dtype.numpy)
    assert found.dtype == dtype.numpy
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint8), wanted[~nan].view(np.uint8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_powers_of_two_are_rounded_as_asked(mode: str, way: str, kernel_cache: Path) -> None:
    x = np.abs(numbers())
    x = x[np.isfinite(x) & (x > 0)]
    node = helper.make_node("Cast", ["x"], ["y"], to=dtypes.float8e8m0.onnx, round_mode=mode)
    found = run(one_node(node, x, dtypes.float8e8m0.onnx), x, way, kernel_cache)
    wanted = onnx.numpy_helper.to_float8e8m0(x, True, mode)
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", INTEGERS)
def test_small_integers_quantise_and_come_back(name: str, way: str, kernel_cache: Path) -> None:
    dtype, (low, high) = dtypes.by_name(name), INTEGERS[name]
    x = np.linspace(-20, 20, 203, dtype=np.float32)
    constants = {"s": np.float32(0.7), "z": np.asarray(1, dtype.numpy)}
    quantise = one_node(helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"]), x, dtype.onnx, constants)
    found = run(quantise, x, way, kernel_cache)
    wanted = np.clip(np.rint(x / np.float32(0.7)) + 1, low, high)
    np.testing.assert_array_equal(found.astype(np.float32), wanted)
    back = one_node(helper.make_node("DequantizeLinear", ["x", "s", "z"], ["y"]), found, TensorProto.FLOAT, constants)
    np.testing.assert_allclose(run(back, found, way, kernel_cache), (wanted - 1) * np.float32(0.7), rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["float8e5m2", "int4"])
def test_they_move_unchanged(name: str, way: str, kernel_cache: Path) -> None:
    x = codes(name).reshape(2, -1)
    model = one_node(helper.make_node("Transpose", ["x"], ["y"]), x, dtypes.by_name(name).onnx)
    np.testing.assert_array_equal(run(model, x, way, kernel_cache).view(np.uint8), x.T.copy().view(np.uint8))


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "int32", "int64", "uint32"])
def test_floats_out_of_range_become_the_nearest_integers(kind: str, way: str, kernel_cache: Path) -> None:
    """Of 32 bits and more; narrower ones keep the low bits of numbers of 32, and are 0 for what has none."""
    dtype = dtypes.by_name(kind)
    far = [np.nan, np.inf, -np.inf, 3e9, -3e9, 1e20, -1e20, 2.0**31, 2147483520]
    x = np.array([*far, -1.9, 1.9, 300, -300], np.float32)
    node = helper.make_node("Cast", ["x"], ["y"], to=dtype.onnx)
    found = run(one_node(node, x, dtype.onnx), x, way, kernel_cache)
    wide = dtype if dtype.bits >= 32 else dtypes.int32
    x = x if dtype.bits >= 32 else np.where(np.abs(x) < 2.0**31, x, np.float32(0))
    wanted = [0 if np.isnan(v) else max(min(int(np.clip(v, -1e30, 1e30)), wide.limits[1]), wide.limits[0]) for v in x]
    np.testing.assert_array_equal(found, np.array(wanted).astype(wide.numpy).astype(dtype.numpy))
