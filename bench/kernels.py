"""Single contractions and convolutions beside ONNX Runtime and torch: operations a second and shares of the peak;
single operators of every kind beside ONNX Runtime.

One worker process a runtime serves all cases in turn, stopped whenever it is not its turn.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.kernel_cases import Case, fixed_cases, operator_cases, random_cases, write_model, zoo_cases
from bench.operator_report import operator_lines
from bench.peak import Peak, describe_tools, measure_peak
from bench.plot import grouped_bars
from bench.support import (
    add_runtime_options,
    add_zoo_options,
    chosen_models,
    export_folder,
    exported,
    failure_lines,
    geometric_mean,
    heading,
    number_text,
    table,
    write_files,
)
from tilewright.report.peers import Job, find_peer
from tilewright.report.sidebyside import (
    OURS,
    Worker,
    WorkerError,
    describe_machine,
    random_inputs,
    read_interface,
    relative_error,
)

RUNTIMES = ("tilewright", "onnxruntime", "torch:eager")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Timing:
    """Seconds of a call, or why there are none; `difference` is relative to the first peer's answer."""

    seconds: float | None = None
    error: str | None = None
    difference: float | None = None


@dataclass(frozen=True)
class CaseReport:
    case: Case
    timings: Mapping[str, Timing]

    def rate(self, runtime: str) -> float | None:
        """Operations a second."""
        seconds = self.timings[runtime].seconds
        return self.case.problem.operations / seconds if seconds is not None else None

    def read_rate(self, runtime: str) -> float | None:
        """Bytes a second, every operand counted once."""
        seconds = self.timings[runtime].seconds
        return 4 * self.case.problem.data_elements / seconds if seconds is not None else None

    def speedup(self, peer: str) -> float | None:
        ours, theirs = self.timings[OURS].seconds, self.timings[peer].seconds
        return theirs / ours if ours is not None and theirs is not None else None

    def to_json(self) -> dict[str, Any]:
        runtimes = {
            name: {
                "us": each.seconds * 1e6 if each.seconds is not None else None,
                "gflops": _scaled(self.rate(name), 1e-9),
                "error": each.error,
                "difference": each.difference,
            }
            for name, each in self.timings.items()
        }
        problem = self.case.problem
        return {
            "group": self.case.group,
            "problem": problem.describe(),
            "origin": self.case.origin,
            "operations": problem.operations,
            "bytes": 4 * problem.data_elements,
            "runtimes": runtimes,
        }


