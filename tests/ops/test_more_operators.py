"""Scatters, TopK, recurrent layers, signals, sampling and others at odd sizes, against a second runtime or NumPy."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.ops.running import interpret_model
from tests.ops.test_sizes import check, normal, run_model  # noqa: F401  (a fixture)
from tilewright import ops
from tilewright.errors import ModelError, UnsupportedError
from tilewright.frontend.onnx import model as frontend
from tilewright.ir.forms.compute import Map, Reduce, Scan

runtime = pytest.importorskip("onnxruntime")


def whole(rng: np.random.Generator, low: int, high: int, *shape: int) -> np.ndarray:
    return rng.integers(low, high, shape).astype(np.int64)


REDUCTIONS = ["none", "add", "mul", "max", "min"]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter_elements(run_model, axis, reduction, known) -> None:  # noqa: F811
    """Indices from the end, fewer than the tensor has, and where several write one place unless that is left open."""
    rng = np.random.default_rng(3)
    x, updates = normal(5, 4, 7), normal(3, 2, 5, seed=1)
    extent = x.shape[axis]
    indices = whole(rng, -extent, extent, 3, 2, 5)
    if reduction == "none":  # of several the last, of which the other runtime is not sure
        indices = np.moveaxis(np.argsort(rng.random((extent, *np.delete(np.array([3, 2, 5]), axis))), axis=0), 0, axis)
        indices = indices[:3, :2, :5].astype(np.int64)
    inputs, constants = {"x": x, "u": updates}, {}
    (constants if known else inputs)["i"] = indices
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=axis, reduction=reduction)
    check(run_model, [node], inputs, constants, version=18)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd(run_model, depth, reduction, known) -> None:  # noqa: F811
    rng = np.random.default_rng(4)
    x = normal(5, 4, 3)
    indices = np.stack([whole(rng, -n, n, 2, 3) for n in x.shape[:depth]], -1)
    if reduction == "none":
        places = rng.permutation(int(np.prod(x.shape[:depth])))[:4].reshape(2, 2)
        indices = np.stack(np.unravel_index(places, x.shape[:depth]), -1).astype(np.int64)
    updates = normal(*indices.shape[:-1], *x.shape[depth:], seed=2)
    inputs, constants = {"x": x, "u": updates}, {}
    (constants if known else inputs)["i"] = indices
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction)
    check(run_model, [node], inputs, constants, version=18)


def scatter_model(extent: int, count: int, known: bool) -> onnx.ModelProto:
    types = {"x": TensorProto.FLOAT, "i": TensorProto.INT64, "u": TensorProto.FLOAT}
    shapes = {"x": [extent], "i": [count, 1], "u": [count]}
    values = [helper.make_tensor_value_info(n, types[n], shapes[n]) for n in ("x", "u", *(() if known else ("i",)))]
    given = [numpy_helper.from_array(np.arange(count)[:, None], "i")] if known else []
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"])
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [extent])]
    graph = helper.make_graph([node], "g", values, out, given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_scatters_are_searched_only_where_that_is_little_work() -> None:
    def kinds(extent: int, count: int, known: bool) -> set[type]:
        return {type(c) for c in ops.lower(frontend.load(scatter_model(extent, count, known))).computes}

    assert kinds(100, 10, False) == {Reduce, Map}
    assert kinds(1 << 20, 1 << 13, False) == {Map, Scan}  # sorted
    assert kinds(1 << 20, 1 << 13, True) == {Map}


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(("axis", "count"), [(-1, 3), (0, 5), (1, 1), (1, 7)])
def test_top_k(run_model, axis, count, largest) -> None:  # noqa: F811
    x = np.round(normal(5, 7, 4) * 2)  # with ties
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"], axis=axis, largest=largest)
    check(run_model, [node], {"x": x}, {"k": np.array([count])}, outputs=("y", "i"))


def test_top_k_of_extremes_and_of_a_vector(run_model) -> None:  # noqa: F811
    x = np.array([-np.inf, np.inf, 0, -np.inf, np.inf, -1], np.float32)
    for largest in (0, 1):
        node = helper.make_node("TopK", ["x", "k"], ["y", "i"], largest=largest)
        check(run_model, [node], {"x": x}, {"k": np.array([6])}, outputs=("y", "i"))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_sequences_of_different_lengths(run_model, op, gates, direction) -> None:  # noqa: F811
    ways = 2 if direction == "bidirectional" else 1
    constants = {"w": normal(ways, gates * 3, 5, seed=1), "r": normal(ways, gates * 3, 3, seed=2),
                 "b": normal(ways, 2 * gates * 3, seed=3)}  # fmt: skip
    inputs = {"x": normal(6, 4, 5), "n": np.array([6, 1, 4, 3], np.int32), "h": normal(ways, 4, 3, seed=4)}
    outputs = ("y", "yh", "yc") if op == "LSTM" else ("y", "yh")
    node = helper.make_node(op, ["x", "w", "r", "b", "n", "h"], list(outputs), hidden_size=3, direction=direction)
    check(run_model, [node], inputs, constants, outputs)


@pytest.mark.parametrize("attributes", [{"clip": 0.4}, {"input_forget": 1}, {"clip": 0.3, "input_forget": 1}])
def test_clipped_and_coupled_gates(run_model, attributes) -> None:  # noqa: F811
    constants = {"w": normal(1, 12, 5, seed=1), "r": normal(1, 12, 3, seed=2), "b": normal(1, 24, seed=3)}
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y", "h", "c"], hidden_size=3, **attributes)
    check(run_model, [node], {"x": normal(4, 2, 5)}, constants, ("y", "h", "c"))


def interpreted(nodes, inputs, constants=None, outputs=("y",), version=20, types=None) -> list[np.ndarray]:
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()
    ]
    given = [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name=o) for o in outputs], given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)
    found = interpret_model(model, inputs)
    return [found[o] for o in outputs]


@pytest.mark.parametrize(("extent", "length"), [(7, None), (7, 5), (5, 8), (1, 1)])
@pytest.mark.parametrize("axis", [1, 2])
def test_transforms_there_and_back(extent, length, axis) -> None:
    shape = (2, extent, 3, 2) if axis == 1 else (2, 3, extent, 2)
    x = normal(*shape).astype(np.float64)
    constants = {"a": np.array(axis)} | ({"n": np.array(length)} if length else {})
    names = ["x", "n" if length else "", "a"]
    complex_x = x[..., 0] + 1j * x[..., 1]
    for inverse, function in ((0, np.fft.fft), (1, np.fft.ifft)):
        (found,) = interpreted([helper.make_node("DFT", names, ["y"], inverse=inverse)], {"x": x}, constants)
        np.testing.assert_allclose(found[..., 0] + 1j * found[..., 1], function(complex_x, length, axis), atol=1e-12)
    (half,) = interpreted([helper.make_node("DFT", names, ["y"], onesided=1)], {"x": x[..., :1]}, constants)
    np.testing.assert_allclose(half[..., 0] + 1j * half[..., 1], np.fft.rfft(x[..., 0], length, axis), atol=1e-12)


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
def test_frames_of_a_signal(run_model, windowed, onesided) -> None:  # noqa: F811
    constants = {"step": np.array(3), "w": np.hanning(9).astype(np.float32), "n": np.array(9)}
    names = ["x", "step", "w" if windowed else "", "n"]
    constants = {n: a for n, a in constants.items() if n in names}
    check(run_model, [helper.make_node("STFT", names, ["y"], onesided=onesided)], {"x": normal(2, 31, 1)}, constants)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_determinants(run_model, size) -> None:  # noqa: F811
    x = normal(3, size, size)
    x[1, :, 0] = 0  # a singular one
    if size > 1:
        x[2, 0, 0] = 0  # one that needs a pivot
    check(run_model, [helper.make_node("Det", ["x"], ["y"])], {"x": x})


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [0, 1])
def test_cubic_samples(run_model, corners, padding) -> None:  # noqa: F811
    inputs = {"x": normal(2, 3, 5, 7), "g": normal(2, 4, 3, 2, seed=1)}
    attributes = {"mode": "bicubic", "padding_mode": padding, "align_corners": corners}
    check(run_model, [helper.make_node("GridSample", ["x", "g"], ["y"], **attributes)], inputs)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("transformation", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("ratio", [0, 3])
def test_regions(run_model, ratio, transformation, mode) -> None:  # noqa: F811
    regions = np.array([[0, 0, 6, 5], [2.5, 1, 4, 9], [-3, 2, 3, 3], [1, 1, 1.2, 1.1]], np.float32)
    constants = {"r": regions, "b": np.array([0, 1, 1, 0])}
    attributes = {"output_height": 3, "output_width": 2, "sampling_ratio": ratio, "spatial_scale": 0.7}
    node = helper.make_node(
        "RoiAlign", ["x", "r", "b"], ["y"], mode=mode, coordinate_transformation_mode=transformation, **attributes
    )
    check(run_model, [node], {"x": normal(2, 3, 8, 6)}, constants)


COLUMNS = [
    ((5, 4), (2, 3), {}),
    ((7, 6), (3, 2), {"strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2]}),
    ((9,), (3,), {"strides": [2]}),
]


@pytest.mark.parametrize(("image", "block", "attributes"), COLUMNS)
def test_columns_to_images(image, block, attributes) -> None:
    """Against the sum it is: every block's elements where an im2col would have read them."""
    rank = len(image)
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    pads = attributes.get("pads", [0] * 2 * rank)
    outs = [(n + pads[a] + pads[a + rank] - (k - 1) * dilations[a] - 1) // strides[a] + 1
            for a, (n, k) in enumerate(zip(image, block, strict=True))]  # fmt: skip
    x = normal(2, 3 * int(np.prod(block)), int(np.prod(outs)))
    wanted = np.zeros((2, 3, *image), np.float32)
    for tap in np.ndindex(*block):
        for at in np.ndindex(*outs):
            place = [o * strides[a] + k * dilations[a] - pads[a] for a, (o, k) in enumerate(zip(at, tap, strict=True))]
            if all(0 <= p < n for p, n in zip(place, image, strict=True)):
                rows = [c * int(np.prod(block)) + np.ravel_multi_index(tap, block) for c in range(3)]
                wanted[(slice(None), slice(None), *place)] += x[:, rows, np.ravel_multi_index(at, outs)]
    node = helper.make_node("Col2Im", ["x", "n", "k"], ["y"], **attributes)
    (found,) = interpreted([node], {"x": x}, {"n": np.array(image), "k": np.array(block)})
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_unpooling_undoes_pooling(run_model) -> None:  # noqa: F811
    nodes = [
        helper.make_node("MaxPool", ["x"], ["m", "i"], kernel_shape=[2, 3], strides=[2, 3]),
        helper.make_node("MaxUnpool", ["m", "i"], ["y"], kernel_shape=[2, 3], strides=[2, 3]),
    ]
    check(run_model, nodes, {"x": normal(2, 3, 6, 9)})


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_shifts_beyond_the_width_leave_nothing(dtype, direction) -> None:
    info = np.iinfo(dtype)
    x = np.array([0, 1, 5, info.max], dtype)[:, None]
    counts = np.array([0, 1, info.bits - 1, info.bits, 200], dtype)[None]
    node = helper.make_node("BitShift", ["x", "n"], ["y"], direction=direction)
    (found,) = interpreted([node], {"x": x, "n": counts})
    numbers = [[(int(v) << int(n) if direction == "LEFT" else int(v) >> int(n)) & int(info.max) for n in counts[0]]
               for v in x[:, 0]]  # fmt: skip
    np.testing.assert_array_equal(found, np.array(numbers, dtype))


