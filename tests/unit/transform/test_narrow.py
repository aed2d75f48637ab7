"""Of tensors that are read in part that part is computed; results stay what the interpreter gives for the whole."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tilewright import ops
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx import model as frontend
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Program
from tilewright.ir.meaning.interpret import evaluate
from tilewright.options import Options
from tilewright.target import machine
from tilewright.transform.clean.narrow import narrow

Constants = dict[str, np.ndarray]


def _model(nodes: list[onnx.NodeProto], constants: Constants, shape: list[int | str],
           outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def _program(*given: object) -> Program:
    return ops.lower(frontend.load(_model(*given), {}))  # type: ignore[arg-type]


def _shapes(program: Program) -> dict[str, tuple[object, ...]]:
    return {t.name: t.shape for c in program.computes for t in c.outputs}


def _slice(source: str, result: str, first: int, last: int, axis: int, constants: Constants,
           step: int = 1) -> onnx.NodeProto:  # fmt: skip
    names = [f"{result}_{part}" for part in ("first", "last", "axis", "step")]
    constants.update({n: np.array([v]) for n, v in zip(names, (first, last, axis, step), strict=True)})
    return helper.make_node("Slice", [source, *names], [result])


def _same(program: Program, seed: int = 5, least: int = 1) -> Program:
    """The narrowed Program, which computes what the whole one does."""
    part = narrow(program, least)
    verify_program(part)
    x = np.random.default_rng(seed).standard_normal(program.inputs[0].shape).astype(np.float32)
    wanted, found = evaluate(program, {"x": x}), evaluate(part, {"x": x})
    for tensor in program.outputs:
        np.testing.assert_allclose(found[tensor.name], wanted[tensor.name], rtol=1e-5, atol=1e-6)
    return part


@pytest.mark.parametrize(("first", "last"), [(0, 1), (6, 7), (2, 5)])
def test_rows_of_a_product_that_nobody_reads_are_not_computed(first: int, last: int) -> None:
    constants = {"w": np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Softmax", ["p"], ["s"], axis=-1),
             _slice("s", "y", first, last, 0, constants)]  # fmt: skip
    part = _same(_program(nodes, constants, [7, 5]))
    assert _shapes(part)["p"] == (last - first, 4) and _shapes(part)["s"] == (last - first, 4)


def test_the_last_block_of_a_classifier_computes_one_token() -> None:
    rng = np.random.default_rng(2)
    constants = {n: rng.standard_normal((6, 6)).astype(np.float32) for n in ("q", "k", "v", "o")}
    constants |= {"scale": np.ones(6, np.float32), "shift": np.zeros(6, np.float32), "token": np.array(0)}
    constants["class"] = rng.standard_normal((1, 6)).astype(np.float32)
    nodes = [helper.make_node("Concat", ["class", "x"], ["tokens"], axis=0),
             *(helper.make_node("MatMul", ["tokens", n], [n + "x"]) for n in "qkv"),
             helper.make_node("Transpose", ["kx"], ["kt"]), helper.make_node("MatMul", ["qx", "kt"], ["scores"]),
             helper.make_node("Softmax", ["scores"], ["p"]), helper.make_node("MatMul", ["p", "vx"], ["a"]),
             helper.make_node("MatMul", ["a", "o"], ["b"]), helper.make_node("Add", ["b", "tokens"], ["r"]),
             helper.make_node("LayerNormalization", ["r", "scale", "shift"], ["n"]),
             helper.make_node("Gather", ["n", "token"], ["y"], axis=0)]  # fmt: skip
    shapes = _shapes(_same(_program(nodes, constants, [8, 6])))
    assert shapes["qx"] == (1, 6) and shapes["scores"] == (1, 9) and shapes["r"] == (1, 6)
    assert shapes["kx"] == shapes["vx"] == shapes["tokens"] == (9, 6)


@pytest.mark.parametrize(("first", "rows", "wanted"), [(0, 50, 8), (49, 50, 8), (20, 50, 8), (3, 12, 12)])
def test_as_many_rows_stay_as_a_matrix_instruction_has(first: int, rows: int, wanted: int) -> None:
    constants = {"w": np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), _slice("p", "y", first, first + 1, 0, constants)]
    part = _same(_program(nodes, constants, [rows, 5]), least=8)
    assert _shapes(part)["p"] == (wanted, 4)


def test_readers_of_different_parts_are_given_both() -> None:
    constants: Constants = {}
    nodes = [helper.make_node("Exp", ["x"], ["e"]), _slice("e", "a", 1, 3, 1, constants),
             _slice("e", "b", 4, 6, 1, constants), helper.make_node("Mul", ["a", "b"], ["y"])]  # fmt: skip
    assert _shapes(_same(_program(nodes, constants, [3, 20])))["e"] == (3, 5)


def test_a_border_alone_stays() -> None:
    constants: Constants = {}
    nodes = [helper.make_node("Exp", ["x"], ["e"]), _slice("e", "y", 0, 56, 1, constants, step=2)]
    program = _program(nodes, constants, [2, 56])
    assert narrow(program) is program


def test_what_is_an_output_too_stays_whole() -> None:
    constants: Constants = {}
    nodes = [helper.make_node("Exp", ["x"], ["e"]), _slice("e", "y", 0, 1, 0, constants)]
    program = _program(nodes, constants, [4, 4], ("y", "e"))
    assert narrow(program) is program


def test_what_data_chooses_stays_whole() -> None:
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("ArgMax", ["x"], ["i"], axis=0, keepdims=0),
             helper.make_node("Gather", ["e", "i"], ["y"], axis=0)]  # fmt: skip
    assert _shapes(_same(_program(nodes, {}, [6, 3])))["e"] == (6, 3)


def _chosen_by_an_input(least: int) -> tuple[Program, Program]:
    """x and a place i: the row i of a softmax of a product."""
    w = numpy_helper.from_array(np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Softmax", ["p"], ["s"], axis=-1),
             helper.make_node("Gather", ["s", "i"], ["y"], axis=0)]  # fmt: skip
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 5]),
              helper.make_tensor_value_info("i", TensorProto.INT64, [])]  # fmt: skip
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_empty_tensor_value_info("y")], [w])
    program = ops.lower(frontend.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), {}))
    return program, narrow(program, least)


@pytest.mark.parametrize("least", [1, 3])
def test_a_row_that_an_input_tells_is_computed_alone(least: int) -> None:
    program, part = _chosen_by_an_input(least)
    verify_program(part)
    shapes = _shapes(part)
    assert shapes["p"] == (least, 4) and shapes["s"] == (least, 4)
    x = np.random.default_rng(5).standard_normal((8, 5)).astype(np.float32)
    for place in (0, 1, 5, 7, -1, -8):
        given = {"x": x, "i": np.array(place)}
        wanted, found = evaluate(program, given)["y"], evaluate(part, given)["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["neoverse_n1", "avx2_desktop", "emerald_rapids"])
def test_a_row_that_an_input_tells_is_planned(target: str) -> None:
    """Its product reads a number without axes, which says where a row is: no layout is looked for in that."""
    whole, _ = _chosen_by_an_input(1)
    options = Options(target=target, stop_after="loops")
    made = build(whole, machine(target), options)
    assert made.loops is not None and made.loops.calls


def test_a_part_behind_a_condition() -> None:
    """A padded part: indices before the tensor are read by nobody, whatever they are."""
    constants: Constants = {"pads": np.array([3, 0, 0, 0])}
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Pad", ["e", "pads"], ["p"]),
             _slice("p", "y", 1, 5, 0, constants)]  # fmt: skip
    shapes = _shapes(_same(_program(nodes, constants, [9, 4])))
    assert shapes["p"] == (4, 4) and shapes["e"] == (2, 4)


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_parts(seed: int) -> None:
    """Chains of maps, sums, products and slices, for whatever comes of them."""
    rng = np.random.default_rng(seed)
    constants: Constants = {}
    shape, nodes, last = [int(n) for n in rng.integers(6, 12, 3)], [], "x"
    start = list(shape)
    for step in range(7):
        name = f"t{step}"
        kind = rng.integers(5)
        axis = int(rng.integers(3))
        if kind == 0:
            nodes.append(helper.make_node("Tanh", [last], [name]))
        elif kind == 1:
            nodes.append(helper.make_node("Softmax", [last], [name], axis=axis))
        elif kind == 2:
            wide = int(rng.integers(4, 9))
            constants[f"w{step}"] = rng.standard_normal((shape[2], wide)).astype(np.float32)
            nodes.append(helper.make_node("MatMul", [last, f"w{step}"], [name]))
            shape[2] = wide
        elif kind == 3:
            order = [int(n) for n in rng.permutation(3)]
            nodes.append(helper.make_node("Transpose", [last], [name], perm=order))
            shape = [shape[n] for n in order]
        else:
            first = int(rng.integers(shape[axis]))
            end = int(rng.integers(first + 1, shape[axis] + 1))
            nodes.append(_slice(last, name, first, end, axis, constants))
            shape[axis] = end - first
        last = name
    nodes.append(_slice(last, "y", shape[1] - 1, shape[1], 1, constants))
    program = _program(nodes, constants, start)
    assert _same(program, seed) is not program


def test_compiled_with_an_extent_of_the_call() -> None:
    """The first row of as many as there are: one is computed, however many come."""
    constants: Constants = {"w": np.random.default_rng(3).standard_normal((5, 5)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), _slice("p", "y", 0, 1, 0, constants)]
    model = tilewright.compile(_model(nodes, constants, ["n", 5]))
    for rows in (1, 3, 40):
        x = np.random.default_rng(rows).standard_normal((rows, 5)).astype(np.float32)
        np.testing.assert_allclose(model(x)[0], (x @ constants["w"])[:1], rtol=1e-5)
