"""What each step of planning brings: every schedule beside the others, times measured, bytes predicted and counted.

`none` is a kernel an expression, `register` composes maps into their neighbours, `unmerged` also keeps tiles on chip,
and `connected` merges independent computes that are alike before. Every variant runs in a process of its own, one awake
at a time, rounds alternating. Of every level of the machine, the bytes that are read from it and written to it: as
predicted, and beside it as the Loops load and store them where they name the level's memory.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench.support import add_zoo_options, chosen_models, export_folder, exported, geometric_mean, table, write_files
from tilewright import Options
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import LoopProgram, Memory
from tilewright.ir.meaning.traffic import Traffic, count_traffic
from tilewright.report.facts import explain_json
from tilewright.report.peers import VARIANTS
from tilewright.report.sidebyside import OURS, compare
from tilewright.target import Target, machine

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
    stages: int  # calls that wait for one another, in the longest chain of them
    levels: dict[str, float]  # bytes read from each level and written to it, as predicted
    counted_levels: dict[str, float]  # the same as the Loops load and store it, of levels that they name


def facts_of(path: Path, variant: str, name: str) -> Facts:
    target = machine(name)
    artifact = build(load(path), target, Options(stop_after="loops", **VARIANTS[STEPS[variant]]))  # type: ignore[arg-type]
    assert artifact.loops is not None and artifact.plan is not None
    facts = explain_json(artifact)
    counted = count_traffic(artifact.loops)
    levels = {x["level"]: float(x["read_bytes"] + x["written_bytes"]) for x in facts["totals"]["levels"]}
    return Facts(len(artifact.plan.kernels), len(artifact.loops.calls), facts["totals"]["predicted_us"] / 1e3,
                 facts["totals"]["traffic_bytes"], sum(counted.distinct.values()), counted.intermediate,
                 stages_of(artifact.loops), levels, _counted_levels(counted, target))  # fmt: skip


def ceiling_ms(path: Path, name: str) -> float:
    """What `register` is predicted to take if memory beyond the tile level were as fast as it and kernels began at
    once: memory and starts can give no more. (What is joined may also be cut better than it was alone.)"""
    target = machine(name)
    fast, far = target.local.bandwidth, target.beyond(target.local)
    levels = [replace(x, bandwidth=max(fast, x.bandwidth), alone=max(fast, x.alone), write=0.0) if x in far else x
              for x in target.levels]  # fmt: skip
    free = replace(target, levels=tuple(levels), kernel_cost=0.0, cold_start=0.0)
    plan = build(load(path), free, Options(stop_after="plan", schedule="register")).plan
    assert plan is not None
    return 1e3 * sum(kernel.estimate.seconds for kernel in plan.kernels)


def _counted_levels(counted: Traffic, target: Target) -> dict[str, float]:
    backend = backend_for(target)
    result = {}
    for level in target.nearer(target.main):
        if not set(target.nearer(level)) & set(target.caches):
            here = backend.memory_at(target, target.place(level)) or (Memory.GLOBAL, Memory.SCRATCH, Memory.SHARED)
            result[level.name] = sum(counted.total(memory) for memory in here)
    return result


def stages_of(loops: LoopProgram) -> int:
    """The longest chain of calls, each of which reads what the one before stores, or stores over it."""
    ways = {k.name: count_traffic(k) for k in loops.kernels}
    wrote: dict[str, int] = {}
    read: dict[str, int] = {}
    most = 0
    for call in loops.calls:
        names = dict(zip((p.name for p in loops.kernel(call.kernel).params), call.arguments, strict=True))
        found = ways[call.kernel]
        loaded, stored = ([names[p] for p in way if p in names] for way in (found.loaded, found.stored))
        before = [wrote.get(t, 0) for t in (*loaded, *stored)] + [read.get(t, 0) for t in stored]
        stage = 1 + max(before, default=0)
        read.update({t: max(stage, read.get(t, 0)) for t in loaded})
        wrote.update(dict.fromkeys(stored, stage))
        most = max(most, stage)
    return most


def report_of(name: str, facts: dict[str, Facts], times: dict[str, float | None], ceiling: float) -> list[str]:
    plain = facts["none"]
    rows = []
    for variant, known in facts.items():
        took = times.get(variant)
        saved = 1 - known.intermediate_bytes / plain.intermediate_bytes if plain.intermediate_bytes else 0.0
        rows.append([variant, "" if took is None else f"{took:.2f}", f"{known.predicted_ms:.2f}", str(known.kernels),
                     str(known.calls), f"{known.predicted_bytes / 1e6:.1f}", f"{known.counted_bytes / 1e6:.1f}",
                     f"{known.intermediate_bytes / 1e6:.1f}", f"{100 * saved:.0f}%", str(known.stages),
                     *_level_cells(known)])  # fmt: skip
    named = plain.counted_levels
    levels = [f"MB {level}{' (counted)' if level in named else ''}" for level in plain.levels]
    header = ["schedule", "ms", "predicted ms", "kernels", "calls", "MB predicted", "MB counted", "MB of intermediates",
              "less", "stages", *levels]  # fmt: skip
    most = f"Predicted for `register` with all memory as fast as the tile level, starts free: {ceiling:.2f} ms."
    return [f"## {name}", "", *table(header, rows), "", most, ""]


def _level_cells(known: Facts) -> list[str]:
    beside = {level: f" ({size / 1e6:.1f})" for level, size in known.counted_levels.items()}
    return [f"{size / 1e6:.1f}{beside.get(level, '')}" for level, size in known.levels.items()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    add_zoo_options(parser, "ablation", batch=True)
    parser.add_argument("--target", default="cpu", help="a machine to plan for; times are measured on this one alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="per round and variant; 0 measures no times")
    arguments = parser.parse_args()
    lines = ["# What each step of planning brings", ""]
    document: dict[str, object] = {}
    gains: dict[str, list[float]] = {variant: [] for variant in STEPS}
    predicted: dict[str, list[float]] = {"connected": [], "at most": []}
    with export_folder(arguments) as (_, folder):
        names = chosen_models(parser, arguments)
        paths = exported(names, arguments.size, folder, lambda text: print(text, flush=True), arguments.batch)
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
            ceiling = ceiling_ms(path, arguments.target)
            predicted["connected"].append(facts["register"].predicted_ms / facts["connected"].predicted_ms)
            predicted["at most"].append(facts["register"].predicted_ms / ceiling)
            told = report_of(name, facts, times, ceiling)
            lines += told
            document[name] = {v: {**vars(f), "ms": times.get(v)} for v, f in facts.items()} | {"ceiling_ms": ceiling}
            print("\n".join(told), flush=True)
    if gains["connected"]:
        means = ", ".join(f"{v} {geometric_mean(g):.3f}x" for v, g in gains.items() if g)
        lines += [f"Against `register`, geometric mean: {means}.", ""]
    means = ", ".join(f"{v} {geometric_mean(g):.3f}x" for v, g in predicted.items() if g)
    lines += [f"Predicted against `register`, geometric mean: {means}.", ""]
    write_files(arguments.results, "ablation", document, "\n".join(lines))
    print(*lines[-4:], sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
