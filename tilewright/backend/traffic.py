"""Traffic and footprint of a Plan at every level of its target, kernel by kernel.

What is next to registers is counted exactly, memory by memory; what caches hold is predicted from footprints
(tile_graph/traffic/traffic.py). Levels go by their place, never by their name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from tilewright.backend import backend_for
from tilewright.ir.forms.compute import Program, Scan, all_computes, all_tensors
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.loops import Buffer, Memory
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.kernel import ScanView
from tilewright.lower.persistent import in_stages, steps_inside, walked_inside
from tilewright.lower.placed import Tree
from tilewright.lower.program import at_step, shape_of
from tilewright.target import Target
from tilewright.tile_graph.algebra.occurrences import unique_names
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.tile_graph.traffic.traffic import Moved, Node, Repeat, SimulatedCache, held, moved, sequence


@dataclass(frozen=True)
class LevelTraffic:
    """Bytes that what is nearer reads from a level and writes to it in one run, and bytes that are kept there."""

    read: float
    written: float
    footprint: float

    @property
    def total(self) -> float:
        return self.read + self.written


@dataclass(frozen=True)
class KernelTraffic:
    name: str
    by_level: tuple[LevelTraffic, ...]  # by place in the target's levels; what is nearest has none nearer
    memories: Mapping[Memory, tuple[float, float]]  # bytes loaded and stored, by memory of the Loops


def traffic_of(program: Program, plan: Plan, target: Target) -> dict[str, KernelTraffic]:
    """What every kernel of a plan moves in one run of the model, nothing being in caches before it. Kernels that are
    alike are looked at once."""
    return traffic_of_runs(runs_of(program, plan, target), target)


def traffic_of_runs(runs: Sequence[KernelRun], target: Target, known: Known | None = None) -> dict[str, KernelTraffic]:
    """The same of runs that are known."""
    known = {} if known is None else known
    backend = backend_for(target)
    passed: dict[int, list[Moved]] = {}
    footprints: dict[int, dict[Hashable, float]] = {}
    trees = {run.key: run.tree for run in runs}
    for level in target.caches:
        place = target.place(level)
        cache = SimulatedCache(level.capacity * level.shared_by, level.transaction)
        passed[place] = sequence([moved_alone(run, cache, known).renamed(run.names) for run in runs], cache)
        footprints[place] = {key: held(tree, cache) for key, tree in trees.items()}
    result = {}
    for number, run in enumerate(runs):
        near = by_memory(run.tree, run.memories)
        levels = [LevelTraffic(0.0, 0.0, 0.0)]
        for place in range(1, len(target.levels)):
            here = backend.memory_at(target, place)
            if place - 1 in passed:
                found = passed[place - 1][number]
                read, written = float(sum(found.fetched.values())), float(sum(found.written.values()))
            else:
                chosen = [v for m, v in near.items() if here is None or m in here]
                read, written = sum(v[0] for v in chosen), sum(v[1] for v in chosen)
            kept = footprints[place][run.key] if place in footprints else _allocated(run.memories, here)
            levels.append(LevelTraffic(read, written, kept))
        result[run.name] = KernelTraffic(run.name, tuple(levels), near)
    return result


@dataclass(frozen=True)
class KernelRun:
    """A kernel, the loops of one that is alike, and what the buffers of that are called here."""

    name: str
    tiles: Size
    threads: int  # that share a tile
    starts: int  # in one run of the model
    scan: str | None  # whose steps those are
    key: Hashable
    tree: Repeat
    memories: Mapping[Hashable, Memory]
    names: Mapping[Hashable, Hashable]


Known = dict[tuple[Hashable, SimulatedCache], Moved]
"""What kernels move by themselves, by their keys and caches: whoever asks about the same runs shares it."""


def moved_alone(run: KernelRun, cache: SimulatedCache, known: Known) -> Moved:
    """One run of a kernel, nothing in the cache before, its buffers as those of the first that is alike."""
    key = run.key, cache
    if key not in known:
        known[key] = moved(run.tree, cache)
    return known[key]


def _allocated(memories: Mapping[Hashable, Memory], kinds: frozenset[Memory] | None) -> float:
    """Bytes of the buffers that a kernel has in memories of its own."""
    return float(sum(prod(extent_of(e) for e in b.shape) * b.dtype.bytes for b, m in memories.items()
                     if isinstance(b, Buffer) and kinds is not None and m in kinds))  # fmt: skip


def by_memory(node: Node, memories: Mapping[Hashable, Memory]) -> dict[Memory, tuple[float, float]]:
    """Bytes that leaves load and store in a whole tree, by memory."""
    result: dict[Memory, tuple[float, float]] = {}

    def below(inner: Node, times: float) -> None:
        if isinstance(inner, Repeat):
            for item in inner.body:
                below(item, times * float(inner.trips))
            return
        for amounts, way in ((inner.loaded, 0), (inner.stored, 1)):
            for buffer, size in amounts.items():
                memory = memories.get(buffer, Memory.SHARED)
                before = result.get(memory, (0.0, 0.0))
                more = float(size) * times
                result[memory] = (before[0] + more, before[1]) if way == 0 else (before[0], before[1] + more)

    below(node, 1.0)
    return result


def runs_of(program: Program, plan: Plan, target: Target, timed: bool = False) -> list[KernelRun]:
    """Every kernel in order; `timed` with what its leaves keep a unit busy."""
    backend = backend_for(target)
    computes = all_computes(program)
    tensors = {t.name: t for t in all_tensors(program)}
    layouts = {tensors[name]: layout for name, layout in plan.layouts if name in tensors}

    def layout(tensor: Tensor) -> Layout:
        return layouts.get(tensor) or Layout.natural(tensor.rank)

    known: dict[Hashable, tuple[Tree, list[str]]] = {}
    result = []
    for kernel, steps in in_stages(plan).launches():
        kernel = unique_names(kernel)
        nests = plan_nests(kernel, computes)
        scan = computes.get(steps.scan or "") if steps is not None else None
        view: ScanView | None = None
        times = 1
        if isinstance(scan, Scan):
            assert isinstance(scan.axis.extent, int)
            step = Axis("step", scan.axis.extent)
            view = ScanView(step, dict(scan.stacked))
            nests = [at_step(n, scan.axis, step) for n in nests]
            times = scan.axis.extent
        walked = steps_inside(kernel)
        if walked is not None:
            inner = computes[walked.scan or ""]
            assert isinstance(inner, Scan)
            nests, view = walked_inside(nests, inner)
        inside = kernel.held
        met = list(dict.fromkeys(t.name for n in nests for t in (*n.reads(), *n.stores)))
        key: Hashable = (
            signature(nests, partial(_about, layout, inside)),
            shape_of(kernel, {leaf.tensor: number for number, leaf in enumerate(kernel.leaves)}),
            kernel.name if view is not None else None,
        )
        if key not in known:
            tree, memories = backend.memory_trace(kernel, nests, layout, view, target if timed else None)
            known[key] = ((tree if times == 1 else Repeat("step", times, [tree]), memories), met)
        (tree, memories), first = known[key]
        scan_name = steps.scan if steps is not None else None
        names: dict[Hashable, Hashable] = dict(zip(first, met, strict=True))
        threads = max((n.count for n in kernel.body if isinstance(n, Tile)), default=1)
        result.append(KernelRun(kernel.name, kernel.tiles, threads, times, scan_name, key, tree, memories, names))
    return result


def _about(layout: Callable[[Tensor], Layout], inside: frozenset[str], tensor: Tensor) -> Hashable:
    return layout(tensor), tensor.name in inside
