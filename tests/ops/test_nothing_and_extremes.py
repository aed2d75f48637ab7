"""Means of nothing, loops without steps, the largest numbers, casts beyond integers, flags, sparse constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tests.cpu_stages import model_of
from tests.ops.running import interpret_model
from tilewright import InputError, ModelError, Options

FLOAT, WHOLE, FLAG = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
port = helper.make_tensor_value_info


def opened(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)


def one(op: str, x: np.ndarray, *others: tuple[str, np.ndarray], version: int = 21, **attributes: Any) -> np.ndarray:
    """One node on the interpreter."""
    node = helper.make_node(op, ["x", *(name for name, _ in others)], ["y"], **attributes)
    given = port("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    fixed = [numpy_helper.from_array(a, name) for name, a in others]
    graph = helper.make_graph([node], "graph", [given], [opened("y")], fixed)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)
    return interpret_model(model, {"x": x})["y"]


OVER_NOTHING = {
    "ReduceMean": np.nan, "ReduceSum": 0, "ReduceProd": 1, "ReduceMax": -np.inf, "ReduceMin": np.inf, "ReduceL1": 0,
    "ReduceL2": 0, "ReduceLogSum": -np.inf, "ReduceLogSumExp": -np.inf, "ReduceSumSquare": 0,
}  # fmt: skip


@pytest.mark.parametrize("op", OVER_NOTHING)
def test_reductions_of_nothing(op: str) -> None:
    got = one(op, np.zeros((2, 0), np.float32), ("axes", np.array([1])), keepdims=0)
    np.testing.assert_array_equal(got, np.full(2, OVER_NOTHING[op], np.float32))


def test_the_mean_of_an_image_without_pixels() -> None:
    got = one("GlobalAveragePool", np.zeros((1, 2, 0, 3), np.float32))
    assert got.shape == (1, 2, 1, 1) and np.isnan(got).all()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_the_largest_numbers(approximate: str, kernel_cache: Path) -> None:
    x = np.array([3.4e38, -3.4e38, 1e30, np.inf, 2.0, 1e-30], np.float32)
    model = model_of([("Gelu", ["x"], "y", {"approximate": approximate})], {"x": x.shape}, {"y": x.shape})
    model.opset_import[0].version = 20
    got = tilewright.compile(model, options=Options(cache_dir=kernel_cache))(x)[0]
    np.testing.assert_array_equal(got[:4], np.array([3.4e38, 0, 1e30, np.inf], np.float32))
    np.testing.assert_allclose(got[4:], [1.9545, 5e-31], rtol=2e-4)


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_an_empty_region_without_samples_is_zero(mode: str) -> None:
    """As the reference and ONNX Runtime have it: no sample, no value."""
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    rois = np.array([[1, 1, 1, 1], [0, 0, 2, 2], [3, 3, 1, 1]], np.float32)
    got = one("RoiAlign", x, ("r", rois), ("b", np.zeros(3, np.int64)), mode=mode, sampling_ratio=0)
    np.testing.assert_array_equal(got.ravel(), [0, 6.0 if mode == "max" else 3.5, 0])


KEPT = {"INT4": 4, "UINT4": 4, "INT2": 2, "UINT2": 2, "INT8": 8, "UINT8": 8, "INT16": 16, "UINT16": 16}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("source", [np.float32, np.float64, np.float16])
def test_narrow_integers_keep_the_low_bits_of_32(name: str, source: type) -> None:
    """Of what 32 bits do not hold, infinities and NaN among them, they keep 0."""
    given = [np.inf, -np.inf, np.nan, 1e10, -1e10, 3e9, -3e9, 2.0**31, -300, 300, 7.5, -8.5, -1.5, 0.5]
    with np.errstate(over="ignore"):
        x = np.array(given, source)
    nodes = [helper.make_node("Cast", ["x"], ["q"], to=getattr(TensorProto, name)),
             helper.make_node("Cast", ["q"], ["y"], to=WHOLE)]  # fmt: skip
    graph = helper.make_graph(nodes, "graph", [port("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
                              [port("y", WHOLE, x.shape)])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=12)
    bits = (1 << KEPT[name]) - 1
    whole = [int(v) & bits if abs(v) < 2.0**31 else 0 for v in x.astype(np.float64)]
    wanted = [w - bits - 1 if name.startswith("I") and w > bits // 2 else w for w in whole]
    np.testing.assert_array_equal(interpret_model(model, {"x": x})["y"], wanted)


def loop(count: int | None, condition: bool | None, body: onnx.GraphProto) -> onnx.ModelProto:
    """A Loop over x [2, 3] that gives its state and a stack; a count or condition that is None is an input."""
    inputs = [port("x", FLOAT, [2, 3]), *([port("n", WHOLE, [])] if count is None else []),
              *([port("c", FLAG, [])] if condition is None else [])]  # fmt: skip
    fixed = [numpy_helper.from_array(np.array(v), n) for n, v in (("n", count), ("c", condition)) if v is not None]
    node = helper.make_node("Loop", ["n", "c", "x"], ["y", "z"], body=body)
    graph = helper.make_graph([node], "graph", inputs, [opened("y"), opened("z")], fixed)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def squares(following: str = "Add", going_on: str = "co") -> onnx.GraphProto:
    """A body that stacks the squares of its state."""
    more = {"axis": 0} if following == "Concat" else {}
    nodes = [helper.make_node("Identity", ["c"], ["co"]), helper.make_node(following, ["s", "s"], ["so"], **more),
             helper.make_node("ReduceSum", ["s"], ["sum"], keepdims=0),
             helper.make_node("Less", ["sum", "sum"], ["ends"]),
             helper.make_node("Mul", ["s", "s"], ["k"])]  # fmt: skip
    return helper.make_graph(nodes, "body", [port("i", WHOLE, []), port("c", FLAG, []), port("s", FLOAT, None)],
                             [port(going_on, FLAG, []), port("so", FLOAT, None), port("k", FLOAT, None)])  # fmt: skip


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (loop(0, True, squares()), {}),
        (loop(-3, True, squares()), {}),
        (loop(0, True, squares("Concat")), {}),
        (loop(5, False, squares()), {}),
        (loop(5, None, squares()), {"c": np.array(False)}),
        (loop(None, True, squares()), {"n": np.array(0)}),
        (loop(5, None, squares(going_on="ends")), {"c": np.array(False)}),
    ],
)
def test_a_loop_without_steps_stacks_nothing(model: onnx.ModelProto, more: dict[str, Any], kernel_cache: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, z = tilewright.compile(model, options=Options(cache_dir=kernel_cache))({"x": x, **more})
    np.testing.assert_array_equal(y, x)
    assert z.shape == (0, 2, 3) and z.dtype == np.float32


def scan(extent: int | str) -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["so"]), helper.make_node("Mul", ["s", "e"], ["k"])], "body",
        [port("s", FLOAT, [3]), port("e", FLOAT, [3])], [port("so", FLOAT, [3]), port("k", FLOAT, [3])],
    )  # fmt: skip
    node = helper.make_node("Scan", ["s", "x"], ["y", "z"], body=body, num_scan_inputs=1)
    graph = helper.make_graph([node], "graph", [port("s", FLOAT, [3]), port("x", FLOAT, [extent, 3])],
                              [opened("y"), opened("z")])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("target", ["cpu", "cuda-emulated"])
def test_a_scan_without_steps_gives_its_state_back(target: str, kernel_cache: Path) -> None:
    """It once gave what lay in the memory of its result."""
    s = np.array([1, 2, 3], np.float32)
    y, z = tilewright.compile(scan(0), options=Options(cache_dir=kernel_cache, target=target))(
        s, np.zeros((0, 3), np.float32)
    )
    np.testing.assert_array_equal(y, s)
    assert z.shape == (0, 3)


def test_a_recurrent_layer_without_steps_gives_its_state_back() -> None:
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 3)).astype(np.float32)
    given = {"w": (1, 12, 2), "r": (1, 12, 3)}
    fixed = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in given.items()]
    node = helper.make_node("LSTM", ["x", "w", "r", "", "", "h"], ["y", "yh"], hidden_size=3)
    graph = helper.make_graph([node], "graph", [port("x", FLOAT, [0, 1, 2]), port("h", FLOAT, [1, 1, 3])],
                              [opened("y"), opened("yh")], fixed)  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found = interpret_model(model, {"x": np.zeros((0, 1, 2), np.float32), "h": state})
    assert found["y"].shape == (0, 1, 1, 3)
    np.testing.assert_array_equal(found["yh"], state)


@pytest.mark.parametrize(
    ("op", "flag"), [("ReduceSum", "keepdims"), ("ArgMax", "select_last_index"), ("Trilu", "upper")]
)
def test_a_flag_is_yes_or_no(op: str, flag: str) -> None:
    """Runtimes differ in what they take other numbers for."""
    with pytest.raises(ModelError, match=f"its attribute {flag} is 2; it is 0 or 1"):
        one(op, np.ones((2, 3), np.float32), **{flag: 2})


SPARSE = [np.array([1, 5]), np.array([[0, 1], [1, 2]])]


@pytest.mark.parametrize("places", SPARSE)
@pytest.mark.parametrize("as_attribute", [False, True])
def test_sparse_constants(places: np.ndarray, as_attribute: bool) -> None:
    values = numpy_helper.from_array(np.array([3, 4], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places, "places"), [2, 3])
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    if as_attribute:
        nodes.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    graph = helper.make_graph(nodes, "graph", [port("x", FLOAT, [2, 3])], [opened("y")],
                              sparse_initializer=[] if as_attribute else [sparse])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    got = interpret_model(model, {"x": np.ones((2, 3), np.float32)})["y"]
    np.testing.assert_array_equal(got, [[1, 4, 1], [1, 1, 5]])


@pytest.mark.parametrize(
    ("places", "shape", "says"),
    [
        (np.array([1, 6]), [2, 3], "a place is outside the shape"),
        (np.array([-1, 2]), [2, 3], "a place is outside the shape"),
        (np.array([1, 2, 3]), [2, 3], "2 values at indices of shape"),
        (np.array([1, 2]), [1 << 20, 1 << 20], "is sparse, with the shape"),
    ],
)
def test_sparse_constants_that_are_none(places: np.ndarray, shape: list[int], says: str) -> None:
    values = numpy_helper.from_array(np.array([3, 4], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places, "places"), shape)
    graph = helper.make_graph([helper.make_node("Relu", ["w"], ["y"])], "graph", [], [opened("y")],
                              sparse_initializer=[sparse])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(tilewright.TilewrightError, match=f"initializer 'w'.*{says}"):
        interpret_model(model, {})


def test_outputs_of_one_name_are_given_in_order_only(kernel_cache: Path) -> None:
    model = model_of([("Relu", ["x"], "y", {})], {"x": (2,)}, {"y": (2,)})
    model.graph.output.append(model.graph.output[0])
    made = tilewright.compile(model, options=Options(cache_dir=kernel_cache))
    assert len(made(np.ones(2, np.float32))) == 2
    with pytest.raises(InputError, match="two outputs are called 'y'"):
        made.run({"x": np.ones(2, np.float32)})


def fixed_batch(target: list[int]) -> onnx.ModelProto:
    """Written for one sample, which it reshapes."""
    return model_of([("Reshape", ["x", "s"], "r", {}), ("Relu", ["r"], "y", {})], {"x": (1, 2, 3)}, {"y": (1, 6)},
                    {"s": np.array(target)})  # fmt: skip


def test_shapes_may_say_another_size_than_the_file(kernel_cache: Path) -> None:
    model = tilewright.compile(fixed_batch([-1, 6]), shapes={"x": [4, 2, 3]}, options=Options(cache_dir=kernel_cache))
    assert [(p.name, p.shape) for p in (*model.inputs, *model.outputs)] == [("x", (4, 2, 3)), ("y", (4, 6))]
    x = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    np.testing.assert_array_equal(model(x)[0], np.maximum(x.reshape(4, 6), 0))


def test_what_does_not_fit_another_size_is_named(kernel_cache: Path) -> None:
    with pytest.raises(ModelError, match="Reshape node 'Reshape_r'"):
        tilewright.compile(fixed_batch([1, 6]), shapes={"x": [4, 2, 3]}, options=Options(cache_dir=kernel_cache))


def test_a_call_has_the_sizes_that_the_file_fixes(kernel_cache: Path) -> None:
    model = model_of([("Relu", ["x"], "y", {})], {"x": (1, 2)}, {"y": (1, 2)})
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    made = tilewright.compile(model, options=Options(cache_dir=kernel_cache))
    assert made(np.ones((3, 2), np.float32))[0].shape == (3, 2)
    with pytest.raises(InputError):
        made(np.ones((3, 4), np.float32))