def test_random_numbers_are_those_of_their_seed() -> None:
    def drawn(op: str, **attributes) -> np.ndarray:
        node = helper.make_node(op, [], ["y"], shape=[100, 100], **attributes)
        return interpreted([node], {"x": normal(1)})[0]

    uniform = drawn("RandomUniform", low=-1.0, high=3.0, seed=1.0)
    assert -1 <= uniform.min() < -0.99 and 2.99 < uniform.max() < 3 and abs(uniform.mean() - 1) < 0.03
    assert np.abs(np.corrcoef(uniform[:, :-1].ravel(), uniform[:, 1:].ravel())[0, 1]) < 0.03
    normals = drawn("RandomNormal", mean=2.0, scale=3.0, seed=1.0)
    assert abs(normals.mean() - 2) < 0.1 and abs(normals.std() - 3) < 0.1 and np.isfinite(normals).all()
    np.testing.assert_array_equal(uniform, drawn("RandomUniform", low=-1.0, high=3.0, seed=1.0))
    assert not np.array_equal(uniform, drawn("RandomUniform", low=-1.0, high=3.0, seed=2.0))


def test_drawn_classes_follow_their_odds() -> None:
    x = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 1e-9]], np.float32))
    (found,) = interpreted([helper.make_node("Multinomial", ["x"], ["y"], sample_size=4000, seed=3.0)], {"x": x})
    for row, odds in zip(found, np.exp(x), strict=True):
        np.testing.assert_allclose(np.bincount(row, minlength=3) / 4000, odds, atol=0.03)


