"""What plans for a GPU bring, measured: schedules beside each other, and predictions of kernels beside their times."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import tilewright
from tilewright.ir.forms.compute import all_computes
from tilewright.ir.meaning.traffic import count_traffic

SCHEDULES = ("none", "register", "connected")
ABLATED = ("vit_b16", "swin_t", "bert_384")
PREDICTED = ("bert_384", "vit_b16", "swin_t", "lstm", "mmoe")
_COPIES = 20  # of a launch in one graph
_ALLOWED = 0.25

Built = Callable[[str, str], tuple[Any, dict[str, np.ndarray]]]
Timed = Callable[[Callable[[int], Any], int], float]
Keep = Callable[[Sequence[Any]], None]  # of what there is so far: a run that is cut off has not been for nothing


@dataclass(frozen=True)
class Step:
    """A model under one schedule."""

    model: str
    schedule: str
    microseconds: float
    launches: int
    device_bytes: float  # loads and stores of device memory, each element once a kernel and direction
    intermediate_bytes: float


@dataclass(frozen=True)
class Kernel:
    """A kernel of a model: what it was predicted to take, and what it takes."""

    model: str
    name: str
    calls: int
    predicted: float
    microseconds: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.microseconds - 1)


def compiled(name: str, size: str, precision: str, built: Built, schedule: str = "connected") -> tuple[Any, Any]:
    """A model of the zoo, and its inputs."""
    from bench import zoo

    module, inputs = built(name, size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        zoo.export_module(module, inputs, path)
        return tilewright.compile(path, target="cuda", precision=precision, schedule=schedule), inputs


def ablation(names: Sequence[str], size: str, precision: str, built: Built, timed: Timed, keep: Keep) -> list[Step]:
    import torch

    steps = []
    print(f"{'model':12} {'schedule':10} {'us':>9} {'launches':>8} {'device MB':>10} {'between MB':>10}")
    for name in names:
        for schedule in SCHEDULES:
            model, inputs = compiled(name, size, precision, built, schedule)
            given = [torch.from_numpy(inputs[port.name]).cuda() for port in model.inputs]
            outputs = [torch.empty(p.shape, dtype=getattr(torch, p.dtype.name), device="cuda") for p in model.outputs]
            taken = timed(lambda _, m=model, g=given, o=outputs: m.run_into(g, o), 5)
            counted = count_traffic(model.artifact.loops)
            step = Step(name, schedule, taken, len(model.artifact.loops.calls), sum(counted.distinct.values()),
                        counted.intermediate)  # fmt: skip
            steps.append(step)
            print(f"{name:12} {schedule:10} {taken:9.1f} {step.launches:8} {step.device_bytes / 1e6:10.1f} "
                  f"{step.intermediate_bytes / 1e6:10.1f}", flush=True)  # fmt: skip
            keep(steps)
    return steps


def predictions(
    names: Sequence[str], size: str, precision: str, built: Built, timed: Timed, keep: Keep
) -> list[Kernel]:
    """Every distinct kernel of models, launched again and again by itself."""
    found: list[Kernel] = []
    for name in names:
        model, inputs = compiled(name, size, precision, built)
        rows = kernels_of(name, model, inputs, timed)
        found.extend(rows)
        worst = sorted(rows, key=lambda k: -k.error * k.microseconds * k.calls)[:4]
        shown = ", ".join(f"{k.name} x {k.calls} {k.predicted:.1f} for {k.microseconds:.1f}" for k in worst)
        print(f"{name}: {len(rows)} kernels, median error {median(k.error for k in rows):.0%}; farthest off: {shown}",
              flush=True)  # fmt: skip
        keep(found)
    inside = sum(k.error <= _ALLOWED for k in found)
    print(f"{len(found)} kernels: median error {median(k.error for k in found):.0%}, {inside} within {_ALLOWED:.0%}")
    return found


def planned_calls(plan: Any, program: Any) -> list[Any]:
    """The kernel of a plan, or the several of one launch, behind each call, in order: a Scan's kernels once a step."""
    computes = all_computes(program)
    found: list[Any] = []
    for steps, launches in groupby(plan.calls(), key=lambda launch: launch[1]):
        kernels = [kernel for kernel, _ in launches]
        found.extend(kernels * (1 if steps is None else int(computes[steps.scan].axis.extent)))
    return found


def kernels_of(name: str, model: Any, inputs: dict[str, np.ndarray], timed: Timed) -> list[Kernel]:
    import torch

    calls = [call.kernel for call in model.artifact.loops.calls]
    # equal kernels of a plan are one in the Loops, under a name of its own: it is told by its first call
    planned = planned_calls(model.artifact.plan, model.artifact.program)
    predicted = {k: planned[calls.index(k)].estimate.seconds * 1e6 for k in dict.fromkeys(calls)}
    arrays = [inputs[port.name] for port in model.inputs]
    rows = []
    for kernel in dict.fromkeys(calls):
        number = calls.index(kernel)
        launchers: dict[int, Callable[[int], None]] = {}

        def call(_: int, number: int = number, known: dict[int, Callable[[int], None]] = launchers) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in known:
                known[stream] = model.artifact.runner.launcher(arrays, stream)
            known[stream](number)

        rows.append(Kernel(name, kernel, calls.count(kernel), predicted[kernel], timed(call, _COPIES)))
    return rows
