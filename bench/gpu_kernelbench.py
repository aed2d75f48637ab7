"""Problems of KernelBench on this machine's GPU: files with a `Model`, `get_inputs` and `get_init_inputs`, float32.

`python bench/gpu.py kernelbench FOLDER` runs every file under FOLDER (a checkout of KernelBench, one of its levels, or
your own files) by Tilewright, by PyTorch's eager mode and by torch.compile. Every one has a process of its own with the
same parameters and inputs, drawn on the device by a seed; those to come are compiled while one is timed, and stand
still then. Modules are in eval mode. Errors are relative to eager PyTorch in full float32.

`python bench/gpu_kernelbench.py RUNTIME FILE PRECISION` is such a process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import gpu_peers

OURS = "tilewright"
RUNTIMES = (OURS, "compile", "eager")
# what PyTorch may round to tf32: (products, convolutions)
ROUNDED = {"float32": (False, False), "tf32_convolutions": (False, True), "tf32": (True, True)}
_RIGHT = {"float32": 1e-4, "tf32_convolutions": 5e-3, "tf32": 5e-3}
_ZERO = 1e-4
_AT_ONCE = 10  # processes, each with gigabytes on the device
_GRAPH_MICROSECONDS, _MOST_CALLS = 20_000, 20  # of the calls of a graph together


@dataclass(frozen=True)
class Row:
    """A problem: microseconds, the error of ours, and what it took to make it."""

    name: str
    ours: float = 0.0
    eager: float = 0.0
    compiled: float = 0.0
    error: float = 0.0
    kernels: int = 0
    compile_seconds: float = 0.0
    refused: str = ""

    @property
    def ratio(self) -> float:
        """Of the better peer's time to ours; 0 where one is missing."""
        best = min((t for t in (self.eager, self.compiled) if t > 0), default=0.0)
        return best / self.ours if self.ours > 0 else 0.0


