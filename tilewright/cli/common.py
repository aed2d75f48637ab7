"""What several subcommands share: options for compiling, reading and writing arrays, and JSON on stdout."""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tilewright import errors
from tilewright.api import compile, load
from tilewright.cli.progress import working
from tilewright.dynamic.open_model import OpenModel
from tilewright.dynamic.ranged_model import RangedModel
from tilewright.dynamic.staged_model import Border, StagedModel
from tilewright.dynamic.variants import OpenPort
from tilewright.errors import InputError, OptionError
from tilewright.model import Array, Model, Port
from tilewright.options import (
    CONTRACTIONS,
    CONVOLUTIONS,
    COST_MODELS,
    DENORMALS,
    EFFORTS,
    FALLBACKS,
    MERGING,
    OBJECTIVES,
    POLICIES,
    SCHEDULES,
    TARGETS,
    Options,
    Watch,
)

AnyModel = Model | OpenModel | RangedModel | StagedModel
PIPE_WIDTH = 240


def add_command(commands: Any, name: str, summary: str, description: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL.onnx", type=Path, help="the ONNX file, or a directory of 'tilewright compile'"
    )
    parser.add_argument(
        "--shape",
        metavar="NAME=1x3x224x224",
        type=parse_shape,
        action="append",
        default=[],
        help="the shape of an input whose shape the model leaves open, or the size of a dimension by its name "
        "(--shape batch=2); may be repeated",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code of a directory that another user has, or may write to",
    )


def add_deciding_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inputs",
        metavar="IN.npz",
        type=Path,
        help="inputs to compile for, where they decide shapes or what is computed",
    )


def add_compile_options(parser: argparse.ArgumentParser, tune: bool = True) -> None:
    group = parser.add_argument_group("compiling")
    group.add_argument(
        "--target",
        metavar="TARGET",
        help=f"the machine to compile for: {', '.join(TARGETS)}, a description that 'tilewright devices' lists, or a "
        ".json file that describes one (default: cpu)",
    )
    group.add_argument("--threads", metavar="N", type=int, help="worker threads on the CPU (default: every core)")
    group.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="connected: keep tiles of neighbouring operators on chip (default); none: a kernel an operator",
    )
    add_algorithms(group)
    group.add_argument("--memory", metavar="4GiB", help="what a run on a CPU may allocate beside inputs and outputs")
    group.add_argument("--device-memory", metavar="8GiB", help="what a model may have on a GPU; weights pass through")
    group.add_argument(
        "--effort",
        choices=EFFORTS,
        help="full: the best code (default); fast: code that may take half as long again, in a third of the time; "
        "adaptive: starts with that and goes over to the full code when it is ready",
    )
    group.add_argument(
        "--optimize",
        metavar="POLICY",
        type=parse_policy,
        help=f"what plans are wanted for: {', '.join(POLICIES)}, or objectives in an order, as latency,fusion "
        f"({', '.join(OBJECTIVES)}; default: latency)",
    )
    group.add_argument(
        "--fallback",
        choices=FALLBACKS,
        help="strings and images have no native code: ONNX's evaluator runs them (host, the default); error refuses",
    )
    group.add_argument(
        "--precision",
        metavar="TYPE",
        help="operands of contractions: float32, bfloat16, and on GPUs float16, tf32, or tf32_convolutions, which is "
        "what PyTorch does (default: as the model says)",
    )
    if tune:
        group.add_argument(
            "--tune",
            metavar="DURATION",
            help="measure other plans for so long in all (90s, 2m) and keep what is faster; the next time it is known",
        )
    group.add_argument(
        "--records",
        metavar="FILE.twr",
        type=Path,
        help="what was measured: read, and appended to where something is (default: a file in the cache)",
    )
    group.add_argument(
        "--cost-model",
        choices=COST_MODELS,
        default="analytic",
        help="what orders plans of a kernel: tree and graph are networks fitted to --records (default: analytic)",
    )
    group.add_argument(
        "--arithmetic",
        action="store_true",
        help="let tuning choose kernels that take sums in another order: results differ in their last bits",
    )
    stages = parser.add_argument_group("looking inside")
    stages.add_argument("--dump", metavar="DIR", type=Path, help="write every form of the model to DIR as text")
    stages.add_argument("--stop-after", metavar="STAGE", help="stop after this stage (the names are those of --dump)")
    stages.add_argument(
        "--override",
        metavar="STAGE=FILE",
        type=parse_override,
        action="append",
        default=[],
        help="take FILE, an edited dump, as the result of STAGE; may be repeated",
    )
    stages.add_argument("--verify", action="store_true", help="check every stage against the interpreter (slow)")


