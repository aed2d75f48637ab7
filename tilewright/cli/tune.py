"""`tilewright tune`: measure other plans of a model's kernels for some time, and keep those that are faster."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from tilewright.cli import common
from tilewright.errors import OptionError
from tilewright.model import Model
from tilewright.options import Tuning, Watch

DESCRIPTION = """\
Measure other plans of a model's kernels inside the model for some time, and keep those that are faster.
Results stay the same to the last bit unless --arithmetic is given. Ctrl-C ends it and keeps what was found;
the next time it goes on, and measures nothing twice. What is found is used where the model is compiled with
as much time: compile(..., tune="2m"), --tune 2m."""

EXAMPLE = """\
  tilewright tune model.onnx --for 2m
  tilewright tune model.onnx --for 10m --records model.twr
  tilewright run model.onnx --tune 2m                  what two minutes have found"""


@dataclass
class _Followed:
    """What was told last."""

    now: Tuning | None = None


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "tune", "measure other plans and keep the faster ones", DESCRIPTION, EXAMPLE)
    common.add_model(parser)
    common.add_trust(parser)
    common.add_deciding_inputs(parser)
    parser.add_argument("--for", dest="tune", metavar="DURATION", required=True,
                        help="how long in all, what was measured before included: 90s, 2m, 1h30m")  # fmt: skip
    parser.add_argument("--trials", metavar="N", type=int, help="plans to measure at most")
    parser.add_argument("--json", action="store_true", help="print an object for scripts")
    common.add_compile_options(parser, tune=False)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.model.is_dir():
        raise OptionError(f"{arguments.model} is compiled already: tune the ONNX file it was made from")
    given = common.read_arrays(arguments.inputs) if arguments.inputs is not None else None
    followed = _Followed()
    begin = time.perf_counter()
    with following(f"tuning {common.printable(arguments.model.name)}", followed) as watch:
        model = common.settled_model(arguments, given, watch)
    seconds = time.perf_counter() - begin
    if not isinstance(model, Model):
        raise OptionError("a model that runs in parts is tuned when its parts are compiled: call it with tune= instead")
    plan = model.artifact.plan
    changed = [] if plan is None else [k.name for k in plan.kernels if "times as fast as" in k.estimate.reason]
    now = followed.now
    facts = {
        "model": str(arguments.model), "seconds": seconds, "trials": now.trials if now else 0,
        "gain": now.gain if now else None, "changed": changed, "kernels": len(plan.kernels) if plan else 0,
    }  # fmt: skip
    if arguments.json:
        common.print_json(facts)
        return 0
    console = common.output_console()
    if now is None:
        said = f"was tuned for as long before: {len(changed)} of {facts['kernels']} kernels are not the best predicted"
    else:
        said = f"{now.said}; {now.trials} trials in {seconds:.0f} s"
    console.print(f"{said}; compile with tune={arguments.tune!r} (--tune {arguments.tune}) to use it", markup=False,
                  highlight=False, soft_wrap=True)  # fmt: skip
    return 0


@contextmanager
def following(title: str, followed: _Followed) -> Iterator[Watch]:
    """A bar with the time left, the trials and the gain so far; elsewhere than on a terminal a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title, console, followed)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[about]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=1.0, about="compiling")

        def watch(now: Tuning) -> None:
            followed.now = now
            about = f"{_clock(now.left)} left, {now.trials} trials, {now.gain:.2f}x so far: {now.said}"
            progress.update(task, completed=1 - now.left / now.whole, about=common.printable(about))

        yield watch


def _lines(title: str, console: Console, followed: _Followed) -> Callable[[Tuning], None]:
    def watch(now: Tuning) -> None:
        followed.now = now
        console.print(f"{title}: {_clock(now.left)} left, {now.trials} trials, {now.gain:.2f}x so far: {now.said}",
                      markup=False, highlight=False, soft_wrap=True)  # fmt: skip

    return watch


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


