"""Quantised networks of the zoo: ours in 8 bits beside ONNX Runtime's, and beside our own float32.

The float model is quantised by ONNX Runtime's own tool (QuantizeLinear and DequantizeLinear around every operator, one
scale a channel for weights), calibrated on its example input. python -m bench.quantised [--threads N] [--models ...].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.peak import Peak, describe_tools, measure_peak
from bench.support import (
    add_runtime_options,
    add_zoo_options,
    chosen_models,
    export_folder,
    failure_lines,
    geometric_mean,
    heading,
    latency_text,
    number_text,
    table,
    versions_of,
    write_files,
)
from bench.zoo.__main__ import export_files
from tilewright.report.sidebyside import OURS, Comparison, compare

MODELS = "mobilenet_v2,resnet50"
RUNTIMES = ("tilewright", "onnxruntime")


@dataclass(frozen=True)
class QuantisedReport:
    name: str
    quantised: Comparison
    plain: Comparison  # ours in float32

    @property
    def speedup(self) -> float | None:
        """The best peer's time over ours, both in 8 bits."""
        ratio = self.quantised.ratio_to_best_peer
        return 1.0 / ratio if ratio is not None else None

    @property
    def gain(self) -> float | None:
        """Our time in float32 over ours in 8 bits."""
        ours, plain = self.quantised.median_of(OURS), self.plain.median_of(OURS)
        return None if ours is None or plain is None else plain / ours

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "speedup_over_best_peer": self.speedup,
            "gain_over_float32": self.gain,
            "quantised": {**self.quantised.to_json(), "model": f"{self.name}.int8.onnx"},
            "float32": {**self.plain.to_json(), "model": f"{self.name}.onnx"},
        }


def quantise(path: Path, inputs: Mapping[str, np.ndarray], target: Path) -> None:
    """Unsigned activations, signed weights by channel."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Example(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.waiting: Iterator[Mapping[str, np.ndarray]] = iter([inputs])

        def get_next(self) -> Mapping[str, np.ndarray] | None:
            return next(self.waiting, None)

    prepared = target.with_suffix(".prepared.onnx")
    quant_pre_process(path, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared, target, Example(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    prepared.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantised", description=__doc__)
    add_zoo_options(parser, "quantised")
    add_runtime_options(parser, RUNTIMES, rounds=7, seconds=0.5)
    parser.set_defaults(models=MODELS)
    arguments = parser.parse_args()
    names = chosen_models(parser, arguments)
    peak = measure_peak(arguments.threads)
    reports: list[QuantisedReport] = []
    with export_folder(arguments) as (_, folder):
        for name in names:
            reports.append(report_model(name, folder, arguments))
            write_results(arguments.results, reports, peak)
            shown = number_text(reports[-1].speedup, ".2f"), number_text(reports[-1].gain, ".2f")
            print(f"{name}: {shown[0]}x the best peer, {shown[1]}x our float32", flush=True)
    print((arguments.results / "quantised.md").read_text())


def report_model(name: str, folder: Path, arguments: argparse.Namespace) -> QuantisedReport:
    def tell(message: str) -> None:
        print(f"{name}: {message}", file=sys.stderr, flush=True)

    path = folder / f"{name}.onnx"
    if not path.is_file() or not path.with_suffix(".npz").is_file():
        tell("building, reference and export")
        export_files(name, arguments.size, folder, ("torchscript",))
    with np.load(path.with_suffix(".npz")) as archive:
        arrays = {key: archive[key] for key in archive.files}
    inputs = {key: array for key, array in arrays.items() if ":" not in key}
    reference = {key.removeprefix("ref:"): array for key, array in arrays.items() if key.startswith("ref:")}
    quantised = path.with_suffix(".int8.onnx")
    if not quantised.is_file():
        tell("quantising")
        quantise(path, inputs, quantised)
    found = [
        compare(
            model, runtimes, arguments.threads, inputs=inputs, rounds=arguments.rounds,
            seconds_per_round=arguments.seconds, progress=lambda message, _fraction: tell(message), reference=reference,
        )
        for model, runtimes in ((quantised, arguments.runtimes.split(",")), (path, [OURS]))
    ]  # fmt: skip
    return QuantisedReport(name, *found)


def write_results(folder: Path, reports: Sequence[QuantisedReport], peak: Peak) -> None:
    document = {
        "machine": dict(reports[0].quantised.machine),
        "versions": versions(reports) | describe_tools(),
        "threads": peak.threads,
        "speedup_over_best_peer": geometric_mean([report.speedup for report in reports]),
        "models": [report.to_json() for report in reports],
    }
    write_files(folder, "quantised", document, to_markdown(reports, peak))


def versions(reports: Sequence[QuantisedReport]) -> dict[str, str]:
    return versions_of(result for report in reports for result in report.quantised.runtimes)


def to_markdown(reports: Sequence[QuantisedReport], peak: Peak) -> str:
    first = reports[0].quantised
    names = [result.name for result in first.runtimes]
    lines = [
        *heading("Quantised networks on the CPU", first.machine, peak, versions(reports)),
        "Latency in ms, median of rounds, of the model in 8 bits; last ours in float32. Speed-up is the best peer's "
        "time over ours in 8 bits, gain our float32 over it.",
        "",
    ]
    latencies, errors = [], []
    for report in reports:
        results, (plain,) = report.quantised.runtimes, report.plain.runtimes
        numbers = [latency_text(plain), number_text(report.speedup, ".2f"), number_text(report.gain, ".2f")]
        latencies.append([report.name, *map(latency_text, results), *numbers])
        errors.append([report.name, *(number_text(each.relative_error, ".1e") for each in (*results, plain))])
    lines += table(["model", *names, "ours in float32", "speed-up", "gain"], latencies)
    geomean = geometric_mean([report.speedup for report in reports])
    disturbance = max(report.quantised.disturbance_cores or 0.0 for report in reports)
    lines += ["", f"Geometric mean of the speed-up over the best peer: **{number_text(geomean, '.2f')}**."]
    lines += [f"Cores that other work kept busy meanwhile, at worst: {disturbance:.2f}."]
    lines += ["", "Relative error to the float64 reference of the float model.", ""]
    lines += table(["model", *names, "ours in float32"], errors)
    found = [(r.name, each) for r in reports for each in (*r.quantised.runtimes, *r.plain.runtimes)]
    lines += failure_lines((name, each.name, each.error) for name, each in found)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