class Pool:
    """One worker a runtime, started again after it has failed."""

    def __init__(self, runtimes: Sequence[str], threads: int, folder: Path) -> None:
        self.threads = threads
        self.folder = folder
        self.peers = {name: find_peer(name) for name in runtimes}
        self.workers: dict[str, Worker] = {}
        self.versions: dict[str, str] = {}
        self.skipped = {name: f"{peer.module} is not installed" for name, (peer, _) in self.peers.items()
                        if not peer.is_installed()}  # fmt: skip

    def request(self, name: str, message: Mapping[str, Any]) -> dict[str, Any]:
        if name not in self.workers:
            log = self.folder / f"{name.replace(':', '-')}.log"
            self.workers[name] = Worker(log.open("w+b"))
        try:
            return self.workers[name].request(message, TIMEOUT_S)
        except WorkerError:
            self.workers.pop(name).close()
            raise

    def load(self, name: str, model: Path, inputs: Path, output_names: tuple[str, ...]) -> None:
        peer, variant = self.peers[name]
        spec = f"bench.kernel_cases:load_torch:{model}"
        job = Job(peer.name, variant, str(model), str(inputs), output_names, self.threads, spec)
        reply = self.request(name, {"command": "load", "job": job.to_json()})
        version = peer.version() or reply["version"]
        if version is not None:
            self.versions[name.partition(":")[0]] = version

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    add_zoo_options(parser, "kernels", plot=True)
    parser.add_argument("--random", type=int, default=100, metavar="N", help="seeded random shapes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--group", action="append", help="only cases whose group contains this; repeatable")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N cases a group, spread over it: a quick look")
    add_runtime_options(parser, RUNTIMES, rounds=5, seconds=0.1)
    arguments = parser.parse_args()
    runtimes = arguments.runtimes.split(",")
    if OURS not in runtimes or len(runtimes) < 2:
        parser.error(f"--runtimes needs {OURS} and at least one peer")
    names = chosen_models(parser, arguments)
    peak = measure_peak(arguments.threads)
    with export_folder(arguments) as (temporary, folder):
        cases = zoo_cases(exported(names, arguments.size, folder, tell))
        cases += [*fixed_cases(), *random_cases(arguments.random, arguments.seed), *operator_cases()]
        chosen = choose(cases, arguments.group, arguments.limit)
        pool = Pool(runtimes, arguments.threads, temporary)
        reports: list[CaseReport] = []
        try:
            for number, case in enumerate(chosen, start=1):
                tell(f"{number} of {len(chosen)}: {case.group}, {case.problem.describe()}")
                reports.append(measure_case(case, pool, arguments.rounds, arguments.seconds))
                if number % 20 == 0 or number == len(chosen):
                    write_results(arguments.results, reports, peak, pool.versions)
        finally:
            pool.close()
    print((arguments.results / "kernels.md").read_text())


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def choose(cases: Sequence[Case], groups: Sequence[str] | None, limit: int | None) -> list[Case]:
    kept: dict[str, list[Case]] = {}
    for case in cases:
        if groups is None or any(part in case.group for part in groups):
            kept.setdefault(case.group, []).append(case)
    if limit is None:
        return [case for members in kept.values() for case in members]
    return [
        members[index * len(members) // min(limit, len(members))]
        for members in kept.values()
        for index in range(min(limit, len(members)))
    ]


def measure_case(case: Case, pool: Pool, rounds: int, seconds: float) -> CaseReport:
    with tempfile.TemporaryDirectory(dir=pool.folder) as directory:
        model, inputs_path = Path(directory, "kernel.onnx"), Path(directory, "inputs.npz")
        write_model(case.problem, model)
        interface = read_interface(model)
        np.savez(inputs_path, **random_inputs(interface.inputs, {}, 0))  # type: ignore[arg-type]
        times: dict[str, list[float]] = {}
        errors = dict(pool.skipped)
        outputs: dict[str, str] = {}
        names = [name for name in pool.peers if case.runs_on(name)]
        for name in names:
            if name in errors:
                continue
            try:
                pool.load(name, model, inputs_path, interface.output_names)
                path = str(Path(directory, f"{name.replace(':', '-')}.npz"))
                pool.request(name, {"command": "outputs", "path": path})
                outputs[name] = path
            except WorkerError as error:
                errors[name] = str(error)
        for index in range(rounds):
            order = list(outputs) if index % 2 == 0 else list(reversed(outputs))
            for name in order:
                if name in errors:
                    continue
                try:
                    reply = pool.request(name, {"command": "measure", "seconds": seconds, "iterations": None})
                except WorkerError as error:
                    errors[name] = str(error)
                    continue
                times.setdefault(name, []).append(statistics.median(reply["times"]))
        timings = {
            name: Timing(
                statistics.median(times[name]) if name in times and name not in errors else None,
                errors.get(name),
                difference(name, outputs),
            )
            for name in names
        }
    return CaseReport(case, timings)


def difference(name: str, outputs: Mapping[str, str]) -> float | None:
    """Of this runtime's answer from the first other runtime's, relative."""
    others = [path for other, path in outputs.items() if other != name]
    if name not in outputs or not others:
        return None
    with np.load(others[0]) as archive:
        reference = {key: archive[key].astype(np.float64) for key in archive.files}
    return relative_error(outputs[name], reference)


def summarise(reports: Sequence[CaseReport], peak: Peak) -> list[dict[str, Any]]:
    """By group: geometric means of the share of the peak and of the speed-up over each peer, and the worst case."""
    reports = [report for report in reports if not report.case.is_operator]
    groups: dict[str, list[CaseReport]] = {}
    for report in reports:
        groups.setdefault(report.case.group, []).append(report)
    rows = []
    for group, members in groups.items():
        row: dict[str, Any] = {"group": group, "cases": len(members), "peak_share": {}, "speedup": {}, "worst": {}}
        for name in members[0].timings:
            rates = [report.rate(name) for report in members]
            row["peak_share"][name] = _scaled(geometric_mean(rates), 1 / peak.operations_per_second)
            if name != OURS:
                speedups = [report.speedup(name) for report in members]
                row["speedup"][name] = geometric_mean(speedups)
                row["worst"][name] = min((each for each in speedups if each is not None), default=None)
        row["read_share"] = _scaled(
            geometric_mean([report.read_rate(OURS) for report in members]), 1 / peak.bytes_per_second
        )
        rows.append(row)
    return rows


def write_results(folder: Path, reports: Sequence[CaseReport], peak: Peak, versions: Mapping[str, str]) -> None:
    document = {
        "machine": describe_machine(),
        "versions": dict(versions) | describe_tools(),
        "peak": peak.to_json(),
        "groups": summarise(reports, peak),
        "cases": [report.to_json() for report in reports],
    }
    write_files(folder, "kernels", document, to_markdown(reports, peak, versions), to_plot(reports, peak))


def to_markdown(everything: Sequence[CaseReport], peak: Peak, versions: Mapping[str, str]) -> str:
    reports = [report for report in everything if not report.case.is_operator]
    operators = [report for report in everything if report.case.is_operator]
    names = list(everything[0].timings)
    peers = [name for name in names if name != OURS]
    lines = [
        *heading("Single kernels on the CPU", describe_machine(), peak, versions),
        "Geometric means by group: share of the measured peak, our share of the measured read bandwidth (every operand "
        "counted once), our speed-up over each peer, and the smallest speed-up of the group. Calls from Python are "
        "timed, so small problems measure the call as well.",
        "",
    ]
    summary = [
        [
            row["group"],
            str(row["cases"]),
            *(_percent(row["peak_share"][name]) for name in names),
            _percent(row["read_share"]),
            *(number_text(row["speedup"][peer], ".2f") for peer in peers),
            *(number_text(row["worst"][peer], ".2f") for peer in peers),
        ]
        for row in summarise(reports, peak)
    ]
    header = ["group", "cases", *(f"{name}, of peak" for name in names), "read"]
    header += [f"over {peer}" for peer in peers] + [f"worst over {peer}" for peer in peers]
    lines += table(header, summary)
    wrong = [report for report in everything if (report.timings[OURS].difference or 0.0) > 1e-5]
    lines += ["", f"Answers further than 1e-5 from a peer's: {len(wrong)}.", "", "![share of peak](kernels.svg)", ""]
    lines += ["Each case in GFLOP/s; our share of the peak; our speed-up over the best peer.", ""]
    rows = []
    for report in reports:
        speedups = [each for peer in peers if (each := report.speedup(peer)) is not None]
        rows.append(
            [
                report.case.problem.describe(),
                report.case.group,
                *(number_text(_scaled(report.rate(name), 1e-9), ".1f") for name in names),
                _percent(_scaled(report.rate(OURS), 1 / peak.operations_per_second)),
                number_text(min(speedups, default=None), ".2f"),
                report.case.origin,
            ]
        )
    lines += table(["problem", "group", *names, "of peak", "speed-up", "found in"], rows)
    lines += operator_lines(operators, peak)
    lines += failure_lines(
        (report.case.problem.describe(), name, timing.error)
        for report in everything
        for name, timing in report.timings.items()
    )
    return "\n".join(lines) + "\n"


def to_plot(reports: Sequence[CaseReport], peak: Peak) -> str:
    rows = summarise(reports, peak)
    names = list(rows[0]["peak_share"]) if rows else []
    series = {name: [_scaled(row["peak_share"][name], 100.0) for row in rows] for name in names}
    title = f"Share of the measured float32 peak, geometric mean by group, {peak.threads} threads"
    return grouped_bars(title, [row["group"].removeprefix("zoo ") for row in rows], series, unit="%", marked=100.0)


def _scaled(value: float | None, factor: float) -> float | None:
    return value * factor if value is not None else None


def _percent(share: float | None) -> str:
    return f"{100 * share:.0f}%" if share is not None else "-"


if __name__ == "__main__":
    main()
