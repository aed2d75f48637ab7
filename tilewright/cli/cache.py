"""`tilewright cache`: where compiled kernels are kept, how much there is, and a way to remove it."""

from __future__ import annotations

import argparse
from typing import Any

from tilewright.cli import common
from tilewright.errors import ToolError
from tilewright.options import Options
from tilewright.runtime.cache import Cache, CacheError

DESCRIPTION = """\
Compiled kernels and packed weights are kept on disk, so that a model compiles once. This shows where
and how much; "clear" removes it all, which costs no more than compiling again."""

EXAMPLE = """\
  tilewright cache
  tilewright cache clear"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "cache", "show or clear the compiled kernels on disk", DESCRIPTION, EXAMPLE)
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="default: show")
    parser.add_argument("--json", action="store_true", help="print an object for scripts")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    cache = Cache(Options.from_environment().cache_dir)
    try:
        stats = cache.stats()
        if arguments.action == "clear":
            cache.clear()
    except CacheError as error:
        raise ToolError(str(error)) from error
    facts = {
        "path": str(stats.root),
        "entries": stats.entries,
        "bytes": stats.total_bytes,
        "limit_bytes": stats.limit_bytes,
        "cleared": arguments.action == "clear",
    }
    if arguments.json:
        common.print_json(facts)
        return 0
    amount = f"{stats.entries} files, {stats.total_bytes / 2**20:.1f} MiB"
    text = f"removed {amount} from {stats.root}" if facts["cleared"] else f"{stats.root}: {amount}"
    common.output_console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0
