"""What a tree takes: time, bytes between memories, the most that is held; copies and barriers with what they overlap.

Kernels take what their estimates say, or what their traffic and arithmetic take at best. Around them, parts follow each
other, children that run together side by side; a copy in stages, or one that an earlier kernel starts,
counts where it takes longer than what it hides behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from tilewright.backend.traffic import KernelTraffic, traffic_of
from tilewright.ir.forms.compute import Program, Scan, all_computes, all_tensors
from tilewright.target import Cluster, Target
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.meaning.outside import (
    Axes,
    Held,
    Outside,
    Ranges,
    is_filled,
    parts_of,
    span_bytes,
    span_of,
    whole_span,
)
from tilewright.tile_graph.plan.form import Barrier, Hold, Plan, Tile


@dataclass
class Prediction:
    seconds: float = 0.0
    barriers: float = 0.0  # of these, at barriers inside kernels
    moved: dict[tuple[str, str], int] = field(default_factory=dict)  # by copies around kernels
    most: dict[str, int] = field(default_factory=dict)  # held by Tiles around kernels, of one device
    kernels: dict[str, KernelTraffic] = field(default_factory=dict)


def predict(program: Program, plan: Plan, system: Target | Cluster) -> Prediction:
    """A plan without cases; `Plan.at` gives that of an extent."""
    return _Tree(program, plan, system).run()


class _Tree:
    def __init__(self, program: Program, plan: Plan, system: Target | Cluster) -> None:
        self.program, self.plan = program, plan
        self.cluster = system if isinstance(system, Cluster) else None
        self.device = system.device if isinstance(system, Cluster) else system
        self.computes = all_computes(program)
        self.tensors = {t.name: t for t in all_tensors(program)}
        self.outside = Outside(self.computes)
        self.found = Prediction()
        self.launches: dict[str, int] = {}
        self.seconds: dict[str, float] = {}  # of a kernel, each time it runs
        self.hides: dict[str, float] = {}  # of these, what copies that start with it do not take yet

    def run(self) -> Prediction:
        flat = _flat(self.plan.body, {}, {})
        alone = self.plan if self.cluster is None else replace(
            self.plan, body=Tile(self.device.main.name, body=tuple(tile for tile, _ in flat))
        )  # fmt: skip
        self.found.kernels = traffic_of(self.program, alone, self.device)
        self.launches = {tile.name: count for tile, count in flat}
        for kernel in self.plan.kernels:
            self.seconds[kernel.name] = self._kernel(kernel)
        self.found.seconds = self._tile(self.plan.body, {}, {}, ())
        self.found.most = Held(self.outside, self.tensors).of(self.plan.body)
        return self.found

    # --- kernels

    def _kernel(self, kernel: Tile) -> float:
        """One run of a kernel: its estimate, or what its traffic and its arithmetic take at best."""
        waits = self._barriers(kernel)
        if kernel.estimate.seconds:
            return kernel.estimate.seconds + waits
        times, units = max(1, self.launches.get(kernel.name, 1)), self.device.units
        own = [k for name, k in self.found.kernels.items() if name.partition(".")[0] == kernel.name]
        moved = max(
            (sum(k.by_level[place].total for k in own) / times / (level.bandwidth * units)
             for place, level in enumerate(self.device.levels) if place), default=0.0,
        )  # fmt: skip
        work = sum(n.value_cost * prod(extent_of(a.extent) for a in n.axes)
                   + n.element_cost * prod(extent_of(a.extent) for a in (*n.axes, *n.reduce_axes))
                   for n in self.outside.kernel(kernel).nests)  # fmt: skip
        done = work * self._steps_inside(kernel) / times / (self.device.fma_rate * units)
        return self.device.kernel_cost + max(moved, done) + waits

    def _steps_inside(self, kernel: Tile) -> int:
        return prod(self._steps(n) for n in kernel.walk() if isinstance(n, Tile) and n.over == "steps")

    def _steps(self, tile: Tile) -> int:
        scan = self.computes[tile.scan or ""]
        assert isinstance(scan, Scan)
        return extent_of(scan.axis.extent)

    def _barriers(self, kernel: Tile) -> float:
        """Seconds at the barriers of one run; on a CPU each is that of a stage of the team."""
        each = dict(self.device.barriers).get("grid", self.device.kernel_cost) if kernel.over == "blocks" else (
            self.device.kernel_cost
        )  # fmt: skip

        def below(tile: Tile) -> float:
            times = self._steps(tile) if tile.over == "steps" else 1
            return times * sum(each if isinstance(n, Barrier) else below(n) if isinstance(n, Tile) else 0.0
                               for n in tile.body)  # fmt: skip

        return below(kernel)

    # --- tiles around kernels

    def _tile(self, tile: Tile, ranges: Ranges, axes: Axes, around: Sequence[Tile]) -> float:
        if tile.is_kernel:
            self.found.barriers += self._barriers(tile)
            return self.seconds[tile.name]
        known = {**axes, **{a.name: a for a in tile.axes}}
        parts = [self._part(tile, part, known, around) for part in parts_of(tile, ranges, known)]
        times = self._steps(tile) if tile.over == "steps" else 1
        if max((h.stages for h in tile.holds), default=1) == 1:
            return times * sum(come + body + left for come, body, left in parts)
        later = [come for come, _, _ in parts[1:]] + [0.0]  # while a part is used the next one comes
        hidden = sum(max(come, body + left) for come, (_, body, left) in zip(later, parts, strict=True))
        return parts[0][0] + hidden

    def _part(self, tile: Tile, ranges: Ranges, axes: Axes, around: Sequence[Tile]) -> tuple[float, float, float]:
        """Seconds until what a part holds has come, of its body, and until its results are written back."""
        come = left = 0.0
        stored = self.outside.stored(tile)
        for hold in tile.holds:
            if not is_filled(hold):
                continue
            seconds = self._copy(tile, hold, ranges, axes, hold.tensor in stored)
            if hold.tensor in stored:
                left += seconds
            else:
                room = self.hides.setdefault(hold.issue or "", self.seconds.get(hold.issue or "", 0.0))
                self.hides[hold.issue or ""] = max(0.0, room - seconds)
                come += max(0.0, seconds - room)
        inner = (*around, tile)
        bodies = [self._tile(n, ranges, axes, inner) for n in tile.body if isinstance(n, Tile)]
        beside = tile.estimate.seconds or max(bodies, default=0.0)
        return come, beside if tile.runs == "together" else sum(bodies), left

    def _count(self, source: str, target: str, size: int) -> None:
        self.found.moved[source, target] = self.found.moved.get((source, target), 0) + size

    def _copy(self, tile: Tile, hold: Hold, ranges: Ranges, axes: Axes, is_back: bool) -> float:
        assert self.cluster is not None
        host, tensor = self.cluster.host, self.tensors[hold.tensor]
        touched = self.outside.touched(tile, ranges, axes)
        part = span_of(touched[hold.tensor][1]) if hold.tensor in touched else whole_span(tensor)
        size = span_bytes(tensor, part)
        way = (tile.level, host.name) if is_back else (host.name, tile.level)
        self._count(*way, size)
        return host.latency + size / (host.writing if is_back else host.bandwidth)


def _flat(tile: Tile, axes: Axes, sizes: Mapping[str, int]) -> list[tuple[Tile, int]]:
    """Every kernel with what Tiles around it cut as axes of its own, and how often one device starts it."""
    known = {**axes, **{a.name: a for a in tile.axes}}
    if tile.is_kernel:
        outer = [known[name] for name in sizes]
        own = {leaf.tensor for leaf in tile.leaves}
        cut = tuple(replace(a, binds=tuple(b for b in a.binds if b.tensor in own)) for a in outer)
        starts = prod(-(-max(1, known[n].extent) // size) for n, size in sizes.items())
        merged = replace(tile, axes=(*cut, *tile.axes), sizes=(*sizes.items(), *tile.sizes))
        return [(merged, starts)]
    inside = {**sizes, **dict(tile.sizes)}
    return [found for n in tile.body if isinstance(n, Tile) for found in _flat(n, known, inside)]