def add_algorithms(parser: Any) -> None:
    parser.add_argument(
        "--merging",
        choices=MERGING,
        help="auto: independent alike computes as one where that is predicted to take no longer (default); off: never",
    )
    parser.add_argument(
        "--convolution",
        choices=CONVOLUTIONS,
        help="auto: Winograd's algorithm in tiles of two where it is predicted to save time (default); winograd: tiles "
        "of four too, whose results share their rounding errors; direct: never",
    )
    parser.add_argument(
        "--contraction",
        choices=CONTRACTIONS,
        help="auto: every row by itself (default); strassen: by Strassen's algorithm where it is predicted to save "
        "time, rows then share their rounding errors; direct: as the model says",
    )
    parser.add_argument(
        "--denormals",
        choices=DENORMALS,
        help="flush: numbers below the smallest normal one count as zeros on CPUs (default); keep: computed with",
    )


def add_mesh(parser: argparse.ArgumentParser) -> Any:
    """Options about several processes; gives their group."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--mesh", metavar="tp=2",
        help="share the model out to processes that torchrun started: axes and their sizes, or auto",
    )  # fmt: skip
    group.add_argument(
        "--micro-batches", metavar="N", type=int, default=1,
        help="parts of the batch that follow each other through stages (default: 1)",
    )  # fmt: skip
    return group


def add_timeout(group: Any) -> None:
    group.add_argument(
        "--timeout", metavar="S", type=float, default=60.0, help="seconds that one waits for another (default: 60)"
    )


def compile_model(
    arguments: argparse.Namespace, given: Mapping[str, Array] | None = None, watch: Watch | None = None
) -> Any:
    """Compile as the command line says, showing progress; arrays that are given settle what shapes are left open. A
    directory holds a model that is compiled already."""
    mesh = getattr(arguments, "mesh", None)
    if arguments.model.is_dir() and mesh is not None:
        raise OptionError(f"{arguments.model} is compiled already: --mesh takes the model file")
    if arguments.model.is_dir():
        timeout = getattr(arguments, "timeout", 60.0)
        return load(arguments.model, threads=arguments.threads, trust=arguments.trust, timeout=timeout)
    shapes: dict[str, tuple[int, ...]] = {name: array.shape for name, array in (given or {}).items()}
    title = f"compiling {printable(arguments.model.name)}"
    with working(title) if watch is None else nullcontext() as tell:
        options = Options.from_environment(
            target=arguments.target,
            threads=arguments.threads,
            precision=arguments.precision,
            schedule=arguments.schedule,
            merging=arguments.merging,
            convolution=arguments.convolution,
            contraction=arguments.contraction,
            denormals=arguments.denormals,
            effort=arguments.effort,
            optimize=arguments.optimize,
            fallback=arguments.fallback,
            memory=arguments.memory,
            device_memory=arguments.device_memory,
            tune=arguments.tune,
            tune_trials=getattr(arguments, "trials", None),
            tune_arithmetic=arguments.arithmetic,
            tune_records=arguments.records,
            tune_watch=watch,
            cost_model=arguments.cost_model,
            dump=arguments.dump,
            stop_after=arguments.stop_after,
            overrides=tuple(arguments.override),
            verify=arguments.verify,
            progress=tell,
        )
        if mesh is not None:
            return compile(arguments.model, shapes=shapes | dict(arguments.shape), options=options, mesh=mesh,
                           micro_batches=arguments.micro_batches, timeout=arguments.timeout)  # fmt: skip
        model = compile(arguments.model, shapes=shapes | dict(arguments.shape), options=options)
        if given is not None and isinstance(model, OpenModel):
            model.prepare(restore_types(given, model.inputs))
        return model


def parse_policy(text: str) -> str | tuple[str, ...]:
    """`memory`, or objectives in an order: `latency,fusion`."""
    is_order = "," in text or (text in OBJECTIVES and text not in POLICIES)
    return tuple(part.strip() for part in text.split(",")) if is_order else text


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`NAME=1x3x224x224`; an ONNX name may itself hold an equals sign. `NAME=` is a scalar."""
    name, separator, extents = text.rpartition("=")
    parts = extents.split("x") if extents else []
    if not separator or not name or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=1x3x224x224")
    return name, tuple(int(part) for part in parts)


