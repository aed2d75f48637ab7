"""python -m bench.judge measure: its options."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.judge.again import measure_again
from bench.judge.measure import Settings, measure
from bench.judge.outside import FAMILIES
from tilewright.options import Options
from tilewright.runtime.cores import usable_cores

_DEFAULT_OUT = Path("judge.jsonl")


def measure_command(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.judge measure", description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="how long in all")
    parser.add_argument("--again", type=Path, metavar="FILE", help="the plans of these records, no others")
    parser.add_argument("--out", type=Path, default=_DEFAULT_OUT, help="appended to (default: %(default)s)")
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; 1 is timed by its processor time")
    parser.add_argument("--plans", type=int, default=12, help="a task (default: %(default)s)")
    parser.add_argument("--seconds-a-task", type=float, default=6.0, help="timed at most (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first program from outside the zoo")
    parser.add_argument("--families", default=",".join(FAMILIES), help="of these programs (default: all)")
    parser.add_argument("--models", default="", help="of the zoo, comma-separated (default: none)")
    parser.add_argument("--exports", type=Path, help="folder of exported models, by size; filled as needed and kept")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--jobs", type=int, default=max(1, usable_cores() - 1), help="processes that make plans")
    arguments = parser.parse_args(given)
    begin = time.perf_counter()
    families = tuple(arguments.families.split(","))
    for name in families:
        if name not in FAMILIES:
            parser.error(f"no family named {name!r}; there are {', '.join(FAMILIES)}")
    options = Options.from_environment(target=arguments.target, threads=arguments.threads)
    if arguments.again is not None:
        found = measure_again(arguments.again, arguments.out, arguments.seconds, arguments.seconds_a_task, options)
        print(f"{found} records appended to {arguments.out}")
        return 0
    with tempfile.TemporaryDirectory(prefix="tilewright-judge-") as temporary:
        models = _exported(arguments, Path(temporary))
        precisions = (None, "float16") if arguments.target == "cuda" else (None,)
        left = arguments.seconds - (time.perf_counter() - begin)
        settings = Settings(
            left, arguments.out, models, arguments.plans, arguments.seconds_a_task, arguments.jobs, arguments.threads,
            precisions, arguments.first, families, options,
        )  # fmt: skip
        print(f"{measure(settings)} records appended to {arguments.out}")
    return 0


def _exported(arguments: argparse.Namespace, temporary: Path) -> tuple[Path, ...]:
    names = [name for name in arguments.models.split(",") if name]
    if not names:
        return ()
    from bench.support import exported  # torch is needed here alone

    folder = (arguments.exports or temporary) / arguments.size
    folder.mkdir(parents=True, exist_ok=True)
    return tuple(exported(names, arguments.size, folder, print).values())
