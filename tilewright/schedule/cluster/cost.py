"""What a piece of a compute and an exchange between ranks are predicted to take."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from tilewright.ir.analysis.pieces import axis_ranges, place_bytes
from tilewright.ir.forms.compute import Compute, Map, Reduce, expressions, reads
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.mesh import Mesh, Spread
from tilewright.ir.forms.sharded import Exchange, ShardedCompute
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.target import Cluster, Link, Target
from tilewright.tile_graph.algebra.nest import data_cost
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.sharding.routes import handled_bytes, route, sent_bytes
from tilewright.tile_graph.sharding.strategies import Strategy


@dataclass(frozen=True)
class Costs:
    """Seconds by a description of the devices and of the links between them."""

    cluster: Cluster
    known: dict[Hashable, float] = field(default_factory=dict, compare=False)  # of routes, by shape and spreads

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(tuple((link.name, link.size) for link in self.cluster.links))

    def piece(self, compute: Compute, strategy: Strategy, constants: Container[Tensor]) -> float:
        """Of the first rank's part, which has most: arithmetic, or weights from main memory and the rest from where
        tiles of neighbouring computes are."""
        device = self.cluster.device
        at = (0,) * len(self.mesh.axes)
        ranges = axis_ranges(ShardedCompute(compute, strategy.cuts, {}, strategy.gives), self.mesh, at)
        work = _work(compute, {axis: count for axis, (_, count) in ranges.items()})
        near = sum(self.bytes_of(t, strategy.gives) for t in compute.outputs)
        far = 0
        for tensor in reads(compute):
            size = min(self.bytes_of(tensor, spread) for spread in strategy.needs[tensor])
            # of a table only the rows that are looked up are read
            size = min(size, near) if isinstance(compute, Map) else size
            far, near = (far + size, near) if tensor in constants else (far, near + size)
        moved = far / device.main.bandwidth + near / device.local.bandwidth
        return max(work / device.fma_rate, moved) / device.units

    def bytes_of(self, tensor: Tensor, spread: Spread) -> int:
        """Of what the first rank has, which is most."""
        if any(not isinstance(extent, int) for extent in tensor.shape):
            return tensor.most_bytes
        return place_bytes(spread.place(extents(tensor), self.mesh, (0,) * len(self.mesh.axes)), tensor)

    def exchange(self, step: Exchange) -> float:
        assert step.axis is not None
        sent, handled = sent_bytes(step, self.mesh), handled_bytes(step, self.mesh)
        return exchange_seconds(step.kind, sent, handled, self.cluster.links[step.axis], self.cluster.device)

    def routed(self, tensor: Tensor, have: Spread, wants: tuple[Spread, ...]) -> float:
        """Of the cheapest way to one of several spreads."""
        if have.is_whole:
            return 0.0
        key = tensor.shape, tensor.dtype.bytes, have, wants
        if key not in self.known:
            routes = [route(tensor, have, want, self.mesh)[0] for want in wants]
            self.known[key] = min(sum(map(self.exchange, steps)) for steps in routes)
        return self.known[key]


def exchange_seconds(kind: str, sent: int, handled: int, link: Link, device: Target) -> float:
    """As a ring: parts are passed on, one exchange after the other; a halo comes from both sides at once. A CPU's one
    thread passes on, and adds up."""
    turns = {"all-reduce": 2 * (link.size - 1), "halo": 1}.get(kind, link.size - 1)
    units = 1 if device.kind == "cpu" else device.units
    return turns * link.latency + sent / link.bandwidth + handled / (device.main.bandwidth * units)


def _work(compute: Compute, cut: Mapping[Axis, int]) -> float:
    """Multiply-add slots of what is left of every axis."""
    if not isinstance(compute, Map | Reduce):
        return float(sum(tensor.most_bytes for tensor in (*compute.outputs, *reads(compute))))
    axes = (*compute.axes, *(compute.reduce_axes if isinstance(compute, Reduce) else ()))
    points = prod(cut.get(axis, extent_of(axis.extent)) for axis in axes)
    return points * max(1, data_cost(*expressions(compute)))
