"""Precision as a rewrite of the Program: what becomes bfloat16 or integers, what stays, and that meaning is kept."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import tilewright
from tilewright import Options, ops
from tilewright.errors import OptionError
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan
from tilewright.ir.forms.expr import Axis, Load, cast, is_op, loads, var
from tilewright.ir.forms.expr import load as expr_load
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine, stored_machines
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.precision.choose import contracted, set_precision
from tilewright.transform.quantise.quantise import IntegerForm, use_integers
from tilewright.transform.storage import all_computes

CPU = machine("cpu")
RNG = np.random.default_rng(11)


def model(nodes: list, inputs: dict, outputs: dict, constants: dict[str, np.ndarray]) -> ModelProto:
    """`inputs` and `outputs`: a name to an element type and a shape."""
    values = [[helper.make_tensor_value_info(n, t, s) for n, (t, s) in side.items()] for side in (inputs, outputs)]
    graph = helper.make_graph(
        nodes, "g", values[0], values[1], [numpy_helper.from_array(a, n) for n, a in constants.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def lowered(made: ModelProto, precision: str | None, target: Target = CPU) -> Program:
    program = fold_constants(set_precision(ops.lower(load(made, {})), target, precision))
    verify_program(program)
    return program


def run(program: Program, **arrays: np.ndarray) -> list[np.ndarray]:
    given = {t.name: arrays[n] for n, t in zip(program.input_names, program.inputs, strict=True)}
    found = evaluate(program, given)
    return [found[t.name] for t in program.outputs]


def contractions(program: Program) -> list[Reduce]:
    return [c for c in all_computes(program) if isinstance(c, Reduce) and contracted(c) is not None]


def is_widened_product(compute: Compute, narrow: tuple[dtypes.DType, ...], wide: dtypes.DType) -> bool:
    """cast(load) * cast(load), either behind a condition that gives 0: what matrix instructions are matched with."""
    assert isinstance(compute, Reduce)
    element = compute.elements[0]
    if not is_op(element, "mul") or compute.outputs[0].dtype is not wide or element.dtype is not wide:
        return False
    for side in element.args:
        value = side.args[1] if is_op(side, "select") else side
        if not is_op(value, "cast") or not isinstance(value.args[0], Load) or value.args[0].dtype not in narrow:
            return False
    return True


FLOAT = TensorProto.FLOAT


@pytest.fixture(scope="module")
def network() -> ModelProto:
    """A normalised input, two products with something in between, a skip and a softmax."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "g", "h"], ["n"], axis=-1),
        helper.make_node("MatMul", ["n", "w0"], ["a"]),
        helper.make_node("Add", ["a", "b0"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Transpose", ["c"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["c", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "c"], ["o"]),
        helper.make_node("MatMul", ["o", "w1"], ["q"]),
        helper.make_node("Add", ["q", "x"], ["y"]),
    ]
    constants = {"g": normal(24), "h": normal(24), "w0": normal(24, 20), "b0": normal(20), "w1": normal(20, 24)}
    return model(nodes, {"x": (FLOAT, [2, 9, 24])}, {"y": (FLOAT, [2, 9, 24]), "c": (FLOAT, [2, 9, 20])}, constants)


def test_operands_are_bfloat16_and_the_rest_is_float32(network: ModelProto) -> None:
    program = lowered(network, "bfloat16")
    found = contractions(program)
    assert len(found) == 4
    assert all(is_widened_product(c, (dtypes.bfloat16,), dtypes.float32) for c in found)
    assert {t.dtype for t in (*program.inputs, *program.outputs)} == {dtypes.float32}
    kept = {t.name: t.dtype for t in program.constants}
    assert kept["w0_bfloat16"] is kept["w1_bfloat16"] is dtypes.bfloat16 and "w0" not in kept
    assert kept["b0"] is kept["g"] is dtypes.float32
    others = [c for c in program.computes if isinstance(c, Reduce) and c not in found]
    assert len(others) == 4 and all(t.dtype is dtypes.float32 for c in others for t in c.outputs)


def test_rounding_rides_on_what_computes_the_values(network: ModelProto) -> None:
    """The normalised input and the probabilities are stored rounded; a transpose moves rounded values."""
    maps = {c.output.name: c for c in lowered(network, "bfloat16").computes if isinstance(c, Map)}
    assert maps["n"].output.dtype is maps["p"].output.dtype is maps["t"].output.dtype is dtypes.bfloat16
    assert isinstance(maps["t"].value, Load) and maps["t"].value.source.dtype is dtypes.bfloat16
    # `c` is an output, which keeps its type: the products read its rounded twin
    assert maps["c"].output.dtype is dtypes.float32 and maps["c_bfloat16"].output.dtype is dtypes.bfloat16


def test_bfloat16_keeps_the_meaning_to_its_rounding(network: ModelProto, kernel_cache: Path) -> None:
    x = normal(2, 9, 24)
    wanted = run(lowered(network, None), x=x)
    interpreted = run(lowered(network, "bfloat16"), x=x)
    options = Options(cache_dir=kernel_cache, precision="bfloat16")
    found = tilewright.compile(network, options=options)(x)
    for want, meant, got in zip(wanted, interpreted, found, strict=True):
        size = np.linalg.norm(want)
        assert 1e-6 * size < np.linalg.norm(got - want) < 2e-2 * size
        assert np.linalg.norm(got - meant) < 5e-3 * size


@pytest.mark.parametrize("name", stored_machines("cpu"))
def test_convolution_guards_stay_outside_of_conversions(name: str) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    made = model(nodes, {"x": (FLOAT, [1, 32, 6, 5])}, {"y": (FLOAT, [1, 4, 6, 5])}, {"w": normal(4, 32, 3, 3)})
    (found,) = contractions(lowered(made, "bfloat16", machine(name)))
    assert is_widened_product(found, (dtypes.bfloat16,), dtypes.float32)
    assert any(is_op(side, "select") for side in found.elements[0].args)


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_recurrences_multiply_in_bfloat16(kind: str, gates: int, kernel_cache: Path) -> None:
    hidden, steps = 12, 5
    outputs = ["y", "last"]
    nodes = [helper.make_node(kind, ["x", "w", "r", "b"], outputs, hidden_size=hidden)]
    constants = {
        "w": normal(1, gates * hidden, 7) / 3,
        "r": normal(1, gates * hidden, hidden) / 3,
        "b": normal(1, 2 * gates * hidden),
    }
    shapes = {"y": (FLOAT, [steps, 1, 2, hidden]), "last": (FLOAT, [1, 2, hidden])}
    made = model(nodes, {"x": (FLOAT, [steps, 2, 7])}, shapes, constants)
    program = lowered(made, "bfloat16")
    found = contractions(program)
    assert len(found) >= 2 and all(is_widened_product(c, (dtypes.bfloat16,), dtypes.float32) for c in found)
    (scan,) = [c for c in program.computes if isinstance(c, Scan)]
    assert scan.carry[0].dtype is dtypes.bfloat16
    assert all(t.dtype is dtypes.float32 for t in scan.carry[1:])  # a cell is only added to
    x = normal(steps, 2, 7)
    wanted = run(lowered(made, None), x=x)
    ours = tilewright.compile(made, options=Options(cache_dir=kernel_cache, precision="bfloat16"))(x)
    for want, got in zip(wanted, ours, strict=True):
        assert np.linalg.norm(got - want) < 2e-2 * np.linalg.norm(want)


def test_sums_of_squares_stay_as_they_are() -> None:
    nodes = [helper.make_node("ReduceSumSquare", ["x"], ["y"], axes=[1])]
    made = model(nodes, {"x": (FLOAT, [4, 9])}, {"y": (FLOAT, [4, 1])}, {})
    assert all(t.dtype is dtypes.float32 for t in lowered(made, "bfloat16").tensors())


def test_bfloat16_verifies(network: ModelProto, kernel_cache: Path) -> None:
    tilewright.compile(network, options=Options(cache_dir=kernel_cache, precision="bfloat16", verify=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, precisions", [
    ("avx2_desktop", (None, "bfloat16")),
    ("emerald_rapids_avx512", (None, "bfloat16")),
    # its matrix units take products of bfloat16 whole, not those that a stream takes in blocks: these run on vectors
    ("emerald_rapids", (None,)),
])  # fmt: skip
def test_long_attention_is_streamed_in_bfloat16_too(name: str, precisions: tuple[str | None, ...]) -> None:
    """Where main memory is slow beside the arithmetic; where it is fast, scores may as well be written."""
    nodes = [
        helper.make_node("MatMul", ["q", "k"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    inputs = {"q": (FLOAT, [2, 4096, 64]), "k": (FLOAT, [2, 64, 4096]), "v": (FLOAT, [2, 4096, 64])}
    made = model(nodes, inputs, {"y": (FLOAT, [2, 4096, 64])}, {})
    target = machine(name)
    for precision in precisions:
        plan = make_plan(choose_layouts(lowered(made, precision, target), target), target)
        assert any(k.stream is not None for k in plan.kernels)


@pytest.mark.parametrize("precision", ("float16", "tf32"))
def test_where_precisions_of_gpus_are_refused(precision: str) -> None:
    with pytest.raises(OptionError, match=f"precision '{precision}' is for GPUs alone, not 'cpu'"):
        Options(precision=precision, target="cpu")
    program = ops.lower(load(model([], {"x": (FLOAT, [2])}, {"x": (FLOAT, [2])}, {}), {}))
    with pytest.raises(OptionError, match=f"precision '{precision}' is for GPUs alone, not 'neoverse_n1'"):
        set_precision(program, machine("neoverse_n1"), precision)  # a file may describe a CPU


@pytest.mark.parametrize("name", ("float16", "bfloat16"))
def test_gpus_take_either_type_of_16_bits(network: ModelProto, name: str) -> None:
    program = lowered(network, name, machine("h200"))
    found = contractions(program)
    assert len(found) == 4
    assert all(is_widened_product(c, (dtypes.by_name(name),), dtypes.float32) for c in found)
    assert {t.dtype for t in (*program.inputs, *program.outputs)} == {dtypes.float32}
    assert {t.name: t.dtype for t in program.constants}[f"w0_{name}"] is dtypes.by_name(name)


def test_tf32_rounds_operands_as_they_are_stored(network: ModelProto) -> None:
    program = lowered(network, "tf32", machine("h200"))
    found = contractions(program)
    assert len(found) == 4
    assert all(is_widened_product(c, (dtypes.tf32,), dtypes.float32) for c in found)
    assert {t.dtype for t in (*program.inputs, *program.outputs)} == {dtypes.float32}
    weights = next(a for t, a in program.constants.items() if t.name == "w0_tf32")
    np.testing.assert_array_equal(weights, dtypes.as_tf32(weights))
    x = normal(2, 9, 24)
    for want, got in zip(run(lowered(network, None), x=x), run(program, x=x), strict=True):
        assert 1e-6 < np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3


def test_rounding_to_tf32() -> None:
    """To 10 bits behind the point, halves away from zero; signs, zeros and infinities stay."""
    given = np.array([1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 0.0, -np.inf, 3.0, np.nan], np.float32)
    given[-1:].view(np.uint32)[:] = 0x7FFFFFFF  # as GPUs give it: all of its bits are set
    axis = Axis("i", len(given))
    x, y = Tensor("x", (len(given),), dtypes.float32), Tensor("y", (len(given),), dtypes.float32)
    rounded = cast(cast(expr_load(x, [var(axis)]), dtypes.tf32), dtypes.float32)
    program = Program((x,), (y,), (Map(y, (axis,), rounded),), {})
    expected = [1 + 2**-10, 1 + 2**-10, 1, -1 - 2**-10, 0, -np.inf, 3, np.nan]
    np.testing.assert_array_equal(evaluate(program, {"x": given})["y"], np.array(expected, np.float32))


@pytest.mark.parametrize("name", stored_machines("cpu"))
def test_bfloat16_is_for_every_described_cpu(name: str) -> None:
    assert Options(precision="bfloat16", target=name).target == name


# --- conversions in vectors

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 1.0, 1.00390625, 1.01171875, -1.00390625, 65535.0],
    np.float32,
)


@pytest.mark.parametrize("length", [1, 4, 37])
def test_rounding_to_bfloat16_is_to_nearest_even(length: int, kernel_cache: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["n"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["n"], ["y"], to=FLOAT),
    ]
    rows = 16
    shapes = {"n": (TensorProto.BFLOAT16, [rows, length]), "y": (FLOAT, [rows, length])}
    made = model(nodes, {"x": (FLOAT, [rows, length])}, shapes, {})
    bits = RNG.integers(0, 1 << 32, rows * length, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([SPECIAL, bits.view(np.float32)])[: rows * length].reshape(rows, length)
    narrow, wide = tilewright.compile(made, options=Options(cache_dir=kernel_cache))(x)
    wanted = x.astype(ml_dtypes.bfloat16)
    number = ~np.isnan(x)
    assert np.array_equal(narrow.view(np.uint16)[number], wanted.view(np.uint16)[number])
    assert np.isnan(narrow.astype(np.float32)[~number]).all()
    assert np.array_equal(wide, narrow.astype(np.float32), equal_nan=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("source", [np.int8, np.uint8, np.int16, np.uint16])
def test_small_integers_widen_and_narrow(source: type, kernel_cache: Path) -> None:
    kinds = {np.int8: TensorProto.INT8, np.uint8: TensorProto.UINT8,
             np.int16: TensorProto.INT16, np.uint16: TensorProto.UINT16}  # fmt: skip
    targets = {"i": TensorProto.INT32, "f": FLOAT, "s": TensorProto.INT8, "u": TensorProto.UINT8}
    nodes = [helper.make_node("Cast", ["x"], [n], to=t) for n, t in targets.items()]
    nodes.append(helper.make_node("Cast", ["f"], ["back"], to=kinds[source]))
    shape = [7, 23]
    outputs = {n: (t, shape) for n, t in {**targets, "back": kinds[source]}.items()}
    made = model(nodes, {"x": (kinds[source], shape)}, outputs, {})
    info = np.iinfo(source)
    x = RNG.integers(info.min, info.max + 1, shape).astype(source)
    whole, real, signed, unsigned, back = tilewright.compile(made, options=Options(cache_dir=kernel_cache))(x)
    assert np.array_equal(whole, x.astype(np.int32)) and np.array_equal(real, x.astype(np.float32))
    assert np.array_equal(signed, x.astype(np.int8)) and np.array_equal(unsigned, x.astype(np.uint8))
    assert np.array_equal(back, x)


def test_round_takes_halves_to_even(kernel_cache: Path) -> None:
    made = model([helper.make_node("Round", ["x"], ["y"])], {"x": (FLOAT, [64])}, {"y": (FLOAT, [64])}, {})
    x = np.concatenate([SPECIAL, np.arange(-12, 12) + 0.5, [8388607.5, -8388609.0, 4194304.5, 0.49999997]])
    x = np.resize(x.astype(np.float32), 64)
    (found,) = tilewright.compile(made, options=Options(cache_dir=kernel_cache))(x)
    assert np.array_equal(found, np.round(x), equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(np.round(x)))


# --- integers

INT8, UINT8, INT32 = TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32
WINDOWS = [
    {"pads": [1, 1, 1, 1]},
    {"pads": [2, 0, 1, 2], "strides": [2, 1]},
    {"pads": [2, 2, 2, 2], "dilations": [2, 2]},
    {"pads": [1, 1, 1, 1], "strides": [2, 2], "group": 2},
    {},
]


def byte_array(dtype: type, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("left", [dtypes.int8, dtypes.uint8], ids=str)
@pytest.mark.parametrize("weights", [np.int8, np.uint8])
def test_padded_convolutions_are_exact(window: dict, left: dtypes.DType, weights: type) -> None:
    """Zero points on both sides, padding, strides: the integer sums equal those of differences."""
    group = window.get("group", 1)
    constants = {
        "w": byte_array(weights, 6, 4 // group, 3, 3), "xz": np.array(77, np.uint8), "wz": byte_array(weights, 6),
    }  # fmt: skip
    nodes = [helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], **window)]
    made = model(nodes, {"x": (UINT8, [2, 4, 9, 8])}, {"y": (INT32, None)}, constants)
    before = ops.lower(load(made, {}))
    after = use_integers(before, IntegerForm(left))
    verify_program(after)
    after = fold_constants(after)
    (found,) = contractions(after)
    assert is_widened_product(found, (dtypes.int8, dtypes.uint8), dtypes.int32)
    assert {n.dtype for n in contracted(found) or ()} == {left, dtypes.int8}
    x = byte_array(np.uint8, 2, 4, 9, 8)
    assert np.array_equal(run(before, x=x)[0], run(after, x=x)[0])


def test_sums_over_padded_weights_are_small() -> None:
    """All outputs whose window lies inside share one sum: a table of three by three an output channel."""
    constants = {"w": byte_array(np.int8, 5, 4, 3, 3), "xz": np.array(9, np.uint8)}
    nodes = [helper.make_node("ConvInteger", ["x", "w", "xz"], ["y"], pads=[1, 1, 1, 1])]
    made = model(nodes, {"x": (UINT8, [1, 4, 40, 30])}, {"y": (INT32, None)}, constants)
    program = lowered(made, None)
    assert [t.shape for t in program.constants if t.dtype is dtypes.int32] == [(3, 3, 5)]


@pytest.mark.parametrize("kinds", [(np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8)], ids=str)
def test_products_of_two_computed_operands_are_exact(kinds: tuple[type, type]) -> None:
    """Neither side is constant: both corrections are sums at run time."""
    types = [INT8 if k is np.int8 else UINT8 for k in kinds]
    constants = {"xz": np.array(5, kinds[0]), "yz": np.array(100, kinds[1])}
    nodes = [helper.make_node("MatMulInteger", ["x", "y", "xz", "yz"], ["z"])]
    made = model(nodes, {"x": (types[0], [3, 6, 11]), "y": (types[1], [3, 11, 5])}, {"z": (INT32, None)}, constants)
    before = ops.lower(load(made, {}))
    after = fold_constants(use_integers(before, IntegerForm()))
    (found,) = contractions(after)
    assert is_widened_product(found, (dtypes.int8,), dtypes.int32)
    arrays = {"x": byte_array(kinds[0], 3, 6, 11), "y": byte_array(kinds[1], 3, 11, 5)}
    assert np.array_equal(run(before, **arrays)[0], run(after, **arrays)[0])


def test_long_sums_stay_in_float() -> None:
    """An int32 would overflow."""
    length = 70_000
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"]),
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["e"]),
        helper.make_node("MatMul", ["e", "d"], ["y"]),
    ]
    constants = {
        "w": byte_array(np.int8, length, 2), "s": np.array(0.1, np.float32), "z": np.array(3, np.uint8),
    }  # fmt: skip
    made = model(nodes, {"x": (FLOAT, [1, length])}, {"y": (FLOAT, [1, 2])}, constants)
    (found,) = contractions(lowered(made, None))
    assert found.outputs[0].dtype is dtypes.float32


def test_float32_asks_for_no_integers() -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"]),
        helper.make_node("DequantizeLinear", ["x", "s"], ["e"]),
        helper.make_node("MatMul", ["e", "d"], ["y"]),
    ]
    constants = {"w": byte_array(np.int8, 8, 4), "s": np.array(0.5, np.float32)}
    made = model(nodes, {"x": (INT8, [3, 8])}, {"y": (FLOAT, [3, 4])}, constants)
    x = byte_array(np.int8, 3, 8)
    results = []
    for precision, kind in ((None, dtypes.int32), ("float32", dtypes.float32)):
        program = lowered(made, precision)
        (found,) = contractions(program)
        assert found.outputs[0].dtype is kind
        results.append(run(program, x=x)[0])
    assert np.array_equal(*results)  # small whole numbers: float32 is exact too


def test_reads_of_an_index_are_not_operands() -> None:
    """A gather's indices are read, not multiplied."""
    nodes = [helper.make_node("Gather", ["table", "i"], ["e"]), helper.make_node("MatMul", ["e", "w"], ["y"])]
    constants = {"table": normal(10, 8), "w": normal(8, 4)}
    made = model(nodes, {"i": (TensorProto.INT64, [5])}, {"y": (FLOAT, [5, 4])}, constants)
    program = lowered(made, "bfloat16")
    assert {t.dtype for t in program.constants} == {dtypes.bfloat16}
    assert program.inputs[0].dtype is dtypes.int64
    assert loads(*contractions(program)[0].elements)


def test_convolutions_alone_in_tf32() -> None:
    """As PyTorch does by default: windows of one element too, products not."""
    weights = {"w": (16, 8, 3, 3), "v": (24, 16, 1, 1), "m": (24, 32)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Conv", ["a", "v"], ["b"]),
             helper.make_node("GlobalAveragePool", ["b"], ["p"]), helper.make_node("Flatten", ["p"], ["f"]),
             helper.make_node("MatMul", ["f", "m"], ["y"])]  # fmt: skip
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (9, 8, 6, 6)), ("y", (9, 32)))]
    arrays = [numpy_helper.from_array(normal(*shape), name) for name, shape in weights.items()]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = lowered(model, "tf32_convolutions", machine("h200"))
    kinds = {c.outputs[0].name: {n.dtype for n in loads(*c.elements)} for c in contractions(program)}
    assert kinds == {"a": {dtypes.tf32}, "b": {dtypes.tf32}, "y": {dtypes.float32}}
    with pytest.raises(OptionError, match="for GPUs alone"):
        set_precision(program, machine("neoverse_n1"), "tf32_convolutions")
