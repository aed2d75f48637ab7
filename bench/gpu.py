"""Times products, models and plans on this machine's GPU:
`python bench/gpu.py products | models | ablation | model | bandwidth | best`.

Device time: copies of a call are captured into one CUDA graph, whose replays are timed by events; the median of some.
Products go through rotating sets of operands that do not fit the L2 cache together; models through `run_into` with
inputs and outputs on the device. PyTorch runs the same float16 operands by cuBLAS, and models in eager mode (float16)
inside a CUDA graph. Errors are relative, against float64 (products) and float32 (models).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tilewright
from bench import gpu_bandwidth, gpu_best, gpu_peers, gpu_plans
from bench.device import relative_error
from tilewright.errors import TilewrightError

REPLAYS = 1000
BEYOND_L2 = 256 << 20  # bytes of all sets of operands
MODELS = ("bert_384", "bert_base", "vit_b16", "vit_s32", "swin_t", "swin_b", "lstm", "mmoe", "efficientnet_b0",
          "resnext101", "resnet50", "mobilenet_v2")  # fmt: skip

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
    replays: int = 0  # that gave the same bits
    refused: str = ""
    compiled: float = 0.0  # by torch.compile
    rotated: float = 0.0  # microseconds where everything was read from device memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    products = commands.add_parser("products", help="contractions of one kernel beside cuBLAS")
    products.add_argument("--family", choices=FAMILIES, action="append", help="only this one; repeatable")
    models = commands.add_parser("models", help="models of the zoo beside PyTorch")
    models.add_argument("--model", action="append", help="one of the zoo; repeatable")
    models.add_argument("--size", default="full", choices=("small", "full"))
    models.add_argument("--peers", action="store_true", help="torch.compile too, in a process of its own")
    models.add_argument("--profile", type=int, default=0, metavar="N", help="print each model's N slowest kernels")
    steps = commands.add_parser("ablation", help="models under each schedule: time, launches, bytes")
    kernels = commands.add_parser("model", help="what kernels of models were predicted to take, and what they take")
    for command in (steps, kernels):
        command.add_argument("--model", action="append", help="one of the zoo; repeatable")
        command.add_argument("--size", default="full", choices=("small", "full"))
    moved = commands.add_parser("bandwidth", help="kernels that only move memory, beside a copy")
    best = commands.add_parser("best", help="the chosen plans of products beside the best of 20, and one stage")
    best.add_argument("--count", type=int, default=40, help="products at most")
    moved.add_argument("--json", type=Path, metavar="FILE")
    best.add_argument("--json", type=Path, metavar="FILE")
    for command in (products, models, steps, kernels):
        command.add_argument("--precision", default="float16", choices=("float32", "tf32", "float16", "bfloat16"))
        command.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.command in ("bandwidth", "best"):
        warm_up()
        found: Sequence[Any] = (
            gpu_bandwidth.measured(device_microseconds) if arguments.command == "bandwidth"
            else gpu_best.measured([s for f in FAMILIES.values() for s in f], arguments.count, device_microseconds)
        )  # fmt: skip
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
        return 0
    if arguments.command in ("ablation", "model"):
        return run_plans(arguments)
    rows = run_products(arguments) if arguments.command == "products" else run_models(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.refused for row in rows) else 0


def run_plans(arguments: argparse.Namespace) -> int:
    warm_up()
    run, usual = (
        (gpu_plans.ablation, gpu_plans.ABLATED) if arguments.command == "ablation"
        else (gpu_plans.predictions, gpu_plans.PREDICTED)
    )  # fmt: skip
    rows: Sequence[Any] = run(arguments.model or usual, arguments.size, arguments.precision, built, device_microseconds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
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


# ---- models


def run_models(arguments: argparse.Namespace) -> list[Row]:
    warm_up()
    names = arguments.model or MODELS
    rows = [model_row(name, arguments) for name in names]
    if arguments.peers:
        times = gpu_peers.microseconds(names, arguments.size, arguments.precision)
        rows = [replace(row, compiled=times[row.name]) for row in rows]
    head = (f"{'model':16} {'us':>9} {'rotated':>9} {'torch':>9} {'compiled':>9} {'ratio':>6} {'predicted':>9} "
            f"{'kernels':>7} {'compile s':>9}")  # fmt: skip
    print(f"{head}  error (torch)")
    for row in rows:
        if row.refused:
            print(f"{row.name:16} {row.refused}")
            continue
        best = min((t for t in (row.torch, row.compiled) if t > 0), default=float("nan"))
        print(f"{row.name:16} {row.microseconds:9.1f} {row.rotated:9.1f} {row.torch:9.1f} {row.compiled:9.1f} "
              f"{best / row.microseconds:6.2f} {row.predicted:9.1f} "
              f"{row.kernels:7} {row.compile_seconds:9.1f}  {row.error:.1e} ({row.torch_error:.1e})"
              f"{'' if row.replays == REPLAYS else f'  {REPLAYS - row.replays} replays differ'}")  # fmt: skip
    return rows


def model_row(name: str, arguments: argparse.Namespace) -> Row:
    import torch

    from bench import zoo

    module, inputs = built(name, arguments.size)
    reference = list(zoo.reference(module, inputs).values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        zoo.export_module(module, inputs, path)
        begin = time.perf_counter()
        try:
            model = tilewright.compile(path, target="cuda", precision=arguments.precision)
        except TilewrightError as failed:
            return Row(name, refused=str(failed).splitlines()[0])
        taken = time.perf_counter() - begin
    given = [torch.from_numpy(inputs[port.name]).cuda() for port in model.inputs]
    outputs = [torch.empty(port.shape, dtype=getattr(torch, port.dtype.name), device="cuda") for port in model.outputs]
    model.run_into(given, outputs)
    torch.cuda.synchronize()
    error = max(relative_error(o.cpu().numpy(), r) for o, r in zip(outputs, reference, strict=True))
    ours = device_microseconds(lambda _: model.run_into(given, outputs), 10)
    rotated = beyond_l2(lambda: model.run_into(given, outputs))
    same = equal_replays(lambda: model.run_into(given, outputs), outputs, REPLAYS)
    if arguments.profile:
        show_profile(model, inputs, arguments.profile)
    predicted = predicted_microseconds(model)
    theirs, torch_error = torch_model(module, inputs, reference, arguments.precision)
    kernels = len(model.artifact.loops.calls)
    print(f"{name}: {ours:.1f} us, with weights from device memory {rotated:.1f} us, torch {theirs:.1f} us, {kernels} "
          f"kernels, error {error:.1e} ({torch_error:.1e}), {same} equal replays, compiled in {taken:.1f} s",
          flush=True)  # fmt: skip
    return Row(name, ours, theirs, error, torch_error, predicted, kernels, taken, same, rotated=rotated)


def beyond_l2(call: Callable[[], Any]) -> float:
    """Microseconds of a call when everything it reads lies in device memory: others are read between the calls."""
    import torch

    other = torch.randn(BEYOND_L2 // 4, device="cuda")

    def after(_: int) -> None:
        other.sum()
        call()

    return device_microseconds(after, 10) - device_microseconds(lambda _: other.sum(), 10)


def built(name: str, size: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A model of the zoo, or one that is measured on GPUs alone."""
    from bench import zoo
    from bench.zoo import vit_s32

    if name == "vit_b16":
        return vit_s32.build_base_16(size)
    return zoo.build(name, size)


