"""`tilewright suite`: ONNX's own backend suite, case by case, with the reason of each that does not pass."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

from tilewright.cli import common
from tilewright.cli.progress import counting
from tilewright.errors import OptionError, ToolError
from tilewright.options import TARGETS, Options, usable_cores

DESCRIPTION = """\
Run the official backend suite of the onnx package that is installed, on this CPU or a GPU: its node, simple,
PyTorch and light model cases, but for training, classical machine learning and strings. A case that
passes with fallback="error" and without ONNX's reference evaluator is native. Every case has a time
limit; a crash ends that case alone."""

EXAMPLE = """\
  tilewright suite
  tilewright suite --cases test_reduce --jobs 4
  tilewright suite --target cuda-emulated
  tilewright suite --json > suite.json"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "suite", "run ONNX's own backend suite", DESCRIPTION, EXAMPLE)
    parser.add_argument("--cases", metavar="PATTERN", default="", help="only names in which this expression is found")
    parser.add_argument("--jobs", metavar="N", type=int, default=usable_cores(), help="processes (default: every core)")
    parser.add_argument("--target", choices=TARGETS, help="where cases run: this CPU (default), a GPU, or one emulated")
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0, help="limit of a case (default: 60)")
    parser.add_argument("--json", action="store_true", help="print an object for scripts instead of text")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.jobs < 1 or arguments.seconds <= 0:
        raise OptionError("--jobs and --seconds must be positive")
    if importlib.util.find_spec("onnx.backend.test") is None:
        raise ToolError("the onnx package that is installed has no backend suite")
    from tilewright.integrations.onnx_suite import run_suite

    options = Options.from_environment(threads=1, target=arguments.target)
    with counting("running the suite") as tell:
        report = run_suite(options, pattern=arguments.cases, jobs=arguments.jobs, seconds=arguments.seconds, tell=tell)
    if not report.results:
        raise OptionError(f"--cases {arguments.cases}: no case has such a name")
    if arguments.json:
        common.print_json(report.to_json())
        return 0
    for result in report.others:
        print(common.printable(f"{result.name}: {result.reason}"))
    total = len(report.results)
    print(
        f"\nonnx {report.version}: {total} cases, {report.left_out} of training, machine learning and strings left out"
    )
    for what, count in (("passed", report.passed), ("native", report.native), ("others", len(report.others))):
        print(f"{what}  {count:5}  {100 * count / total:5.1f}%")
    if report.others:
        print("\nwhy the others do not pass, by number of cases:")
    for reason, count in report.reasons()[:20]:
        print(common.printable(f"{count:5}  {reason}"))
    sys.stdout.flush()
    return 0
