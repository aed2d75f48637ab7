"""The slice in numbers: accuracy and latency of the zoo's models beside other runtimes."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import zoo
from bench.support import (
    RESULTS,
    add_runtime_options,
    failure_lines,
    geometric_mean,
    latency_text,
    number_text,
    table,
    write_files,
)
from tilewright.report.sidebyside import Comparison, compare

RUNTIMES = ("tilewright", "tilewright:none", "onnxruntime", "openvino", "torch", "torch:frozen")


@dataclass(frozen=True)
class ModelReport:
    """One model: PyTorch's own float32 error, the error that we allow ourselves, and the times."""

    name: str
    torch_error: float
    comparison: Comparison

    @property
    def allowed_error(self) -> float:
        return max(1e-5, 3.0 * self.torch_error)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "torch_float32_error": self.torch_error,
            "allowed_error": self.allowed_error,
            **self.comparison.to_json(),
            "model": f"{self.name}.onnx",
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.slice",
        description="Accuracy and latency of the zoo's models beside other runtimes.",
    )
    parser.add_argument("--size", choices=zoo.SIZES, default="full")
    parser.add_argument("--model", choices=tuple(zoo.MODELS), action="append", help="only this one; repeatable")
    add_runtime_options(parser, RUNTIMES, rounds=7, seconds=0.5)
    parser.add_argument("--exporter", choices=zoo.EXPORTERS, default="torchscript")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for slice.json and slice.md")
    arguments = parser.parse_args()

    reports = []
    for name in arguments.model or zoo.SLICE:
        reports.append(
            report_model(
                name,
                size=arguments.size,
                exporter=arguments.exporter,
                runtimes=arguments.runtimes.split(","),
                threads=arguments.threads,
                rounds=arguments.rounds,
                seconds=arguments.seconds,
            )
        )
        # Written after each model, so that an interrupted run leaves what it has learnt.
        text = to_markdown(reports)
        document = {"models": [report.to_json() for report in reports], "summary": summarise(reports)}
        write_files(arguments.results, "slice", document, text)
    print(text)


def report_model(
    name: str,
    *,
    size: str,
    exporter: str,
    runtimes: Sequence[str],
    threads: int,
    rounds: int,
    seconds: float,
) -> ModelReport:
    print(f"{name}: building, reference and export", file=sys.stderr, flush=True)
    module, inputs = zoo.build(name, size)
    reference = zoo.reference(module, inputs)
    torch_error = zoo.relative_error(zoo.float32_outputs(module, inputs), reference)
    with tempfile.TemporaryDirectory(prefix="tilewright-slice-") as directory:
        path = Path(directory, f"{name}.onnx")
        zoo.export_module(module, inputs, path, exporter=exporter)
        comparison = compare(
            path,
            runtimes,
            threads,
            inputs=inputs,
            rounds=rounds,
            seconds_per_round=seconds,
            progress=lambda message, _fraction: print(f"{name}: {message}", file=sys.stderr, flush=True),
            torch_spec=f"bench.zoo:build:{name}:{size}",
            reference=reference,
        )
    return ModelReport(name, torch_error, comparison)


def summarise(reports: Sequence[ModelReport]) -> dict[str, float | None]:
    """Geometric means over the models; None where a model has no number."""
    comparisons = [report.comparison for report in reports]
    return {
        "tilewright_to_best_peer": geometric_mean([each.ratio_to_best_peer for each in comparisons]),
        "none_to_onnxruntime": geometric_mean([ratio(each, "tilewright:none", "onnxruntime") for each in comparisons]),
        "tilewright_to_none": geometric_mean([ratio(each, "tilewright", "tilewright:none") for each in comparisons]),
    }


def ratio(comparison: Comparison, numerator: str, denominator: str) -> float | None:
    above, below = comparison.median_of(numerator), comparison.median_of(denominator)
    return above / below if above is not None and below is not None else None


def to_markdown(reports: Sequence[ModelReport]) -> str:
    first = reports[0].comparison
    names = [result.name for result in first.runtimes]
    machine = f"{first.machine['processor']}, {first.threads} threads"
    latencies, errors = [], []
    for report in reports:
        results = report.comparison.runtimes
        best = number_text(report.comparison.ratio_to_best_peer, ".2f")
        latencies.append([report.name, *map(latency_text, results), best])
        limits = [number_text(report.torch_error, ".1e"), number_text(report.allowed_error, ".1e")]
        errors.append([report.name, *(number_text(each.relative_error, ".1e") for each in results), *limits])
    lines = [f"Latency in ms, median of rounds, on {machine}.", ""]
    lines += table(["model", *names, "to best peer"], latencies)
    lines += ["", "Relative error to the float64 reference; ours may reach the limit.", ""]
    lines += table(["model", *names, "PyTorch float32", "limit"], errors)
    lines += ["", "Geometric means over the models:", ""]
    lines += [f"- {key.replace('_', ' ')}: {number_text(value, '.2f')}" for key, value in summarise(reports).items()]
    disturbances = [report.comparison.disturbance_cores or 0.0 for report in reports]
    lines += [f"- cores that other work kept busy meanwhile, at worst: {max(disturbances):.2f}"]
    lines += failure_lines((r.name, each.name, each.error) for r in reports for each in r.comparison.runtimes)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
