"""A Plan with other names for its tensors and kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilewright.tile_graph.plan.form import Leaf, Plan, Tile, UnitBarrier

Rename = Callable[[str], str]


def renamed(plan: Plan, tensor: Rename, kernel: Rename) -> Plan:
    """The same Plan for tensors and kernels of other names."""
    layouts = tuple((tensor(name), layout) for name, layout in plan.layouts)
    cases = tuple(replace(case, body=_tile(case.body, tensor, kernel)) for case in plan.cases)
    return replace(plan, body=_tile(plan.body, tensor, kernel), layouts=layouts, cases=cases)


def _tile(tile: Tile, tensor: Rename, kernel: Rename) -> Tile:
    holds = tuple(replace(h, tensor=tensor(h.tensor), issue=None if h.issue is None else kernel(h.issue))
                  for h in tile.holds)  # fmt: skip
    axes = tuple(replace(a, binds=tuple(replace(b, tensor=tensor(b.tensor)) for b in a.binds)) for a in tile.axes)
    return replace(
        tile, holds=holds, axes=axes, name=kernel(tile.name) if tile.name else "",
        scan=None if tile.scan is None else tensor(tile.scan),
        body=tuple(_node(node, tensor, kernel) for node in tile.body),
    )  # fmt: skip


def _node(node: Tile | Leaf | UnitBarrier, tensor: Rename, kernel: Rename) -> Tile | Leaf | UnitBarrier:
    if isinstance(node, Tile):
        return _tile(node, tensor, kernel)
    if isinstance(node, Leaf):
        composed, epilogue = (tuple(map(tensor, names)) for names in (node.composed, node.epilogue))
        return replace(node, tensor=tensor(node.tensor), core=tensor(node.core), epilogue=epilogue, composed=composed)
    return node
