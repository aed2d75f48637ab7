"""Traffic and footprint of a Plan at every level of its target, kernel by kernel.

What is next to registers is counted exactly, memory by memory; what caches hold is predicted from footprints
(tile_graph/traffic.py). Levels go by their place, never by their name.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod

from tilewright.backend import backend_for
from tilewright.ir.compute import Program, Scan, all_computes
from tilewright.ir.expr import Axis
from tilewright.ir.loops import Buffer, Memory
from tilewright.ir.tensor import Layout, Tensor
from tilewright.lower.kernel import ScanView
from tilewright.lower.program import all_tensors, at_step
from tilewright.target import Target
from tilewright.tile_graph.held import plan_nests
from tilewright.tile_graph.plan import Plan
from tilewright.tile_graph.propagate import extent_of
from tilewright.tile_graph.traffic import Cache, Moved, Node, Repeat, held, moved, sequence


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
    levels: tuple[LevelTraffic, ...]  # by place in the target's levels; what is nearest has none nearer
    memories: Mapping[Memory, tuple[float, float]]  # bytes loaded and stored, by memory of the Loops


def traffic_of(program: Program, plan: Plan, target: Target) -> dict[str, KernelTraffic]:
    """What every kernel of a plan moves, one run of the model after nothing else has run."""
    trees = _trees(program, plan, target)
    backend = backend_for(target)
    nodes = [tree for tree, _ in trees.values()]
    passed: dict[int, list[Moved]] = {}
    footprints: dict[int, list[float]] = {}
    for place in backend.caches(target):
        level = target.levels[place]
        cache = Cache(level.capacity * level.shared_by, level.transaction)
        alone = [moved(node, cache) for node in nodes]
        passed[place] = sequence(nodes, alone, cache)
        footprints[place] = [held(node, cache) for node in nodes]
    result = {}
    for number, (name, (tree, memories)) in enumerate(trees.items()):
        near = by_memory(tree, memories)
        levels = [LevelTraffic(0.0, 0.0, 0.0)]
        for place in range(1, len(target.levels)):
            inner = place - 1
            if inner in passed:
                found = passed[inner][number]
                read, written = float(sum(found.fetched.values())), float(sum(found.written.values()))
            else:
                kind = backend.memory_at(target, place)
                chosen = [v for m, v in near.items() if kind is None or m in kind]
                read, written = sum(v[0] for v in chosen), sum(v[1] for v in chosen)
            if place in footprints:
                kept = footprints[place][number]
            else:
                kept = _allocated(memories, backend.memory_at(target, place))
            levels.append(LevelTraffic(read, written, kept))
        result[name] = KernelTraffic(name, tuple(levels), near)
    return result


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


def _trees(program: Program, plan: Plan, target: Target) -> dict[str, tuple[Repeat, dict[Hashable, Memory]]]:
    backend = backend_for(target)
    computes = all_computes(program)
    tensors = {t.name: t for t in all_tensors(program)}
    layouts = {tensors[name]: layout for name, layout in plan.layouts if name in tensors}

    def layout(tensor: Tensor) -> Layout:
        return layouts.get(tensor) or Layout.natural(tensor.rank)

    result = {}
    for kernel, steps in plan.launches():
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
        tree, memories = backend.walks(kernel, nests, layout, view)
        result[kernel.name] = (tree if times == 1 else Repeat("step", times, [tree]), memories)
    return result

