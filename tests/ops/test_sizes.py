"""Operators at odd sizes and with unusual attributes against a second runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tests.ops.running import RunModel, interpret_model
from tilewright import Options, UnsupportedError

runtime = pytest.importorskip("onnxruntime")
INT64 = np.int64


@pytest.fixture(scope="module", params=["interpreted", pytest.param("compiled", marks=pytest.mark.slow)])
def run_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunModel:
    """On the interpreter, and as machine code where there is some for the operator."""
    if request.param == "interpreted":
        return interpret_model
    options = Options(cache_dir=tmp_path_factory.mktemp("cache"), threads=2)

    def run(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        try:
            made = tilewright.compile(model, shapes={n: a.shape for n, a in inputs.items()}, options=options)
        except UnsupportedError as error:
            pytest.skip(str(error))
        return made.run(dict(inputs))

    return run


def check(
    run_model: RunModel, nodes, inputs: dict[str, np.ndarray], constants=None, outputs=("y",), version=17
) -> None:
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()
    ]
    outs = [onnx.ValueInfoProto(name=o) for o in outputs]
    initializers = [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", values, outs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=9)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(list(outputs), inputs)
    found = run_model(model, inputs)
    for name, want in zip(outputs, expected, strict=True):
        assert found[name].dtype == want.dtype and found[name].shape == want.shape, name
        np.testing.assert_allclose(found[name], want, rtol=2e-4, atol=2e-5, err_msg=name)


def normal(*shape: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed + 17 * len(shape)).standard_normal(shape).astype(dtype)


CONVOLUTIONS = [
    # input, weight, attributes
    ((1, 3, 13), (5, 3, 4), {"strides": [3], "pads": [2, 1]}),
    ((2, 6, 7, 11), (4, 3, 3, 2), {"group": 2, "dilations": [2, 3], "pads": [1, 0, 2, 4]}),
    ((1, 7, 9, 5), (7, 1, 3, 3), {"group": 7, "pads": [1, 1, 1, 1], "strides": [2, 1]}),
    ((1, 5, 6, 6), (10, 1, 3, 3), {"group": 5}),
    ((1, 3, 10, 9), (4, 3, 5, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ((1, 3, 10, 9), (4, 3, 5, 4), {"auto_pad": "SAME_LOWER", "strides": [3, 2]}),
    ((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 0]}),
    ((1, 3, 1, 1), (2, 3, 1, 1), {}),
]


@pytest.mark.parametrize(("shape", "weight", "attributes"), CONVOLUTIONS)
def test_convolution(run_model, shape, weight, attributes) -> None:
    constants = {"w": normal(*weight, seed=1), "b": normal(weight[0], seed=2)}
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    check(run_model, [node], {"x": normal(*shape)}, constants)


TRANSPOSED = [
    ((1, 4, 5, 3), (4, 3, 3, 2), {"strides": [2, 3], "pads": [1, 0, 0, 1], "output_padding": [1, 0]}),
    ((2, 6, 4), (6, 2, 3), {"group": 3, "dilations": [2]}),
    ((1, 2, 3, 3), (2, 2, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    # phases with unequal taps, with none at all, behind dilations that share a factor with the stride or do not
    ((1, 5, 7, 4), (5, 6, 5, 4), {"strides": [3, 2], "pads": [1, 1, 2, 1]}),
    ((1, 3, 6, 5), (3, 4, 2, 1), {"strides": [3, 2], "output_padding": [1, 1]}),
    ((1, 3, 6, 5), (3, 4, 3, 4), {"strides": [4, 3], "dilations": [2, 2], "pads": [0, 3, 5, 0]}),
    ((1, 3, 4, 5), (3, 2, 3, 3), {"strides": [2, 2], "dilations": [3, 4], "pads": [1, 2, 3, 4]}),
    ((2, 6, 5, 4), (6, 3, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 2}),
    ((1, 9, 5, 7), (9, 1, 3, 3), {"strides": [2, 3], "pads": [1, 0, 1, 0], "group": 9}),
    ((1, 4, 3, 4, 5), (4, 5, 3, 2, 3), {"strides": [2, 2, 1], "pads": [0, 1, 1, 1, 0, 1]}),
    ((1, 3, 5, 5), (3, 2, 3, 3), {"strides": [2, 2], "output_shape": [10, 9]}),
    ((1, 7, 19), (7, 5, 8), {"strides": [4], "pads": [2, 2]}),
]


@pytest.mark.parametrize(("shape", "weight", "attributes"), TRANSPOSED)
def test_transposed_convolution(run_model, shape, weight, attributes) -> None:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
    check(run_model, [node], {"x": normal(*shape)}, {"w": normal(*weight, seed=1)})


POOLS = [
    ("MaxPool", (1, 2, 7, 9), {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}),
    ("MaxPool", (1, 2, 10), {"kernel_shape": [3], "strides": [2], "ceil_mode": 1, "dilations": [2]}),
    ("AveragePool", (1, 2, 7, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("AveragePool", (1, 2, 7, 9), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("AveragePool", (1, 1, 5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [2, 1, 3]}),
    ("GlobalAveragePool", (2, 3, 5, 7), {}),
    ("GlobalMaxPool", (2, 3, 5), {}),
]


@pytest.mark.parametrize(("op", "shape", "attributes"), POOLS)
def test_pooling(run_model, op, shape, attributes) -> None:
    check(run_model, [helper.make_node(op, ["x"], ["y"], **attributes)], {"x": normal(*shape)})


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 5), (5, 7)), ((5,), (5,)), ((5,), (2, 5, 3)), ((2, 1, 3, 5), (4, 5, 1)), ((1, 1), (1, 1)), ((2, 3, 5), (5,))],
)
def test_matrix_product(run_model, a, b) -> None:
    check(run_model, [helper.make_node("MatMul", ["a", "b"], ["y"])], {"a": normal(*a), "b": normal(*b, seed=1)})


@pytest.mark.parametrize("flips", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("bias", [(), (7,), (3, 1), None])
def test_gemm(run_model, flips, bias) -> None:
    inputs = {"a": normal(*((5, 3) if flips[0] else (3, 5))), "b": normal(*((7, 5) if flips[1] else (5, 7)), seed=1)}
    if bias is not None:
        inputs["c"] = np.asarray(normal(*bias, seed=2))
    node = helper.make_node("Gemm", list(inputs), ["y"], transA=flips[0], transB=flips[1], alpha=0.5, beta=1.5)
    check(run_model, [node], inputs)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("extra", ["plain", "full"])
def test_recurrent(run_model, op, direction, extra) -> None:
    steps, batch, inputs, hidden = 5, 3, 7, 6
    gates, places = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 2 if direction == "bidirectional" else 1
    constants = {
        "w": normal(places, gates * hidden, inputs, seed=1),
        "r": normal(places, gates * hidden, hidden, seed=2),
    }
    names, attributes = ["x", "w", "r"], {"hidden_size": hidden, "direction": direction}
    given = {"x": normal(steps, batch, inputs)}
    if extra == "full":
        constants |= {"b": normal(places, 2 * gates * hidden, seed=3), "n": np.full(batch, steps, np.int32)}
        given["h"] = normal(places, batch, hidden, seed=4)
        names += ["b", "n", "h"]
        if op == "LSTM":
            given["c"] = normal(places, batch, hidden, seed=5)
            constants["p"] = normal(places, 3 * hidden, seed=6)
            names += ["c", "p"]
        if op == "GRU":
            attributes["linear_before_reset"] = 1
    outputs = ["y", "y_h", "y_c"][: 3 if op == "LSTM" else 2]
    check(run_model, [helper.make_node(op, names, outputs, **attributes)], given, constants, outputs)


@pytest.mark.parametrize("wanted", [["y", ""], ["", "y"]])
def test_recurrent_outputs_left_out(run_model, wanted) -> None:
    constants = {"w": normal(1, 16, 3, seed=1), "r": normal(1, 16, 4, seed=2)}
    node = helper.make_node("LSTM", ["x", "w", "r"], wanted, hidden_size=4)
    check(run_model, [node], {"x": normal(3, 2, 3)}, constants)


@pytest.mark.parametrize(("version", "axis"), [(12, 1), (12, 2), (17, 0), (17, 1), (17, -1)])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax(run_model, op, version, axis) -> None:
    check(run_model, [helper.make_node(op, ["x"], ["y"], axis=axis)], {"x": normal(3, 5, 7)}, version=version)


@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_normalisation(run_model, axis) -> None:
    shape = (5, 7) if axis == 1 else (7,)
    constants = {"s": normal(*shape, seed=1), "b": normal(*shape, seed=2)}
    node = helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], axis=axis)
    check(run_model, [node], {"x": normal(3, 5, 7) + 3}, constants)


@pytest.mark.parametrize(
    "target", [[15, 7], [105], [3, 35], [5, 21], [7, 3, 5], [1, 3, 1, 5, 7, 1], [0, -1], [21, 5], [3, 5, 7]]
)
def test_reshape(run_model, target) -> None:
    constants = {"s": np.asarray(target, INT64)}
    check(run_model, [helper.make_node("Reshape", ["x", "s"], ["y"])], {"x": normal(3, 5, 7)}, constants)


def test_reshape_back_and_forth_has_no_division(run_model) -> None:
    """Attention's split of heads: the split reads x[.., h * 4 + d] and needs no division."""
    from tilewright import ops
    from tilewright.frontend.onnx import model as frontend
    from tilewright.ir.forms.compute import expressions
    from tilewright.ir.forms.expr import Op, walk

    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray([2, 5, 3, 4]), "s")],
    )  # fmt: skip
    program = ops.lower(frontend.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])))
    used = {n.op.name for c in program.computes for e in expressions(c) for n in walk(e) if isinstance(n, Op)}
    assert used == {"mul", "add"}


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
@pytest.mark.parametrize("pads", [[0, 2, 1, 2, 0, 1], [1, 0, 0, 1, 0, 0], [0, -1, 2, 0, 2, -1]])
def test_pad(run_model, mode, pads) -> None:
    if min(pads) < 0 and mode == "reflect":
        pytest.skip("runtimes differ on a reflection into a cropped part")
    constants = {"p": np.asarray(pads, INT64), "v": np.float32(1.5)}
    check(run_model, [helper.make_node("Pad", ["x", "p", "v"], ["y"], mode=mode)], {"x": normal(3, 4, 5)}, constants)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_division_truncates(run_model, dtype) -> None:
    a, b = np.asarray([7, -7, 7, -7, 6, -6, 0, 1], dtype), np.asarray([2, 2, -2, -2, 3, 3, 5, -9], dtype)
    check(run_model, [helper.make_node("Div", ["a", "b"], ["y"])], {"a": a, "b": b})