def test_training_drops_a_share() -> None:
    x = np.ones((100, 100), np.float32)
    node = helper.make_node("Dropout", ["x", "r", "t"], ["y", "m"], seed=7)
    found, mask = interpreted([node], {"x": x, "t": np.array(True)}, {"r": np.float32(0.25)}, ("y", "m"))
    assert abs(mask.mean() - 0.75) < 0.02
    np.testing.assert_allclose(found, mask / np.float32(0.75), rtol=1e-6)


@pytest.mark.parametrize("wrong", ["scale", "B", "mean", "var"])
def test_batch_normalization_names_what_does_not_fit(wrong) -> None:
    constants = {n: np.ones(4 if n == wrong else 3, np.float32) for n in ("scale", "B", "mean", "var")}
    node = helper.make_node("BatchNormalization", ["x", *constants], ["y"])
    with pytest.raises(ModelError, match=rf"input '{wrong}' has the shape \[4\]; \[3\] is needed"):
        interpreted([node], {"x": normal(2, 3, 5)}, constants)


def test_sequences_leave_no_trace(run_model) -> None:  # noqa: F811
    nodes = [
        helper.make_node("SplitToSequence", ["x", "two"], ["s"], axis=1),
        helper.make_node("SequenceAt", ["s", "last"], ["a"]),
        helper.make_node("SequenceErase", ["s", "last"], ["t"]),
        helper.make_node("SequenceInsert", ["t", "z", "first"], ["u"]),
        helper.make_node("ConcatFromSequence", ["u"], ["c"], axis=1),
        helper.make_node("SequenceLength", ["u"], ["n"]),
    ]
    constants = {"two": np.array(2), "last": np.array(-1), "first": np.array(0)}
    check(run_model, nodes, {"x": normal(3, 7), "z": normal(3, 2, seed=1)}, constants, ("a", "c", "n"))


