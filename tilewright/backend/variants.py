"""What variants of kernels have in common, whatever the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.plan.form import Hold, Leaf, Tile, TileAxis


def like(chosen: Tile, theirs: Sequence[Nest], kernel: Tile, ours: Sequence[Nest]) -> Tile:
    """A kernel run as a variant of another that is equal but for its names: their nests tell which are whose."""
    names: dict[str, str] = {}
    for one, two in zip(theirs, ours, strict=True):
        pairs = zip(one.outline.tensors, two.outline.tensors, strict=True)
        names.update({t.name: o.name for t, o in pairs})
    leaves = {their.tensor: own for their, own in zip(chosen.leaves, kernel.leaves, strict=True)}
    names.update({tensor: own.tensor for tensor, own in leaves.items()})
    made = _renamed(chosen, leaves, names)
    reason = chosen.estimate.reason or kernel.estimate.reason
    about = replace(kernel.estimate, seconds=chosen.estimate.seconds, reason=reason)
    return replace(made, name=kernel.name, estimate=about)


def _renamed(tile: Tile, leaves: Mapping[str, Leaf], names: Mapping[str, str]) -> Tile:
    def leaf(one: Leaf) -> Leaf:
        own = leaves[one.tensor]
        return replace(one, tensor=own.tensor, core=own.core, epilogue=own.epilogue, composed=own.composed)

    def axis(one: TileAxis) -> TileAxis:
        return replace(one, binds=tuple(replace(b, tensor=names[b.tensor]) for b in one.binds))

    def hold(one: Hold) -> Hold:
        return replace(one, tensor=names[one.tensor], within=None if one.within is None else names[one.within])

    body = tuple(
        _renamed(n, leaves, names) if isinstance(n, Tile) else leaf(n) if isinstance(n, Leaf) else n for n in tile.body
    )
    return replace(tile, body=body, holds=tuple(map(hold, tile.holds)), axes=tuple(map(axis, tile.axes)))
