"""XLA as a peer: an ONNX model node by node in JAX gives what ONNX's evaluator gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tests.cpu_stages import model_of
from tilewright.cli.bench import USUAL
from tilewright.report import cuda_peers
from tilewright.report.peers import find_peer
from tilewright.report.xla import jax_function

RNG = np.random.default_rng(5)


def weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def block() -> onnx.ModelProto:
    """Convolution, pooling, a normalisation, attention's pieces and what moves data between them."""
    steps = [
        ("Conv", ["x", "w"], "a", {"pads": [1, 1, 1, 1], "group": 2}),
        ("Relu", ["a"], "b", {}),
        ("MaxPool", ["b"], "c", {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1], "dilations": [2, 2]}),
        ("Reshape", ["c", "shape"], "d", {}),
        ("Transpose", ["d"], "e", {"perm": [0, 2, 1]}),
        ("LayerNormalization", ["e", "g", "h"], "f", {"axis": -1}),
        ("MatMul", ["f", "m"], "i", {}),
        ("Softmax", ["i"], "j", {"axis": -1}),
        ("Slice", ["j", "one", "six", "one"], "k", {}),
        ("Erf", ["k"], "l", {}),
        ("ReduceMean", ["l"], "y", {"axes": [1], "keepdims": 0}),
    ]
    constants = {"w": weights(8, 2, 3, 3), "shape": np.array([0, 0, -1]), "g": weights(8), "h": weights(8),
                 "m": weights(8, 8), "one": np.array([1]), "six": np.array([6])}  # fmt: skip
    return model_of(steps, {"x": (1, 4, 6, 6)}, {"y": (1, 8)}, constants)


def recurrence() -> onnx.ModelProto:
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=3)
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [5, 1, 4]), ("y", [5, 1, 1, 3]))]
    shapes = {"w": (1, 12, 4), "r": (1, 12, 3), "b": (1, 24)}
    kept = [onnx.numpy_helper.from_array(weights(*s), n) for n, s in shapes.items()]
    graph = helper.make_graph([node], "lstm", ports[:1], ports[1:], kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("model", [block(), recurrence()], ids=["block", "lstm"])
def test_the_same_as_onnx(model: onnx.ModelProto, precision: str, tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    run, kept, names = jax_function(str(path), precision)
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    given = {names[0]: weights(*shape)}
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU would multiply in fewer bits
        (found,) = jax.jit(run)(kept, given)
    assert found.dtype == precision
    (wanted,) = ReferenceEvaluator(model).run(None, given)
    close = 1e-5 if precision == "float32" else 5e-3
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=close, atol=close)


def test_an_operator_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model_of([("Det", ["x"], "y", {})], {"x": (2, 2)}, {"y": ()}, {}), path)
    with pytest.raises(ValueError, match="XLA: no Det among the operators"):
        jax_function(str(path))


def test_a_window_given_otherwise_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    pool = ("MaxPool", ["x"], "y", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1})
    onnx.save(model_of([pool], {"x": (1, 1, 5, 5)}, {"y": (1, 1, 3, 3)}, {}), path)
    with pytest.raises(ValueError, match="XLA: ceil_mode of MaxPool is not known"):
        jax_function(str(path))


def test_every_usual_peer_of_a_gpu_is_known_there() -> None:
    for spelling in USUAL["cuda"].split(","):
        assert find_peer(spelling)[0].name in cuda_peers.RUNTIMES
