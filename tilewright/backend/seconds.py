"""The one predictor: what a Plan takes, by a fold over its tree, with its terms.

A leaf keeps its unit busy for some seconds and touches boxes of tensors; a Tile around it fetches what its level and
the nearer ones do not keep from the trip before (tile_graph/traffic). A byte is charged once, at the level where it is
found. Before a run the levels that units have to themselves hold nothing of it, the last one before main memory what
the run before left. How arithmetic and movement overlap is the kind of machine's to say. Sizes may be arrays with an
entry a candidate, where the tree's are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.backend import backend_for
from tilewright.backend.around import Around, on_device
from tilewright.backend.terms import FoundBytes, KernelWork, Terms
from tilewright.backend.traffic import KernelRun, Known, moved_alone, runs_of
from tilewright.ir.forms.compute import Program, Scan, all_computes
from tilewright.target import Cluster, MemoryLevel, Target
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.plan.form import Plan, Tile, UnitBarrier
from tilewright.tile_graph.traffic.touch import least, most
from tilewright.tile_graph.traffic.traffic import LeafTrace, Moved, Node, Repeat, SimulatedCache, moved, sequence

_STREAMS = 16  # that prefetchers follow at once

Bytes = Mapping[tuple[Hashable, bool], Size]  # by buffer and by whether it is written


@dataclass(frozen=True)
class Priced:
    """A Plan's seconds, and what its kernels take; of those that share a launch, alone."""

    seconds: Size
    kernels: Mapping[str, Terms] = field(default_factory=dict)
    copied: Mapping[tuple[str, str], int] = field(default_factory=dict)  # bytes around kernels, by the levels


def price(program: Program, plan: Plan, system: Target | Cluster) -> Priced:
    """What one run of a Plan takes that has no cases; `Plan.at` gives that of an extent. Of a device with a host what
    is around kernels counts, too."""
    if isinstance(system, Target):
        return price_of_runs(runs_of(program, plan, system, timed=True), program, plan, system)
    alone, starts = on_device(plan, system)
    kernels = price(program, alone, system.device).kernels
    each: dict[str, float] = {}
    for name, terms in kernels.items():
        own, times = whole_name(name), starts[whole_name(name)]
        each[own] = each.get(own, 0.0) + float(terms.seconds - terms.waits) / times + float(terms.waits)
    around = Around(program, plan, system, each)
    return Priced(around.seconds, kernels, around.moved)


def price_of_runs(
    runs: Sequence[KernelRun], program: Program, plan: Plan, target: Target, known: Known | None = None
) -> Priced:
    """The same of timed runs that are known."""
    works = works_of(runs, target, _all_barriers(program, plan), known)
    return _priced(plan, {work.name: work for work in works}, target)


def price_in_turn(parts: Sequence[tuple[Program, Plan]], target: Target) -> list[Priced]:
    """The same of several Plans that run one after the other, again and again: each finds in caches what all of them
    leave there."""
    runs: list[KernelRun] = []
    barriers: dict[str, int] = {}
    for number, (program, plan) in enumerate(parts):
        own = runs_of(program, plan, target, timed=True)
        runs += [replace(run, name=f"{number}:{run.name}", key=(number, run.key)) for run in own]  # buffers are its own
        barriers |= {f"{number}:{name}": count for name, count in _all_barriers(program, plan).items()}
    works: list[dict[str, KernelWork]] = [{} for _ in parts]
    for work in works_of(runs, target, barriers):
        place, _, name = work.name.partition(":")
        works[int(place)][name] = replace(work, name=name)
    return [_priced(plan, own, target) for (_, plan), own in zip(parts, works, strict=True)]


def _all_barriers(program: Program, plan: Plan) -> dict[str, int]:
    computes = all_computes(program)
    return {kernel.name: _barriers(kernel, computes) for kernel in plan.kernels}


def _priced(plan: Plan, works: Mapping[str, KernelWork], target: Target) -> Priced:
    backend = backend_for(target)
    terms = {name: backend.kernel_terms(work, target) for name, work in works.items()}
    parts: dict[str, list[str]] = {}
    for name in terms:
        parts.setdefault(whole_name(name), []).append(name)
    total: Size = 0.0
    for call, _ in plan.calls():
        kernels = [call] if call.is_kernel else [k for k in call.body if isinstance(k, Tile)]
        own = [name for kernel in kernels for name in parts[kernel.name]]
        if call.is_kernel:
            seconds = sum((terms[name].seconds for name in own), 0.0)
        else:
            seconds = backend.launch_terms([works[name] for name in own], target).seconds
        total = most(total, seconds) if plan.body.runs == "together" else total + seconds
    return Priced(total, terms)


def whole_name(name: str) -> str:
    """The kernel that a part between barriers belongs to."""
    return name.partition(".")[0]


def works_of(
    runs: Sequence[KernelRun], target: Target, barriers: Mapping[str, int] | None = None, known: Known | None = None
) -> list[KernelWork]:
    """What kernels do in one run of the model, those of one kernel between its barriers one by one; the first of them
    starts it, and counts its barriers."""
    by_level = found_by_level(runs, target, {} if known is None else known)
    made: list[KernelWork] = []
    started: set[str] = set()
    for number, run in enumerate(runs):
        whole = whole_name(run.name)
        starts, meetings = (0, 0) if whole in started else (run.starts, (barriers or {}).get(whole, 0))
        started.add(whole)
        leaves = list(_leaves(run.tree, 1.0))
        found = [level[number] for level in by_level]
        made.append(KernelWork(run.name, run.tiles, run.threads, starts, meetings, leaves, found))
    return made


