"""What a C compiler's passes cost and bring: `python -m bench.compiler_passes model.onnx ...` compiles the kernels of
each model with -O3, with the passes that kernels get, and with those of code that is wanted soon.

Processor seconds of the compiler and of a call on one thread, the codes taking turns: they hold on a machine that
others use. `--shape NAME=1x3x320x320` settles what models leave open. `--also "-fno-ivopts"` adds a row: kernels'
passes and these flags. `-O3` is there twice: what its second row differs by from 1 is chance.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from tilewright.backend import renderable
from tilewright.backend.cpu.machine_code import model_image
from tilewright.cli.common import parse_shape
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load, ports
from tilewright.options import Options
from tilewright.runtime import Cache, CpuModel, default_flags, find_compiler, for_kernels, this_machine
from tilewright.runtime import build as build_image
from tilewright.target import machine

Flags = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compiler_passes", description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--shape", action="append", default=[], type=parse_shape, metavar="NAME=1x3x320x320")
    parser.add_argument("--also", action="append", default=[], metavar="FLAGS")
    parser.add_argument("--rounds", type=int, default=25)
    given = parser.parse_args()
    choices = flag_sets(given.also)
    print(f"{'model':18} {'passes':28} {'compiler s':>10} {'ratio':>6} {'call ms':>9} {'ratio':>6}")
    for path in given.models:
        wanted = {port.name for port in ports(path)[0]}
        shapes = {name: shape for name, shape in given.shape if name in wanted}
        rows = measure(path, shapes, choices, given.rounds)
        _, first_compiled, first_called = rows[0]
        for name, compiled, called in rows:
            print(f"{path.stem:18} {name:28} {compiled:10.2f} {compiled / first_compiled:6.2f} "
                  f"{1e3 * called:9.3f} {called / first_called:6.3f}", flush=True)  # fmt: skip


def flag_sets(also: Sequence[str]) -> dict[str, Flags]:
    compiler, here = find_compiler(None), this_machine()
    every, kernels = default_flags(compiler, here), for_kernels(compiler, here)
    sets = {"-O3": every, "-O3 again": every, "kernels": kernels, "soon": for_kernels(compiler, here, hurried=True)}
    return sets | {f"kernels {flags}": (*kernels, *flags.split()) for flags in also}


def measure(
    path: Path, shapes: Mapping[str, tuple[int, ...]], choices: Mapping[str, Flags], rounds: int
) -> list[tuple[str, float, float]]:
    """Name, processor seconds of the compiler, and of a call in the middle of its quieter half."""
    artifact = build(load(path, shapes), machine("cpu"), Options(threads=1, stop_after="source"))
    with ExitStack() as opened:
        models, compiled = [], []
        for flags in choices.values():
            start = _children()
            models.append(opened.enter_context(_model(artifact, flags, opened)))
            compiled.append(_children() - start)
        called = _call_seconds(artifact, models, rounds)
    return [(name, *row) for name, row in zip(choices, zip(compiled, called, strict=True), strict=True)]


def _model(artifact: Artifact, flags: Flags, opened: ExitStack) -> CpuModel:
    assert artifact.loops is not None and artifact.program is not None and artifact.plan is not None
    cache = Cache(Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-passes-"))))
    loops = renderable(artifact.loops, artifact.target)
    image = model_image(artifact.sources, loops, artifact.program, artifact.plan)
    built = build_image(image, find_compiler(None), flags, this_machine(), cache, jobs=1, weights_cache=cache)
    return CpuModel(built, 1)


def _call_seconds(artifact: Artifact, models: Sequence[CpuModel], rounds: int) -> list[float]:
    rng = np.random.default_rng(0)
    inputs = [np.asarray(rng.standard_normal(p.shape)).astype(p.dtype.numpy) for p in artifact.inputs]
    outputs = [np.empty(p.shape, p.dtype.numpy) for p in artifact.outputs]
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds + 1):
        for model, kept in zip(models, times, strict=True):
            start = time.process_time()
            model.run(inputs, outputs)
            kept.append(time.process_time() - start)
    return [median(sorted(kept[1:])[: (rounds + 1) // 2]) for kept in times]


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