def test_a_branch_that_does_not_fit_asks_for_the_condition() -> None:
    """With the condition known, the other branch is no obstacle; without, that is what is missing."""
    branches = {
        name: helper.make_graph([helper.make_node("Reshape", ["x", shape], [name])], name, [],
                                [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])
        for name, shape in (("then_branch", "fits"), ("else_branch", "fails"))
    }  # fmt: skip
    node, constants = (
        helper.make_node("If", ["c"], ["y"], **branches),
        {"fits": np.array([3, 2]), "fails": np.array([5, 5])},
    )
    x = normal(6)
    (found,) = interpreted([node], {"x": x}, constants | {"c": np.array(True)})
    np.testing.assert_array_equal(found, x.reshape(3, 2))
    with pytest.raises(UnsupportedError, match="its input 'cond' is computed at run time"):
        interpreted([node], {"x": x, "c": np.array(True)}, constants)


def test_frames_of_a_signal_without_parts(run_model) -> None:  # noqa: F811
    constants = {"step": np.array(3), "w": np.hanning(9).astype(np.float32)}
    check(run_model, [helper.make_node("STFT", ["x", "step", "w"], ["y"])], {"x": normal(2, 31)}, constants)


@pytest.mark.parametrize("bound", [1.5, 20.0, 1e9])
def test_a_loop_that_its_data_ends(run_model, bound) -> None:  # noqa: F811
    """x is doubled until its largest element is beyond the bound, at most ten times."""
    nodes = [
        helper.make_node("Add", ["v", "v"], ["w"]),
        helper.make_node("ReduceMax", ["w"], ["top"], keepdims=0),
        helper.make_node("Less", ["top", "bound"], ["more"]),
        helper.make_node("Add", ["n", "one"], ["m"]),
    ]
    inputs = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_tensor_value_info("v", TensorProto.FLOAT, [3, 5]),
        helper.make_tensor_value_info("n", TensorProto.FLOAT, []),
    ]
    outputs = [
        helper.make_tensor_value_info("more", TensorProto.BOOL, []),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 5]),
        helper.make_tensor_value_info("m", TensorProto.FLOAT, []),
    ]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    node = helper.make_node("Loop", ["ten", "go", "x", "zero"], ["y", "steps"], body=body)
    constants = {"ten": np.array(10), "go": np.array(True), "one": np.float32(1), "zero": np.float32(0)}
    check(run_model, [node], {"x": normal(3, 5), "bound": np.array(bound, np.float32)}, constants, ("y", "steps"))


