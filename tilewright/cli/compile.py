"""`tilewright compile`: a model as a directory that starts without the compiler, from Python and from C."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.api import Array, Model, Port
from tilewright.cli import common
from tilewright.errors import OptionError
from tilewright.late.open_model import OpenModel
from tilewright.late.staged_model import Border, StagedModel
from tilewright.shipping.directory import check_free

DESCRIPTION = """\
Compile a model and write it to a directory: shared object, weights, C header with an example program,
sources, plan, and a manifest. tilewright.load(DIR), 'tilewright run DIR' and a C program start from it
without compiling. It is for processors that have all that this one has."""

EXAMPLE = """\
  tilewright compile model.onnx -o model
  tilewright compile model.onnx -o model --shape batch=8 --threads 4
  tilewright run model --inputs in.npz"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "compile", "write a model to a directory to ship", DESCRIPTION, EXAMPLE)
    common.add_model(parser)
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, required=True, help="a new or empty directory, or a saved model"
    )
    parser.add_argument(
        "--inputs",
        metavar="IN.npz",
        type=Path,
        help="inputs to compile for, where they decide shapes or what is computed",
    )
    parser.add_argument("--json", action="store_true", help="print a summary for scripts")
    common.add_compile_options(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.stop_after is not None:
        raise OptionError("--stop-after leaves no code to save; 'tilewright run' takes it")
    check_free(arguments.output.resolve())
    start = time.perf_counter()
    given = common.read_arrays(arguments.inputs) if arguments.inputs is not None else None
    model = compiled(arguments, given)
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


def compiled(arguments: argparse.Namespace, given: Mapping[str, Array] | None) -> Model | StagedModel:
    """The model as it is saved: for the shapes of the inputs, where it leaves them open, with the parts that they lead
    to, where it runs in parts."""
    model: Any = common.compile_model(arguments, given)
    if isinstance(model, OpenModel):
        if given is None:
            common.check_settled(model, "--inputs IN.npz")
        inputs = common.restore_types(given or {}, model.inputs)
        model = model.prepare(inputs)
        given = {port.name: inputs[port.name] for port in model.inputs}
    if isinstance(model, StagedModel) and given is not None:
        model.run(common.restore_types(given, model.inputs))
    saved: Model | StagedModel = model
    return saved


def port_row(port: Port | Border) -> dict[str, Any]:
    shape = None if port.shape is None else list(port.shape)
    return {"name": port.name, "dtype": None if port.dtype is None else port.dtype.name, "shape": shape}
