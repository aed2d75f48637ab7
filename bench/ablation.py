"""What each step of planning brings: every schedule beside the others, times measured, bytes predicted and counted.

`none` is a kernel an expression, `register` composes maps into their neighbours, `unmerged` also keeps tiles on chip,
and `connected` merges independent computes that are alike before. Every variant runs in a process of its own, one awake
at a time, rounds alternating.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.support import add_zoo_options, chosen_models, export_folder, exported, geometric_mean, table, write_files
from tilewright import Options
from tilewright.compiler import build
from tilewright.frontend.onnx import load
from tilewright.ir.traffic import count_traffic
from tilewright.report.facts import explain_json
from tilewright.report.peers import VARIANTS
from tilewright.report.sidebyside import OURS, compare
from tilewright.target import machine

STEPS = {"none": "none", "register": "register", "unmerged": "unmerged", "connected": ""}  # as runtimes are spelled


@dataclass(frozen=True)
class Facts:
    """What a variant of a model is planned to be."""

    kernels: int
    calls: int
    predicted_ms: float
    predicted_bytes: float  # from and to main memory
    counted_bytes: float  # loads and stores of global memory in the Loops, each once a kernel and direction
    intermediate_bytes: float


def facts_of(path: Path, variant: str, target: str) -> Facts:
    artifact = build(load(path), machine(target), Options(stop_after="loops", **VARIANTS[STEPS[variant]]))  # type: ignore[arg-type]
    assert artifact.loops is not None and artifact.plan is not None
    facts = explain_json(artifact)
    counted = count_traffic(artifact.loops)
    return Facts(len(artifact.plan.kernels), len(artifact.loops.calls), facts["totals"]["predicted_us"] / 1e3,
                 facts["totals"]["traffic_bytes"], sum(counted.distinct.values()), counted.intermediate)  # fmt: skip


def report_of(name: str, facts: dict[str, Facts], times: dict[str, float | None]) -> list[str]:
    plain = facts["none"]
    rows = []
    for variant, known in facts.items():
        took = times.get(variant)
        saved = 1 - known.intermediate_bytes / plain.intermediate_bytes if plain.intermediate_bytes else 0.0
        rows.append([variant, "" if took is None else f"{took:.2f}", f"{known.predicted_ms:.2f}", str(known.kernels),
                     str(known.calls), f"{known.predicted_bytes / 1e6:.1f}", f"{known.counted_bytes / 1e6:.1f}",
                     f"{known.intermediate_bytes / 1e6:.1f}", f"{100 * saved:.0f}%"])  # fmt: skip
    header = ["schedule", "ms", "predicted ms", "kernels", "calls", "MB predicted", "MB counted", "MB of intermediates",
              "less"]  # fmt: skip
    return [f"## {name}", "", *table(header, rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    add_zoo_options(parser, "ablation")
    parser.add_argument("--target", default="cpu", help="a machine to plan for; times are measured on this one alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="per round and variant; 0 measures no times")
    arguments = parser.parse_args()
    lines = ["# What each step of planning brings", ""]
    document: dict[str, object] = {}
    gains: dict[str, list[float]] = {variant: [] for variant in STEPS}
    with export_folder(arguments) as (_, folder):
        paths = exported(chosen_models(parser, arguments), arguments.size, folder, lambda text: print(text, flush=True))
        for name, path in paths.items():
            facts = {variant: facts_of(path, variant, arguments.target) for variant in STEPS}
            times: dict[str, float | None] = {}
            if arguments.seconds > 0:
                spelled = {variant: f"tilewright:{name}" if name else OURS for variant, name in STEPS.items()}
                found = compare(path, list(spelled.values()), arguments.threads, rounds=arguments.rounds,
                                seconds_per_round=arguments.seconds)  # fmt: skip
                times = {variant: found.median_of(spelling) for variant, spelling in spelled.items()}
                register = times.get("register")
                for variant, took in times.items():
                    if took is not None and register is not None:
                        gains[variant].append(register / took)
            lines += report_of(name, facts, times)
            document[name] = {v: {**vars(f), "ms": times.get(v)} for v, f in facts.items()}
            print("\n".join(lines[-len(facts) - 5 :]), flush=True)
    if gains["connected"]:
        means = ", ".join(f"{v} {geometric_mean(g):.3f}x" for v, g in gains.items() if g)
        lines += [f"Against `register`, geometric mean: {means}.", ""]
    write_files(arguments.results, "ablation", document, "\n".join(lines))
    print(lines[-2] if gains["connected"] else "", file=sys.stderr)


if __name__ == "__main__":
    main()
