"""Predicted against measured: each kernel call of whole models, as the cost model sees the plan it was measured with.

    python -m bench.predicted                                    both machines that were measured, from bench/measured
    python -m bench.predicted FILE --target machine.json         other measurements, or another description
    python -m bench.predicted FILE --models DIR --target NAME    a file without Programs: DIR has its models as .onnx
    python -m bench.predicted --measure FILE --models DIR        measures this machine first
    python -m bench.predicted --held-out                         each model by constants fitted to the others alone

One factor a model is free: the clock of a shared host varies by a third within minutes. It is the one that puts most of
the model's calls between 0.7 and 1.4. Kernels of Scans (an LSTM's steps) are left out. "Unchanged" are calls whose plan
the planner would choose today, by root, tile and register tiles.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np

import tilewright
from bench.measurements import Call, Measured, Predicted, predict, read, with_program, write
from bench.support import table
from tilewright.ir.text.text import program_text
from tilewright.options import Options
from tilewright.target import Target, machine
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tune.kinds import kind_of

STORED = Path(__file__).parent / "measured"
SUFFIX = ".jsonl.xz"
LOW, HIGH, BEYOND = 0.7, 1.4, 3.0
_RUNS = 2
_REPEATS = 10


@dataclass(frozen=True)
class Share:
    """Calls of one model, or of all, with the free factor taken out of the ratio of measured to predicted time."""

    name: str
    factor: float
    ratios: tuple[float, ...]

    @property
    def within(self) -> float:
        return sum(LOW <= r <= HIGH for r in self.ratios) / max(1, len(self.ratios))

    @property
    def beyond(self) -> int:
        return sum(not 1 / BEYOND <= r <= BEYOND for r in self.ratios)

    def cells(self) -> list[str]:
        least, most = (min(self.ratios), max(self.ratios)) if self.ratios else (0.0, 0.0)
        factor = f"{self.factor:.2f}" if self.factor else ""
        return [self.name, str(len(self.ratios)), factor, f"{self.within:.0%}", f"{least:.2f} to {most:.2f}",
                str(self.beyond)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.predicted", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, help="measurements (default: all in bench/measured)")
    parser.add_argument("--target", help="description (default: by the file's name; when measuring, this machine)")
    parser.add_argument("--models", type=Path, metavar="DIR", help="NAME.onnx of the models of the file")
    parser.add_argument("--only", help="comma-separated names of models")
    parser.add_argument("--without", default="lstm", help="models left out (default: %(default)s)")
    parser.add_argument("--worst", type=int, default=8, metavar="N", help="kernels to show (default: %(default)s)")
    parser.add_argument("--held-out", action="store_true", help="fit the description's constants without each model")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure the models here, and write this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the measurements with Programs and Plans")
    arguments = parser.parse_args()
    left_out = set(arguments.without.split(","))
    only = set(arguments.only.split(",")) if arguments.only else None
    if arguments.measure is not None:
        if arguments.models is None:
            parser.error("--measure needs --models DIR, a folder of .onnx files (python -m bench.zoo export DIR)")
        names = sorted(path.stem for path in arguments.models.glob("*.onnx"))
        chosen = [n for n in names if n not in left_out and (only is None or n in only)]
        given = [measure(n, arguments.models / f"{n}.onnx", arguments.target, arguments.threads) for n in chosen]
        write(arguments.measure, given)
        files = [arguments.measure]
    else:
        files = [arguments.file] if arguments.file is not None else sorted(STORED.glob(f"*{SUFFIX}"))
    for path in files:
        name = arguments.target or ("cpu" if arguments.measure is not None else path.name.partition(".")[0])
        target = machine(name, cache_dir=Options.from_environment().cache_dir)
        measured = [m for m in read(path) if m.model not in left_out and (only is None or m.model in only)]
        if any(m.program is None for m in measured):
            if arguments.models is None:
                parser.error(f"{path} has no Programs: --models DIR names a folder with the models' .onnx files")
            measured = [with_program(m, arguments.models / f"{m.model}.onnx", target) for m in measured]
        if arguments.pack is not None:
            write(arguments.pack, measured)
        if arguments.held_out:
            from bench import held_out

            print(held_out.report(path.name, measured, target), flush=True)
        else:
            print(report(path.name, measured, target, arguments.worst))


def measure(name: str, path: Path, target: str | None, threads: int) -> Measured:
    """Each kernel call of a model on this machine: the median of some runs, the lesser of two such medians."""
    import torch

    torch.set_flush_denormal(True)  # of this thread; the workers it starts have it from it
    print(f"measuring {name}", file=sys.stderr, flush=True)
    options = Options.from_environment(threads=threads, target=target)
    model = tilewright.compile(path, options=options)
    runs = [model.profile(repeat=_REPEATS).calls for _ in range(_RUNS)]
    artifact = model.artifact
    assert artifact.program is not None and artifact.plan is not None
    kernels = artifact.plan.kernels
    if len(kernels) != len(runs[0]):
        raise SystemExit(f"{name}: {len(runs[0])} calls of {len(kernels)} kernels; models with Scans are not measured")
    calls = [Call(i, kernel.name, min(c.nanoseconds for c in each) / 1e3, {})
             for i, (kernel, each) in enumerate(zip(kernels, zip(*runs, strict=True), strict=True))]  # fmt: skip
    return Measured(name, tuple(calls), program_text(artifact.program), artifact.plan)


def report(name: str, measured: Sequence[Measured], target: Target, worst: int) -> str:
    """Tables for one machine: by model, of plans as measured and of those that are still chosen; the worst kernels."""
    calls = [call for each in measured for call in predict(each, target)]
    header = ["model", "calls", "factor", f"within {LOW} to {HIGH}", "range", f"beyond {BEYOND:.0f}"]
    lines = [f"## {name}, predicted as {target.name}", ""]
    for title, some in (("Every plan as measured", calls), ("Plans unchanged", [c for c in calls if c.unchanged])):
        shares = by_model(some)
        everything = Share("all", 0.0, tuple(r for share in shares for r in share.ratios))
        lines += [f"{title}:", "", *table(header, [s.cells() for s in (*shares, everything)]), ""]
    factors = {share.name: share.factor for share in by_model(calls)}
    ranked = sorted(calls, key=lambda c: -abs(log(c.ratio / factors[c.model])))
    seen: dict[str, None] = {}
    for call in ranked:
        text = described(call)
        if text not in seen and len(seen) < worst:
            seen[text] = None
            ratio = call.ratio / factors[call.model]
            times = f"{call.call.microseconds:.1f} us measured, {call.microseconds:.1f} predicted"
            lines += [f"{ratio:.2f}: {call.model} {call.kernel.name}, {times}", text, ""]
    return "\n".join(lines)


def by_model(calls: Sequence[Predicted]) -> list[Share]:
    shares = []
    for model in dict.fromkeys(call.model for call in calls):
        ratios = np.array([call.ratio for call in calls if call.model == model])
        factor = free_factor(ratios)
        shares.append(Share(model, factor, tuple((ratios / factor).tolist())))
    return shares


def within_bounds(ratios: np.ndarray) -> int:
    return int(((ratios >= LOW) & (ratios <= HIGH)).sum())


def free_factor(ratios: np.ndarray) -> float:
    """The factor that leaves most ratios within the bounds; of several the middle."""
    tried = np.exp(np.arange(np.log(ratios.min()), np.log(ratios.max()) + 0.02, 0.02))
    inside = [within_bounds(ratios / f) for f in tried]
    best = [f for f, count in zip(tried.tolist(), inside, strict=True) if count == max(inside)]
    return float(best[len(best) // 2])


def described(call: Predicted) -> str:
    """What a kernel is: its tile, and each nest with its loops and register tile."""
    tile = " ".join(f"{a}:{n}" for a, n in call.kernel.cut) or "whole"
    lines = [f"    tile {tile} x {call.kernel.tiles}{', streamed' if call.kernel.stream else ''}"]
    for nest, plan in zip(call.nests, call.kernel.leaves, strict=True):
        sizes = "x".join(str(extent_of(a.extent)) for a in nest.axes)
        sums = "x".join(str(extent_of(a.extent)) for a in nest.reduce_axes)
        register = " ".join(f"{a}:{n}" for a, n in plan.register) or "none"
        lines.append(f"    {kind_of(nest)} {sizes}{f' over {sums}' if sums else ''}: vector {plan.vector}, register"
                     f" {register}, order {' '.join(plan.order)}{plan.form.text()}")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
