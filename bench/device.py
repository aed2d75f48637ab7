"""Holds a real GPU against the emulator: `record` runs small models emulated, `run` repeats them on the device.

Run from the repository: `python bench/device.py record DIR` where there is a C++ compiler, then, with DIR at hand,
`python bench/device.py run DIR` on a machine with a GPU. DIR holds NAME.onnx and NAME.npz, as
`python -m bench.zoo export DIR` writes them. `--full` adds the full-size models, beside PyTorch in eager mode.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tilewright
from tilewright.errors import TilewrightError

SCHEDULES = ("none", "connected")


@dataclass(frozen=True)
class Row:
    """One line of the table; an error takes the place of the numbers."""

    model: str
    schedule: str
    kernels: int = 0
    calls: int = 0
    against_reference: float | None = None
    against_emulator: float | None = None
    call_ms: float | None = None
    device_ms: float | None = None
    torch_ms: float | None = None
    error: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run the models of DIR under the emulator and keep their outputs")
    record.add_argument("directory", type=Path, metavar="DIR")
    run = commands.add_parser("run", help="run the models of DIR on this machine's GPU and compare")
    run.add_argument("directory", type=Path, metavar="DIR")
    run.add_argument("--schedule", choices=SCHEDULES, action="append", help="only this one; repeatable")
    run.add_argument("--full", action="store_true", help="also build the zoo's full-size models (needs torch)")
    run.add_argument("--model", action="append", help="only this one; repeatable")
    run.add_argument("--repeat", type=int, default=30, help="timed calls, of which the median counts")
    run.add_argument("--target", default="cuda", choices=("cuda", "cuda-emulated"))
    run.add_argument("--profile", action="store_true", help="print each full-size model's slowest kernels")
    arguments = parser.parse_args()
    if arguments.command == "record":
        return record_all(arguments.directory)
    return run_all(arguments)


def models_in(directory: Path) -> list[Path]:
    return sorted(p for p in directory.glob("*.onnx") if p.with_suffix(".npz").exists())


def recorded(path: Path, schedule: str) -> Path:
    return path.with_name(f"{path.stem}.{schedule}.emulated.npz")


def record_all(directory: Path) -> int:
    for path in models_in(directory):
        for schedule in SCHEDULES:
            model = tilewright.compile(path, target="cuda-emulated", schedule=schedule)
            outputs = model.run(inputs_of(model, np.load(path.with_suffix(".npz"))))
            np.savez(recorded(path, schedule), **outputs)  # type: ignore[arg-type]
            print(f"{recorded(path, schedule)}", flush=True)
    return 0


def run_all(arguments: argparse.Namespace) -> int:
    rows: list[Row] = []
    schedules = arguments.schedule or SCHEDULES
    wanted = set(arguments.model or ())
    for path in models_in(arguments.directory):
        if not wanted or path.stem in wanted:
            for schedule in schedules:
                rows.append(guarded(path.stem, schedule, lambda s=schedule, p=path: small_row(p, s, arguments)))
    if arguments.full:
        rows.extend(full_rows(schedules, wanted, arguments))
    print_table(rows)
    return 1 if any(row.error for row in rows) else 0


def guarded(name: str, schedule: str, measure: Callable[[], Row]) -> Row:
    try:
        row = measure()
    except TilewrightError as error:
        row = Row(name, schedule, error=str(error).splitlines()[0])
    print(f"{name} {schedule}: {row.error or 'done'}", flush=True)
    return row


def small_row(path: Path, schedule: str, arguments: argparse.Namespace) -> Row:
    data = np.load(path.with_suffix(".npz"))
    model = tilewright.compile(path, target=arguments.target, schedule=schedule)
    inputs = inputs_of(model, data)
    outputs = model.run(inputs)
    reference = max(relative_error(array, data[f"ref:{name}"]) for name, array in outputs.items())
    emulated: float | None = None
    if recorded(path, schedule).exists():
        kept = np.load(recorded(path, schedule))
        emulated = max(relative_error(array, kept[name]) for name, array in outputs.items())
    return Row(path.stem, schedule, *counts(model), reference, emulated, *times(model, inputs, arguments.repeat))


def full_rows(schedules: Sequence[str], wanted: set[str], arguments: argparse.Namespace) -> list[Row]:
    try:
        from bench import zoo
    except ImportError as error:
        return [Row("full size", "", error=f"the zoo needs torch: {error}")]
    rows = []
    for name in zoo.MODELS:
        if wanted and name not in wanted:
            continue
        module, inputs = zoo.build(name, "full")
        reference = zoo.reference(module, inputs)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.onnx"
            zoo.export_module(module, inputs, path)
            eager = torch_ms(module, inputs, arguments.repeat) if arguments.target == "cuda" else None

            def measure(schedule: str, name: str = name, path: Path = path, inputs: Any = inputs,
                        reference: Any = reference, eager: float | None = eager) -> Row:  # fmt: skip
                model = tilewright.compile(path, target=arguments.target, schedule=schedule)
                outputs = model.run(inputs)
                worst = max(relative_error(outputs[key], array) for key, array in reference.items())
                if arguments.profile:
                    print("\n".join(str(model.profile(repeat=5)).splitlines()[:12]), flush=True)
                return Row(
                    f"{name} full",
                    schedule,
                    *counts(model),
                    worst,
                    None,
                    *times(model, inputs, arguments.repeat),
                    eager,
                )

            for schedule in schedules:
                rows.append(guarded(f"{name} full", schedule, lambda s=schedule, m=measure: m(s)))
    return rows


def inputs_of(model: tilewright.Model, data: Any) -> dict[str, np.ndarray]:
    return {port.name: data[port.name] for port in model.inputs}


def counts(model: tilewright.Model) -> tuple[int, int]:
    return len(model.artifact.plan.kernels), len(model.artifact.loops.calls)


def relative_error(array: np.ndarray, reference: np.ndarray) -> float:
    wide = np.asarray(reference, np.float64)
    return float(np.linalg.norm(array.astype(np.float64) - wide) / np.linalg.norm(wide))


def times(model: tilewright.Model, inputs: dict[str, np.ndarray], repeat: int) -> tuple[float, float]:
    """(median of a call with its copies, kernels alone by the device's clock), in milliseconds."""
    profile = model.profile(inputs, repeat=max(1, repeat // 5))
    walls = []
    for _ in range(repeat):
        begin = time.perf_counter()
        model.run(inputs)
        walls.append(time.perf_counter() - begin)
    return median(walls) * 1e3, profile.total_nanoseconds / 1e6


def torch_ms(module: Any, inputs: dict[str, np.ndarray], repeat: int) -> float | None:
    """PyTorch in eager mode on the GPU, in full float32 as ours, its copies left out."""
    import torch

    if not torch.cuda.is_available():
        return None
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    on_device = module.to("cuda")
    given = [torch.from_numpy(a).to("cuda") for a in inputs.values()]
    walls = []
    with torch.no_grad():
        for number in range(repeat + 5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            on_device(*given)
            torch.cuda.synchronize()
            if number >= 5:
                walls.append(time.perf_counter() - begin)
    module.to("cpu")
    return median(walls) * 1e3


def print_table(rows: Sequence[Row]) -> None:
    head = ("model", "schedule", "kernels", "launches", "reference", "emulator", "call ms", "device ms", "torch ms")
    lines = [head]
    for row in rows:
        numbers = (
            ("", "", row.error, "", "", "", "") if row.error else
            (str(row.kernels), str(row.calls), scientific(row.against_reference), scientific(row.against_emulator),
             plain(row.call_ms), plain(row.device_ms), plain(row.torch_ms))
        )  # fmt: skip
        lines.append((row.model, row.schedule, *numbers))
    widths = [max(len(line[i]) for line in lines if not (i == 4 and line[2] == "")) for i in range(len(head))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