def parse_override(text: str) -> tuple[str, Path]:
    stage, separator, file = text.partition("=")
    if not separator or not stage or not file:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form STAGE=FILE")
    return stage, Path(file)


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file by name."""
    if not path.exists():
        raise InputError(f"there is no file {path}; write one with numpy.savez({str(path)!r}, NAME=array)")
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise InputError(f"{path} holds one array without a name; write it with numpy.savez, not numpy.save")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = "it is none" if "allow_pickle=`" in str(error) else error
        raise InputError(f"{path} cannot be read as an .npz file: {reason}") from error


def restore_types(arrays: Mapping[str, Array], ports: Sequence[Port | OpenPort | Border]) -> dict[str, Array]:
    """Arrays of types that the .npz format does not know (bfloat16) come back as raw bytes: give them their type."""
    expected = {port.name: port.dtype for port in ports}
    restored = dict(arrays)
    for name, array in arrays.items():
        dtype = expected.get(name)
        if dtype is not None and array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
            restored[name] = array.view(dtype)
    return restored


def settled_model(
    arguments: argparse.Namespace, given: Mapping[str, Array] | None, watch: Watch | None = None
) -> Model | StagedModel:
    """The model for the shapes of the inputs, where it leaves them open; with the parts they lead to, where it runs
    in parts."""
    model: Any = compile_model(arguments, given, watch)
    if isinstance(model, OpenModel):
        check_settled(model, given)
        inputs = restore_types(given or {}, model.inputs)
        model = model.prepare(inputs)
        given = {port.name: inputs[port.name] for port in model.inputs}
    if isinstance(model, StagedModel) and given is not None:
        model.run(restore_types(given, model.inputs))
    settled: Model | StagedModel = model
    return settled


def inputs_of(model: AnyModel, given: Mapping[str, Array] | None, seed: int) -> dict[str, Array]:
    """What the model runs on: what is given, or random numbers where its shapes are known."""
    if given is not None:
        return restore_types(given, model.inputs)
    check_settled(model, given)
    if isinstance(model, StagedModel):
        takes = ", ".join(map(str, model.inputs))
        raise OptionError(f"the inputs decide what this model computes ({takes}): give --inputs IN.npz")
    return model.random_inputs(seed)


def check_settled(model: AnyModel, given: Mapping[str, Array] | None) -> None:
    """Who does not give inputs that decide shapes is told how."""
    if given is not None or not isinstance(model, OpenModel):
        return
    is_open = any(port.shape is None or not all(isinstance(n, int) for n in port.shape) for port in model.inputs)
    ways = f"{'--shape NAME=SIZES, or ' if is_open else ''}--inputs IN.npz"
    raise OptionError(f"the inputs decide shapes of this model ({', '.join(map(str, model.inputs))}): give {ways}")


def arrays_of(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Outputs as arrays: those of a sequence one by one, strings of a type that is not pickled, nothing of what is
    absent."""
    found: dict[str, Array] = {}
    for name, value in outputs.items():
        items = {f"{name}[{k}]": v for k, v in enumerate(value)} if isinstance(value, list) else {name: value}
        arrays = {n: np.asarray(v) for n, v in items.items() if v is not None}
        found |= {n: a.astype(str) if a.dtype.kind == "O" else a for n, a in arrays.items()}
    return found


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """An .npz file under exactly this path. numpy.savez adds a suffix and cannot take an array named 'file'."""
    try:
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error


def output_console() -> Console:
    """For tables on stdout. Into a pipe they are as wide as they need, where a terminal would fold them."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def printable(text: str) -> str:
    """Text for a terminal: characters that command one are spelled out, lines stay."""
    return errors.printable(text, keep="\n")


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
