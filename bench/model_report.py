"""Numbers and text of the cost model's benchmark: rank correlation, the planner's choice against the best, and which
features of a plan the model misjudges."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log, prod
from statistics import median
from typing import Any

import numpy as np

from bench.support import number_text, table

CLOSE = 1.1  # times the best measured: what the planner's choice may take
# A choice from a few plans says little of the model: fewer are counted, but not correlated.
FEWEST_PLANS = 4
FEWEST_OF_A_FEATURE = 10


def ranks(values: Sequence[float]) -> np.ndarray:
    """Places from the smallest up; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: np.ndarray = (last - (counts - 1) / 2.0)[inverse]
    return mean


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """The correlation of the ranks; None where one side has no order at all."""
    a, b = ranks(left), ranks(right)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 0 else None


@dataclass(frozen=True)
class PlanTime:
    """A plan's tile and nests, and its seconds: predicted, the least measured, the median measured."""

    plan: Mapping[str, Any]
    predicted: float
    least: float
    median: float

    def text(self) -> str:
        tile = " ".join(f"{a}:{n}" for a, n in self.plan["tile"]) or "whole"
        parts = [f"tile {tile} x{self.plan['tiles']}"]
        for nest in self.plan["nests"]:
            register = " ".join(f"{a}:{n}" for a, n in nest["register"])
            shown = f"vector {nest['vector']}x{nest['lanes']} register [{register}] order {' '.join(nest['order'])}"
            options = _options(nest)
            if options.get("unroll"):
                shown += f" unroll {' '.join(options['unroll'])}"
            if options.get("row_lanes", 1) > 1:
                shown += f" row_lanes {options['row_lanes']}"
            parts.append(shown)
        return "; ".join(parts)


def _options(nest: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a leaf says of its form; older plans have it beside everything else."""
    return next(iter(nest["form"].values()), {}) if nest.get("form") else nest


@dataclass(frozen=True)
class KernelReport:
    """The plans of one kernel, the planner's own first."""

    name: str
    kind: str
    plans: tuple[PlanTime, ...]
    runs: int

    @property
    def correlation(self) -> float | None:
        if len(self.plans) < FEWEST_PLANS:
            return None
        return spearman([p.predicted for p in self.plans], [p.least for p in self.plans])

    @property
    def best(self) -> float:
        return min(p.least for p in self.plans)

    @property
    def choice_ratio(self) -> float:
        """The planner's choice over the best of all, measured."""
        return self.plans[0].least / self.best

    @property
    def model_ratio(self) -> float:
        """The same for the plan with the least prediction among these, which should be the planner's."""
        return min(self.plans, key=lambda p: p.predicted).least / self.best

    @property
    def noise(self) -> float:
        return median(p.median / p.least for p in self.plans)

    def line(self) -> str:
        return (f"{self.name} ({self.kind}): correlation {number_text(self.correlation, '.2f')}, choice "
                f"{self.choice_ratio:.2f}x of the best {1e6 * self.best:.1f} us, noise {self.noise:.2f}")  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "correlation": self.correlation,
            "choice_over_best": self.choice_ratio,
            "runs": self.runs,
            "plans": [
                {"plan": dict(p.plan), "predicted_us": 1e6 * p.predicted, "us": 1e6 * p.least,
                 "median_us": 1e6 * p.median}
                for p in self.plans
            ],
        }  # fmt: skip


def summarise(reports: Sequence[KernelReport]) -> dict[str, Any]:
    known = [r.correlation for r in reports if r.correlation is not None]
    return {
        "kernels": len(reports),
        "plans": sum(len(r.plans) for r in reports),
        "median_rank_correlation": median(known) if known else None,
        "choice_within_10_percent": share(reports, lambda r: r.choice_ratio <= CLOSE),
        "least_prediction_within_10_percent": share(reports, lambda r: r.model_ratio <= CLOSE),
        "choice_over_best_median": median(r.choice_ratio for r in reports),
        "choice_is_least_prediction": share(
            reports, lambda r: r.plans[0].predicted <= 1.001 * min(p.predicted for p in r.plans)
        ),
        "noise": median(r.noise for r in reports),
    }


def share(reports: Sequence[KernelReport], holds: Any) -> float:
    return sum(bool(holds(r)) for r in reports) / len(reports)


