"""Times products, models and plans on this machine's GPU:
`python bench/gpu.py products | convolutions | attention | models | quantised | kernelbench | ablation | model |
bandwidth | best`.

Device time: copies of a call are captured into one CUDA graph, whose replays are timed by events; the median of some.
Products and convolutions go through rotating sets of operands that do not fit the L2 cache together; models through
`run_into` with inputs and outputs on the device. PyTorch runs the same operands by cuBLAS and cuDNN; models, of the zoo
or of yours, have peers in processes of their own (gpu_peers.py). Errors are relative, against float64.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tilewright
from bench import (
    gpu_attention,
    gpu_bandwidth,
    gpu_best,
    gpu_convolutions,
    gpu_kernelbench,
    gpu_models,
    gpu_peers,
    gpu_plans,
    gpu_quantised,
)
from tilewright.errors import TilewrightError
from tilewright.target import machine

BEYOND_L2 = 256 << 20  # bytes of all sets of operands

# rows, summed, columns, products beside each other, whether the second operand lies transposed
Shape = tuple[int, int, int, int, bool]
FAMILIES: dict[str, tuple[Shape, ...]] = {
    "square": ((1024, 1024, 1024, 1, False), (1024, 1024, 1024, 1, True), (4096, 4096, 4096, 1, False)),
    "bert 384": tuple((384, k, n, 1, False) for k, n in ((768, 2304), (768, 768), (768, 3072), (3072, 768))),
    "bert 128": tuple((128, k, n, 1, False) for k, n in ((768, 2304), (768, 768), (768, 3072), (3072, 768))),
    "attention": ((384, 64, 384, 12, True), (384, 384, 64, 12, False), (128, 64, 128, 12, True),
                  (128, 128, 64, 12, False)),
    "odd": (
        (49, 1024, 3072, 1, False), (197, 768, 768, 1, False), (197, 768, 3072, 1, False), (197, 3072, 768, 1, False),
        (50, 384, 1152, 1, False), (50, 384, 1536, 1, False), (100, 1000, 100, 1, False), (1000, 264, 520, 1, False),
        (33, 48, 1000, 1, False), (130, 77, 33, 1, False), (67, 53, 71, 1, False), (16, 4096, 4096, 1, False),
        (8, 768, 3072, 1, False), (4096, 64, 64, 1, False), (64, 64, 4096, 1, False), (3136, 96, 288, 1, False),
        (784, 192, 576, 1, False), (196, 384, 1536, 1, False), (2048, 30, 2048, 1, False), (511, 513, 257, 1, False),
        (1000, 1000, 1000, 1, True), (333, 128, 999, 1, True), (24, 2048, 512, 1, True), (640, 320, 1280, 1, True),
        (77, 640, 2560, 1, True), (12544, 64, 256, 1, False), (49, 2048, 512, 1, True), (400, 40, 400, 8, False),
        (65, 96, 65, 32, True), (1500, 384, 384, 1, False),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    name: str
    microseconds: float = 0.0
    torch: float = 0.0
    error: float = 0.0
    torch_error: float = 0.0
    predicted: float = 0.0
    kernels: int = 0
    compile_seconds: float = 0.0
    refused: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    products = commands.add_parser("products", help="contractions of one kernel beside cuBLAS")
    products.add_argument("--family", choices=FAMILIES, action="append", help="only this one; repeatable")
    layers = commands.add_parser("convolutions", help="single layers beside cuDNN")
    layers.add_argument("--layer", action="append", default=[], metavar="TEXT",
                        help="those with this in their family or name; repeatable")  # fmt: skip
    layers.add_argument("--batch", type=int, default=1)
    models = commands.add_parser("models", help="models of the zoo, or yours, beside PyTorch")
    models.add_argument("files", nargs="*", metavar="FILE", type=own_model,
                        help="an ONNX file, or module:function that gives a torch module and its example inputs; all "
                        "extents of an ONNX file's inputs are known")  # fmt: skip
    models.add_argument("--model", action="append", help="one of the zoo; repeatable")
    models.add_argument("--size", default="full", choices=("small", "full"))
    models.add_argument("--batch", type=int, default=1, help="inputs at once, of models of the zoo")
    models.add_argument("--peers", action="store_true", help="PyTorch and XLA too, in processes of their own")
    models.add_argument("--peer", action="append", choices=gpu_peers.RUNTIMES, help="only this one; repeatable")
    models.add_argument("--peer-seconds", type=float, default=200, help="that peers have from the start to compile")
    models.add_argument("--profile", type=int, default=0, metavar="N", help="print each model's N slowest kernels")
    attention = commands.add_parser("attention", help="attention of one kernel beside PyTorch's")
    bytewise = commands.add_parser("quantised", help="8-bit models and weights of few bits beside our float16")
    bytewise.add_argument("--only", action="append", default=[], metavar="TEXT", help="rows with this in their name")
    bytewise.add_argument("--json", type=Path, metavar="FILE")
    problems = commands.add_parser("kernelbench", help="problems of KernelBench beside PyTorch, or files like them")
    problems.add_argument("folder", type=Path, help="a checkout of it, or a folder of such files")
    problems.add_argument("--only", action="append", default=[], metavar="TEXT", help="files with this in their path")
    problems.add_argument("--precision", default="float32", choices=gpu_kernelbench.ROUNDED,
                          help="what all may round to tf32: tf32_convolutions is PyTorch's default")  # fmt: skip
    problems.add_argument("--runtime", action="append", choices=gpu_kernelbench.RUNTIMES, help="only this one")
    problems.add_argument("--seconds", type=float, default=3600, help="for all together")
    problems.add_argument("--json", type=Path, metavar="FILE")
    steps = commands.add_parser("ablation", help="models under each schedule: time, launches, bytes")
    kernels = commands.add_parser("model", help="what kernels of models were predicted to take, and what they take")
    for command in (steps, kernels):
        command.add_argument("--model", action="append", help="one of the zoo; repeatable")
        command.add_argument("--size", default="full", choices=("small", "full"))
    moved = commands.add_parser("bandwidth", help="kernels that only move memory, beside a copy")
    best = commands.add_parser("best", help="the chosen plans of kernels beside the best of 20, and one stage")
    best.add_argument("--count", type=int, default=40, help="kernels at most")
    best.add_argument("--only", action="append", default=[], metavar="TEXT", help="kernels with this in their name")
    best.add_argument("--make", type=Path, metavar="FILE", help="make the plans of an H200 here, to be timed elsewhere")
    best.add_argument("--made", type=Path, metavar="FILE", help="time plans that were made beforehand")
    moved.add_argument("--json", type=Path, metavar="FILE")
    best.add_argument("--json", type=Path, metavar="FILE")
    for command in (products, layers, attention, models, steps, kernels):
        command.add_argument("--precision", default="float16", choices=("float32", "tf32", "float16", "bfloat16"))
        command.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    shapes = [s for f in FAMILIES.values() for s in f]
    if arguments.command == "best" and arguments.make is not None:
        made = gpu_best.made_plans(shapes, arguments.count, machine("h200"), arguments.only)
        arguments.make.write_bytes(pickle.dumps(made))
        return 0
    if arguments.command in ("bandwidth", "best", "attention", "convolutions", "quantised"):
        warm_up()
        found: Sequence[Any] = (
            gpu_bandwidth.measured(device_microseconds) if arguments.command == "bandwidth"
            else gpu_attention.measured(device_microseconds, arguments.precision) if arguments.command == "attention"
            else gpu_convolutions.measured(device_microseconds, arguments.precision, arguments.batch, arguments.layer)
            if arguments.command == "convolutions"
            else gpu_quantised.measured(device_microseconds, arguments.only) if arguments.command == "quantised"
            else gpu_best.measured(shapes, arguments.count, device_microseconds, arguments.made, arguments.only)
        )  # fmt: skip
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
        return 0
    if arguments.command == "kernelbench":
        of = gpu_kernelbench.measured(arguments.folder, arguments.precision, arguments.only,
                                      arguments.runtime or gpu_kernelbench.RUNTIMES, arguments.seconds)  # fmt: skip
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(row) for row in of], indent=1) + "\n")
        return 1 if any(row.refused for row in of) else 0
    if arguments.command in ("ablation", "model"):
        return run_plans(arguments)
    rows: Sequence[Any] = run_products(arguments) if arguments.command == "products" else run_models(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.refused for row in rows) else 0


def own_model(text: str) -> str:
    """A user's model as its benchmark names it."""
    if ":" in text or (text.endswith(".onnx") and Path(text).is_file()):
        return text
    raise argparse.ArgumentTypeError(f"no file {text}: an ONNX file, or module:function, or --model for one of the zoo")