F, N = TensorProto.FLOAT, TensorProto.INT64
WRONG = [
    # operator, inputs by type and shape, constants, attributes, what the message says
    ("MaxUnpool", [(F, [1, 1, 2, 2]), (N, [1, 1, 3, 2])], [], {"kernel_shape": [2, 2]}, "input 'I' has the shape"),
    ("TensorScatter", [(F, [2, 3, 4]), (F, [2, 1, 4]), (N, [3])], [], {}, "input 'write_indices' has the shape"),
    ("ScatterND", [(F, [2, 3]), (N, [2, 5]), (F, [2])], [], {}, "do not fit"),
    ("ScatterElements", [(F, [2, 3]), (N, [3, 1]), (F, [3, 1])], [], {"axis": 1}, "reach outside"),
    ("GridSample", [(F, [1, 2, 4, 4]), (F, [2, 3, 3, 2])], [], {}, "a grid .* does not fit"),
    ("RoiAlign", [(F, [1, 1, 4, 4]), (F, [2, 4]), (N, [3])], [], {"sampling_ratio": 2}, "input 'batch_indices'"),
    ("LSTM", [(F, [4, 2, 3]), (F, [1, 8, 3]), (F, [1, 8, 2]), (F, [1, 15])], [], {"hidden_size": 2}, "input 'B' has"),
    ("Det", [(F, [3, 4])], [], {}, "no square matrices"),
    ("STFT", [(F, [1, 10, 1])], [np.array(0)], {}, "frames of 10 every 0"),
    ("DFT", [(F, [1, 10, 3])], [], {}, "there is no such transform"),
    ("Col2Im", [(F, [1, 4, 9])], [np.array([1 << 40, 4]), np.array([2, 2])], {}, "are not those of"),
    ("SplitToSequence", [(F, [1 << 30])], [], {}, "a sequence of 4097 tensors"),
    ("BitCast", [(F, [3])], [], {"to": TensorProto.INT8}, "has 32 bits an element"),
    ("BatchNormalization", [(F, [1, 3]), (F, [3]), (F, [3]), (F, [2]), (F, [3])], [], {}, "input 'mean' has the shape"),
]


@pytest.mark.parametrize(("op", "given", "constants", "attributes", "words"), WRONG, ids=[w[0] for w in WRONG])
def test_what_does_not_fit_is_named(op, given, constants, attributes, words) -> None:
    values = [helper.make_tensor_value_info(f"x{k}", kind, shape) for k, (kind, shape) in enumerate(given)]
    known = [numpy_helper.from_array(a, f"c{k}") for k, a in enumerate(constants)]
    names = [*(v.name for v in values), *(t.name for t in known)]
    node = helper.make_node(op, names, ["y"], name="culprit", **attributes)
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name="y")], known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 26)], ir_version=12)
    with pytest.raises((ModelError, UnsupportedError), match=rf"{op} node 'culprit': .*{words}"):
        ops.lower(frontend.load(model))
