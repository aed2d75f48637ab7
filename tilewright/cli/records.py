"""`tilewright records`: what tuning has measured, shown, and files of it put together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from tilewright.cli import common
from tilewright.errors import OptionError
from tilewright.options import Options
from tilewright.tune.log import stored
from tilewright.tune.records import Measurement, RecordError, Records, Writer, read

DESCRIPTION = """\
Tuning appends a record after every trial: what was computed, by which plan, on which machine, and how long
it took. "show" tells what files hold (default: those in the cache); "merge" puts files together, what is the
same in them once. Records are data: reading them runs nothing."""

EXAMPLE = """\
  tilewright records show
  tilewright records show model.twr
  tilewright records merge office.twr lab.twr -o both.twr"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "records", "show or merge what tuning has measured", DESCRIPTION, EXAMPLE)
    parser.add_argument("action", choices=("show", "merge"))
    parser.add_argument("files", nargs="*", metavar="FILE.twr", type=Path)
    parser.add_argument("-o", "--output", metavar="FILE.twr", type=Path, help="of merge: the file to write")
    parser.add_argument("--json", action="store_true", help="print an object for scripts")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "merge":
        return merge(arguments)
    files = arguments.files or stored(Options.from_environment().cache_dir)
    rows = [row for file in files for row in rows_of(file)]
    if arguments.json:
        common.print_json(rows)
        return 0
    console = common.output_console()
    if not rows:
        console.print("nothing was tuned yet: tilewright tune model.onnx --for 2m", highlight=False)
        return 0
    table = Table("file", "machine", "threads", "class", "tasks", "plans", "best over planned")
    for row in rows:
        best = f"{row['best']:.2f}" if row["best"] is not None else ""
        cells = (row["file"], row["machine"], row["threads"], row["class"], row["tasks"], row["plans"], best)
        table.add_row(*(escape(common.printable(str(cell))) for cell in cells))
    console.print(table)
    return 0


def rows_of(file: Path) -> list[dict[str, Any]]:
    """By machine, threads and class."""
    records = read(file)
    found: dict[tuple[str, int, str], list[Measurement]] = {}
    for m in records.measurements:
        machine = records.targets[m.target]
        key = (f"{machine.processor} ({machine.microarchitecture})", m.threads, m.kind)
        found.setdefault(key, []).append(m)
    rows = []
    for (shown, threads, kind), some in found.items():
        tasks: dict[str, list[float]] = {}
        for m in some:
            tasks.setdefault(m.task, []).append(m.microseconds / m.anchor.around)
        best = min((min(ratios) for ratios in tasks.values()), default=None)
        rows.append({"file": str(file), "machine": shown, "threads": threads, "class": kind, "tasks": len(tasks),
                     "plans": len(some), "best": best})  # fmt: skip
    return rows


def merge(arguments: argparse.Namespace) -> int:
    if arguments.output is None or len(arguments.files) < 2:
        raise OptionError("merge takes two files or more and -o, the file to write")
    if arguments.output.exists():
        raise RecordError(f"{arguments.output} is there already; give another name, or remove it")
    both = Records()
    for file in arguments.files:
        both = both.merged(read(file))
    writer = Writer(arguments.output)
    for m in both.measurements:
        writer.append(m, both.programs[m.program], both.targets[m.target])
    facts = {"file": str(arguments.output), "measurements": len(both.measurements)}
    if arguments.json:
        common.print_json(facts)
        return 0
    text = f"wrote {len(both.measurements)} measurements to {arguments.output}"
    common.output_console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0