def run_models(arguments: argparse.Namespace) -> list[gpu_models.Row]:
    warm_up()
    peers = arguments.peer or (gpu_peers.RUNTIMES if arguments.peers else ())
    named = [*arguments.files, *(arguments.model or ())]
    return gpu_models.run_models(named or gpu_models.MODELS, arguments.size, arguments.precision, device_microseconds,
                                 peers, arguments.peer_seconds, arguments.profile, arguments.batch)  # fmt: skip


def run_plans(arguments: argparse.Namespace) -> int:
    warm_up()
    run, usual = (
        (gpu_plans.ablation, gpu_plans.ABLATED) if arguments.command == "ablation"
        else (gpu_plans.predictions, gpu_plans.PREDICTED)
    )  # fmt: skip

    def keep(rows: Sequence[Any]) -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")

    names = arguments.model or usual
    run(names, arguments.size, arguments.precision, gpu_models.built, device_microseconds, keep)
    return 0


# ---- products


def run_products(arguments: argparse.Namespace) -> list[Row]:
    warm_up()
    rows: list[Row] = []
    print(f"{'product':34} {'us':>8} {'cuBLAS':>8} {'ratio':>6} {'predicted':>9}  error (cuBLAS)")
    for family in arguments.family or FAMILIES:
        found = [product_row(f"{family} {text_of(shape)}", shape, arguments.precision) for shape in FAMILIES[family]]
        rows.extend(found)
        ratios = [row.torch / row.microseconds for row in found if row.microseconds]
        if ratios:
            print(f"{family}: {geometric_mean(ratios):.2f} of cuBLAS' speed, geometric mean of {len(ratios)}")
    return rows