@pytest.mark.parametrize(
    "equation", ["bij,bjk->bik", "ij->ji", "ii->i", "ij,jk,kl->il", "...ij,...jk->...ik", "ij,ij->"]
)
def test_einsum(run_model, equation) -> None:
    shapes = {
        "bij,bjk->bik": [(2, 3, 5), (2, 5, 4)],
        "ij->ji": [(3, 5)],
        "ii->i": [(5, 5)],
        "ij,jk,kl->il": [(3, 5), (5, 2), (2, 7)],
        "...ij,...jk->...ik": [(4, 2, 3, 5), (4, 2, 5, 3)],
        "ij,ij->": [(3, 5), (3, 5)],
    }[equation]
    inputs = {f"x{k}": normal(*s, seed=k) for k, s in enumerate(shapes)}
    check(run_model, [helper.make_node("Einsum", list(inputs), ["y"], equation=equation)], inputs)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("transform", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize("sizes", [[1, 2, 9, 7], [1, 2, 3, 11], [1, 2, 10, 12]])
def test_resize(run_model, mode, transform, sizes) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": transform, "nearest_mode": "floor"}
    node = helper.make_node("Resize", ["x", "", "", "s"], ["y"], **attributes)
    check(run_model, [node], {"x": normal(1, 2, 5, 6)}, {"s": np.asarray(sizes, INT64)})


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max"])
def test_scatter_with_repeated_indices(run_model, reduction) -> None:
    indices = np.asarray([[0, 1, 2], [2, 2, 0]] if reduction != "none" else [[0, 1, 2], [2, 0, 0]], INT64)
    inputs = {"x": normal(4, 3), "i": indices, "u": normal(2, 3, seed=1)}
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], reduction=reduction)
    check(run_model, [node], inputs, version=18)


def test_gather_negative_indices(run_model) -> None:
    inputs = {"x": normal(5, 7), "i": np.asarray([[-1, 0], [3, -5]], INT64)}
    check(run_model, [helper.make_node("Gather", ["x", "i"], ["y"])], inputs)


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_breaks_ties_by_the_lower_index(run_model, largest) -> None:
    x = np.asarray([[3, 1, 3, 2, 1], [0, 0, 0, 0, 0]], np.float32)
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"], largest=largest)
    check(run_model, [node], {"x": x}, {"k": np.asarray([3], INT64)}, ["y", "i"])