def equal_replays(call: Callable[[], Any], outputs: Sequence[Any], count: int) -> int:
    """How many of so many calls, one after the other, gave the bits of the first."""
    import torch

    call()
    torch.cuda.synchronize()
    first = [o.clone() for o in outputs]
    same = torch.ones((), dtype=torch.int64, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(count):
        call()
        same.fill_(1)
        for output, expected in zip(outputs, first, strict=True):
            same *= (output.view(torch.uint8) == expected.view(torch.uint8)).all()
        total += same
    return int(total)


def show_profile(model: tilewright.Model, inputs: dict[str, np.ndarray], count: int) -> None:
    print("\n".join(str(model.profile(inputs, repeat=5)).splitlines()[: count + 4]), flush=True)


def predicted_microseconds(model: tilewright.Model) -> float:
    from tilewright.schedule.planner import plan_seconds

    return plan_seconds(model.artifact.plan, model.artifact.program) * 1e6


def torch_model(
    module: Any, inputs: dict[str, np.ndarray], reference: Sequence[np.ndarray], precision: str
) -> tuple[float, float]:
    """Microseconds and error of eager PyTorch inside a CUDA graph."""
    import torch

    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(precision, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        on_device = module.to("cuda").to(kind)
        given = [torch.from_numpy(a).cuda() for a in inputs.values()]
        given = [a.to(kind) if a.is_floating_point() else a for a in given]
        with torch.no_grad():
            found = on_device(*given)
            found = [found] if isinstance(found, torch.Tensor) else list(found)
            error = max(relative_error(f.float().cpu().numpy(), r) for f, r in zip(found, reference, strict=False))
            return device_microseconds(lambda _: on_device(*given), 10), error
    except RuntimeError as failed:
        print(f"torch: {str(failed).splitlines()[0]}")
        return float("nan"), float("nan")


# ---- pieces


def relative(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def warm_up() -> None:
    """The clock rises under load."""
    import torch

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    begin = time.perf_counter()
    while time.perf_counter() - begin < 1.0:
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
