"""Attention of queries, keys and values beside PyTorch's `scaled_dot_product_attention`: `bench/gpu.py attention`.

Its flash and cuDNN backends are each forced, the better one is what we are compared with. Each goes through sets of
arrays that do not fit the L2 cache together; errors are relative, against float64. Causal attention follows the same
sizes in full, and says what part of that time it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import tilewright

Timed = Callable[[Callable[[int], Any], int], float]

_BEYOND_L2 = 256 << 20
_LONG = 2048  # rows from which a few calls take long enough to be timed
_JUDGED = 1024  # rows of a head whose error is told: scores of float64 take much room
# heads, rows, columns, whether a row sees those before it alone
CASES: tuple[tuple[tuple[int, int, int], bool], ...] = (
    ((12, 384, 64), False), ((12, 128, 64), False), ((12, 197, 64), False), ((768, 49, 32), False),
    ((12, 4096, 64), False), ((12, 4096, 64), True), ((16, 16384, 128), False), ((16, 16384, 128), True),
    ((16, 1000, 80), False), ((16, 1000, 80), True), ((8, 77, 40), False),
)  # fmt: skip


@dataclass(frozen=True)
class Attention:
    name: str
    microseconds: float
    flash: float
    cudnn: float
    error: float
    torch_error: float
    predicted: float
    kernels: int
    of_full: float  # of the time without the mask, 0 where there is none

    @property
    def best(self) -> float:
        return min(self.flash, self.cudnn)


def measured(timed: Timed, precision: str) -> list[Attention]:
    rows: list[Attention] = []
    full: dict[tuple[int, int, int], float] = {}
    print(f"{'heads, rows, columns':24} {'us':>9} {'flash':>9} {'cuDNN':>9} {'ratio':>6} {'of full':>7} "
          f"{'predicted':>9} kernels  error (SDPA)")  # fmt: skip
    for sizes, causal in CASES:
        row = _row(sizes, causal, timed, precision, full)
        rows.append(row)
        print(f"{row.name:24} {row.microseconds:9.2f} {row.flash:9.2f} {row.cudnn:9.2f} "
              f"{row.best / row.microseconds:6.2f} {row.of_full:7.2f} {row.predicted:9.2f} {row.kernels:7}  "
              f"{row.error:.1e} ({row.torch_error:.1e})", flush=True)  # fmt: skip
    return rows


def _row(
    sizes: tuple[int, int, int], causal: bool, timed: Timed, precision: str, full: dict[tuple[int, int, int], float]
) -> Attention:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    shape = (1, *sizes)
    sets = max(2, min(48, _BEYOND_L2 // (4 * kind.itemsize * prod(sizes)) + 1))
    given = [[torch.randn(shape, device="cuda").to(kind) for _ in range(3)] for _ in range(sets)]
    results = [torch.full(shape, float("nan"), device="cuda", dtype=kind) for _ in range(sets)]
    calls = 6 if sizes[1] >= _LONG else max(sets, 24)
    model = tilewright.compile(model_of(sizes, precision, causal), target="cuda", precision=precision)
    model.run_into(given[0], [results[0]])
    torch.cuda.synchronize()
    attention = torch.nn.functional.scaled_dot_product_attention
    wanted = _wanted(given[0], causal)
    theirs = attention(*given[0], is_causal=causal)
    rows = wanted.shape[-2]
    errors = [float((o[:, :1, :rows].double() - wanted).norm() / wanted.norm()) for o in (results[0], theirs)]
    if bool(torch.isnan(results[0]).any()):
        errors[0] = float("nan")
    ours = timed(lambda i: model.run_into(given[i % sets], [results[i % sets]]), calls)
    peers = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel([backend]):
                peers.append(timed(lambda i: attention(*given[i % sets], is_causal=causal), calls))
        except RuntimeError:  # this backend does not take such operands
            peers.append(inf)
    kernels = model.artifact.plan.kernels
    predicted = sum(kernel.estimate.seconds for kernel in kernels) * 1e6
    of_full = ours / full[sizes] if causal and sizes in full else 0.0
    if not causal:
        full[sizes] = ours
    name = f"{' x '.join(map(str, sizes))}{' causal' if causal else ''}"
    return Attention(name, ours, peers[0], peers[1], errors[0], errors[1], predicted, len(kernels), of_full)


def _wanted(given: list[Any], causal: bool) -> Any:
    """The first rows of the first head."""
    import torch

    q, k, v = (x[:, :1].double() for x in given)
    q = q[:, :, :_JUDGED]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -inf)
    return torch.softmax(scores, -1) @ v


def model_of(sizes: tuple[int, int, int], precision: str, causal: bool = False) -> Any:
    """Sums and softmax in float32, as PyTorch has them: every product of 16-bit operands is left to `precision`."""
    from onnx import TensorProto, helper

    kinds = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
    kind = kinds.get(precision, TensorProto.FLOAT)
    node = helper.make_node
    rows = sizes[1]
    masked = [node("LessOrEqual", ["places", "rows"], ["seen"]), node("Where", ["seen", "scaled", "low"], ["masked"])]
    nodes = [
        *(node("Cast", [x], [f"{x}_wide"], to=TensorProto.FLOAT) for x in "qkv"),
        node("Transpose", ["k_wide"], ["k_turned"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q_wide", "k_turned"], ["scores"]),
        node("Mul", ["scores", "scale"], ["scaled"]),
        *(masked if causal else ()),
        node("Softmax", ["masked" if causal else "scaled"], ["weights"], axis=-1),
        node("MatMul", ["weights", "v_wide"], ["wide"]),
        node("Cast", ["wide"], ["o"], to=kind),
    ]
    ports = [helper.make_tensor_value_info(x, kind, [1, *sizes]) for x in "qkvo"]
    numbers = [helper.make_tensor("scale", TensorProto.FLOAT, [], [sizes[2] ** -0.5])]
    if causal:
        numbers += [helper.make_tensor("places", TensorProto.INT64, [rows], range(rows)),
                    helper.make_tensor("rows", TensorProto.INT64, [rows, 1], range(rows)),
                    helper.make_tensor("low", TensorProto.FLOAT, [], [-inf])]  # fmt: skip
    graph = helper.make_graph(nodes, "attention", ports[:3], ports[3:], numbers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
