"""Models of the zoo, or of a user's, on this machine's GPU beside other runtimes: device time, error over many inputs,
equal replays. A user's model is an ONNX file, whose reference is our own float32 on the CPU and which XLA alone runs
beside us, or `module:function`, a function that gives a torch module and its example inputs by name.

The error of a model, ours and PyTorch's at the same precision, is the root of the mean square of the relative errors
over 20 inputs against float64: the example's elements in other orders along the last axis, by a seed. Of a single
input the error of two numbers (MMoE) says nothing. Models are exported, and peers compile, while ours are measured;
the peers are stopped whenever something is timed.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import tilewright
from bench import gpu_peers
from bench.gpu_peers import file_of, is_file
from tilewright.errors import TilewrightError
from tilewright.options import Options
from tilewright.report.torch_spec import call_spec
from tilewright.target import machine

REPLAYS = 1000
BEYOND_L2 = 256 << 20
JUDGED = 20  # inputs that errors are taken over
MODELS = ("bert_384", "bert_base", "vit_b16", "vit_s32", "swin_t", "swin_b", "lstm", "mmoe", "efficientnet_b0",
          "resnext101", "resnet50", "mobilenet_v2")  # fmt: skip
_EXPORTING = 4  # processes that export models while others are measured

Timed = Callable[[Callable[[int], Any], int], float]


@dataclass(frozen=True)
class Row:
    """A model: microseconds of ours and of its peers, errors, and what it took to make it."""

    name: str
    microseconds: float = 0.0
    rotated: float = 0.0  # where everything was read from device memory
    # peers; 0: not timed
    eager: float = 0.0  # PyTorch's eager mode inside a CUDA graph
    compiled: float = 0.0  # by torch.compile
    xla: float = 0.0
    error: float = 0.0
    torch_error: float = 0.0
    inputs: int = 0  # that the errors were taken over
    predicted: float = 0.0
    kernels: int = 0
    compile_seconds: float = 0.0
    replays: int = 0  # that gave the same bits
    refused: str = ""


def run_models(
    names: Sequence[str], size: str, precision: str, timed: Timed, peers: Sequence[str] = (), seconds: float = 200.0,
    profile: int = 0, batch: int = 1,
) -> list[Row]:  # fmt: skip
    """Every model, then its peers, which have had so many seconds to compile since the start."""
    machine("cuda", cache_dir=Options().cache_dir)  # its rates are measured and kept while nobody else is at work
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with ProcessPoolExecutor(min(_EXPORTING, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
            exported = {name: pool.submit(export, name, size, batch, folder / file_of(name)) for name in names}
            runtimes = {name: tuple(r for r in peers if r == "xla" or not is_file(name)) for name in names}
            beside = gpu_peers.Peers(gpu_peers.of_models(runtimes, (size, batch, precision), folder), seconds)
            rows = []
            for name in names:
                rows.append(model_row(name, exported[name], size, batch, precision, timed, beside.quiet, profile))
                beside.collect()
        beside.finish()
    if peers:
        rows = [with_peers(row, beside.found) for row in rows]
    show(rows)
    return rows


def with_peers(row: Row, times: Mapping[tuple[str, str], float]) -> Row:
    eager, compiled, xla = (times.get((runtime, row.name), 0.0) for runtime in gpu_peers.RUNTIMES)
    return replace(row, eager=eager, compiled=compiled, xla=xla)


def show(rows: Sequence[Row]) -> None:
    print(f"{'model':16} {'us':>8} {'rotated':>8} {'eager':>8} {'compiled':>8} {'XLA':>8} {'ratio':>6} "
          f"{'predicted':>9} {'kernels':>7} {'compile s':>9}  error (torch) over {JUDGED} inputs")  # fmt: skip
    for row in rows:
        if row.refused:
            print(f"{row.name:16} {row.refused}")
            continue
        best = min((t for t in (row.eager, row.compiled, row.xla) if t > 0), default=float("nan"))
        differ = "" if row.replays == REPLAYS else f"  {REPLAYS - row.replays} replays differ"
        others = " ".join(f"{t:8.1f}" if t else f"{'-':>8}" for t in (row.eager, row.compiled, row.xla))
        print(f"{row.name:16} {row.microseconds:8.1f} {row.rotated:8.1f} {others} {best / row.microseconds:6.2f} "
              f"{row.predicted:9.1f} {row.kernels:7} {row.compile_seconds:9.1f}  "
              f"{row.error:.1e} ({row.torch_error:.1e}){differ}")  # fmt: skip


def export(name: str, size: str, batch: int, path: Path) -> Path:
    """One file, there only when it is whole."""
    part = path.with_suffix(".part")
    if is_file(name):
        inputs = random_inputs(Path(name))
        shutil.copyfile(name, part)
    else:
        module, inputs = built(name, size, batch)
        export_module(module, inputs, part)
    np.savez(path.with_suffix(".npz"), **inputs)  # type: ignore[arg-type]
    part.rename(path)
    return path


def model_row(
    name: str, exported: Future[Path], size: str, batch: int, precision: str, timed: Timed,
    quiet: Callable[[], Any], profile: int,
) -> Row:  # fmt: skip
    import torch

    path = exported.result()
    module, inputs = (None, random_inputs(Path(name))) if is_file(name) else built(name, size, batch)
    begin = time.perf_counter()
    try:
        model = tilewright.compile(path, target="cuda", precision=precision)
    except TilewrightError as failed:
        return Row(name, refused=str(failed).splitlines()[0])
    taken = time.perf_counter() - begin
    given = [torch.from_numpy(inputs[port.name]).cuda() for port in model.inputs]
    outputs = [torch.empty(port.shape, dtype=getattr(torch, port.dtype.name), device="cuda") for port in model.outputs]
    error, torch_error = errors(model, path if module is None else module, inputs, outputs, precision)
    with quiet():
        ours = timed(lambda _: model.run_into(given, outputs), 10)
        rotated = beyond_l2(lambda: model.run_into(given, outputs), timed)
        same = equal_replays(lambda: model.run_into(given, outputs), outputs, REPLAYS)
        if profile:
            print("\n".join(str(model.profile(inputs, repeat=5)).splitlines()[: profile + 4]), flush=True)
    kernels = len(model.artifact.loops.calls)
    print(f"{name}: {ours:.1f} us, with weights from device memory {rotated:.1f} us, {kernels} kernels, "
          f"error {error:.1e} ({torch_error:.1e}), {same} equal replays, {taken:.1f} s", flush=True)  # fmt: skip
    predicted = predicted_microseconds(model)
    return Row(name, ours, rotated, error=error, torch_error=torch_error, inputs=JUDGED, predicted=predicted,
               kernels=kernels, compile_seconds=taken, replays=same)  # fmt: skip


def built(name: str, size: str, batch: int = 1) -> tuple[Any, dict[str, np.ndarray]]:
    """A model of the zoo with so many inputs at once, one that is measured on GPUs alone, or what a function of a
    user's gives."""
    from bench import zoo
    from bench.zoo import vit_s32

    if ":" in name:
        sys.path.insert(0, os.getcwd())  # a user's module is looked for where he stands
        module, inputs = call_spec(name)
        return module, dict(inputs)
    if name == "vit_b16":
        module, inputs = vit_s32.build_base_16(size)
        return module, {key: zoo.batched(array, batch) for key, array in inputs.items()}
    return zoo.build(name, size, batch)


