"""Does the cost model predict? Random plans of many kernels and the planner's own, measured side by side: the rank
correlation of predicted and measured times, and how close the planner's choice comes to the best of them."""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.model_cases import Case, random_kernels, spread, zoo_kernels
from bench.model_report import KernelReport, PlanTime, summarise, to_markdown, worst_text
from bench.plan_times import Bench, Prepared, compile_ahead, prepare
from bench.support import add_zoo_options, chosen_models, export_folder, exported, write_files
from tilewright.backend.cpu.kernel.candidates import predict
from tilewright.backend.cpu.kernel.variants import CpuVariants, run_another_way
from tilewright.backend.protocol import Choice
from tilewright.options import Options
from tilewright.report.sidebyside import describe_machine
from tilewright.runtime.toolchain import find_compiler
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Tile, leaf_of, leaf_values

Tell = Callable[[str], None]
# What a plan says of a kernel beside the names of its tensors.
_NAMES = ("tensor", "core", "epilogue", "composed", "part")


@dataclass(frozen=True)
class Settings:
    plans: int
    seed: int
    seconds: float
    threads: int
    jobs: int
    is_cold: bool
    clock: str
    options: Options


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.model", description=__doc__)
    add_zoo_options(parser, "model")
    parser.add_argument("--kernels", type=int, default=200, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument(
        "--plans", type=int, default=20, metavar="M", help="random plans a kernel (default: %(default)s)"
    )
    parser.add_argument("--only", metavar="PATTERN", help="kernels whose name or kind matches this expression")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring, per kernel (default: %(default)s)")
    parser.add_argument("--warm", action="store_true", help="leave the caches as the kernel's own last run left them")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="wall: on all threads; cpu: processor time of one, for a busy machine")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--worst", type=int, default=8, metavar="N", help="kernels to show plan by plan")
    parser.add_argument("--replay", type=Path, metavar="FILE",
                        help="predict the plans of an earlier model.json again, and measure nothing")  # fmt: skip
    arguments = parser.parse_args()
    target = machine("cpu")
    options = Options.from_environment().override(threads=arguments.threads)
    settings = Settings(arguments.plans, arguments.seed, arguments.seconds, arguments.threads, arguments.jobs,
                        not arguments.warm, arguments.clock, options)  # fmt: skip
    names = chosen_models(parser, arguments)
    with export_folder(arguments) as (temporary, folder):
        paths = exported(names, arguments.size, folder, tell)
        cases = chosen_cases(paths, arguments.kernels, arguments.only, arguments.seed, temporary, target)
    if arguments.replay is not None:
        earlier = json.loads(arguments.replay.read_text())
        reports = replay(cases, earlier, target)
        if not reports:
            parser.error(f"no kernel of {arguments.replay} is among those chosen here")
    else:
        reports = measure_cases(cases, settings, target, tell)
    document = {
        "machine": describe_machine(),
        "versions": {"compiler": find_compiler(options.compiler).version},
        "threads": arguments.threads,
        "clock": settings.clock,
        "caches": "cold" if settings.is_cold else "warm",
        "summary": summarise(reports),
        "kernels": [report.to_json() for report in reports],
    }
    text = to_markdown(reports, document)
    if arguments.replay is None:
        write_files(arguments.results, "model", document, text, compact=True)
    print(worst_text(reports, arguments.worst))
    print(text)


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def chosen_cases(
    paths: Mapping[str, Path], count: int, only: str | None, seed: int, folder: Path, target: Target
) -> list[Case]:
    """The zoo's kernels, random ones until there are enough, and of all these `count`."""
    found = zoo_kernels(dict(paths), target)
    if len(found) < count:
        found += random_kernels(count - len(found), seed, folder / "random", target)
    if only is not None:
        found = [case for case in found if re.search(only, case.name) or re.search(only, case.kind)]
    return spread(found, count) if len(found) > count else found


def plans_of(case: Case, settings: Settings, target: Target) -> list[Tile]:
    """The planner's kernel first, predicted like the others, then different random ones."""
    variants = case.variants(target)
    own = with_prediction(case.kernel, variants)
    rng = np.random.default_rng([settings.seed, len(case.name), sum(case.name.encode())])
    drawn = variants.random(settings.plans, rng)
    return [own, *(k for k in drawn if (k.leaves, k.cut) != (own.leaves, own.cut))]


def with_prediction(kernel: Tile, variants: CpuVariants) -> Tile:
    seconds = predict(variants.nests, kernel.leaves, variants.context, variants.stored, [kernel.cut])
    return replace(kernel, estimate=replace(kernel.estimate, seconds=float(seconds[0])))


