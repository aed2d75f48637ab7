"""`tilewright devices`: the machines this computer can compile for and run on."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tilewright.cli import common
from tilewright.options import TARGETS, Options

DESCRIPTION = """\
List the targets: what each is, whether it can be used here, and if not, what is missing. The numbers
are what the compiler decides by: memory levels, vector registers, units."""

EXAMPLE = """\
  tilewright devices
  tilewright devices --json"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "devices", "list the machines to compile for", DESCRIPTION, EXAMPLE)
    parser.add_argument("--threads", metavar="N", type=int, help="describe the CPU with N threads")
    parser.add_argument("--json", action="store_true", help="print an object for scripts instead of a table")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    threads = Options.from_environment(threads=arguments.threads).threads
    found = [describe(name, threads) for name in TARGETS]
    if arguments.json:
        common.print_json({"devices": found})
        return 0
    console = common.output_console()
    for device in found:
        state = "ready" if device["error"] is None else f"cannot run here: {escape(device['error'])}"
        console.print(f"[bold]{device['name']}[/bold]  {state}", highlight=False, soft_wrap=True)
        console.print(level_table(device["description"].get("levels", ())))
        facts = [
            f"{key} {text(value)}" for key, value in device["description"].items() if key not in ("name", "levels")
        ]
        console.print(f"  {', '.join(facts)}", markup=False, highlight=False)
    return 0


def describe(name: str, threads: int | None) -> dict[str, Any]:
    from tilewright.target import machine

    error = missing_for_cuda() if name == "cuda" else None
    return {"name": name, "error": error, "description": machine(name, threads).describe()}


def missing_for_cuda() -> str | None:
    """What keeps this computer from running CUDA code; None where nothing does. Its code can be compiled anyway."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda-core is not installed; run: pip install 'tilewright[cuda]'"
    return None


def level_table(levels: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("level", "capacity", "transaction", "bandwidth a unit")
    for level in levels:
        speed = f"{level['bandwidth'] / 1e9:.0f} GB/s"
        table.add_row(level["name"], amount(level["capacity"]), amount(level["transaction"]), speed)
    return table


def amount(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:g} {unit}"
        size /= 1024
    return f"{size:g} TiB"


def text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