def export_module(module: Any, inputs: dict[str, np.ndarray], path: Path) -> None:
    """A module that does not name its outputs has one."""
    from bench import zoo

    if not hasattr(module, "output_names"):
        module.output_names = ("output",)
    zoo.export_module(module, inputs, path)


def random_inputs(path: Path) -> dict[str, np.ndarray]:
    """For a model file: numbers of a normal distribution; integers of 0 and 1, which are in range for most readers."""
    import onnx
    from onnx.helper import tensor_dtype_to_np_dtype

    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {w.name for w in graph.initializer}
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    for port in graph.input:
        if port.name in constants:
            continue
        about = port.type.tensor_type
        shape = [d.dim_value for d in about.shape.dim]
        if not all(shape):
            raise SystemExit(f"{path}: input '{port.name}' leaves an extent open; give the file fixed shapes first")
        dtype = tensor_dtype_to_np_dtype(about.elem_type)
        is_real = np.issubdtype(dtype, np.floating)
        found[port.name] = (rng.standard_normal(shape) if is_real else rng.integers(0, 2, shape)).astype(dtype)
    return found


def variations(inputs: dict[str, np.ndarray], count: int) -> Iterator[dict[str, np.ndarray]]:
    """The inputs with their elements in other orders along the last axis: as large, and in range for whoever reads
    them as indices."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        yield {name: rng.permuted(array, axis=-1) if array.ndim else array for name, array in inputs.items()}


def errors(
    model: Any, module: Any, inputs: dict[str, np.ndarray], outputs: Sequence[Any], precision: str
) -> tuple[float, float]:
    """Of ours and of PyTorch at the same precision, against PyTorch in float64, all on the device; of a model file ours
    alone, against float32 on the CPU."""
    import torch

    if isinstance(module, Path):
        return file_error(model, module, inputs, outputs), 0.0
    kind = torch_kind(precision)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    exact, narrow = copy.deepcopy(module).to("cuda").double(), copy.deepcopy(module).to("cuda").to(kind)

    def by(one: Any, arrays: dict[str, np.ndarray], wanted: Any) -> list[Any]:
        given = [torch.from_numpy(a).cuda() for a in arrays.values()]
        with torch.no_grad():
            found = one(*(a.to(wanted) if a.is_floating_point() else a for a in given))
        return [f.double() for f in ([found] if isinstance(found, torch.Tensor) else found)]

    ours, theirs = [], []
    for arrays in variations(inputs, JUDGED):
        reference = by(exact, arrays, torch.float64)
        model.run_into([torch.from_numpy(arrays[port.name]).cuda() for port in model.inputs], outputs)
        ours.append(largest(outputs, reference))
        theirs.append(largest(by(narrow, arrays, kind), reference))
    return root_mean_square(ours), root_mean_square(theirs)


def file_error(model: Any, path: Path, inputs: dict[str, np.ndarray], outputs: Sequence[Any]) -> float:
    import torch

    plain = tilewright.compile(path, target="cpu")
    found = []
    for arrays in variations(inputs, JUDGED):
        reference = [torch.from_numpy(np.asarray(a)).cuda().double() for a in plain.run(arrays).values()]
        model.run_into([torch.from_numpy(arrays[port.name]).cuda() for port in model.inputs], outputs)
        found.append(largest(outputs, reference))
    return root_mean_square(found)


def largest(found: Sequence[Any], reference: Sequence[Any]) -> float:
    """Over the outputs, of the relative errors."""
    return max(float((f.double() - r).norm() / r.norm()) for f, r in zip(found, reference, strict=False))


def root_mean_square(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def torch_kind(precision: str) -> Any:
    import torch

    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(precision, torch.float32)


def beyond_l2(call: Callable[[], Any], timed: Timed) -> float:
    """Microseconds of a call when everything it reads lies in device memory: others are read between the calls."""
    import torch

    other = torch.randn(BEYOND_L2 // 4, device="cuda")

    def after(_: int) -> None:
        other.sum()
        call()

    return timed(after, 10) - timed(lambda _: other.sum(), 10)


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


def predicted_microseconds(model: tilewright.Model) -> float:
    from tilewright.schedule.planner import plan_seconds

    return plan_seconds(model.artifact.plan, model.artifact.program) * 1e6
