"""Kernels that only move memory, beside copies on the device: elementwise chains, sums of rows, softmax, LayerNorm.

Each goes through sets of arrays that do not fit the L2 cache together; bytes are what must be read and written once,
and the copy beside it moves as many (what is only read, as much as a copy reads and writes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

import tilewright

Timed = Callable[[Callable[[int], Any], int], float]

_BEYOND_L2 = 256 << 20
_CALLS = 6
# (name, kind, shape in elements of float32; float16 has twice the rows), 64 MB and more of every array
CASES: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("chain of one operand", "chain1", (16384, 1024)),
    ("chain of two operands", "chain2", (16384, 1024)),
    ("chain with a row and a column", "chain3", (16384, 1024)),
    ("chain of odd rows", "chain2", (16384, 1023)),
    ("chain of a line", "chain2", (16777217,)),
    ("sum of rows", "sum", (16384, 1024)),
    ("sum of long rows", "sum", (1024, 16384)),
    ("softmax of 256", "softmax", (65536, 256)),
    ("softmax of 1024", "softmax", (16384, 1024)),
    ("softmax of 4096", "softmax", (4096, 4096)),
    ("LayerNorm of 768", "norm", (22528, 768)),
    ("LayerNorm of 1024", "norm", (16384, 1024)),
)


@dataclass(frozen=True)
class Moved:
    """One kernel: its time, its share of the copy's bandwidth, and what a plan says of it."""

    name: str
    dtype: str
    microseconds: float
    bytes: int
    bandwidth: float  # bytes a second
    of_copy: float
    predicted: float
    kernels: int
    error: float


def measured(timed: Timed) -> list[Moved]:
    rows: list[Moved] = []
    copies: dict[int, float] = {}
    print(f"{'kernel':32} {'dtype':8} {'us':>8} {'TB/s':>6} {'of copy':>8} {'predicted':>9}  error")
    for dtype in ("float32", "float16"):
        for name, kind, shape in CASES:
            doubled = (shape[0] * (2 if dtype == "float16" else 1), *shape[1:])
            row = _row(name, kind, doubled, dtype, copies, timed)
            rows.append(row)
            print(f"{name:32} {dtype:8} {row.microseconds:8.1f} {row.bandwidth / 1e12:6.2f} {row.of_copy:8.0%} "
                  f"{row.predicted:9.1f}  {row.error:.1e}{'' if row.kernels == 1 else f'  {row.kernels} kernels'}",
                  flush=True)  # fmt: skip
    return rows


def _copied(moved: int, timed: Timed) -> float:
    """Bytes a second of a copy that reads and writes so many together."""
    import torch

    sets = max(2, _BEYOND_L2 // moved + 1)
    given = [torch.randn(moved // 8, device="cuda") for _ in range(sets)]
    found = [torch.empty_like(x) for x in given]
    return moved / (timed(lambda i: found[i % sets].copy_(given[i % sets]), _CALLS) * 1e-6)


def _row(name: str, kind: str, shape: tuple[int, ...], dtype: str, copies: dict[int, float], timed: Timed) -> Moved:
    import torch

    model = tilewright.compile(model_of(kind, shape, dtype), target="cuda")
    ports = {p.name: tuple(int(e) for e in p.shape) for p in (*model.inputs, *model.outputs)}
    width = 2 if dtype == "float16" else 4
    moved = sum(prod(dims) for dims in ports.values()) * width
    sets = max(2, _BEYOND_L2 // moved + 1)
    real = getattr(torch, dtype)
    given = [[torch.randn(ports[p.name], device="cuda").to(real) for p in model.inputs] for _ in range(sets)]
    found = [[torch.full(ports[p.name], float("nan"), device="cuda", dtype=real) for p in model.outputs]
             for _ in range(sets)]  # fmt: skip
    model.run_into(given[0], found[0])
    torch.cuda.synchronize()
    names = [p.name for p in model.inputs]
    wanted = reference(kind, dict(zip(names, given[0], strict=True)))
    error = float((found[0][0].double() - wanted).norm() / wanted.norm())
    taken = timed(lambda i: model.run_into(given[i % sets], found[i % sets]), _CALLS)
    plan = model.artifact.plan
    predicted = sum(k.estimate.seconds for k in plan.kernels) * 1e6
    rate = moved / (taken * 1e-6)
    size = moved >> 20  # copies of about as many bytes are one
    if size not in copies:
        copies[size] = _copied(size << 20, timed)
    return Moved(name, dtype, taken, moved, rate, rate / copies[size], predicted, len(plan.kernels), error)


def model_of(kind: str, shape: tuple[int, ...], dtype: str) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    real = TensorProto.FLOAT16 if dtype == "float16" else TensorProto.FLOAT
    last = list(shape[-1:])
    inputs: dict[str, list[int]] = {"x": list(shape)}
    out, constants = list(shape), []
    nodes = []
    if kind.startswith("chain"):
        extra = {"chain1": {}, "chain2": {"b": list(shape)}, "chain3": {"b": last, "c": [shape[0], 1]}}[kind]
        inputs |= extra
        value = "x"
        for number, name in enumerate(extra):
            nodes.append(helper.make_node(("Mul", "Add")[number % 2], [value, name], [f"m{number}"]))
            value = f"m{number}"
        nodes += [helper.make_node("Sigmoid", [value], ["s"]), helper.make_node("Mul", [value, "s"], ["y"])]
    elif kind == "sum":
        out = [shape[0], 1]
        constants.append(numpy_helper.from_array(np.array([-1], np.int64), "axes"))
        nodes.append(helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=1))
    elif kind == "softmax":
        nodes.append(helper.make_node("Softmax", ["x"], ["y"], axis=-1))
    else:
        inputs |= {"s": last, "b": last}
        nodes.append(helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], axis=-1))
    ports = [helper.make_tensor_value_info(name, real, dims) for name, dims in inputs.items()]
    ended = [helper.make_tensor_value_info("y", real, out)]
    graph = helper.make_graph(nodes, kind, ports, ended, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def reference(kind: str, given: dict[str, Any]) -> Any:
    """In float64, by PyTorch."""
    import torch

    wide = {name: array.double() for name, array in given.items()}
    x = wide["x"]
    if kind.startswith("chain"):
        x = x * wide["b"] if "b" in wide else x
        x = x + wide["c"] if "c" in wide else x
        return x * torch.sigmoid(x)
    if kind == "sum":
        return x.sum(-1, keepdim=True)
    if kind == "softmax":
        return torch.softmax(x, -1)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], wide["s"], wide["b"], 1e-5)
