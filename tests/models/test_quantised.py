"""Quantised models: integer contractions, bytes between layers, results as ONNX Runtime's to one quantisation step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

import tilewright
from tilewright import Options, ops
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program, Reduce, reads
from tilewright.ir.meaning.interpret import evaluate
from tilewright.target import machine
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.precision.choose import contracted, set_precision
from tilewright.transform.quantise.quantise import IntegerForm, form_of, use_integers

onnxruntime = pytest.importorskip("onnxruntime", reason="a quantiser and a second runtime to compare with")
quantization = pytest.importorskip("onnxruntime.quantization", reason="a quantiser")

CPU = machine("cpu")
SHAPES = {
    "block": (1, 16, 13, 11), "mlp": (9, 40), "attention": (2, 10, 32), "separable": (2, 8, 9, 9),
    "windows": (1, 3, 19, 22), "residual": (1, 3, 21, 18),
}  # fmt: skip
CONTRACTIONS = {"block": 4, "mlp": 3, "attention": 6, "separable": 3, "windows": 6, "residual": 5}
KINDS = {"u8s8": ("QUInt8", "QInt8"), "s8s8": ("QInt8", "QInt8"), "u8u8": ("QUInt8", "QUInt8")}


class Weights:
    """Seeded weights, collected as initializers."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.made: dict[str, np.ndarray] = {}

    def add(self, name: str, *shape: int, fan: int = 1) -> str:
        self.made[name] = (self.rng.standard_normal(shape) * np.sqrt(2 / fan)).astype(np.float32)
        return name

    def keep(self, name: str, array: np.ndarray) -> str:
        self.made[name] = array
        return name


def conv(w: Weights, x: str, y: str, outputs: int, inputs: int, size: int, **attributes: object) -> list:
    fan = inputs * size * size
    names = [x, w.add(f"w_{y}", outputs, inputs, size, size, fan=fan), w.add(f"b_{y}", outputs)]
    return [helper.make_node("Conv", names, [f"{y}_c"], **attributes), helper.make_node("Relu", [f"{y}_c"], [y])]


def block(w: Weights) -> list:
    """Two convolutions with a skip, one with a stride, a pool and a classifier."""
    same = {"pads": [1, 1, 1, 1]}
    nodes = conv(w, "x", "a", 16, 16, 3, **same) + conv(w, "a", "b", 16, 16, 3, **same)[:1]
    nodes += [helper.make_node("Add", ["b_c", "x"], ["s"]), helper.make_node("Relu", ["s"], ["r"])]
    nodes += conv(w, "r", "d", 24, 16, 3, strides=[2, 2], **same)
    nodes += [helper.make_node("GlobalAveragePool", ["d"], ["p"]), helper.make_node("Flatten", ["p"], ["f"])]
    last = ["f", w.add("w_y", 10, 24, fan=24), w.add("b_y", 10)]
    return [*nodes, helper.make_node("Gemm", last, ["y"], transB=1)]


def mlp(w: Weights) -> list:
    nodes = []
    for x, y, rows, columns in (("x", "a", 40, 64), ("a", "b", 64, 48)):
        nodes += [
            helper.make_node("MatMul", [x, w.add(f"w_{y}", rows, columns, fan=rows)], [f"{y}_m"]),
            helper.make_node("Add", [f"{y}_m", w.add(f"b_{y}", columns)], [f"{y}_s"]),
            helper.make_node("Relu", [f"{y}_s"], [y]),
        ]
    return [*nodes, helper.make_node("MatMul", ["b", w.add("w_y", 48, 12, fan=48)], ["y"])]