def problems(folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """The files with a Model, in order of their numbers."""
    found = [path for path in folder.rglob("*.py") if "get_init_inputs" in path.read_text()]
    wanted = [path for path in found if not only or any(text in str(path.relative_to(folder)) for text in only)]
    return sorted(wanted, key=lambda path: (path.parent.name, _number(path), path.name))


def measured(folder: Path, precision: str, only: Sequence[str], runtimes: Sequence[str], seconds: float) -> list[Row]:
    paths = problems(folder, only)
    names = {f"{path.parent.name}/{path.stem}": path for path in paths}
    wanted = [(r, name, [__file__, r, str(path), precision]) for name, path in names.items() for r in runtimes]
    beside = gpu_peers.Peers(wanted, seconds, _AT_ONCE)
    beside.finish()
    rows = []
    for name in names:
        eager, compiled, ours = (beside.found.get((r, name), 0.0) for r in ("eager", "compile", OURS))
        about = beside.answers.get((OURS, name), {})
        refused = beside.failed.get((OURS, name), "" if OURS in runtimes and ours else "not run")
        rows.append(Row(name, ours, eager, compiled, about.get("error", 0.0), about.get("kernels", 0),
                        about.get("compile_seconds", 0.0), "" if ours else refused))  # fmt: skip
    show(rows, _RIGHT[precision])
    return rows


def show(rows: Sequence[Row], allowed: float) -> None:
    print(f"{'problem':58} {'us':>9} {'eager':>9} {'compiled':>9} {'ratio':>6} {'kernels':>7} {'s':>5}  error")
    for row in rows:
        if row.refused:
            print(f"{row.name:58} {row.refused}")
            continue
        others = " ".join(f"{t:9.1f}" if t else f"{'-':>9}" for t in (row.eager, row.compiled))
        print(f"{row.name:58} {row.ours:9.1f} {others} {row.ratio:6.2f} {row.kernels:7} {row.compile_seconds:5.1f}  "
              f"{row.error:.1e}{'' if row.error <= allowed else '  WRONG'}")  # fmt: skip
    rated = [row.ratio for row in rows if row.ratio]
    if rated:
        wrong = sum(not row.error <= allowed for row in rows if not row.refused)
        refused = sum(bool(row.refused) for row in rows)
        print(f"{geometric_mean(rated):.2f} times as fast as the better peer, geometric mean of {len(rated)}; "
              f"{sum(r < 0.7 for r in rated)} below 0.7, {wrong} wrong, {refused} refused")  # fmt: skip


# ---- one problem by one runtime


def main(runtime: str, path: str, precision: str) -> None:
    import torch

    os.nice(19)
    module, inputs = built(Path(path))
    with torch.no_grad():
        call, about = prepared(runtime, module, inputs, precision)
        call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        gpu_peers.announced()
        print(json.dumps({**about, "microseconds": microseconds(call)}), flush=True)


def built(path: Path) -> tuple[Any, list[Any]]:
    """The module and its inputs, the same in every process."""
    import torch

    spec = importlib.util.spec_from_file_location("problem", path)
    assert spec is not None and spec.loader is not None
    problem = importlib.util.module_from_spec(spec)
    sys.modules["problem"] = problem
    spec.loader.exec_module(problem)
    with torch.device("cuda"):
        torch.manual_seed(0)
        module = problem.Model(*problem.get_init_inputs()).eval()
        torch.manual_seed(1)
        given = problem.get_inputs()
    return module.cuda(), [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]


def prepared(
    runtime: str, module: Any, inputs: Sequence[Any], precision: str
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """What runs the module once, compiled already, and what there is to say of it."""
    import torch

    products, convolutions = ROUNDED[precision]
    if runtime != OURS:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions
        run = torch.compile(module) if runtime == "compile" else module
        for _ in range(2):
            run(*inputs)
        return lambda: run(*inputs), {}
    import tilewright

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    wanted = _tensors(module(*inputs))
    begin = time.perf_counter()
    compiled = tilewright.compile(module, tuple(inputs), target="cuda",
                                  precision=None if precision == "float32" else precision)  # fmt: skip
    about: dict[str, Any] = {"compile_seconds": time.perf_counter() - begin}
    about["error"] = max(_error(f, w) for f, w in zip(_tensors(compiled(*inputs)), wanted, strict=True))
    about["kernels"] = sum(len(model.artifact.loops.calls) for model in compiled.models)
    return lambda: compiled(*inputs), about


def microseconds(call: Callable[[], Any]) -> float:
    """Device time of a call: copies of it in a graph, fewer of one that takes long."""
    import torch

    from bench.gpu import device_microseconds, warm_up

    warm_up(0.3)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    count = max(1, min(_MOST_CALLS, int(_GRAPH_MICROSECONDS / (begin.elapsed_time(end) * 1e3))))
    return device_microseconds(lambda _: call(), count)


def _tensors(found: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _error(found: Any, wanted: Any) -> float:
    """Relative, a part at a time: copies in float64 would be twice as large; of integers how many differ. Of numbers
    that are rounding errors of zero in the reference too, as means of what a norm leaves, there is nothing to compare:
    those below `_ZERO` in the mean are judged as if they were as large."""
    import torch

    if not wanted.is_floating_point():
        return float((found != wanted).double().mean())
    own, of = torch.zeros((), dtype=torch.float64, device="cuda"), torch.zeros((), dtype=torch.float64, device="cuda")
    for f, w in zip(found.reshape(-1).split(1 << 26), wanted.reshape(-1).split(1 << 26), strict=True):
        same = (f == w) | (f.isnan() & w.isnan())
        own += torch.where(same, 0.0, f.double() - w.double()).square().sum()
        of += torch.where(w.isfinite(), w, 0.0).double().square().sum()
    return float((own / of.clamp(min=max(1, wanted.numel()) * _ZERO**2)).sqrt())


def _number(path: Path) -> int:
    head = path.name.split("_")[0]
    return int(head) if head.isdigit() else 0


if __name__ == "__main__":
    main(*sys.argv[1:])
