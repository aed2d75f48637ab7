"""`tilewright compile`: a model as a directory that starts without the compiler, from Python and from C."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.cli import common
from tilewright.distributed.model import RankedModel
from tilewright.dynamic.staged_model import Border, StagedModel
from tilewright.errors import OptionError
from tilewright.model import Array, Port
from tilewright.packages.directory import check_free

DESCRIPTION = """\
Compile a model and write it to a directory: shared object, weights, C header with an example program,
sources, plan, and a manifest. tilewright.load(DIR), 'tilewright run DIR' and a C program start from it
without compiling. It is for processors that have all that this one has."""

EXAMPLE = """\
  tilewright compile model.onnx -o model
  tilewright compile model.onnx -o model --shape batch=8 --threads 4
  tilewright run model --inputs in.npz
  torchrun --nproc-per-node 2 -m tilewright compile model.onnx --mesh tp=2 -o model"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "compile", "write a model to a directory to ship", DESCRIPTION, EXAMPLE)
    common.add_model(parser)
    common.add_trust(parser)
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, required=True, help="a new or empty directory, or a saved model"
    )
    common.add_deciding_inputs(parser)
    parser.add_argument("--json", action="store_true", help="print a summary for scripts")
    common.add_compile_options(parser)
    common.add_timeout(common.add_mesh(parser))
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.stop_after is not None:
        raise OptionError("--stop-after leaves no code to save; 'tilewright run' takes it")
    check_free(arguments.output.resolve())
    start = time.perf_counter()
    given = common.read_arrays(arguments.inputs) if arguments.inputs is not None else None
    if arguments.mesh is not None:
        return save_together(arguments, given, start)
    model = common.settled_model(arguments, given)
    model.save(arguments.output)
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in arguments.output.rglob("*") if path.is_file())
    if arguments.json:
        ports = {"inputs": model.inputs, "outputs": model.outputs}
        common.print_json(
            {
                "directory": str(arguments.output),
                "bytes": size,
                "seconds": seconds,
                **{side: [port_row(port) for port in found] for side, found in ports.items()},
            }
        )
        return 0
    text = f"wrote {arguments.output}, {size / 2**20:.1f} MiB, in {seconds:.1f} s"
    if isinstance(model, StagedModel) and given is None:
        text += "; what its data decides is compiled at a call, or here for --inputs IN.npz"
    common.output_console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def save_together(arguments: argparse.Namespace, given: Mapping[str, Array] | None, start: float) -> int:
    """One rank's part of a model on several processes; rank 0 tells of it."""
    model: RankedModel = common.compile_model(arguments, given)
    model.save(arguments.output)
    model.close()
    if model.rank:
        return 0
    text = f"wrote {arguments.output} for {model.size} ranks in {time.perf_counter() - start:.1f} s"
    common.output_console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def port_row(port: Port | Border) -> dict[str, Any]:
    shape = None if port.shape is None else list(port.shape)
    return {"name": port.name, "dtype": None if port.dtype is None else port.dtype.name, "shape": shape}
