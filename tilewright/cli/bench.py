"""`tilewright bench`: time a model here beside the other runtimes that are installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from rich.markup import escape
from rich.table import Table

from tilewright.calls.arguments import checked_path, count_inputs, suggest
from tilewright.cli import common
from tilewright.cli.progress import counting
from tilewright.errors import InputError, ModelError, OptionError
from tilewright.model import Array
from tilewright.options import Options, remark_on_threads, usable_cores
from tilewright.report.peers import find_peer
from tilewright.report.sidebyside import OURS, Comparison, ModelInterface, compare, random_inputs, read_interface

ALGORITHMS = ("merging", "convolution", "contraction", "denormals")
DESCRIPTION = """\
Time a model in Tilewright and in other runtimes on the same inputs. Every runtime has a process of
its own, one is awake at a time, and rounds alternate; what is shown is the median over the rounds.
A runtime that is not installed is skipped and said so."""

EXAMPLE = """\
  tilewright bench model.onnx
  tilewright bench model.onnx --peers onnxruntime,openvino --threads 4
  tilewright bench model.onnx --peers tilewright:none,onnxruntime --json
  tilewright bench model.onnx --contraction strassen
  tilewright bench mmoe.onnx --peers torch --torch bench.zoo:build:mmoe:full
  tilewright bench mmoe.onnx --target cuda --peers torch,torch:eager --torch bench.zoo:build:mmoe:full"""


USUAL = {"cpu": "onnxruntime,openvino,torch", "cuda": "onnxruntime,torch,torch:eager,xla"}  # peers, by target


def add_parser(commands: Any) -> None:
    parser = common.add_command(commands, "bench", "time a model beside other runtimes", DESCRIPTION, EXAMPLE)
    common.add_model(parser)
    parser.add_argument(
        "--peers",
        metavar="NAMES",
        help="runtimes to compare with: onnxruntime, openvino, torch and torch:eager (they need --torch), on GPUs xla, "
        f"and tilewright:none for the unfused schedule (default: {USUAL['cpu']}; on GPUs {USUAL['cuda']})",
    )
    parser.add_argument(
        "--target",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where every runtime runs; on a GPU arrays stay there, and calls in flight are timed (default: cpu)",
    )
    parser.add_argument("--threads", metavar="N", type=int, help="threads for every runtime (default: every core)")
    parser.add_argument("--inputs", metavar="IN.npz", type=Path, help="the inputs by name (default: random)")
    parser.add_argument("--rounds", metavar="N", type=int, default=7, help="rounds per runtime (default: 7)")
    parser.add_argument("--seconds", metavar="S", type=float, default=0.5, help="length of a round (default: 0.5)")
    parser.add_argument("--limit", metavar="S", type=float, default=300.0,
                        help="seconds that a runtime may take to load and compile; one that takes longer is left out "
                             "(default: 300)")  # fmt: skip
    parser.add_argument(
        "--torch",
        metavar="MODULE:FUNCTION",
        help="a function that returns the model as (torch module, example inputs), since torch reads no ONNX",
    )
    parser.add_argument("--json", action="store_true", help="print an object for scripts instead of a table")
    common.add_algorithms(parser.add_argument_group("compiling in tilewright"))
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    path = checked_path(arguments.model)
    runtimes = parse_runtimes(arguments.peers or USUAL[arguments.target])
    threads = Options.from_environment(threads=arguments.threads).threads or usable_cores()
    remark_on_threads(threads)
    if arguments.rounds < 1 or arguments.seconds <= 0 or arguments.limit <= 0:
        raise OptionError("--rounds, --seconds and --limit must be positive")
    interface = checked_interface(path)
    dimensions = open_dimensions(interface, dict(arguments.shape))
    if arguments.inputs is not None:
        inputs = common.read_arrays(arguments.inputs)
        check_names(interface, inputs)
    else:
        inputs = draw_inputs(interface, dimensions)
    with counting(f"timing {common.printable(path.name)}") as tell:
        comparison = compare(
            path,
            runtimes,
            threads,
            inputs=inputs,
            rounds=arguments.rounds,
            seconds_per_round=arguments.seconds,
            progress=tell,
            report=lambda line: print(line, file=sys.stderr, flush=True),
            timeout_s=arguments.limit,
            torch_spec=arguments.torch,
            target=arguments.target,
            algorithms={name: getattr(arguments, name) for name in ALGORITHMS},
        )
    if arguments.json:
        common.print_json(comparison.to_json())
    else:
        show(comparison)
    return 0 if comparison.median_of(OURS) is not None else 1


def parse_runtimes(text: str) -> list[str]:
    names = [OURS, *(name.strip() for name in text.split(",") if name.strip())]
    for name in names:
        try:
            find_peer(name)
        except ValueError as error:
            raise OptionError(f"--peers: {error}") from error
    return list(dict.fromkeys(names))


def checked_interface(path: Path) -> ModelInterface:
    try:
        return read_interface(path)
    except DecodeError as error:
        raise ModelError(f"'{path}' is not an ONNX model, or is damaged") from error


def open_dimensions(interface: ModelInterface, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The values that --shape gives to the model's symbolic dimensions."""
    values = {value.name: value for value in interface.inputs}
    dimensions: dict[str, int] = {}
    for name, shape in shapes.items():
        if (
            name not in values
            and len(shape) == 1
            and any(d.dim_param == name for v in values.values() for d in v.type.tensor_type.shape.dim)
        ):
            dimensions[name] = shape[0]
            continue
        if name not in values:
            raise InputError(f"there is no input {name!r}; {suggest(name, list(values))}")
        declared = values[name].type.tensor_type.shape.dim
        if len(declared) != len(shape):
            raise InputError(f"input {name!r} has {len(declared)} dimensions, not {len(shape)}")
        for dimension, extent in zip(declared, shape, strict=True):
            if dimension.dim_param:
                dimensions[dimension.dim_param] = extent
    return dimensions


def draw_inputs(interface: ModelInterface, dimensions: Mapping[str, int]) -> dict[str, Array]:
    try:
        return random_inputs(interface.inputs, dimensions, seed=0)
    except ValueError as error:
        raise InputError(f"no random inputs: {error}") from error


def check_names(interface: ModelInterface, inputs: Mapping[str, Array]) -> None:
    names = [value.name for value in interface.inputs]
    if set(names) != set(inputs):
        raise InputError(f"the model takes {count_inputs(names)}; --inputs holds {', '.join(inputs) or 'nothing'}")


def show(comparison: Comparison) -> None:
    console = common.output_console()
    table = Table("runtime", "version", "median ms", "fastest ms", "cold start s", "note")
    for result in comparison.runtimes:
        table.add_row(
            result.name,
            result.version or "",
            number(result.median_ms),
            number(result.min_ms),
            number(result.cold_start_s),
            escape(result.error or ""),
        )
    console.print(table)
    console.print(f"{comparison.model}, {comparison.threads} threads, {comparison.machine['processor']}", markup=False)
    ratio = comparison.ratio_to_best_peer
    if ratio is not None:
        verdict = f"{1 / ratio:.2f} times as fast as" if ratio <= 1 else f"{ratio:.2f} times slower than"
        console.print(f"tilewright is {verdict} the best peer", highlight=False)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