def text_of(shape: Shape) -> str:
    m, k, n, count, transposed = shape
    return f"{'' if count == 1 else f'{count} x '}{m} x {k} x {n}{' transposed' if transposed else ''}"


def product_row(name: str, shape: Shape, precision: str) -> Row:
    import torch

    m, k, n, count, transposed = shape
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    lead = () if count == 1 else (count,)
    second = (n, k) if transposed else (k, n)
    width = 2 if kind is not torch.float32 else 4
    sets = max(2, min(64, BEYOND_L2 // (width * count * (m * k + k * n + m * n)) + 1))
    given = [(torch.randn(*lead, m, k, device="cuda").to(kind), torch.randn(*lead, *second, device="cuda").to(kind))
             for _ in range(sets)]  # fmt: skip
    results = [torch.full((*lead, m, n), float("nan"), device="cuda", dtype=kind) for _ in range(sets)]
    calls = max(sets, 20) if m * k * n * count < 1e10 else 6
    try:
        begin = time.perf_counter()
        model = tilewright.compile(product_model(shape, precision), target="cuda", precision=narrowed(precision))
        taken = time.perf_counter() - begin
        model.run_into(list(given[0]), [results[0]])
        torch.cuda.synchronize()
        a, b = (x.double() for x in given[0])
        wanted = a @ (b.transpose(-1, -2) if transposed else b)
        error = relative(results[0], wanted)
        ours = device_microseconds(lambda i: model.run_into(list(given[i % sets]), [results[i % sets]]), calls)
    except TilewrightError as failed:
        print(f"{name:34} {failed}", flush=True)
        return Row(name, refused=str(failed))

    def peer(i: int) -> None:
        x, y = given[i % sets]
        torch.matmul(x, y.transpose(-1, -2) if transposed else y, out=results[i % sets])

    theirs = device_microseconds(peer, calls)
    torch_error = relative(results[0], wanted)
    predicted = sum(kernel.estimate.seconds for kernel in model.artifact.plan.kernels) * 1e6
    row = Row(name, ours, theirs, error, torch_error, predicted, len(model.artifact.plan.kernels), taken)
    print(f"{name:34} {ours:8.2f} {theirs:8.2f} {theirs / ours:6.2f} {predicted:9.2f}  {error:.1e} ({torch_error:.1e})"
          f"{'' if row.kernels == 1 else f'  {row.kernels} kernels'}", flush=True)  # fmt: skip
    return row


def narrowed(precision: str) -> str | None:
    """A product of 16-bit operands is what its model says already."""
    return "tf32" if precision == "tf32" else None


def product_model(shape: Shape, precision: str) -> Any:
    from onnx import TensorProto, helper

    m, k, n, count, transposed = shape
    kinds = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
    kind = kinds.get(precision, TensorProto.FLOAT)
    lead = [] if count == 1 else [count]
    nodes = [helper.make_node("MatMul", ["a", "t" if transposed else "b"], ["o"])]
    if transposed:
        order = [*range(len(lead)), len(lead) + 1, len(lead)]
        nodes.insert(0, helper.make_node("Transpose", ["b"], ["t"], perm=order))
    shapes = {"a": [*lead, m, k], "b": [*lead, *((n, k) if transposed else (k, n))], "o": [*lead, m, n]}
    ports = {name: helper.make_tensor_value_info(name, kind, dims) for name, dims in shapes.items()}
    graph = helper.make_graph(nodes, "product", [ports["a"], ports["b"]], [ports["o"]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---- pieces


def relative(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def warm_up(seconds: float = 1.0) -> None:
    """The clock rises under load."""
    import torch

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        x @ x
        torch.cuda.synchronize()


def device_microseconds(call: Callable[[int], Any], count: int, rounds: int = 7) -> float:
    """Of one call, `count` of them captured into a graph."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(count):
            call(number)
    graph.replay()
    torch.cuda.synchronize()
    taken = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / count)
    return median(taken)


if __name__ == "__main__":
    sys.exit(main())
