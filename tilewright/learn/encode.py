"""A kernel as networks see it: the numbers of every Tile and Leaf of its Plan's tree, and who reads what from whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from tilewright.ir.forms.compute import Compute, Program, all_computes
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.tune.features import Told, bits, features, leaf_numbers
from tilewright.tune.kinds import work


@dataclass(frozen=True)
class Encoded:
    """One kernel of a Plan; nodes are its Tiles and Leaves, each after the Tile around it, the kernel first."""

    seconds: float  # as the fold predicts them
    whole: Mapping[str, int]
    nodes: tuple[Mapping[str, int], ...]
    parents: tuple[int, ...]  # of each node but the first
    leaves: tuple[int, ...]  # nodes
    reads: tuple[tuple[int, int], ...]  # a Leaf, and one that it reads from


def encoded(program: Program, plan: Plan, target: Target) -> list[Encoded]:
    """Of every kernel of a Plan that shares no launch."""
    return with_trees(program, plan, target, features(program, plan, target))


def with_trees(program: Program, plan: Plan, target: Target, told: Sequence[Told]) -> list[Encoded]:
    """The same, of a Plan that the fold has priced."""
    computes = all_computes(program)
    return [_Kernel(kernel, computes, target).encoded(one.seconds, one.numbers)
            for kernel, one in zip(plan.kernels, told, strict=True)]  # fmt: skip


@dataclass
class _Kernel:
    kernel: Tile
    computes: Mapping[str, Compute]
    target: Target
    nodes: list[Mapping[str, int]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)

    def encoded(self, seconds: float, whole: Mapping[str, int]) -> Encoded:
        nests = plan_nests(self.kernel, self.computes)
        self._add(self.kernel, {axis.name: axis.extent for axis in self.kernel.axes}, iter(nests))
        stored = {nest.tensor.name: place for nest, place in zip(nests, self.leaves, strict=True)}
        reads = tuple((place, stored[t.name]) for nest, place in zip(nests, self.leaves, strict=True)
                      for t in nest.reads() if t.name in stored)  # fmt: skip
        return Encoded(seconds, whole, tuple(self.nodes), tuple(self.parents), tuple(self.leaves), reads)

    def _add(self, tile: Tile, around: Mapping[str, int], nests: Iterator[Nest]) -> None:
        """The Tile with all that is in it; `around` are the sizes of the part that it is cut from."""
        place = len(self.nodes)
        extents = {**{axis.name: axis.extent for axis in tile.axes}, **around}
        self.nodes.append(self._tile_numbers(tile, extents))
        inside = {**extents, **dict(tile.sizes)}
        for node in tile.body:
            if isinstance(node, Tile):
                self.parents.append(place)
                self._add(node, inside, nests)
            elif isinstance(node, Leaf):
                self.parents.append(place)
                self._add_leaf(node, nests)

    def _add_leaf(self, leaf: Leaf, nests: Iterator[Nest]) -> None:
        if leaf in self.kernel.leaves:
            nest = next(nests)
            self.leaves.append(len(self.nodes))
            self.nodes.append({"is leaf": 1, **leaf_numbers(leaf, nest), "points": bits(work([nest]))})
        else:  # how the carried state of one of these begins or ends
            self.nodes.append({"is leaf": 1, f"part {leaf.part}": 1})

    def _tile_numbers(self, tile: Tile, extents: Mapping[str, int]) -> dict[str, int]:
        cut = [(extents.get(name, size), size) for name, size in tile.sizes]
        near = [self.target.place(cache) for cache in self.target.caches if cache.name == tile.level]
        return {
            "is tile": 1,
            f"over {tile.over}": 1,
            "trips": prod(-(-extent // size) for extent, size in cut),
            "part": prod(size for _, size in cut),
            "innermost part": cut[-1][1] if cut else 0,
            "level": near[0] if near else 0,
            "holds": len(tile.holds),
            "rolling": sum(hold.mode == "rolling" for hold in tile.holds),
            "copied": sum(hold.fill is not None for hold in tile.holds),
            "stages": max((hold.stages for hold in tile.holds), default=1),
            "threads": tile.count,
            "footprint": bits(tile.estimate.footprint),
        }
