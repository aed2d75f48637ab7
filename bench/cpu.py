"""The zoo on the CPU beside other runtimes: latency, error, and how far each is from the arithmetic floor."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import zoo
from bench.arithmetic import total_operations
from bench.peak import Peak, describe_tools, measure_peak
from bench.plot import grouped_bars
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

RUNTIMES = ("tilewright", "onnxruntime", "openvino", "torch")
# torch.compile writes C++ for each piece of a model: minutes for one with a hundred blocks.
LOADING_SECONDS = 900.0


@dataclass(frozen=True)
class ModelReport:
    name: str
    operations: int
    torch_error: float
    comparison: Comparison

    @property
    def speedup(self) -> float | None:
        """The best peer's time over ours: above one is faster than all of them."""
        ratio = self.comparison.ratio_to_best_peer
        return 1.0 / ratio if ratio is not None else None

    @property
    def allowed_error(self) -> float:
        return max(1e-5, 3.0 * self.torch_error)

    def times_ours(self, runtime: str) -> float | None:
        """Another runtime's time over ours."""
        other, ours = self.comparison.median_of(runtime), self.comparison.median_of(OURS)
        return other / ours if other is not None and ours is not None else None

    def floor_ms(self, peak: Peak) -> float:
        return 1e3 * self.operations / peak.operations_per_second

    def best_peer_ms(self) -> float | None:
        times = [
            result.median_ms
            for result in self.comparison.runtimes
            if result.median_ms is not None and result.name.partition(":")[0] != OURS
        ]
        return min(times, default=None)

    def to_json(self, peak: Peak) -> dict[str, Any]:
        return {
            "name": self.name,
            "operations": self.operations,
            "floor_ms": self.floor_ms(peak),
            "speedup_over_best_peer": self.speedup,
            "torch_float32_error": self.torch_error,
            "allowed_error": self.allowed_error,
            **self.comparison.to_json(),
            "model": f"{self.name}.onnx",
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    add_zoo_options(parser, "cpu", plot=True, batch=True)
    add_runtime_options(parser, RUNTIMES, rounds=7, seconds=0.5)
    arguments = parser.parse_args()
    names = chosen_models(parser, arguments)
    peak = measure_peak(arguments.threads)
    reports: list[ModelReport] = []
    with export_folder(arguments) as (_, folder):
        for name in names:
            reports.append(
                report_model(
                    name,
                    folder,
                    size=arguments.size,
                    batch=arguments.batch,
                    runtimes=arguments.runtimes.split(","),
                    threads=arguments.threads,
                    rounds=arguments.rounds,
                    seconds=arguments.seconds,
                )
            )
            # Written after each model, so that an interrupted run leaves what it has learnt.
            write_results(arguments.results, reports, peak, arguments.batch)
            print(f"{name}: {number_text(reports[-1].speedup, '.2f')}x the best peer", flush=True)
    print((arguments.results / f"{file_name(arguments.batch)}.md").read_text())


def report_model(
    name: str,
    folder: Path,
    *,
    size: str,
    batch: int = 1,
    runtimes: Sequence[str],
    threads: int,
    rounds: int,
    seconds: float,
) -> ModelReport:
    def tell(message: str) -> None:
        print(f"{name}: {message}", file=sys.stderr, flush=True)

    path = folder / f"{name}.onnx"
    if not path.is_file() or not path.with_suffix(".npz").is_file():
        tell("building, reference and export")
        export_files(name, size, folder, ("torchscript",), batch)
    with np.load(path.with_suffix(".npz")) as archive:
        arrays = {key: archive[key] for key in archive.files}
    inputs = {key: array for key, array in arrays.items() if ":" not in key}
    reference = {key.removeprefix("ref:"): array for key, array in arrays.items() if key.startswith("ref:")}
    float32 = {key.removeprefix("f32:"): array for key, array in arrays.items() if key.startswith("f32:")}
    comparison = compare(
        path,
        runtimes,
        threads,
        inputs=inputs,
        rounds=rounds,
        seconds_per_round=seconds,
        progress=lambda message, _fraction: tell(message),
        torch_spec=f"bench.zoo:build:{name}:{size}:{batch}",
        reference=reference,
        timeout_s=LOADING_SECONDS,
    )
    return ModelReport(name, total_operations(path), zoo.relative_error(float32, reference), comparison)


def file_name(batch: int) -> str:
    """Of the results; larger batches do not take the place of single inputs."""
    return "cpu" if batch == 1 else f"cpu-batch{batch}"


def write_results(folder: Path, reports: Sequence[ModelReport], peak: Peak, batch: int = 1) -> None:
    document = {
        "machine": dict(reports[0].comparison.machine),
        "versions": versions(reports) | describe_tools(),
        "peak": peak.to_json(),
        "speedup_over_best_peer": geometric_mean([report.speedup for report in reports]),
        "speedup_without_the_largest": without_the_largest(reports),
        "times_ours": times_ours(reports),
        "models": [report.to_json(peak) for report in reports],
    }
    write_files(folder, file_name(batch), document, to_markdown(reports, peak, batch), to_plot(reports))


def without_the_largest(reports: Sequence[ModelReport]) -> float | None:
    """The geometric mean of the speed-up without the model where it is largest: one small model is not the whole."""
    known = sorted(report.speedup for report in reports if report.speedup is not None)
    return geometric_mean(known[:-1]) if len(known) == len(reports) else None


def times_ours(reports: Sequence[ModelReport]) -> dict[str, float | None]:
    """Geometric means over the models, by runtime; other schedules of ours among them."""
    names = [result.name for result in reports[0].comparison.runtimes if result.name != OURS]
    return {name: geometric_mean([report.times_ours(name) for report in reports]) for name in names}


def versions(reports: Sequence[ModelReport]) -> dict[str, str]:
    return versions_of(result for report in reports for result in report.comparison.runtimes)


def to_markdown(reports: Sequence[ModelReport], peak: Peak, batch: int = 1) -> str:
    first = reports[0].comparison
    names = [result.name for result in first.runtimes]
    title = "The zoo on the CPU" if batch == 1 else f"The zoo on the CPU, batch {batch}"
    lines = [
        *heading(title, first.machine, peak, versions(reports)),
        "Latency in ms, median of rounds. Speed-up is the best peer's time over ours. The floor is the arithmetic "
        "of contractions and convolutions, counted directly, at the measured peak.",
        "",
    ]
    latencies, errors, starts = [], [], []
    for report in reports:
        results = report.comparison.runtimes
        ours = report.comparison.median_of(OURS)
        floor = report.floor_ms(peak)
        share = f"{100 * floor / ours:.0f}%" if ours is not None else "-"
        numbers = [number_text(report.speedup, ".2f"), format(floor, ".4g"), share]
        latencies.append([report.name, *map(latency_text, results), *numbers])
        limits = [number_text(report.torch_error, ".1e"), number_text(report.allowed_error, ".1e")]
        errors.append([report.name, *(number_text(each.relative_error, ".1e") for each in results), *limits])
        starts.append([report.name, *(number_text(each.cold_start_s, ".1f") for each in results)])
    lines += table(["model", *names, "speed-up", "floor", "floor / ours"], latencies)
    geomean = geometric_mean([report.speedup for report in reports])
    disturbance = max(report.comparison.disturbance_cores or 0.0 for report in reports)
    smaller = number_text(without_the_largest(reports), ".2f")
    lines += [
        "",
        f"Geometric mean of the speed-up over the best peer: **{number_text(geomean, '.2f')}**, "
        f"{smaller} without the model where it is largest.",
    ]
    others = ", ".join(f"{name} {number_text(mean, '.2f')}" for name, mean in times_ours(reports).items())
    lines += [f"Geometric means of other times over ours: {others}."] if others else []
    lines += [f"Cores that other work kept busy meanwhile, at worst: {disturbance:.2f}.", "",
              f"![speed]({file_name(batch)}.svg)"]  # fmt: skip
    lines += ["", "Relative error to the float64 reference; ours may reach the limit.", ""]
    lines += table(["model", *names, "PyTorch float32", "limit"], errors)
    lines += ["", "Seconds from start to the first answer, compilation included.", ""]
    lines += table(["model", *names], starts)
    lines += failure_lines((r.name, each.name, each.error) for r in reports for each in r.comparison.runtimes)
    return "\n".join(lines) + "\n"


def to_plot(reports: Sequence[ModelReport]) -> str:
    """Speed of every runtime relative to the best peer of each model."""
    names = [result.name for result in reports[0].comparison.runtimes]
    series: dict[str, list[float | None]] = {name: [] for name in names}
    for report in reports:
        best = report.best_peer_ms()
        for name in names:
            time = report.comparison.median_of(name)
            series[name].append(best / time if best is not None and time is not None else None)
    title = f"Speed relative to the best peer, {reports[0].comparison.threads} threads, float32, batch 1"
    return grouped_bars(title, [report.name for report in reports], series, marked=1.0)


if __name__ == "__main__":
    main()
