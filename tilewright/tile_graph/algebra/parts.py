"""Which part of every nest of a kernel belongs to given parts of the axes that Tiles cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis
from tilewright.tile_graph.algebra.nest import Nest, roots_of
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of, propagate, whole
from tilewright.tile_graph.plan.form import Tile, TileAxis, UnitBarrier

Limits = dict[Nest, dict[Axis, Range]]  # parts of reductions


def between_barriers(kernel: Tile, nests: Mapping[str, Nest]) -> list[list[Nest]]:
    """The nests of a kernel from one barrier to the next: what is read across one lies in memory."""
    groups: list[list[Nest]] = [[]]

    def below(tile: Tile) -> None:
        for node in tile.body:
            if isinstance(node, Tile):
                below(node)
            elif isinstance(node, UnitBarrier):
                groups.append([])
            elif node.part in ("whole", "step", "copy"):
                groups[-1].append(nests[node.tensor])

    below(kernel)
    return [group for group in groups if group]


def boxes_at(
    groups: Sequence[Sequence[Nest]], ranges: Mapping[str, Range], axes: Mapping[str, TileAxis], clip: bool = True
) -> tuple[dict[Nest, Box], Limits]:
    """The box of every nest where axes of the tree run over these parts, and parts of reductions."""
    by_name = {n.tensor.name: n for group in groups for n in group}
    bound: dict[tuple[str, str], Range] = {}
    for name, part in ranges.items():
        for bind in axes[name].binds:
            if bind.tensor not in by_name:
                continue
            low = part.low if bind.scale == 1 and not bind.offset else part.low * bind.scale + bind.offset
            extent = extent_of(by_name[bind.tensor].named(bind.axis).extent)
            bound[bind.tensor, bind.axis] = Range(simplify(low), part.size * bind.scale, extent)
    limits: Limits = {}
    for (tensor, axis), part in bound.items():
        if axis[0] == "r":
            nest = by_name[tensor]
            limits.setdefault(nest, {})[nest.named(axis)] = part
    boxes: dict[Nest, Box] = {}
    for group in groups:
        roots = {
            root: tuple(
                bound.get((root.tensor.name, f"o{i}"), whole(extent_of(a.extent))) for i, a in enumerate(root.axes)
            )
            for root in roots_of(group)
        }
        boxes.update(propagate(group, roots, limits, clip=clip))
    return boxes, limits
