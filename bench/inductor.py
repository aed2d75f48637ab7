"""torch.compile(module, backend="tilewright") beside Inductor, over the zoo and for a call of almost nothing.

Each backend in a process of its own, rounds alternating; a model's times are written down as soon as they are known,
and a later run replaces those it measures anew.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from bench.cpu import report_model
from bench.overhead import add_model
from bench.support import (
    add_runtime_options,
    add_zoo_options,
    chosen_models,
    export_folder,
    geometric_mean,
    number_text,
    table,
    versions_of,
    write_files,
)
from tilewright.report.sidebyside import Comparison, compare

OURS, PEER = "torch:tilewright", "torch"
ADD = "one Add of 64"


class Add(torch.nn.Module):
    output_names = ("sum",)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


def one_add() -> tuple[torch.nn.Module, Mapping[str, np.ndarray]]:
    return Add(), {"a": np.ones((1, 64), np.float32), "b": np.ones((1, 64), np.float32)}


def measure_add(threads: int, rounds: int, seconds: float) -> Comparison:
    """What a call costs beyond its arithmetic."""
    with tempfile.TemporaryDirectory(prefix="tilewright-inductor-") as folder:
        path = Path(folder, "add.onnx")
        onnx.save(add_model((1, 64)), path)
        return compare(path, (OURS, PEER), threads, inputs=one_add()[1], rounds=rounds, seconds_per_round=seconds,
                       torch_spec="bench.inductor:one_add", timeout_s=900.0)  # fmt: skip


def entry(name: str, found: Comparison) -> dict[str, Any]:
    ours, peer = found.median_of(OURS), found.median_of(PEER)
    errors = {r.name: r.error for r in found.runtimes if r.error is not None}
    starts = {r.name: r.cold_start_s for r in found.runtimes}
    speedup = None if ours is None or peer is None else peer / ours
    return {"name": name, "tilewright_ms": ours, "inductor_ms": peer, "speedup": speedup, "cold_start_s": starts,
            "relative_error": {r.name: r.relative_error for r in found.runtimes}, "errors": errors,
            "disturbance_cores": found.disturbance_cores, "versions": versions_of(found.runtimes),
            "threads": found.threads, "machine": dict(found.machine)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.inductor", description=__doc__)
    add_zoo_options(parser, "inductor")
    add_runtime_options(parser, (OURS, PEER), rounds=5, seconds=0.5)
    arguments = parser.parse_args()
    names = chosen_models(parser, arguments)
    path = arguments.results / "inductor.json"
    known = {e["name"]: e for e in json.loads(path.read_text())["models"]} if path.is_file() else {}

    def keep(name: str, found: Comparison) -> None:
        known[name] = entry(name, found)
        write_files(arguments.results, "inductor", {"models": list(known.values())}, to_markdown(list(known.values())))
        print(f"{name}: {number_text(known[name]['speedup'], '.2f')}x Inductor", file=sys.stderr, flush=True)

    keep(ADD, measure_add(arguments.threads, arguments.rounds, min(0.3, arguments.seconds)))
    with export_folder(arguments) as (_, folder):
        for name in names:
            report = report_model(name, folder, size=arguments.size, runtimes=arguments.runtimes.split(","),
                                  threads=arguments.threads, rounds=arguments.rounds,
                                  seconds=arguments.seconds)  # fmt: skip
            keep(name, report.comparison)
    print((arguments.results / "inductor.md").read_text())


def to_markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    first = entries[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    rows = []
    for e in entries:
        times = [number_text(e[key], ".4g") for key in ("tilewright_ms", "inductor_ms")]
        starts = [number_text(e["cold_start_s"].get(name), ".1f") for name in (OURS, PEER)]
        errors = [number_text(e["relative_error"].get(name), ".1e") for name in (OURS, PEER)]
        rows.append([e["name"], *times, number_text(e["speedup"], ".2f"), *errors, *starts])
    ratios = [e["speedup"] for e in entries if e["name"] != ADD and e["speedup"] is not None]
    lines = [
        "# torch.compile: our backend beside Inductor", "",
        f"{first['machine']['processor']}, {first['threads']} threads, float32, batch 1; {versions}. Milliseconds a "
        "call, median of rounds: `python -m bench.inductor`.", "",
        *table(["model", "tilewright", "Inductor", "speed-up", "our error", "its error", "our start, s", "its start"],
               rows), "",
        f"Geometric mean of the speed-up over {len(ratios)} models: **{number_text(geometric_mean(ratios), '.2f')}**. "
        f"A start is the time to the first answer; code that was compiled before may be found again by either.",
    ]  # fmt: skip
    failed = [f"- {e['name']}, {name}: {error}" for e in entries for name, error in e["errors"].items()]
    lines += ["", "Without a number:", "", *failed] if failed else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
