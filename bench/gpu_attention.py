"""Attention of queries, keys and values beside PyTorch's `scaled_dot_product_attention`: `bench/gpu.py attention`.

Each goes through sets of arrays that do not fit the L2 cache together; errors are relative, against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import tilewright

Timed = Callable[[Callable[[int], Any], int], float]

_BEYOND_L2 = 256 << 20
_LONG = 2048  # rows from which a few calls take long enough to be timed
# heads, rows, columns
CASES: tuple[tuple[int, int, int], ...] = (
    (12, 384, 64), (12, 128, 64), (12, 197, 64), (768, 49, 32), (12, 4096, 64), (16, 1000, 80), (8, 77, 40),
)  # fmt: skip


@dataclass(frozen=True)
class Attention:
    name: str
    microseconds: float
    torch: float
    error: float
    torch_error: float
    predicted: float
    kernels: int


def measured(timed: Timed, precision: str) -> list[Attention]:
    rows = []
    print(f"{'heads, rows, columns':24} {'us':>8} {'SDPA':>8} {'ratio':>6} {'predicted':>9} kernels  error (SDPA)")
    for sizes in CASES:
        row = _row(sizes, timed, precision)
        rows.append(row)
        print(f"{row.name:24} {row.microseconds:8.2f} {row.torch:8.2f} {row.torch / row.microseconds:6.2f} "
              f"{row.predicted:9.2f} {row.kernels:7}  {row.error:.1e} ({row.torch_error:.1e})", flush=True)  # fmt: skip
    return rows


def _row(sizes: tuple[int, int, int], timed: Timed, precision: str) -> Attention:
    import torch

    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    shape = (1, *sizes)
    sets = max(2, min(48, _BEYOND_L2 // (4 * kind.itemsize * prod(sizes)) + 1))
    given = [[torch.randn(shape, device="cuda").to(kind) for _ in range(3)] for _ in range(sets)]
    results = [torch.full(shape, float("nan"), device="cuda", dtype=kind) for _ in range(sets)]
    calls = 6 if sizes[1] >= _LONG else max(sets, 24)
    model = tilewright.compile(model_of(sizes, precision), target="cuda", precision=precision)
    model.run_into(given[0], [results[0]])
    torch.cuda.synchronize()
    q, k, v = (x.double() for x in given[0])
    wanted = torch.softmax(q @ k.transpose(-1, -2) * sizes[2] ** -0.5, -1) @ v
    attention = torch.nn.functional.scaled_dot_product_attention
    errors = [float((o.double() - wanted).norm() / wanted.norm()) for o in (results[0], attention(*given[0]))]
    ours = timed(lambda i: model.run_into(given[i % sets], [results[i % sets]]), calls)
    theirs = timed(lambda i: attention(*given[i % sets]), calls)
    kernels = model.artifact.plan.kernels
    predicted = sum(kernel.estimate.seconds for kernel in kernels) * 1e6
    return Attention(" x ".join(map(str, sizes)), ours, theirs, *errors, predicted, len(kernels))


def model_of(sizes: tuple[int, int, int], precision: str) -> Any:
    """Sums and softmax in float32, as PyTorch has them: every product of 16-bit operands is left to `precision`."""
    from onnx import TensorProto, helper

    kinds = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
    kind = kinds.get(precision, TensorProto.FLOAT)
    node = helper.make_node
    nodes = [
        *(node("Cast", [x], [f"{x}_wide"], to=TensorProto.FLOAT) for x in "qkv"),
        node("Transpose", ["k_wide"], ["k_turned"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q_wide", "k_turned"], ["scores"]),
        node("Mul", ["scores", "scale"], ["scaled"]),
        node("Softmax", ["scaled"], ["weights"], axis=-1),
        node("MatMul", ["weights", "v_wide"], ["wide"]),
        node("Cast", ["wide"], ["o"], to=kind),
    ]
    ports = [helper.make_tensor_value_info(x, kind, [1, *sizes]) for x in "qkvo"]
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [sizes[2] ** -0.5])
    graph = helper.make_graph(nodes, "attention", ports[:3], ports[3:], [scale])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
