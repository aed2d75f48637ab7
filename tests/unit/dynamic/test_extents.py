"""One Program for a range of run-time numbers gives, for each of them, what the Program for that number alone gives,
whatever lies in the room behind the elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tilewright.errors import UnevenError
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.graph import NUMBERS, Form, Graph, Part, Room
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops.extents import form_of, lower_open, settled
from tilewright.ops.lower import lower, lower_with_recipes

F, I64, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
N = helper.make_node
ROOM = Room(5, 8)
NUMBER = {"n": Form(0, (1,)), "m": Form(0, (0, 1))}


def open_graph(nodes: list[onnx.NodeProto], inputs: dict[str, Any], rooms: tuple[Room, ...], **constants: Any) -> Graph:
    """A Graph whose dimensions n and m are run-time numbers."""
    outputs = [helper.make_empty_tensor_value_info(name) for name in nodes[-1].output]
    for value in outputs:
        value.type.tensor_type.elem_type = 0
    ports = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    given = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    source = helper.make_model(
        helper.make_graph(nodes, "g", ports, outputs, given), opset_imports=[helper.make_opsetid("", 20)], ir_version=9
    )
    graph = load(source, {name: room.high for name, room in zip("nm", rooms, strict=False)})
    forms: dict[str | int, tuple[Form, ...]] = {
        name: tuple(NUMBER[e] if isinstance(e, str) else Form(e) for e in shape) for name, (_, shape) in inputs.items()
    }
    return replace(graph, part=Part(rooms=rooms, forms=forms))


def check(graph: Graph, numbers: tuple[int, ...]) -> None:
    merged, shapes = lower_open(graph, lower_with_recipes)
    verify_program(merged)
    exact = lower(settled(graph, numbers))
    rng = np.random.default_rng(sum(numbers))
    inputs, roomy = {}, {}
    for tensor, large in zip(exact.inputs, merged.inputs, strict=False):
        values = rng.standard_normal(tensor.shape) * 4
        inputs[tensor.name] = values.astype(tensor.dtype.numpy)
        # what must not be looked at: no number, and an index far outside
        filler = np.nan if tensor.dtype.is_float else 1 << 20
        roomy[large.name] = np.full(large.shape, filler).astype(large.dtype.numpy)
        roomy[large.name][tuple(map(slice, tensor.shape))] = inputs[tensor.name]
    roomy[merged.inputs[-1].name] = np.array(numbers, np.int64)
    wanted, found = evaluate(exact, inputs), evaluate(merged, roomy)
    for (name, forms), want, got in zip(shapes.items(), wanted.values(), found.values(), strict=True):
        extents = tuple(f.at(numbers) for f in forms)
        assert extents == want.shape, name
        np.testing.assert_allclose(got[tuple(map(slice, extents))], want, rtol=1e-5, atol=1e-6, err_msg=name)


LSTM = {"w": np.ones((1, 8, 3), np.float32) / 4, "r": np.ones((1, 8, 2), np.float32) / 3}
CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, Any], dict[str, Any]]] = {
    "sum and mean": (
        [N("ReduceSum", ["x", "a"], ["s"]), N("ReduceMean", ["x", "a"], ["t"]), N("Add", ["s", "t"], ["y"])],
        {"x": (F, ["n", 3])}, {"a": np.array([0])}),
    "variance": ([N("LayerNormalization", ["x", "one"], ["y"], axis=0)], {"x": (F, ["n"])}, {"one": np.float32([2.0])}),
    "extremes": (
        [N("ReduceMax", ["x", "a"], ["s"]), N("ArgMin", ["x"], ["t"], axis=0), N("Cast", ["t"], ["u"], to=F),
         N("Add", ["s", "u"], ["y"])],
        {"x": (F, ["n", 3])}, {"a": np.array([0])}),
    "attention": (
        [N("Transpose", ["x"], ["k"]), N("MatMul", ["x", "k"], ["s"]), N("Softmax", ["s"], ["p"]),
         N("MatMul", ["p", "x"], ["y"])],
        {"x": (F, ["n", 4])}, {}),
    "flattened inner axis": (
        [N("Reshape", ["x", "flat"], ["r"]), N("Neg", ["r"], ["y"])], {"x": (F, [3, "n"])}, {"flat": np.array([-1])}),
    "shape as data": (
        [N("Shape", ["x"], ["s"]), N("Mul", ["s", "s"], ["t"]), N("ConstantOfShape", ["s"], ["z"]),
         N("Add", ["x", "z"], ["u"]), N("Cast", ["s"], ["v"], to=F), N("ReduceSum", ["v"], ["w"]),
         N("Div", ["u", "w"], ["y"])],
        {"x": (F, ["n", 2])}, {}),
    "range": (
        [N("Shape", ["x"], ["s"]), N("Squeeze", ["s"], ["c"]), N("Range", ["zero", "c", "one"], ["r"]),
         N("Gather", ["x", "r"], ["y"])],
        {"x": (F, ["n"])}, {"zero": np.int64(0), "one": np.int64(1)}),
    "concat and slice": (
        [N("Concat", ["x", "x", "c"], ["k"], axis=0), N("Slice", ["k", "two", "end"], ["y"])],
        {"x": (F, ["n", 2])}, {"c": np.ones((3, 2), np.float32), "two": np.array([2]), "end": np.array([1 << 40])}),
    "reversed": (
        [N("Slice", ["x", "last", "first", "axis", "back"], ["y"])], {"x": (F, ["n", 2])},
        {"last": np.array([-1]), "first": np.array([-1 << 40]), "axis": np.array([0]), "back": np.array([-1])}),
    "gather by run-time places": (
        [N("GatherND", ["x", "i"], ["g"]), N("ScatterND", ["x", "i", "g"], ["y"], reduction="add")],
        {"x": (F, [6]), "i": (I64, ["n", 1])}, {}),
    "scatter into": (
        [N("ScatterElements", ["x", "i", "u"], ["y"], axis=0)], {"x": (F, ["n"]), "i": (I64, [3]), "u": (F, [3])}, {}),
    "running sum": ([N("CumSum", ["x", "a"], ["y"])], {"x": (F, ["n", 2])}, {"a": np.array(0)}),
    "running sum backwards": (
        [N("CumSum", ["x", "a"], ["y"], reverse=1, exclusive=1)], {"x": (F, ["n", 2])}, {"a": np.array(0)}),
    "recurrence and its last state": (
        [N("LSTM", ["x", "w", "r"], ["a", "y"], hidden_size=2)], {"x": (F, ["n", 1, 3])}, LSTM),
    "recurrence backwards": (
        [N("LSTM", ["x", "w", "r"], ["y", "b"], hidden_size=2, direction="reverse")], {"x": (F, ["n", 1, 3])}, LSTM),
    "the largest": (
        [N("TopK", ["x", "k"], ["y", "i"], axis=0)], {"x": (F, ["n", 2])}, {"k": np.array([3])}),
    "all in order": (
        [N("Shape", ["x"], ["k"]), N("TopK", ["x", "k"], ["y", "i"])], {"x": (F, ["n"])}, {}),
    "convolution": (
        [N("Conv", ["x", "w"], ["y"], pads=[1, 1])], {"x": (F, [1, 2, "n"])}, {"w": np.ones((2, 2, 3), np.float32)}),
    "two numbers": (
        [N("MatMul", ["x", "z"], ["p"]), N("Softmax", ["p"], ["s"], axis=0), N("ReduceSum", ["s", "a"], ["t"]),
         N("Concat", ["s", "t"], ["y"], axis=0)],
        {"x": (F, ["n", 3]), "z": (F, [3, "m"])}, {"a": np.array([0])}),
    "a mask and places of both numbers": (
        [N("Shape", ["x"], ["n"]), N("Squeeze", ["n"], ["count"]), N("Shape", ["z"], ["m"]),
         N("Squeeze", ["m"], ["before"]), N("Add", ["count", "before"], ["all"]),
         N("Range", ["before", "all", "one"], ["place"]),
         N("Range", ["zero", "all", "one"], ["key"]), N("Unsqueeze", ["place", "last"], ["row"]),
         N("LessOrEqual", ["key", "row"], ["seen"]), N("Where", ["seen", "none", "much"], ["mask"]),
         N("Gather", ["table", "place"], ["own"]), N("Add", ["x", "own"], ["q"]),
         N("Concat", ["z", "q"], ["k"], axis=0),
         N("Unsqueeze", ["q", "last"], ["r"]), N("Mul", ["r", "k"], ["p"]), N("Add", ["p", "mask"], ["s"]),
         N("Softmax", ["s"], ["y"])],
        {"x": (F, ["n"]), "z": (F, ["m"])},
        {"zero": np.int64(0), "one": np.int64(1), "last": np.array([1]), "none": np.float32(0),
         "much": np.float32(-1e9), "table": np.linspace(-1, 1, 56, dtype=np.float32)}),
    "split": (
        [N("Shape", ["z"], ["s"]), N("Slice", ["x", "s", "end"], ["a"]), N("Neg", ["a"], ["y"])],
        {"z": (F, ["n"]), "x": (F, [12])}, {"end": np.array([12])}),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_one_program_for_all_numbers(name: str) -> None:
    nodes, inputs, constants = CASES[name]
    rooms = (ROOM, Room(9, 16)) if any("m" in shape for _, shape in inputs.values()) else (ROOM,)
    graph = open_graph(nodes, inputs, rooms, **constants)
    for number in range(ROOM.low, ROOM.high + 1):
        check(graph, (number, *(10 + number % 3 for _ in rooms[1:])))


def test_beside_a_single_row_one_program_has_all_numbers_too() -> None:
    """What is looked up in a table is then one element, another one for each number."""
    nodes, inputs, constants = CASES["a mask and places of both numbers"]
    graph = open_graph(nodes, inputs, (Room(1, 1), Room(2, 19)), **constants)
    for number in (2, 7, 18, 19):
        check(graph, (1, number))


@pytest.mark.parametrize(
    ("nodes", "inputs", "constants"),
    [
        ([N("Slice", ["x", "a", "b"], ["y"])], {"x": (F, ["n"])}, {"a": np.array([0]), "b": np.array([6])}),
        ([N("MaxPool", ["x"], ["y"], kernel_shape=[2], strides=[2])], {"x": (F, [1, 1, "n"])}, {}),
        ([N("Add", ["x", "z"], ["y"])], {"x": (F, ["n"]), "z": (F, [8])}, {}),
        ([N("Add", ["x", "z"], ["y"])], {"x": (F, ["n"]), "z": (F, ["m"])}, {}),
        ([N("Reshape", ["x", "f"], ["y"])], {"x": (F, ["n", "m"])}, {"f": np.array([-1])}),
    ],
    ids=["at most six", "every second", "one number alone", "two alike", "a product of two"],
)
def test_what_is_not_a_sum_of_multiples_is_refused(nodes: Any, inputs: Any, constants: Any) -> None:
    rooms = (ROOM, ROOM)[: 1 + any("m" in shape for _, shape in inputs.values())]
    with pytest.raises(UnevenError):
        lower(open_graph(nodes, inputs, rooms, **constants))


def test_forms() -> None:
    samples = [(8, 16), (5, 16), (7, 16), (8, 9), (8, 15), (5, 9)]
    assert form_of([2 * a - b + 3 for a, b in samples], samples) == Form(3, (2, -1))
    assert form_of([4] * 6, samples) == Form(4)
    with pytest.raises(UnevenError):
        form_of([a * b for a, b in samples], samples)
    assert Form(3, (2, -1)).most((Room(5, 8), Room(9, 16))) == 3 + 16 - 9
    assert Room(33, 64).around(40) == Room(33, 48) and Room(3, 4).around(3) == Room(3, 3)


def test_the_numbers_are_the_last_input() -> None:
    nodes, inputs, constants = CASES["sum and mean"]
    assert lower(open_graph(nodes, inputs, (ROOM,), **constants)).input_names == ("x", NUMBERS)
