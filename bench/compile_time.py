"""Cold compile time by stage: `python -m bench.compile_time model.onnx ...` compiles each with an empty cache.

Processor seconds are printed beside wall time, those of the C compiler apart: they hold on a machine that others use.
`--shape NAME=1x3x320x320` settles what models leave open, in those that have such an input. `--effort full fast`
compares efforts; a call of each code is timed too, in processor seconds of one thread, the codes taking turns.
`--machine NAME ...` plans for stored machine descriptions and stops before machine code. `--planning` stops after the
plan, and prints what planning took: all plans that were made, those of ways that were tried and not taken too.
"""

import argparse
import functools
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tilewright.cli.common import parse_shape
from tilewright.compiler import settling
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load, ports
from tilewright.options import Options
from tilewright.schedule import planner
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Plan

Shapes = Mapping[str, tuple[int, ...]]


class Planning:
    """Plans made so far, and the processor seconds that they took."""

    def __init__(self) -> None:
        self.plans = 0
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        made: Callable[..., Plan] = planner.make_plan

        @functools.wraps(made)
        def make_plan(*arguments: Any, **more: Any) -> Plan:
            start = time.process_time()
            plan = made(*arguments, **more)
            self.seconds += time.process_time() - start
            self.plans += 1
            return plan

        with mock.patch.object(planner, "make_plan", make_plan), mock.patch.object(settling, "make_plan", make_plan):
            yield


def measure(path: Path, name: str | None, shapes: Shapes, efforts: Sequence[str]) -> list[dict[str, object]]:
    """A row for each effort."""
    # the machine is described first: its probes are run once a machine, not once a model
    target = machine(name or "cpu")
    rows: list[dict[str, object]] = []
    runners = []
    with ExitStack() as folders:
        for effort in efforts:
            folder = Path(folders.enter_context(tempfile.TemporaryDirectory()))
            options = Options(cache_dir=folder, stop_after=None if name is None else "source", effort=effort, threads=1)
            wall, own, below = time.perf_counter(), time.process_time(), _children()
            artifact = build(load(path, shapes), target, options)
            python, compiler = time.process_time() - own, _children() - below
            rows.append({
                "model": path.stem,
                "machine": name or "this one",
                "effort": effort,
                "wall_s": round(time.perf_counter() - wall, 2),
                "cpu_s": round(python + compiler, 2),
                "python_cpu_s": round(python, 2),
                "compiler_cpu_s": round(compiler, 2),
                "kernels": len(artifact.sources),
                "text_bytes": sum(map(len, artifact.sources.values())),
                "stages_s": {stage: round(seconds, 2) for stage, seconds in artifact.stage_seconds.items()},
            })  # fmt: skip
            if artifact.runner is not None:
                runners.append(artifact)
        for row, seconds in zip(rows, _call_seconds(runners), strict=False):
            row["call_cpu_ms"] = round(1e3 * seconds, 3)
    return rows


def _call_seconds(artifacts: Sequence[Artifact], rounds: int = 10) -> list[float]:
    """The least processor time of a call of each."""
    rng = np.random.default_rng(0)
    least = [float("inf")] * len(artifacts)
    for _ in range(rounds if len(artifacts) > 1 else 0):
        for place, artifact in enumerate(artifacts):
            inputs = [np.asarray(rng.standard_normal(p.shape)).astype(p.dtype.numpy) for p in artifact.inputs]
            outputs = [np.empty(p.shape, p.dtype.numpy) for p in artifact.outputs]
            start = time.process_time()
            artifact.runner.run(inputs, outputs)
            least[place] = min(least[place], time.process_time() - start)
    return least if len(artifacts) > 1 else []


def measure_planning(path: Path, name: str, shapes: Shapes) -> str:
    """A line: what planning took, and the plan."""
    planning = Planning()
    with planning.counted():
        plan = build(load(path, shapes), machine(name), Options(stop_after="plan")).plan
    assert plan is not None
    predicted = 1e3 * sum(kernel.estimate.seconds for kernel in plan.kernels)
    return (f"{path.stem:16} {name:16} {planning.seconds:6.2f} s for {planning.plans:2} plans; "
            f"{len(plan.kernels):3} kernels, {predicted:.3f} ms predicted")  # fmt: skip


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--machine", nargs="+", help="stored machine descriptions, such as emerald_rapids")
    parser.add_argument("--shape", type=parse_shape, action="append", default=[], help="NAME=1x3x320x320")
    parser.add_argument("--effort", nargs="+", choices=("full", "fast"), default=["full"])
    parser.add_argument("--planning", action="store_true", help="processor seconds of planning alone")
    arguments = parser.parse_args()
    for path in arguments.models:
        inputs = {value.name for value in ports(path, {})[0]}
        shapes = {name: shape for name, shape in arguments.shape if name in inputs}
        for name in arguments.machine or (["cpu"] if arguments.planning else [None]):
            if arguments.planning:
                print(measure_planning(path, name, shapes), flush=True)
                continue
            for row in measure(path, name, shapes, arguments.effort):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