def prepared_plans(case: Case, settings: Settings, target: Target) -> list[Prepared]:
    variants = case.variants(target)
    found = []
    for kernel in plans_of(case, settings, target):
        layouts = {t.name: layout for t, layout in case.program.layouts.items()}
        layouts |= {t.name: layout for t, layout in variants.layouts(kernel).items()}
        plan = replace(case.plan.with_kernels({kernel.name: kernel}), layouts=tuple(sorted(layouts.items())))
        found.append(prepare(case.program, plan, target))
    compile_ahead([each.ready for each in found], settings.options)
    return found


def measure_cases(cases: Sequence[Case], settings: Settings, target: Target, tell: Tell) -> list[KernelReport]:
    """First everything is compiled, on all cores; then the machine is left alone with one kernel at a time."""
    start = time.perf_counter()
    prepared = prepare_all(cases, settings, target, tell)
    tell(f"compiled in {time.perf_counter() - start:.0f} s")
    reports = []
    for number, case in enumerate(cases):
        if number not in prepared:
            continue
        bench = Bench(case.program, prepared[number], target, settings.options)
        measure = bench.measure_wall if settings.clock == "wall" else bench.measure_cpu
        times = measure(settings.seconds, settings.is_cold)
        plans = tuple(
            PlanTime(values_of(each.kernel), each.kernel.estimate.seconds, least, median)
            for each, least, median in zip(prepared[number], times.least, times.median, strict=True)
        )
        reports.append(KernelReport(case.name, case.kind, plans, times.runs))
        tell(f"{number + 1} of {len(cases)}: {reports[-1].line()}")
    tell(f"measured in all {time.perf_counter() - start:.0f} s")
    return reports


def prepare_all(cases: Sequence[Case], settings: Settings, target: Target, tell: Tell) -> dict[int, list[Prepared]]:
    """Lowered and compiled by several processes; they inherit the cases and take them one by one."""
    context = multiprocessing.get_context("fork")
    waiting: Any = context.Queue()
    finished: Any = context.Queue()
    for number in range(len(cases)):
        waiting.put(number)
    for _ in range(settings.jobs):
        waiting.put(None)

    def work() -> None:
        while (number := waiting.get()) is not None:
            try:
                finished.put((number, prepared_plans(cases[number], settings, target), ""))
            except (RuntimeError, ValueError, AssertionError, KeyError) as error:
                finished.put((number, [], f"{type(error).__name__}: {error}"))

    workers = [context.Process(target=work, daemon=True) for _ in range(settings.jobs)]
    for worker in workers:
        worker.start()
    found: dict[int, list[Prepared]] = {}
    for done in range(len(cases)):
        number, plans, error = finished.get()
        if error:
            tell(f"{cases[number].name} could not be compiled: {error}")
        else:
            found[number] = plans
        if (done + 1) % 10 == 0:
            tell(f"compiled {done + 1} of {len(cases)}")
    for worker in workers:
        worker.join()
    return found


def values_of(kernel: Tile) -> dict[str, Any]:
    """What distinguishes this plan of a kernel from its others, as JSON keeps it."""
    nests = [{name: v for name, v in leaf_values(leaf).items() if name not in _NAMES} for leaf in kernel.leaves]
    return {"tile": kernel.cut, "tiles": kernel.tiles, "nests": nests}


def from_values(kernel: Tile, values: Mapping[str, Any], variants: CpuVariants) -> Tile:
    """What is not said is as it is by default."""
    leaves = tuple(
        leaf_of({name: v for name, v in leaf_values(own).items() if name in _NAMES} | part)
        for own, part in zip(kernel.leaves, values["nests"], strict=True)
    )
    about = kernel.estimate
    choice = Choice(_frozen(values["tile"]), about.seconds, 0, about.footprint)
    return run_another_way(kernel, leaves, choice, variants.nests, variants.context.layout)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def replay(cases: Sequence[Case], earlier: Mapping[str, Any], target: Target) -> list[KernelReport]:
    """The measured times of an earlier run against what the model says now."""
    measured = {row["name"]: row for row in earlier["kernels"]}
    reports = []
    for case in cases:
        row = measured.get(case.name)
        if row is None:
            continue
        variants = case.variants(target)
        plans = []
        for each in row["plans"]:
            kernel = with_prediction(from_values(case.kernel, each["plan"], variants), variants)
            plans.append(PlanTime(each["plan"], kernel.estimate.seconds, each["us"] * 1e-6, each["median_us"] * 1e-6))
        reports.append(KernelReport(case.name, case.kind, tuple(plans), row["runs"]))
    return reports


if __name__ == "__main__":
    main()
