"""`tilewright explain`: which kernels a model became, where its data lives, and why."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tilewright.cli import common

DESCRIPTION = """\
Compile a model and say what became of it: its kernels, which operators each holds, the memory level
where every intermediate tile lives, the tiles, the predicted traffic, and why it was decided so."""

EXAMPLE = """\
  tilewright explain model.onnx
  tilewright explain model.onnx --schedule none
  tilewright explain model.onnx --json"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "explain", "say what became of a model, and why", DESCRIPTION, EXAMPLE)
    common.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print an object for scripts instead of text")
    common.add_compile_options(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    from tilewright.report.explain import explain_json, explain_text

    model = common.compile_model(arguments)
    if arguments.json:
        common.print_json(explain_json(model.artifact))
        return 0
    sys.stdout.write(explain_text(model.artifact).rstrip("\n") + "\n")
    return 0
