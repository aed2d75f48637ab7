"""Small graphs for the GPU's stages, and how to run what the compiler made of them on Loops and on the emulator."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.gpu import MEANINGS
from tilewright.ir.forms.tensor import Layout
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.options import Options
from tilewright.target import machine

FLOAT = TensorProto.FLOAT
Ports = Sequence[tuple[str, Sequence[int]]]


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def no_plan_fails() -> Iterator[None]:
    """An error where a plan failed on the way: a plainer one in its place would hide that."""
    log, told = logging.getLogger("tilewright"), _Told()
    log.addHandler(told)
    try:
        yield
    finally:
        log.removeHandler(told)
    failed = [m for m in told.messages if "a plan of Tilewright's failed" in m]
    assert not failed, failed


def graph(nodes: Sequence[tuple[str, Sequence[str], str, dict[str, object]]], inputs: Ports, outputs: Ports,
          kinds: Mapping[str, int] | None = None) -> ModelProto:  # fmt: skip
    """A model of (operator, inputs, output, attributes); everything is float32 unless `kinds` says otherwise."""
    types = kinds or {}
    made = [helper.make_node(op, list(given), [out], **attributes) for op, given, out, attributes in nodes]
    ports = [
        [helper.make_tensor_value_info(n, types.get(n, FLOAT), list(s)) for n, s in part] for part in (inputs, outputs)
    ]
    whole = helper.make_graph(made, "graph", *ports)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def matmul(m: int, k: int, n: int) -> ModelProto:
    return graph([("MatMul", ["a", "b"], "o", {})], [("a", (m, k)), ("b", (k, n))], [("o", (m, n))])


def gemm(m: int, k: int, n: int) -> ModelProto:
    """The second operand transposed, and a bias."""
    return graph([("Gemm", ["a", "b", "c"], "o", {"transB": 1})], [("a", (m, k)), ("b", (n, k)), ("c", (n,))],
                 [("o", (m, n))])  # fmt: skip


def softmax_of_matmul(m: int, k: int, n: int) -> ModelProto:
    return graph([("MatMul", ["a", "b"], "s", {}), ("Softmax", ["s"], "o", {"axis": -1})],
                 [("a", (m, k)), ("b", (k, n))], [("o", (m, n))])  # fmt: skip


def attention(length: int, head: int, heads: int = 2) -> ModelProto:
    shape = (1, heads, length, head)
    nodes = [("Transpose", ["k"], "kt", {"perm": [0, 1, 3, 2]}), ("MatMul", ["q", "kt"], "s", {}),
             ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})]  # fmt: skip
    return graph(nodes, [("q", shape), ("k", shape), ("v", shape)], [("o", shape)])  # type: ignore[arg-type]


def reduction(op: str, shape: Sequence[int], axes: Sequence[int]) -> ModelProto:
    out = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return graph([(op, ["a"], "o", {"axes": list(axes), "keepdims": 1})], [("a", shape)], [("o", out)])


def argmax(shape: Sequence[int], axis: int) -> ModelProto:
    out = tuple(n for i, n in enumerate(shape) if i != axis)
    return graph([("ArgMax", ["a"], "o", {"axis": axis, "keepdims": 0})], [("a", shape)], [("o", out)],
                 {"o": TensorProto.INT64})  # fmt: skip


def convolution(shape: Sequence[int], channels: int, kernel: int, group: int = 1, stride: int = 1) -> ModelProto:
    pad = kernel // 2
    size = [(n + 2 * pad - kernel) // stride + 1 for n in shape[2:]]
    attributes = {"group": group, "strides": [stride, stride], "pads": [pad] * 4}
    return graph([("Conv", ["a", "w"], "o", attributes)],
                 [("a", shape), ("w", (channels, shape[1] // group, kernel, kernel))],
                 [("o", (shape[0], channels, *size))])  # fmt: skip


def elementwise(shape: Sequence[int]) -> ModelProto:
    turned = tuple(reversed(shape))
    nodes = [("Transpose", ["a"], "t", {}), ("Tanh", ["t"], "u", {}), ("Mul", ["u", "b"], "o", {})]
    return graph(nodes, [("a", shape), ("b", turned)], [("o", turned)])  # type: ignore[arg-type]


# odd sizes, primes and ones; every way a nest can be lowered
GRAPHS: Mapping[str, ModelProto] = {
    "matmul": matmul(67, 53, 71),
    "matmul_even": matmul(64, 32, 128),
    "matmul_row": matmul(1, 97, 103),
    "matmul_column": matmul(103, 97, 1),
    "matmul_one": matmul(1, 1, 1),
    "matmul_long": matmul(5, 331, 6),
    "gemm": gemm(5, 131, 67),
    "gemm_row": gemm(1, 131, 67),
    "softmax_of_matmul": softmax_of_matmul(37, 29, 101),
    "attention": attention(13, 5, 3),
    "attention_77": attention(77, 40, 1),
    "sum_of_a_scalar": graph([("ReduceSumSquare", ["x"], "p", {}), ("Sqrt", ["p"], "y", {})], [("x", ())], [("y", ())]),
    "row_max": reduction("ReduceMax", (7, 113), (1,)),
    "column_mean": reduction("ReduceMean", (113, 7), (0,)),
    "two_axes": reduction("ReduceL2", (3, 5, 67), (0, 2)),
    "all_axes": reduction("ReduceSumSquare", (7, 11, 13), (0, 1, 2)),
    "logsumexp": reduction("ReduceLogSumExp", (9, 77), (1,)),
    "product": reduction("ReduceProd", (3, 37), (1,)),
    "argmax_row": argmax((5, 61), 1),
    "argmax_column": argmax((61, 5), 0),
    "convolution": convolution((1, 3, 17, 19), 5, 3),
    "convolution_strided": convolution((2, 8, 15, 15), 16, 3, stride=2),
    "convolution_depthwise": convolution((1, 6, 9, 11), 6, 3, group=6),
    "convolution_grouped": convolution((1, 8, 9, 9), 12, 3, group=4),
    "convolution_pointwise": convolution((1, 16, 7, 7), 32, 1),
    "elementwise": elementwise((3, 5, 7)),
}


def compiled(model: ModelProto | Path, schedule: str, cache: Path, stop_after: str | None = None) -> Artifact:
    options = Options(target="cuda-emulated", schedule=schedule, cache_dir=cache, stop_after=stop_after)
    return build(load(model, {}), machine("cuda-emulated"), options)


def random_inputs(artifact: Artifact, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {p.name: rng.standard_normal(p.shape).astype(p.dtype.numpy) for p in artifact.inputs}


def on_loops(artifact: Artifact, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs by name as the interpreter of Loops computes them."""
    program, loops, plan = artifact.program, artifact.loops, artifact.plan
    assert program is not None and loops is not None and plan is not None
    layouts = dict(plan.layouts)
    tensors: dict[str, np.ndarray] = {}
    for tensor, array in program.constants.items():
        layout = layouts.get(tensor.name) or Layout.natural(tensor.rank)
        tensors[tensor.name] = layout.pack(np.asarray(array).reshape(tuple(int(e) for e in tensor.shape)))
    for tensor, port in zip(program.inputs, artifact.inputs, strict=True):
        tensors[tensor.name] = np.ascontiguousarray(inputs[port.name])
    run_loops(loops, tensors, instructions=MEANINGS)
    return {p.name: tensors[t.name].reshape(p.shape) for t, p in zip(program.outputs, artifact.outputs, strict=True)}


def on_emulator(artifact: Artifact, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    outputs = {p.name: np.empty(p.shape, p.dtype.numpy) for p in artifact.outputs}
    artifact.runner.run([inputs[p.name] for p in artifact.inputs], list(outputs.values()))
    return outputs
