"""A batch of any size in blocks: which models are cut, into what, and that results are those of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tilewright.compiler.blocks import blocks_of
from tilewright.errors import InputError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.blocks import Blocks
from tilewright.ir.forms.graph import Graph
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops import lower
from tilewright.target import machine

N = helper.make_node
SIDE = 24
# samples beside each other along the second dimension of what comes out
BESIDE = (N("Add", ["b", "bias:0"], ["c"]), N("Transpose", ["c"], ["t"], perm=[1, 0, 2, 3]), N("Flatten", ["t"], ["y"]))


def convolved(*more: onnx.NodeProto, rows: int = SIDE) -> onnx.ModelProto:
    """Convolutions whose weights are used many times a sample; `more` makes 'y' of 'b'."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, c, 3, 3)).astype(np.float32) / 8 for name, c in (("v", 4), ("w", 8))}
    nodes = [
        N("Conv", ["x.1", "v"], ["a"], pads=[1, 1, 1, 1]),
        N("Relu", ["a"], ["r"]),
        N("Conv", ["r", "w"], ["b"], pads=[1, 1, 1, 1]),
        *(more or (N("Add", ["b", "bias:0"], ["y"]),)),
    ]
    x = helper.make_tensor_value_info("x.1", TensorProto.FLOAT, ["n", 4, rows, SIDE])
    bias = helper.make_tensor_value_info("bias:0", TensorProto.FLOAT, [8, 1, 1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    unread = helper.make_tensor_value_info("unread", TensorProto.INT64, [3, "n"])
    constants = [numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, "g", [x, bias, unread], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def found(model: onnx.ModelProto, low: int = 1, high: int = 64, target: str = "neoverse_n1") -> Blocks | None:
    def exact(samples: int) -> Graph:
        return load(model, {"n": samples})

    return blocks_of(exact, low, high, machine(target))


def test_samples_that_do_not_meet_go_in_blocks() -> None:
    made = found(convolved(rows=480))
    assert made is not None and made.inputs == {"x.1": 0, "unread": 1} and made.outputs == {"y": 0}
    assert made.sizes[-1] == 1 and len(made.sizes) > 1
    assert [sum(made.of(n)) for n in range(1, 40)] == list(range(1, 40))


def test_a_token_that_every_sample_has_is_each_ones_own() -> None:
    """Of one sample it is the constant itself, of several its copies."""
    model = convolved(
        N("Shape", ["b"], ["s"], end=1), N("Concat", ["s", "rest"], ["shape"], axis=0),
        N("Expand", ["token", "shape"], ["e"]), N("Concat", ["b", "e"], ["y"], axis=1), rows=480,
    )  # fmt: skip
    token = np.random.default_rng(1).standard_normal((1, 1, 480, SIDE)).astype(np.float32)
    rest = np.array([1, 480, SIDE])
    model.graph.initializer.extend([numpy_helper.from_array(token, "token"), numpy_helper.from_array(rest, "rest")])
    assert found(model) is not None


def test_samples_lie_along_any_dimension() -> None:
    made = found(convolved(*BESIDE, rows=480))
    assert made is not None and made.outputs == {"y": 1}


@pytest.mark.parametrize(
    "more",
    [
        [N("Softmax", ["b"], ["y"], axis=0)],
        [N("ReduceMean", ["b"], ["y"], axes=[0])],
        [N("CumSum", ["b", "zero"], ["y"])],
        [N("Shape", ["b"], ["s"]), N("Cast", ["s"], ["f"], to=TensorProto.FLOAT), N("ReduceSum", ["f"], ["t"]),
         N("Mul", ["b", "t"], ["y"])],
    ],
    ids=["softmax", "mean", "sums", "the number itself"],
)  # fmt: skip
def test_samples_that_meet_do_not(more: list[onnx.NodeProto]) -> None:
    model = convolved(*more, rows=480)
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    assert found(model) is None


def test_weights_that_are_used_once_a_sample_are_read_once_for_all() -> None:
    """Rows of one product: blocks would read the weights for each."""
    weight = numpy_helper.from_array(np.ones((2048, 2048), np.float32), "w")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2048]) for name in ("x.1", "y")]
    graph = helper.make_graph([N("MatMul", ["x.1", "w"], ["y"])], "g", ports[:1], ports[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert found(model) is None
    assert found(convolved(rows=480), target="h200") is None


def test_results_are_those_of_the_whole_batch(tmp_path: Path, kernel_cache: Path, monkeypatch: Any) -> None:
    # small models pay for each call: the sizes are given here
    monkeypatch.setattr("tilewright.compiler.blocks._CALL", 0.0)
    monkeypatch.setattr("tilewright.compiler.blocks._AT_MOST", 9.0)
    monkeypatch.setattr("tilewright.compiler.blocks._USUALLY", 9.0)
    model = convolved(*BESIDE)
    options = tilewright.Options(cache_dir=kernel_cache, threads=2, effort="fast")
    made: Any = tilewright.compile(model, dynamic={"n": (1, 12)}, options=options)
    assert [str(v) for v in made.variants] == ["n 1", "n 4"] and made.compilations == 2
    assert "in blocks of 4 and 1" in made.explain()
    made.save(tmp_path / "saved")
    loaded: Any = tilewright.load(tmp_path / "saved")
    bias = np.arange(8, dtype=np.float32).reshape(8, 1, 1)
    for samples in (1, 3, 4, 7, 12):
        x = np.random.default_rng(samples).standard_normal((samples, 4, SIDE, SIDE)).astype(np.float32)
        unread = np.zeros((3, samples), np.int64)
        program = lower(load(model, {"n": samples}))
        (expected,) = evaluate(program, {"x.1": x, "bias:0": bias, "unread": unread}).values()
        for each in (made, loaded):
            np.testing.assert_allclose(each(x, bias, unread)[0], expected, rtol=1e-4, atol=1e-5)
    into = np.empty((8, 7 * SIDE * SIDE), np.float32)
    x, unread = x[:7], unread[:, :7]
    made.run_into([x, bias, unread], [into])
    np.testing.assert_array_equal(into, made(x, bias, unread)[0])
    assert len(made.profile(x, bias, unread, repeat=1).calls) == len(made.calls)
    with pytest.raises(InputError, match="axis 0 of input 'x.1' is 13, and the model is compiled for n from 1 to 12"):
        made(np.zeros((13, 4, SIDE, SIDE), np.float32), bias, unread)
    with pytest.raises(InputError, match="output 'y' does not fit"):
        made.run_into([x, bias, unread], [into[:6]])
