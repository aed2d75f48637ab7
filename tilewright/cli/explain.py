"""`tilewright explain`: which kernels a model became, where its data lives, and why."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tilewright.cli import common
from tilewright.errors import OptionError
from tilewright.options import Options
from tilewright.target import cluster, stored_clusters

DESCRIPTION = """\
Compile a model and say what became of it: its kernels, which operators each holds, the memory level
where every intermediate tile lives, the tiles, the predicted traffic, and why it was decided so."""

EXAMPLE = """\
  tilewright explain model.onnx
  tilewright explain model.onnx --schedule none
  tilewright explain model.onnx --html model.html --measure
  tilewright explain model.onnx --json
  tilewright explain model.onnx --mesh tp=4 --cluster h200_8"""


_REPEAT = 10  # runs of a profile, whose medians are shown


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "explain", "say what became of a model, and why", DESCRIPTION, EXAMPLE)
    common.add_model(parser)
    common.add_trust(parser)
    common.add_deciding_inputs(parser)
    parser.add_argument("--json", action="store_true", help="print an object for scripts instead of text")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with pictures instead of text")
    parser.add_argument("--measure", action="store_true", help="time every kernel too, on random inputs")
    common.add_compile_options(parser)
    group = common.add_mesh(parser)
    group.add_argument(
        "--cluster", metavar="NAME",
        help=f"the machines to share it out to: {', '.join(stored_clusters())}, or a .json file that describes them",
    )  # fmt: skip
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    from tilewright.report.explain import explain_text
    from tilewright.report.explain_html import explain_html
    from tilewright.report.facts import explain_json

    if arguments.mesh is not None or arguments.cluster is not None:
        return show_ranks(arguments)
    if arguments.model.is_dir() and arguments.inputs is None and not arguments.measure:
        return show_saved(arguments)
    given = common.read_arrays(arguments.inputs) if arguments.inputs is not None else None
    model = common.settled_model(arguments, given)
    measured = model.profile(repeat=_REPEAT) if arguments.measure else None
    if arguments.html is not None:
        page = explain_html(model.artifact, arguments.model.name, measured)
        try:
            arguments.html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot write {arguments.html}: {error.strerror}") from error
    if arguments.json:
        common.print_json(explain_json(model.artifact, measured))
    elif arguments.html is None:
        told = model.explain() if measured is None else explain_text(model.artifact, measured=measured)
        sys.stdout.write(common.printable(told))
    else:
        sys.stdout.write(f"wrote {arguments.html}\n")
    return 0


def show_ranks(arguments: argparse.Namespace) -> int:
    """How a model is shared out to a cluster, as predicted; nothing is compiled, and no other process is needed."""
    from tilewright.distributed.compiling import Asked, program_of, shared_out
    from tilewright.distributed.meshes import PROCESSES, mesh_of, parse_mesh
    from tilewright.frontend.onnx.model import load
    from tilewright.report.ranks import ranks_text
    from tilewright.schedule.batches import in_parts

    if arguments.html is not None or arguments.measure:
        raise OptionError("how a model is shared out is told as text or --json: leave out --html and --measure")
    options = Options.from_environment(target=arguments.target, threads=arguments.threads)
    name = arguments.cluster or PROCESSES
    if arguments.mesh is not None:
        mesh = parse_mesh(arguments.mesh)
    else:
        mesh = mesh_of(tuple((link.name, link.size) for link in cluster(name).links))
    shapes: dict[str, tuple[int, ...]] = dict(arguments.shape)
    parts = arguments.micro_batches
    batches = in_parts(program_of(load(arguments.model, shapes)), parts)
    sharded = shared_out(batches.program, Asked(mesh, parts, cluster=name), options)
    sys.stdout.write(sharded.to_json() if arguments.json else common.printable(ranks_text(sharded)))
    return 0


def show_saved(arguments: argparse.Namespace) -> int:
    """A directory is read, not loaded: its code, which may be anybody's, does not run."""
    from tilewright.packages.inspection import explain

    if arguments.json or arguments.html is not None:
        raise OptionError("a saved model has its explanation as text alone; --json and --html take the model file")
    sys.stdout.write(common.printable(explain(arguments.model)))
    return 0
