"""`tilewright devices`: the machines this computer can compile for and run on, in numbers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewright.cli import common
from tilewright.cli.progress import working
from tilewright.options import TARGETS, Options, check_target
from tilewright.target import stored_machines

DESCRIPTION = """\
List the targets, what this machine has first: what each is, and if it cannot be used here, what is
missing. The numbers are what the compiler decides by: memory levels, instructions, the cost of a
barrier. This computer's processor is measured once and the figures are kept; --probe measures anew.
After them come machines that Tilewright has a description of: they can be planned for wherever one is.

With the name of one target, --json prints its description alone. Edited, such a file is a target too:
--target FILE.json plans for the machine that it describes."""

EXAMPLE = """\
  tilewright devices
  tilewright devices --probe
  tilewright devices emerald_rapids
  tilewright devices cpu --json > machine.json
  tilewright explain model.onnx --target machine.json --stop-after source
  torchrun --nproc-per-node 2 -m tilewright devices --links > pair.json"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "devices", "list the machines to compile for", DESCRIPTION, EXAMPLE)
    parser.add_argument("device", metavar="TARGET", nargs="?", help="one target, or a .json file; default: all targets")
    parser.add_argument("--probe", action="store_true", help="measure this computer's processor anew")
    parser.add_argument("--links", action="store_true", help="measure the link between processes that torchrun started")
    parser.add_argument("--threads", metavar="N", type=int, help="describe the CPU with N threads")
    parser.add_argument("--json", action="store_true", help="print an object for scripts instead of tables")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    options = Options.from_environment(threads=arguments.threads)
    if arguments.links:
        return show_links(options)
    names = TARGETS if arguments.device is None else (arguments.device,)
    described = stored_machines() if arguments.device is None else ()
    for name in names:
        check_target(name)
    if arguments.probe:
        probe_anew(options)
    found = sorted((describe(name, options) for name in names), key=rank)
    others = [describe(name, options) for name in described]
    if arguments.json:
        whole = {"devices": found, "described": others}
        common.print_json(whole if arguments.device is None else found[0]["description"])
        return 0
    console = common.output_console()
    for device in found:
        show(device, console)
    if others:
        console.print(described_table(others))
    return 0


def show_links(options: Options) -> int:
    """A description of the processes as a cluster, by rank 0."""
    from tilewright.distributed.links import described_links
    from tilewright.target import machine

    device = machine("cpu", options.threads, cache_dir=options.cache_dir, compiler=options.compiler)
    found = described_links(60.0, device)
    if found is not None:
        common.print_json(found)
    return 0


def rank(device: Mapping[str, Any]) -> tuple[bool, bool]:
    """What this machine has comes first, then what it imitates, then what it lacks."""
    return device["error"] is not None, "emulated" in device["name"]


def probe_anew(options: Options) -> None:
    from tilewright.target import this_cpu
    from tilewright.target.kept import measured

    with working("measuring the machine") as tell:
        measured(this_cpu(), options.cache_dir, options.compiler, anew=True, tell=tell)


def describe(name: str, options: Options) -> dict[str, Any]:
    from tilewright.backend import backend_for
    from tilewright.target import machine

    with working("looking at the machine") as tell:
        target = machine(name, options.threads, cache_dir=options.cache_dir, compiler=options.compiler, tell=tell)
    error = backend_for(target).why_not_here(target)
    return {"name": target.name, "error": error, "description": target.describe()}


def show(device: Mapping[str, Any], console: Console) -> None:
    facts = device["description"]
    state = "ready" if device["error"] is None else f"cannot run here: {escape(device['error'])}"
    console.print(f"[bold]{escape(device['name'])}[/bold]  {state}", highlight=False, soft_wrap=True)
    for line in summary(facts):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(level_table(facts["levels"]))
    if facts["rates"]:
        console.print(rate_table(facts))
    console.print()


def described_table(devices: Sequence[Mapping[str, Any]]) -> Table:
    title = "described, to plan for anywhere: --target NAME --stop-after source"
    table = Table("target", "what", "runs here", title=title, title_justify="left")
    for device in devices:
        facts = device["description"]
        state = "yes" if device["error"] is None else f"no: {device['error']}"
        table.add_row(device["name"], escape(f"{summary(facts)[0]}\n{facts['source']}"), escape(state))
    return table


def summary(facts: Mapping[str, Any]) -> list[str]:
    unit = "core" if facts["kind"] == "cpu" else "multiprocessor"
    parts = [f"{facts['units']} {unit}{'s' if facts['units'] > 1 else ''} {facts['architecture']}"]
    parts.append(f"{facts['vector_registers']} registers of {facts['vector_bytes']} bytes")
    if facts["kind"] == "gpu":
        parts[-1] = f"warps of {facts['warp']}, blocks of up to {facts['max_threads']} threads"
    if facts["clock"]:
        parts.append(f"{facts['clock'] / 1e9:g} GHz")
    parts += [" ".join(facts["features"])] if facts["features"] else []
    rate = f"float32: {2 * facts['fma_rate'] / 1e9:.3g} GFLOP/s a {unit}"
    if facts["fma_alone"]:
        rate += f" with all busy, {2 * facts['fma_alone'] / 1e9:.3g} alone"
    if facts["kind"] == "cpu":
        rate += f"; {facts['fma_chains']} independent multiply-adds under way reach it"
    costs = f"{duration(facts['kernel_cost'])} from kernel to kernel"
    if facts["kind"] == "cpu":
        costs += f", {duration(facts['tile_cost'])} to hand out a tile"
    costs += "".join(f", {duration(cost)} for a {scope.replace('_', ' ')}" for scope, cost in facts["barriers"].items())
    return [", ".join(parts), rate, costs, f"numbers: {facts['source']}"]


def level_table(levels: Sequence[Mapping[str, Any]]) -> Table:
    """Columns of what nobody measured are left out."""
    optional = {key: any(level[key] for level in levels) for key in ("alone", "write", "latency")}
    table = Table("level", title="memory, for one unit", title_justify="left")
    heads = ["capacity", "shared by", "transaction", "read, all busy"]
    more = (("alone", "read, alone"), ("write", "write, all busy"), ("latency", "latency"))
    heads += [head for key, head in more if optional[key]]
    for head in heads:
        table.add_column(head, justify="right")
    for level in levels:
        cells = [level["name"], amount(level["capacity"]), str(level["shared_by"]), amount(level["transaction"])]
        cells += [speed(level[key]) for key in ("bandwidth", "alone", "write") if optional.get(key, True)]
        cells += [duration(level["latency"]) if level["latency"] else "-"] if optional["latency"] else []
        table.add_row(*cells)
    return table


def rate_table(facts: Mapping[str, Any]) -> Table:
    table = Table("instruction", title="arithmetic, for one unit, all busy", title_justify="left")
    for head in ("multiply-adds/s", "x float32"):
        table.add_column(head, justify="right")
    for name, rate in facts["rates"].items():
        amounts = f"{rate / 1e12:.3g} T" if rate >= 1e12 else f"{rate / 1e9:.3g} G"
        table.add_row(name, amounts, f"{rate / facts['fma_rate']:.3g}")
    return table


def amount(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:g} {unit}"
        size /= 1024
    return f"{size:g} TiB"


def speed(bandwidth: float) -> str:
    if bandwidth >= 1e12:
        return f"{bandwidth / 1e12:.3g} TB/s"
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth else "-"


def duration(seconds: float) -> str:
    return f"{seconds * 1e9:.2g} ns" if seconds < 1e-7 else f"{seconds * 1e6:.2g} us"
