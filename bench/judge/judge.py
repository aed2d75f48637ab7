"""How well predictors order plans that were measured, and what a change of a predictor does to that.

    python -m bench.judge                                 the records in bench/judge/records
    python -m bench.judge FILES... --against REVISION     beside the predictors of another revision
    python -m bench.judge measure --seconds 600           more records, of this machine: appended, goes on anywhere
    python -m bench.judge measure --seconds 240 --target cuda --out gpu.jsonl

Nothing runs but in `measure`: prices are those of the description that each record names. By machine, predictor and
class: rank (Spearman's, within a task), loss (what the plan predicted best takes over the best measured), near (tasks
in which that is within 10%), pairs (that differ in one decision, decided rightly; those that noise decides are left
out, and equal predictions decide nothing). With --against the exit status is 1 where a figure falls beyond noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.judge.figures import Figures, TaskFigures, fallen, noise, pairs_of, summed, task_figures
from bench.judge.price import PREDICTORS, Prices, all_prices, read_all
from bench.support import checked_out, number_text, table
from tilewright.tune.records import Measurement, Records

STORED = Path(__file__).parent / "records"
ALL = "all"


@dataclass(frozen=True)
class Side:
    """One revision's figures: of each task, by machine, predictor and class."""

    tasks: Mapping[tuple[str, str, str], Mapping[str, TaskFigures]]
    figures: Mapping[tuple[str, str, str], Figures]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["measure"]:
        from bench.judge.command import measure_command

        return measure_command(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m bench.judge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="records (default: those of bench/judge/records)")
    parser.add_argument("--against", metavar="REVISION", help="as git names it")
    parsed = parser.parse_args(given)
    files = parsed.files or sorted(p for p in STORED.iterdir() if p.name.endswith((".jsonl", ".jsonl.xz")))
    records = read_all(files)
    if not records.measurements:
        parser.error("there are no records")
    prices = all_prices(records)
    this = side(records, prices)
    print(report(records, this))
    print(by_decision(records, prices))
    if parsed.against is None:
        return 0
    earlier = side(records, prices_of(parsed.against, files))
    return compare(parsed.against, earlier, this)


def machines_of(records: Records) -> dict[str, str]:
    """Machines by target: a processor's names, with the units that were used."""
    return {
        digest: f"{m.processor}, {m.description['units']} {'core' if m.description['kind'] == 'cpu' else 'unit'}"
        f"{'s' if m.description['units'] != 1 else ''}"
        for digest, m in records.targets.items()
    }


def side(records: Records, prices: Sequence[Prices]) -> Side:
    names = machines_of(records)
    by_task: dict[tuple[str, str], list[tuple[Measurement, Prices]]] = {}
    for measured, priced in zip(records.measurements, prices, strict=True):
        by_task.setdefault((names[measured.target], measured.task), []).append((measured, priced))
    factors = {name: noise([m for m in records.measurements if names[m.target] == name]) for name in names.values()}
    tasks: dict[tuple[str, str, str], dict[str, TaskFigures]] = {}
    plans: dict[tuple[str, str, str], list[float | None]] = {}
    for (machine, task), rows in by_task.items():
        measured_plans = [m for m, _ in rows]
        for predictor in PREDICTORS:
            some = [p.get(predictor) for _, p in rows]
            found = task_figures(measured_plans, some, factors[machine])
            for kind in (rows[0][0].kind, ALL):
                tasks.setdefault((machine, predictor, kind), {})[task] = found
                plans.setdefault((machine, predictor, kind), []).extend(some)
    figures = {key: summed(list(t.values()), len(plans[key]), plans[key].count(None)) for key, t in tasks.items()}
    return Side(tasks, figures)


