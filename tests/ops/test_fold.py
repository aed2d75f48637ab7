"""Folding of a Program: constants evaluated, equal computes merged, dead ones dropped, meaning kept."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tilewright import ops
from tilewright.frontend.onnx import model as frontend
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program, Reduce
from tilewright.ir.forms.expr import Axis, cast, load, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import fold, foldable
from tilewright.ir.meaning.interpret import evaluate
from tilewright.transform.clean.fold import fold_constants


def _program(nodes, constants: dict[str, np.ndarray], shape: list[int], version: int = 17) -> Program:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )  # fmt: skip
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
    return ops.lower(frontend.load(model))


def test_batch_normalisation_becomes_one_map() -> None:
    rng = np.random.default_rng(3)
    constants = {n: rng.uniform(0.5, 1.5, 5).astype(np.float32) for n in ("s", "b", "m", "v")}
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"])
    program = _program([node], constants, [2, 5, 3])
    assert [type(c) for c in program.computes] == [Map]
    assert len(program.constants) == 2
    x = rng.standard_normal((2, 5, 3)).astype(np.float32)
    s, b, m, v = (constants[n][:, None] for n in ("s", "b", "m", "v"))
    expected = (x - m) / np.sqrt(v + 1e-5) * s + b
    np.testing.assert_allclose(evaluate(program, {"x": x})[program.outputs[0].name], expected, rtol=1e-5, atol=1e-6)


def test_equal_computes_are_merged() -> None:
    nodes = [
        helper.make_node("Softmax", ["x"], ["a"], axis=-1),
        helper.make_node("Softmax", ["x"], ["b"], axis=-1),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    program = _program(nodes, {}, [3, 7])
    folded = fold_constants(program)
    assert (len(program.computes), len(folded.computes)) == (9, 5)
    x = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    np.testing.assert_array_equal(evaluate(folded, {"x": x})[folded.outputs[0].name], np.zeros((3, 7)))


def test_different_computes_are_not_merged() -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["a"], keepdims=0),
        helper.make_node("ReduceMax", ["x"], ["b"], keepdims=0),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    folded = fold_constants(_program(nodes, {}, [3, 3]))
    assert sum(isinstance(c, Reduce) for c in folded.computes) == 2


def test_a_large_expansion_is_not_folded() -> None:
    constants = {"c": np.ones((1, 1), np.float32), "n": np.asarray([700, 700])}
    nodes = [helper.make_node("Expand", ["c", "n"], ["e"]), helper.make_node("Add", ["x", "e"], ["y"])]
    program = fold_constants(_program(nodes, constants, [700, 700]))
    assert sum(a.nbytes for a in program.constants.values()) < 1 << 20


def test_equal_constants_are_shared() -> None:
    a = np.random.default_rng(1).standard_normal((9, 9)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["p"]),
        helper.make_node("MatMul", ["p", "b"], ["y"]),
    ]
    program = _program(nodes, {"a": a, "b": a.copy()}, [4, 9])
    assert len(program.constants) == 2
    folded = fold_constants(program)
    assert len(folded.constants) == 1
    x = np.random.default_rng(2).standard_normal((4, 9)).astype(np.float32)
    np.testing.assert_allclose(evaluate(folded, {"x": x})[folded.outputs[0].name], x @ a @ a, rtol=1e-4, atol=1e-5)


def test_scalars_stay_scalars() -> None:
    given, made = Tensor("s", (), dtypes.float32), Tensor("a", (), dtypes.float32)
    folded = fold(Map(made, (), load(given, ())), {given: np.array(1.5, np.float32)})
    assert folded[made].shape == () and folded[made] == 1.5


def test_weights_of_any_size_are_converted_beforehand() -> None:
    """What is computed from as many elements is left for the run."""
    w = Tensor("w", (1 << 14, 1 << 14), dtypes.float32)
    constants = {w: np.broadcast_to(np.float32(0), (1 << 14, 1 << 14))}
    axes = (Axis("i", 1 << 14), Axis("j", 1 << 14))
    read = load(w, [var(a) for a in axes])
    for narrow in (dtypes.float16, dtypes.tf32):
        assert foldable(Map(Tensor("n", w.shape, narrow), axes, cast(read, narrow)), constants)
    assert foldable(Map(Tensor("t", w.shape, w.dtype), axes, load(w, [var(a) for a in reversed(axes)])), constants)
    assert not foldable(Map(Tensor("e", w.shape, w.dtype), axes, read * read), constants)
