"""What each step of a paper brings here, beside what the paper says it brought there.

    python -m bench.papers welder --models nafnet,vit_s32,swin_t
    python -m bench.papers souffle --models mmoe,lstm --target h200 --precision float16
    python -m bench.papers roller --seconds 0.3
    python -m bench.papers alcop --target a100
    python -m bench.papers tensorssa --models lstm,suppression --seconds 0.3

Counts and predictions are for --target, which is the machine at hand unless another is named, and need no hardware.
Times are measured where --seconds is given and the target is this computer's; all variants take turns in one process.
On one thread, the default, they are processor time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import zoo
from bench.papers import alcop, roller, souffle, tensorssa, welder
from bench.papers.steps import Counts, Step, counted, timed
from bench.support import exported, geometric_mean, table
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.target import Target, machine

HERE = ("cpu", "cuda")  # targets that are this computer's
OF_MODELS: dict[str, ModuleType] = {"welder": welder, "souffle": souffle}
_ROUNDS_A_SECOND = 40  # of a product on a device, with the way of its arrays to it


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    target: Target
    options: Options
    seconds: float


def main(given: Sequence[str] | None = None) -> None:
    arguments = parsed(given)
    options = Options.from_environment(target=arguments.target, precision=arguments.precision)
    measures = arguments.seconds if arguments.target in HERE else 0.0
    target = machine(arguments.target, cache_dir=options.cache_dir)
    asked = Asked(target, options.override(threads=arguments.threads), measures)
    print(f"# {arguments.paper}, on {target.name}: {target.units} units, {target.source}\n", flush=True)
    if arguments.paper in OF_MODELS:
        of_models(OF_MODELS[arguments.paper], arguments, asked)
    elif arguments.paper == "roller":
        of_rows(roller.COLUMNS, roller.rows(target, asked.options, seconds=measures))
        print("\n".join(("", *roller.SAID)))
    elif arguments.paper == "tensorssa":
        names = arguments.models.split(",") if arguments.models else list(tensorssa.ALL)
        of_rows(tensorssa.COLUMNS, tensorssa.rows(names, asked.options, measures))
        print("\n".join(("", *tensorssa.SAID)))
    else:
        rounds = round(measures * _ROUNDS_A_SECOND)
        of_rows(alcop.COLUMNS, alcop.rows(target, asked.options, rounds=rounds))
        print("\n".join(("", *alcop.SAID)))


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    described = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.papers", description=__doc__, formatter_class=described)
    parser.add_argument("paper", choices=(*OF_MODELS, "roller", "alcop", "tensorssa"))
    parser.add_argument("--models", help="of the zoo, comma-separated (default: those of the paper's own ablation)")
    parser.add_argument("--size", choices=zoo.SIZES, default="full")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--target", default=None, help="default: cpu; for alcop a100, the paper's machine")
    parser.add_argument("--precision", help="as tilewright.compile takes it")
    parser.add_argument("--seconds", type=float, default=0.0, help="of measuring a variant; 0: nothing runs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--exports", type=Path, help="folder of exported models; filled as needed and kept")
    arguments = parser.parse_args(given)
    if arguments.paper == "tensorssa" and arguments.target not in (None, "cpu"):
        parser.error("tensorssa runs its programs, on this computer's processor: leave --target out")
    arguments.target = arguments.target or ("a100" if arguments.paper == "alcop" else "cpu")
    return arguments


def of_rows(columns: Sequence[tuple[str, Callable[[Any], str]]], rows: Iterable[Any]) -> None:
    cells = [[cell(row) for _, cell in columns] for row in rows]
    print("\n".join(table([name for name, _ in columns], cells)), flush=True)


# --- ablations of whole models


def of_models(paper: ModuleType, arguments: argparse.Namespace, asked: Asked) -> None:
    names = (arguments.models or ",".join(paper.MODELS)).split(",")
    gains: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="tilewright-bench-") as temporary:
        folder = (arguments.exports or Path(temporary)) / f"{arguments.size}-batch{arguments.batch}"
        folder.mkdir(parents=True, exist_ok=True)
        paths = exported(names, arguments.size, folder, lambda text: None, arguments.batch)
        for name, path in paths.items():
            steps = list(paper.steps(load(path), asked.target, asked.options))
            counts = [counted(step, asked.target) for step in steps]
            times = timed(steps, asked.target, asked.options, asked.seconds) if asked.seconds > 0 else None
            print("\n".join((f"## {name}", "", *report(steps, counts, times), "")), flush=True)
            spent = times or [found.predicted for found in counts]
            for step, before, after in zip(steps[1:], spent, spent[1:], strict=False):
                if isfinite(before) and isfinite(after):
                    gains.setdefault(step.name, []).append(before / after)
    words = "measured" if asked.seconds > 0 else "predicted"
    means = ", ".join(f"{step} {geometric_mean(found):.2f}x of {len(found)}" for step, found in gains.items())
    summary = f"Each step against the one before, {words}, geometric mean of so many models: {means}."
    print("\n".join((summary, "", *paper.SAID)))


def report(steps: Sequence[Step], counts: Sequence[Counts], times: Sequence[float] | None) -> list[str]:
    """A row a step; in brackets the change against the row above, as the papers give theirs."""
    levels = list(counts[0].levels)
    header = ["step", "kernels", "launches", "MB between kernels", *(f"MB {level}" for level in levels), "predicted ms",
              *(["ms"] if times else [])]  # fmt: skip
    columns = [
        [step.name for step in steps],
        [str(c.kernels) for c in counts],
        list(_changes([c.launches for c in counts], "d")),
        list(_changes([c.between / 1e6 for c in counts], ".3g")),
        *(list(_changes([c.levels[level] / 1e6 for c in counts], ".3g")) for level in levels),
        list(_changes([1e3 * c.predicted for c in counts], ".3g")),
        *([list(_changes([1e3 * t for t in times], ".3g"))] if times else []),
    ]
    return table(header, list(zip(*columns, strict=True)))


def _changes(values: Sequence[float], form: str) -> Iterator[str]:
    """What the model of the machine never looks at, such as rings of one stage, has no price."""
    for place, value in enumerate(values):
        before = values[place - 1] if place else 0
        change = f" ({100 * (value / before - 1):+.0f}%)" if before and isfinite(before) else ""
        yield f"{value:{form}}{change}" if isfinite(value) else "not priced"


if __name__ == "__main__":
    main()
