"""The part of the kernel report about single operators: time, speed-up, and how near moving the bytes alone it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.peak import Peak
from bench.support import geometric_mean, number_text, table

OURS, PEER = "tilewright", "onnxruntime"


def operator_lines(reports: Sequence[Any], peak: Peak) -> list[str]:
    """Families first, then each operator; `reports` are those of operators alone."""
    if not reports or PEER not in reports[0].timings:
        return []
    families: dict[str, list[Any]] = {}
    for report in reports:
        families.setdefault(report.case.group, []).append(report)
    summary = [
        [
            group.removeprefix("operators: "),
            str(len(members)),
            number_text(geometric_mean([r.speedup(PEER) for r in members]), ".2f"),
            number_text(min((s for r in members if (s := r.speedup(PEER)) is not None), default=None), ".2f"),
            str(sum(1 for r in members if (s := r.speedup(PEER)) is not None and s < 1.0)),
        ]
        for group, members in families.items()
    ]
    rows = [
        [
            report.case.problem.describe(),
            *(number_text(_microseconds(report.timings[name].seconds), ".1f") for name in (OURS, PEER)),
            number_text(report.speedup(PEER), ".2f"),
            number_text(_over_floor(report, peak), ".1f"),
        ]
        for members in families.values()
        for report in members
    ]
    return [
        "",
        "## Single operators",
        "",
        "Odd shapes of every kind of operator. `floor` is our time by the time of reading as many bytes as the "
        "operator reads and writes, at the measured read bandwidth of main memory: below 1 they come from caches.",
        "",
        *table(["family", "cases", f"over {PEER}", "worst", "below 1"], summary),
        "",
        *table(["operator", f"{OURS}, us", f"{PEER}, us", "speed-up", "floor"], rows),
    ]


def _microseconds(seconds: float | None) -> float | None:
    return seconds * 1e6 if seconds is not None else None


def _over_floor(report: Any, peak: Peak) -> float | None:
    rate = report.read_rate(OURS)
    return peak.bytes_per_second / rate if rate else None