def attention(w: Weights) -> list:
    split, whole = w.keep("split", np.array([2, 10, 4, 8])), w.keep("whole", np.array([2, 10, 32]))
    nodes = []
    for n in "qkv":
        nodes += [
            helper.make_node("MatMul", ["x", w.add(f"w_{n}", 32, 32, fan=64)], [f"{n}_m"]),
            helper.make_node("Reshape", [f"{n}_m", split], [f"{n}_s"]),
            helper.make_node("Transpose", [f"{n}_s"], [n], perm=[0, 2, 3, 1] if n == "k" else [0, 2, 1, 3]),
        ]
    return [
        *nodes,
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Mul", ["scores", w.keep("scale", np.array(0.35, np.float32))], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["o"]),
        helper.make_node("Transpose", ["o"], ["o_t"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["o_t", whole], ["o_w"]),
        helper.make_node("MatMul", ["o_w", w.add("w_y", 32, 32, fan=64)], ["y"]),
    ]


def separable(w: Weights) -> list:
    nodes = conv(w, "x", "a", 24, 8, 1) + conv(w, "a", "b", 24, 1, 3, pads=[1, 1, 1, 1], strides=[2, 2], group=24)
    return [*nodes, *conv(w, "b", "y", 8, 24, 1)]


def windows(w: Weights) -> list:
    """Few and odd channels, strides, windows of five, and padding that differs from side to side."""
    nodes = conv(w, "x", "a", 17, 3, 3, strides=[2, 2], pads=[0, 1, 1, 0])
    nodes += conv(w, "a", "d", 17, 1, 5, pads=[2, 2, 2, 2], group=17)
    nodes += conv(w, "d", "e", 40, 17, 1)
    nodes += conv(w, "e", "f", 40, 1, 3, strides=[2, 2], pads=[1, 0, 0, 1], group=40)
    nodes += conv(w, "f", "g", 3, 40, 1)
    return [*nodes, *conv(w, "g", "y", 3, 1, 3, pads=[1, 1, 1, 1], group=3)]


def residual(w: Weights) -> list:
    """A stem with a pool, and a bottleneck whose shortcut is a convolution too."""
    nodes = conv(w, "x", "a", 24, 3, 7, strides=[2, 2], pads=[3, 3, 3, 3])
    nodes += [helper.make_node("MaxPool", ["a"], ["m"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])]
    nodes += conv(w, "m", "d", 8, 24, 1) + conv(w, "d", "e", 8, 8, 3, pads=[1, 1, 1, 1])
    nodes += conv(w, "e", "f", 40, 8, 1)[:1] + conv(w, "m", "g", 40, 24, 1)[:1]
    return [*nodes, helper.make_node("Add", ["f_c", "g_c"], ["s"]), helper.make_node("Relu", ["s"], ["y"])]


GRAPHS: dict[str, Callable[[Weights], list]] = {
    "block": block, "mlp": mlp, "attention": attention, "separable": separable, "windows": windows,
    "residual": residual,
}  # fmt: skip


def float_model(name: str) -> ModelProto:
    weights = Weights()
    nodes = GRAPHS[name](weights)
    given = helper.make_tensor_value_info("x", 1, SHAPES[name])
    result = helper.make_tensor_value_info("y", 1, None)
    initial = [numpy_helper.from_array(a, n) for n, a in weights.made.items()]
    graph = helper.make_graph(nodes, name, [given], [result], initial)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def example(name: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype(np.float32)


class Samples(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
    def __init__(self, name: str) -> None:
        self.waiting: Iterator[dict[str, np.ndarray]] = iter([{"x": example(name, seed)} for seed in range(6)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.waiting, None)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, bool], ModelProto]:
    folder = tmp_path_factory.mktemp("quantised")

    def make(name: str, kind: str, per_channel: bool) -> ModelProto:
        import onnx

        target = folder / f"{name}-{kind}-{per_channel}.onnx"
        if not target.exists():
            activations, weights = (getattr(quantization.QuantType, k) for k in KINDS[kind])
            quantization.quantize_static(
                float_model(name), target, Samples(name), quant_format=quantization.QuantFormat.QDQ,
                per_channel=per_channel, activation_type=activations, weight_type=weights,
            )  # fmt: skip
        return onnx.load(target)

    return make


def lowered(model: ModelProto) -> Program:
    return fold_constants(set_precision(ops.lower(load(model, {})), CPU, None))


def interpreted(program: Program, x: np.ndarray) -> np.ndarray:
    return evaluate(program, {program.inputs[0].name: x})[program.outputs[0].name]


def peer(model: ModelProto, x: np.ndarray) -> np.ndarray:
    """ONNX Runtime on the model as it is written: its own fusions round elsewhere, by two steps for attention."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def step(model: ModelProto) -> float:
    """The quantisation step of the output."""
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    (last,) = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.output[0] == "y"]
    return float(constants[last.input[1]])


def contractions(program: Program) -> list[Reduce]:
    return [c for c in program.computes if isinstance(c, Reduce) and contracted(c) is not None]


@pytest.mark.sample(3)
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_meaning_is_that_of_onnxruntime(name: str, kind: str, per_channel: bool, quantised) -> None:
    model = quantised(name, kind, per_channel)
    x = example(name, seed=100)
    program = lowered(model)
    difference = np.abs(interpreted(program, x) - peer(model, x)).max()
    assert difference <= 1.01 * step(model)
    found = contractions(program)
    assert len(found) == CONTRACTIONS[name] and all(c.outputs[0].dtype is dtypes.int32 for c in found)


@pytest.mark.parametrize("name", GRAPHS)
def test_both_byte_forms_mean_the_same(name: str, quantised) -> None:
    """What VNNI takes (uint8 times int8) and what a dot product of signed bytes takes."""
    lowest = ops.lower(load(quantised(name, "u8s8", True), {}))
    x = example(name, seed=7)
    results = []
    for left in (dtypes.int8, dtypes.uint8):
        program = fold_constants(use_integers(lowest, IntegerForm(left)))
        constant = [c for c in contractions(program) if any(t in program.constants for t in reads(c))]
        for compute in constant:
            first, second = contracted(compute) or ()
            assert (first.dtype, second.dtype) == (left, dtypes.int8)
        results.append(interpreted(program, x))
    assert np.array_equal(*results)


@pytest.mark.parametrize(("name", "kind"), [("block", "u8s8"), ("mlp", "s8s8")])
def test_layers_pass_bytes(name: str, kind: str, quantised) -> None:
    """Every contraction reads bytes, made by a compute that stores them; nothing is multiplied in float."""
    program = lowered(quantised(name, kind, True))
    found = contractions(program)
    assert not [c for c in found if c.outputs[0].dtype.is_float]
    for compute in found:
        operands = contracted(compute)
        assert operands is not None
        assert all(n.dtype in (dtypes.int8, dtypes.uint8) for n in operands)
    weights = {t for c in found for t in reads(c) if t in program.constants}
    assert len(weights) == len(found) and all(t.dtype is dtypes.int8 for t in weights)
    assert all(t.dtype is not dtypes.float32 or t.rank <= 1 for t in program.constants)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "kind", "per_channel"),
    [("block", "u8s8", True), ("mlp", "s8s8", False), ("windows", "u8s8", True)]
    + [pytest.param(n, k, p, marks=pytest.mark.slow) for n in GRAPHS for k in KINDS for p in (False, True)],
)
def test_machine_code_is_exact(name: str, kind: str, per_channel: bool, quantised, kernel_cache: Path) -> None:
    model = quantised(name, kind, per_channel)
    compiled = tilewright.compile(model, options=Options(cache_dir=kernel_cache))
    x = example(name, seed=100)
    assert np.array_equal(compiled(x)[0], interpreted(lowered(model), x))
    assert np.abs(compiled(x)[0] - peer(model, x)).max() <= 1.01 * step(model)
    # on a machine that makes more than one kernel of it
    loops = build(load(model, {}), machine("neoverse_n1"), Options(stop_after="loops")).loops
    assert loops is not None
    between = [t.dtype for t in loops.tensors if t.role == "temporary"]
    if name in ("block", "windows", "residual"):
        assert between and all(d in (dtypes.int8, dtypes.uint8) for d in between)


def test_weights_beyond_a_byte_need_no_sum_over_every_window(quantised) -> None:
    """Where each channel has a window of its own, weights less their zero point are sums of two bytes."""
    lowest = ops.lower(load(quantised("windows", "u8u8", False), {}))
    x = example("windows", seed=8)
    results = []
    for has_lanes in (False, True):
        program = fold_constants(use_integers(lowest, IntegerForm(dtypes.int8, has_lanes)))
        sums = [t for c in program.computes for t in c.outputs if t.name.endswith("_left_sum")]
        by_channel = [t for t in sums if {17, 40}.intersection(t.shape)]
        assert bool(by_channel) is not has_lanes
        results.append(interpreted(program, x))
    assert np.array_equal(*results)


def test_dynamic_quantisation_multiplies_bytes(tmp_path: Path, kernel_cache: Path) -> None:
    """Scales and zero points that are only known at run time."""
    import onnx

    quantization.quantize_dynamic(float_model("mlp"), tmp_path / "q.onnx", weight_type=quantization.QuantType.QInt8)
    model = onnx.load(tmp_path / "q.onnx")
    program = lowered(model)
    found = contractions(program)
    assert len(found) == 3 and all(c.outputs[0].dtype is dtypes.int32 for c in found)
    left = form_of(CPU).left
    assert all([n.dtype for n in contracted(c) or ()] == [left, dtypes.int8] for c in found)
    x = example("mlp", seed=4)
    wanted = peer(model, x)
    compiled = tilewright.compile(model, options=Options(cache_dir=kernel_cache))
    assert np.abs(compiled(x)[0] - wanted).max() <= 0.02 * np.abs(wanted).max()


def test_quantised_models_verify(quantised, kernel_cache: Path) -> None:
    tilewright.compile(quantised("mlp", "s8s8", False), options=Options(cache_dir=kernel_cache, verify=True))
