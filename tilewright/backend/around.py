"""What Tiles around kernels add to what those take: copies between a host and its device, and what they hide behind.

Parts follow each other; a copy in stages, or one that an earlier kernel starts, counts where it takes longer than what
it hides behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from tilewright.ir.forms.compute import Program, all_computes, all_tensors
from tilewright.target import Cluster
from tilewright.tile_graph.meaning.outside import (
    Axes,
    Outside,
    Ranges,
    is_filled,
    parts_of,
    span_bytes,
    span_of,
    whole_span,
)
from tilewright.tile_graph.plan.form import Hold, Plan, Tile


class Around:
    """Seconds of a plan whose kernels take so many each time they start, and the bytes that are copied around them."""

    def __init__(self, program: Program, plan: Plan, cluster: Cluster, seconds: Mapping[str, float]) -> None:
        self.host, self.tensors = cluster.host, {t.name: t for t in all_tensors(program)}
        self.outside = Outside(all_computes(program))
        self.kernels = seconds
        self.hides: dict[str, float] = {}  # of a kernel, what copies that start with it do not take yet
        self.moved: dict[tuple[str, str], int] = {}
        self.seconds = self._tile(plan.body, {}, {})

    def _tile(self, tile: Tile, ranges: Ranges, axes: Axes) -> float:
        if tile.is_kernel:
            return self.kernels[tile.name]
        known = {**axes, **{a.name: a for a in tile.axes}}
        parts = [self._part(tile, part, known) for part in parts_of(tile, ranges, known)]
        if max((h.stages for h in tile.holds), default=1) == 1:
            return sum(come + body + left for come, body, left in parts)
        later = [come for come, _, _ in parts[1:]] + [0.0]  # while a part is used the next one comes
        hidden = sum(max(come, body + left) for come, (_, body, left) in zip(later, parts, strict=True))
        return parts[0][0] + hidden

    def _part(self, tile: Tile, ranges: Ranges, axes: Axes) -> tuple[float, float, float]:
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
                room = self.hides.setdefault(hold.issue or "", self.kernels.get(hold.issue or "", 0.0))
                self.hides[hold.issue or ""] = max(0.0, room - seconds)
                come += max(0.0, seconds - room)
        bodies = [self._tile(n, ranges, axes) for n in tile.body if isinstance(n, Tile)]
        return come, max(bodies, default=0.0) if tile.runs == "together" else sum(bodies), left

    def _copy(self, tile: Tile, hold: Hold, ranges: Ranges, axes: Axes, is_back: bool) -> float:
        tensor, touched = self.tensors[hold.tensor], self.outside.touched(tile, ranges, axes)
        part = span_of(touched[hold.tensor][1]) if hold.tensor in touched else whole_span(tensor)
        size = span_bytes(tensor, part)
        way = (tile.level, self.host.name) if is_back else (self.host.name, tile.level)
        self.moved[way] = self.moved.get(way, 0) + size
        return self.host.latency + size / (self.host.writing if is_back else self.host.bandwidth)


def on_device(plan: Plan, cluster: Cluster) -> tuple[Plan, dict[str, int]]:
    """The kernels of a plan without the Tiles around them, whose cuts are then their own, and how often each starts."""
    flat = _flat(plan.body, {}, {})
    body = Tile(cluster.device.main.name, body=tuple(tile for tile, _ in flat))
    return replace(plan, body=body), {tile.name: count for tile, count in flat}


def _flat(tile: Tile, axes: Axes, sizes: Mapping[str, int]) -> list[tuple[Tile, int]]:
    known = {**axes, **{a.name: a for a in tile.axes}}
    if tile.is_kernel:
        own = {leaf.tensor for leaf in tile.leaves}
        cut = [replace(known[n], binds=tuple(b for b in known[n].binds if b.tensor in own)) for n in sizes]
        starts = prod(-(-max(1, known[n].extent) // size) for n, size in sizes.items())
        return [(replace(tile, axes=(*cut, *tile.axes), sizes=(*sizes.items(), *tile.sizes)), starts)]
    inside = {**sizes, **dict(tile.sizes)}
    return [found for n in tile.body if isinstance(n, Tile) for found in _flat(n, known, inside)]