def _barriers(kernel: Tile, computes: Mapping[str, object]) -> int:
    """Barriers that one run of a kernel passes."""

    def below(tile: Tile) -> int:
        scan = computes.get(tile.scan or "")
        times = extent_of(scan.axis.extent) if tile.over == "steps" and isinstance(scan, Scan) else 1
        return times * sum(below(n) if isinstance(n, Tile) else isinstance(n, UnitBarrier) for n in tile.body)

    return below(kernel)


def _leaves(node: Node, times: Size) -> Iterator[tuple[LeafTrace, Size]]:
    if isinstance(node, LeafTrace):
        yield node, times
        return
    for inner in node.body:
        yield from _leaves(inner, times * node.trips)


# --- bytes


def found_by_level(runs: Sequence[KernelRun], target: Target, known: Known) -> list[list[FoundBytes]]:
    """By level, what every run of a kernel finds there and leaves there."""
    beyond = {target.place(cache): _beyond(runs, target, cache, known) for cache in target.caches}
    if target.copies_tiles:  # what is told what to hold: leaves fetch what they touch, tile by tile
        beyond[target.place(target.local)] = _touched(runs, target.beyond_local.transaction)
    found = [[FoundBytes() for _ in runs] for _ in target.levels]
    walked = [_walked(run, target.main.transaction) for run in runs]
    for number in range(len(runs)):
        passing: Bytes | None = None  # what comes from beyond the caches so far
        for place in sorted(beyond):
            moving = _charged(beyond[place][number])
            if passing is not None:
                moving = {key: least(moving.get(key, 0.0), size) for key, size in passing.items()}
                here = {key: size - moving[key] for key, size in passing.items()}
                found[place][number] = _sums(here, walked[number])
            passing = moving
        found[-1][number] = _sums(passing or {}, walked[number])
    return found


def _walked(run: KernelRun, line: int) -> dict[Hashable, Size]:
    """Bytes of the runs in which the first leaf that touches a buffer walks it."""
    found: dict[Hashable, Size] = {}
    for leaf, _ in _leaves(run.tree, 1.0):
        found = {**leaf.runs(line, _STREAMS), **found}
    return {run.names.get(buffer, buffer): size for buffer, size in found.items()}


def _charged(moved: Moved) -> Bytes:
    """Bytes by buffer and by whether it is written: a line that is written is charged where it is left, its coming
    among that."""
    return {(buffer, buffer in moved.written): most(size, moved.written.get(buffer, 0.0))
            for buffer, size in moved.fetched.items()}  # fmt: skip


def _sums(found: Bytes, walked: Mapping[Hashable, Size]) -> FoundBytes:
    total: dict[bool, Size] = {False: 0.0, True: 0.0}
    runs: dict[bool, Size] = {False: 0.0, True: 0.0}
    for (buffer, is_written), size in found.items():
        total[is_written] = total[is_written] + size
        runs[is_written] = runs[is_written] + size / most(walked.get(buffer, size), 1.0)
    return FoundBytes(total[False], total[True], runs[False], runs[True])


def _beyond(runs: Sequence[KernelRun], target: Target, level: MemoryLevel, known: Known) -> list[Moved]:
    """What every run of a kernel fetches from beyond a cache, and writes there."""
    cache = SimulatedCache(level.capacity * level.shared_by, level.transaction)
    alone = _alone(runs, cache, known)
    if level is not target.caches[-1]:
        return sequence(alone, cache)
    return sequence([*alone, *alone], cache)[len(alone) :]


def _touched(runs: Sequence[KernelRun], line: int) -> list[Moved]:
    """What the leaves of every run touch, each time they run."""
    result = []
    for run in runs:
        fetched: dict[Hashable, Size] = {}
        written: set[Hashable] = set()
        for leaf, times in _leaves(run.tree, 1.0):
            written |= leaf.written
            for buffer, size in leaf.footprint(len(leaf.parts) - 1, line)[0].items():
                fetched[buffer] = fetched.get(buffer, 0.0) + size * times
        stored = {b: n for b, n in fetched.items() if b in written}
        result.append(Moved(fetched, fetched, stored, {}).renamed(run.names))
    return result


def _alone(runs: Sequence[KernelRun], cache: SimulatedCache, known: Known) -> list[Moved]:
    """Every run by itself, nothing in the cache before; kernels of a Scan's step take turns, step after step."""
    alone = [moved_alone(run, cache, known).renamed(run.names) for run in runs]
    for scan in dict.fromkeys(run.scan for run in runs if run.scan is not None):
        numbers = [i for i, run in enumerate(runs) if run.scan == scan]
        if len(numbers) > 1:
            steps = [runs[i].tree for i in numbers]
            together = moved(Repeat(steps[0].loop, steps[0].trips, [n for tree in steps for n in tree.body]), cache)
            for number, own in zip(numbers, _shares(together, [alone[i] for i in numbers]), strict=True):
                alone[number] = own
    return alone


def _shares(together: Moved, alone: Sequence[Moved]) -> list[Moved]:
    """What each of several parts fetches and writes of what they do together, as by itself."""

    def shared(whole: Mapping[Hashable, Size], parts: Sequence[Mapping[Hashable, Size]]) -> list[dict[Hashable, Size]]:
        sums = {b: sum((p.get(b, 0.0) for p in parts), 0.0) for b in whole}
        return [{b: n * whole.get(b, n) / most(sums.get(b, n), 1.0) for b, n in part.items()} for part in parts]

    fetched = shared(together.fetched, [m.fetched for m in alone])
    written = shared(together.written, [m.written for m in alone])
    return [replace(m, fetched=f, written=w) for m, f, w in zip(alone, fetched, written, strict=True)]
