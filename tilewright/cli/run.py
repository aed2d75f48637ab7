"""`tilewright run`: compile a model, run it once, and write or show its outputs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewright.cli import common
from tilewright.cli.progress import working
from tilewright.distributed.model import RankedModel
from tilewright.model import Array

DESCRIPTION = """\
Compile a model and run it. Inputs come from an .npz file (an archive of named NumPy arrays, as
numpy.savez writes it) whose names are those of the model's inputs; without one, they are random."""

EXAMPLE = """\
  tilewright run model.onnx
  tilewright run model.onnx --inputs in.npz --outputs out.npz
  tilewright run model.onnx --target cuda-emulated --schedule none --dump stages/
  tilewright run model.onnx --shape image=1x3x224x224 --threads 4 --tune 1m
  torchrun --nproc-per-node 2 -m tilewright run model.onnx --mesh tp=2"""


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "run", "compile a model and run it", DESCRIPTION, EXAMPLE)
    common.add_model(parser)
    common.add_trust(parser)
    parser.add_argument("--inputs", metavar="IN.npz", type=Path, help="the inputs by name (default: random)")
    parser.add_argument("--outputs", metavar="OUT.npz", type=Path, help="where to write the outputs by name")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the random inputs (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a summary for scripts instead of a table")
    common.add_compile_options(parser)
    common.add_timeout(common.add_mesh(parser))
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    given = common.read_arrays(arguments.inputs) if arguments.inputs is not None else None
    start = time.perf_counter()
    model = common.compile_model(arguments, given)
    compiled_s = time.perf_counter() - start
    if isinstance(model, RankedModel):
        return run_together(model, arguments, given, compiled_s)
    if not model.can_run and arguments.json:
        dump = None if arguments.dump is None else str(arguments.dump)
        summary = {"model": str(arguments.model), "compile_s": compiled_s, "stopped_after": arguments.stop_after}
        common.print_json({**summary, "dump": dump, "verified": arguments.verify})
        return 0
    if not model.can_run:
        where = f"; see {arguments.dump}" if arguments.dump is not None else "; add --dump DIR to see its result"
        Console(stderr=True).print(f"stopped after {arguments.stop_after}{where}", markup=False, highlight=False)
        return 0
    inputs = common.inputs_of(model, given, arguments.seed)
    with working(f"running {common.printable(arguments.model.name)}"):
        start = time.perf_counter()
        results = model.run(inputs)
        run_s = time.perf_counter() - start
    outputs = common.arrays_of(results)
    if arguments.outputs is not None:
        common.write_arrays(arguments.outputs, outputs)
    if arguments.json:
        summary = {
            "model": str(arguments.model),
            "compile_s": compiled_s,
            "first_run_ms": 1e3 * run_s,
            "kernel_calls": len(model.calls),
            "dump": None if arguments.dump is None else str(arguments.dump),
            "verified": arguments.verify,
            "outputs": [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in outputs.items()],
        }
        common.print_json(summary)
        return 0
    console = common.output_console()
    console.print(output_table(outputs))
    console.print(
        f"compiled in {compiled_s:.2f} s to {len(model.calls)} kernel calls; the first run took {1e3 * run_s:.2f} ms",
        highlight=False,
    )
    if arguments.verify:
        console.print("every stage gives what the interpreter gives", highlight=False)
    if arguments.dump is not None:
        console.print(f"wrote every form of the model to {arguments.dump}", markup=False, highlight=False)
    if arguments.outputs is not None:
        console.print(f"wrote {arguments.outputs}", markup=False, highlight=False)
    return 0


def run_together(
    model: RankedModel, arguments: argparse.Namespace, given: dict[str, Array] | None, compiled_s: float
) -> int:
    """One rank's part; rank 0 has the inputs and tells of the results."""
    inputs = model.random_inputs(arguments.seed) if given is None else common.restore_types(given, model.inputs)
    start = time.perf_counter()
    outputs = {name: array for name, array in model.run(inputs).items() if array is not None}
    run_s = time.perf_counter() - start
    model.close()
    if model.rank:
        return 0
    if arguments.outputs is not None:
        common.write_arrays(arguments.outputs, outputs)
    if arguments.json:
        about = [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in outputs.items()]
        summary = {"model": str(arguments.model), "mesh": arguments.mesh, "ranks": model.size, "compile_s": compiled_s,
                   "first_run_ms": 1e3 * run_s, "weights": model.weights, "outputs": about}  # fmt: skip
        common.print_json(summary)
        return 0
    console = common.output_console()
    console.print(output_table(outputs))
    told = f"compiled in {compiled_s:.2f} s for {model.size} ranks; the first run took {1e3 * run_s:.2f} ms"
    console.print(told, highlight=False)
    return 0


def output_table(outputs: dict[str, Array]) -> Table:
    table = Table("output", "type", "shape", "smallest", "mean", "largest")
    for name, array in outputs.items():
        table.add_row(
            escape(common.printable(name)),
            array.dtype.name,
            "x".join(str(n) for n in array.shape) or "scalar",
            *summarise(array),
        )
    return table


def summarise(array: Array) -> tuple[str, str, str]:
    if array.size == 0 or array.dtype.kind in "US":
        return "", "", ""
    values = array.astype(np.float64)
    return f"{values.min():.6g}", f"{values.mean():.6g}", f"{values.max():.6g}"