def to_markdown(reports: Sequence[KernelReport], document: Mapping[str, Any]) -> str:
    facts = document["summary"]
    correlation = number_text(facts["median_rank_correlation"], ".2f")
    least = f"{100 * facts['least_prediction_within_10_percent']:.0f}%"
    close = f"{100 * facts['choice_within_10_percent']:.0f}%"
    caches = "inner caches swept and activations rewritten before each run"
    lines = [
        "# The cost model against measurements",
        "",
        f"{document['machine']['processor']}, {document['threads']} threads, {document['clock']} time; compiler "
        f"{document['versions']['compiler']}; "
        f"{caches if document['caches'] == 'cold' else 'caches as the last run left them'}.",
        "",
        f"{facts['kernels']} kernels, {facts['plans']} plans: for each kernel the planner's choice and random feasible "
        "plans, least of several runs.",
        "",
        f"- Median rank correlation of predicted and measured time: **{correlation}**",
        f"- The planner's choice is within 10% of the best of all for **{close}** "
        f"of the kernels; in the median it takes {facts['choice_over_best_median']:.2f}x the best",
        f"- The plan with the least prediction among those measured is within 10% of the best for {least}",
        f"- Median over least time of a plan, which is what other work on the machine did: {facts['noise']:.2f}",
        "",
    ]
    kinds: dict[str, list[KernelReport]] = {}
    for report in reports:
        kinds.setdefault(report.kind, []).append(report)
    rows = []
    for kind, members in kinds.items():
        part = summarise(members)
        scale = [p.least / p.predicted for r in members for p in r.plans[:1]]
        rows.append([
            kind, str(len(members)), number_text(part["median_rank_correlation"], ".2f"),
            f"{100 * part['choice_within_10_percent']:.0f}%", f"{part['choice_over_best_median']:.2f}",
            f"{max(r.choice_ratio for r in members):.2f}", f"{median(scale):.2f}",
        ])  # fmt: skip
    header = ["kind", "kernels", "correlation", "choice within 10%", "choice / best", "worst", "measured / predicted"]
    lines += table(header, rows)
    lines += ["", "Each kernel: time of the planner's choice, of the best, and what was predicted of both.", ""]
    lines += table(["kernel", "kind", "correlation", "choice / best", "choice us", "predicted", "best us", "predicted"],
                   [_row(r) for r in sorted(reports, key=lambda r: -r.choice_ratio)])  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(report: KernelReport) -> list[str]:
    own, best = report.plans[0], min(report.plans, key=lambda p: p.least)
    times = [f"{1e6 * t:.1f}" for t in (own.least, own.predicted, best.least, best.predicted)]
    return [report.name, report.kind, number_text(report.correlation, ".2f"), f"{report.choice_ratio:.2f}", *times]


def worst_text(reports: Sequence[KernelReport], count: int) -> str:
    """For mending the model: the kernels it serves worst, plan by plan, and the features it misjudges."""
    lines = ["", "== kernels whose choice is farthest from the best"]
    for report in sorted(reports, key=lambda r: -r.choice_ratio)[:count]:
        lines += _plan_lines(report)
    lines += ["", "== kernels with the least rank correlation"]
    ranked = [r for r in reports if r.correlation is not None]
    for report in sorted(ranked, key=lambda r: r.correlation or 0.0)[:count]:
        lines += _plan_lines(report)
    lines += ["", "== features of plans: measured over predicted, relative to the other plans of the same kernel"]
    lines += ["   (above 1: slower than the model thinks)"]
    lines += feature_lines(reports)
    return "\n".join(lines)


def _plan_lines(report: KernelReport) -> list[str]:
    lines = [report.line(), f"  {'us':>9} {'predicted':>9} {'ratio':>6}"]
    own = report.plans[0]
    for each in sorted(report.plans, key=lambda p: p.least):
        mark = "*" if each is own else " "
        times = f"{1e6 * each.least:>9.1f} {1e6 * each.predicted:>9.1f} {each.least / each.predicted:>6.2f}"
        lines.append(f" {mark}{times}  {each.text()}")
    return lines


def feature_lines(reports: Sequence[KernelReport]) -> list[str]:
    groups: dict[str, list[float]] = {}
    for report in reports:
        if len(report.plans) < FEWEST_PLANS:
            continue
        errors = [log(p.least / p.predicted) for p in report.plans]
        middle = median(errors)
        for plan, error in zip(report.plans, errors, strict=True):
            for feature in features(report, plan):
                groups.setdefault(feature, []).append(error - middle)
    lines = []
    for feature, errors in sorted(groups.items()):
        if len(errors) < FEWEST_OF_A_FEATURE:
            continue
        low, middle, high = np.exp(np.quantile(errors, [0.1, 0.5, 0.9]))
        lines.append(f"  {middle:>6.2f}  (from {low:.2f} to {high:.2f}, {len(errors):>4} plans)  {feature}")
    return lines


def features(report: KernelReport, each: PlanTime) -> Iterator[str]:
    nest = each.plan["nests"][-1]
    own = report.plans[0].plan["nests"][-1]
    sizes = dict(nest["register"])
    kind = report.kind
    vector = nest["vector"]
    where = "none" if vector is None else "the planner's" if vector == own["vector"] else f"another {vector[0]}-axis"
    yield f"{kind}: vector along {where}"
    rows = prod(n for a, n in sizes.items() if a != vector)
    columns = sizes.get(vector, nest["lanes"]) // max(1, nest["lanes"])
    yield f"{kind}: {_bucket(rows, (1, 2, 4, 6, 8, 12))} rows"
    yield f"{kind}: {_bucket(columns, (1, 2, 3, 4, 6, 8))} vectors"
    yield f"{kind}: {_bucket(rows * columns, (1, 2, 4, 8, 12, 16, 20, 24, 32))} accumulators"
    yield f"{kind}: {_bucket(each.plan['tiles'], (1, 2, 4, 8, 16, 64, 256, 1024))} tiles"
    yield f"{kind}: order {'as the planner' if nest['order'] == own['order'] else 'another'}"
    yield f"{kind}: {'unrolled' if _options(nest).get('unroll') else 'not unrolled'}"
    yield f"{kind}: rows read by {'lane' if _options(nest).get('row_lanes', 1) > 1 else 'scalar'}"


def _bucket(value: int, limits: Sequence[int]) -> str:
    """Numbers are padded, so that text sorts as they do."""
    below = 0
    for limit in limits:
        if value <= limit:
            return f"{limit:>4}" if limit == below + 1 else f"{below + 1:>4} to {limit}"
        below = limit
    return f"{below + 1:>4} up"
