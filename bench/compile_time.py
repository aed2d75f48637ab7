"""Cold compile time by stage: `python -m bench.compile_time model.onnx ...` compiles each with an empty cache.

Processor seconds are printed beside wall time, those of the C compiler apart: they hold on a machine that others use.
`--machine NAME ...` plans for stored machine descriptions and stops before machine code. `--planning` stops after the
plan, and prints what planning took: all plans that were made, those of ways that were tried and not taken too.
"""

import argparse
import functools
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tilewright import compiler
from tilewright.compiler import build
from tilewright.frontend.onnx import load
from tilewright.options import Options
from tilewright.schedule import planner
from tilewright.target import machine
from tilewright.tile_graph.plan import Plan


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

        with mock.patch.object(planner, "make_plan", make_plan), mock.patch.object(compiler, "make_plan", make_plan):
            yield


def measure(path: Path, name: str | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        # the machine is described first: its probes are run once a machine, not once a model
        target = machine(name or "cpu")
        options = Options(cache_dir=Path(folder), stop_after=None if name is None else "source")
        wall, own = time.perf_counter(), time.process_time()
        below = _children()
        artifact = build(load(path, {}), target, options)
        result: dict[str, object] = {
            "model": path.stem,
            "machine": name or "this one",
            "wall_s": round(time.perf_counter() - wall, 2),
            "python_cpu_s": round(time.process_time() - own, 2),
            "compiler_cpu_s": round(_children() - below, 2),
            "kernels": len(artifact.sources),
            "text_bytes": sum(map(len, artifact.sources.values())),
            "stages_s": {stage: round(seconds, 2) for stage, seconds in artifact.stage_seconds.items()},
        }
    return result


def measure_planning(path: Path, name: str) -> str:
    """A line: what planning took, and the plan."""
    planning = Planning()
    with planning.counted():
        plan = build(load(path, {}), machine(name), Options(stop_after="plan")).plan
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
    parser.add_argument("--planning", action="store_true", help="processor seconds of planning alone")
    arguments = parser.parse_args()
    for path in arguments.models:
        for name in arguments.machine or (["cpu"] if arguments.planning else [None]):
            found = measure_planning(path, name) if arguments.planning else json.dumps(measure(path, name))
            print(found, flush=True)


if __name__ == "__main__":
    main()