def report(records: Records, found: Side) -> str:
    lines: list[str] = []
    names = machines_of(records)
    for machine in dict.fromkeys(names.values()):
        own = [m for m in records.measurements if names[m.target] == machine]
        paired = sum(bool(m.pairs) for m in own)
        outside = sum(m.source == "outside" for m in own)
        lines += [f"## {machine}", "",
                  f"{len(own)} plans of {len({m.task for m in own})} tasks, {paired} of them in pairs, {outside} from "
                  f"outside the zoo; plans beside themselves within {noise(own):.3f} (nine of ten).", ""]  # fmt: skip
        for predictor in PREDICTORS:
            keys = [k for k in found.figures if k[:2] == (machine, predictor)]
            keys.sort(key=lambda k: (k[2] == ALL, k[2]))
            header = [predictor, "tasks", "plans", "unpriced", "rank", "loss", "near", "pairs right", "of", "untold"]
            lines += [*table(header, [_cells(k[2], found.figures[k]) for k in keys]), ""]
    return "\n".join(lines)


def _cells(kind: str, f: Figures) -> list[str]:
    return [kind, str(f.tasks), str(f.plans), str(f.unpriced), number_text(f.rank, ".2f"), number_text(f.loss, ".3f"),
            number_text(f.near, ".0%"), number_text(f.pairs, ".0%"), str(f.decided), str(f.untold)]  # fmt: skip


def by_decision(records: Records, prices: Sequence[Prices]) -> str:
    """Pairs by the decision in which they differ."""
    names = machines_of(records)
    lines = ["Pairs by decision, rightly decided of those that noise leaves:", ""]
    rows = []
    decisions = sorted({p.decision for m in records.measurements for p in m.pairs})
    for machine in dict.fromkeys(names.values()):
        chosen = [i for i, m in enumerate(records.measurements) if names[m.target] == machine]
        own = [records.measurements[i] for i in chosen]
        factor = noise(own)
        for decision in decisions:
            cells = [machine, decision]
            for predictor in PREDICTORS:
                pairs = pairs_of(own, [prices[i].get(predictor) for i in chosen], decision)
                told = [(a, b) for a, b in pairs if max(a[0] / b[0], b[0] / a[0]) > factor]
                right = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in told)
                cells.append(f"{right} of {len(told)}")
            if any(not cell.endswith(" of 0") for cell in cells[2:]):
                rows.append(cells)
    return "\n".join([*lines, *table(["machine", "decision", *PREDICTORS], rows), ""])


def prices_of(revision: str, files: Sequence[Path]) -> list[Prices]:
    """What another revision's own pricing says of the records; it has to have a judge."""
    with (
        tempfile.TemporaryDirectory(prefix="tilewright-judge-") as temporary,
        checked_out(revision, Path(temporary) / "earlier") as root,
    ):
        if not (root / "bench/judge/price.py").is_file():
            raise SystemExit(f"{revision} has no bench/judge/price.py, so that its predictors cannot be asked")
        command = [sys.executable, "-m", "bench.judge.price", *(str(f.absolute()) for f in files)]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, check=True,
                              env={**os.environ, "PYTHONPATH": str(root)})  # fmt: skip
    return [json.loads(line) for line in told.stdout.splitlines()]


def compare(revision: str, earlier: Side, this: Side) -> int:
    """Tells what fell and what rose; 1 where anything fell beyond noise."""
    status = 0
    for key, tasks in this.tasks.items():
        before = earlier.tasks.get(key)
        if before is None:
            continue
        names = [name for name in tasks if name in before]
        sides = [before[n] for n in names], [tasks[n] for n in names]
        for word, (one, two) in (("fell", sides), ("rose", sides[::-1])):
            for figure, (was, now) in fallen(one, two).items():
                was, now = (was, now) if word == "fell" else (now, was)
                print(f"{word}: {', '.join(key)}: {figure} {was:.3f} to {now:.3f}")
                status = 1 if word == "fell" else status
    print(f"against {revision}: " + ("worse beyond noise" if status else "nothing is worse beyond noise"))
    return status
