"""What a call costs beyond its arithmetic: models of one Add beside other runtimes, each in a process of its own."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from bench.support import RESULTS, add_runtime_options, number_text, table, write_files
from tilewright.report.sidebyside import Comparison, compare

RUNTIMES = ("tilewright", "onnxruntime", "openvino")
SHAPES = ((1,), (1, 64), (1, 4096))


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), **self.comparison.to_json(), "model": "one Add"}


def add_model(shape: Sequence[int]) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name in ("a", "b", "sum")]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["sum"])], "add", ports[:2], ports[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(shape: tuple[int, ...], runtimes: Sequence[str], threads: int, rounds: int, seconds: float) -> Case:
    with tempfile.TemporaryDirectory(prefix="tilewright-overhead-") as folder:
        path = Path(folder, "add.onnx")
        onnx.save(add_model(shape), path)
        print(f"one Add of shape {shape}", file=sys.stderr, flush=True)
        return Case(shape, compare(path, runtimes, threads, rounds=rounds, seconds_per_round=seconds))


def to_markdown(cases: Sequence[Case]) -> str:
    first = cases[0].comparison
    names = [result.name for result in first.runtimes]
    rows = []
    for case in cases:
        times = [None if r.median_ms is None else 1e3 * r.median_ms for r in case.comparison.runtimes]
        ratio = number_text(case.comparison.ratio_to_best_peer, ".2f")
        rows.append([str(case.shape), *(number_text(time, ".2f") for time in times), ratio])
    machine = f"{first.machine['processor']}, {first.threads} threads"
    disturbance = max(case.comparison.disturbance_cores or 0.0 for case in cases)
    lines = [f"Microseconds a call of a model of one Add, inputs by name, median of rounds, on {machine}.", ""]
    lines += table(["shape", *names, "to best peer"], rows)
    lines += ["", f"Cores that other work kept busy meanwhile, at worst: {disturbance:.2f}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description="The cost of a call.")
    add_runtime_options(parser, RUNTIMES, rounds=7, seconds=0.3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for overhead.json and overhead.md")
    given = parser.parse_args()
    runtimes = given.runtimes.split(",")
    cases = [measure(shape, runtimes, given.threads, given.rounds, given.seconds) for shape in SHAPES]
    text = to_markdown(cases)
    write_files(given.results, "overhead", {"cases": [case.to_json() for case in cases]}, text)
    print(text)


if __name__ == "__main__":
    main()
