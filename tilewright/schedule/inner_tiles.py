"""Recursive sub-graph tiling (Welder, section 4.3): inside the tile of a chosen kernel, nests that follow each other
may be tiled again, so that what passes between them stays at a nearer level than the rest.

Looked at for chosen kernels alone, each distinct one once, and kept where the kernel's own prediction is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.backend.protocol import Choice, Inner
from tilewright.schedule.connect import Group, microseconds
from tilewright.schedule.constants import INNER_NESTS, INNER_WORTH, LEAST_GAIN
from tilewright.schedule.group_cost import GroupCost
from tilewright.schedule.replan import group_seconds
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest, held_inside
from tilewright.tile_graph.plan.form import Leaf, Tile


def tiled_again(
    groups: Sequence[Group], leaves: Mapping[Nest, Leaf], costs: GroupCost, context: NestContext, most: int
) -> list[Group]:
    """The groups with tiles inside theirs, at most so many distinct ones tried, those that take most time first;
    `leaves` are others than those that nests have alone."""
    result = list(groups)
    known = context.memo.inner
    tries = 0
    for place in sorted(range(len(groups)), key=lambda i: -group_seconds(groups[i])):
        group = groups[place]
        if group.choice is None or len(group.nests) < INNER_NESTS or costs.repeated:
            continue
        plans = [leaves.get(n) or costs.plans[n] for n in group.nests]
        key = costs.key(tuple(group.nests)), tuple([p.unnamed for p in plans]), group.choice.tile, group.choice.step
        if key not in known:
            if tries == most:
                continue
            tries += 1
            known[key] = _better(group, plans, costs, context)
        if known[key] is not None:
            result[place] = Group(group.nests, known[key], group.score)
    return result


def _better(group: Group, plans: Sequence[Leaf], costs: GroupCost, context: NestContext) -> Choice | None:
    assert group.choice is not None
    found = costs.backend.tile_again(group.nests, plans, context, costs.stored(group.nests), group.choice)
    limit = min(INNER_WORTH * group.choice.seconds, group.choice.seconds - LEAST_GAIN)
    return found if found is not None and found.seconds < limit else None


def inner_reason(group: Group, costs: GroupCost) -> str:
    """What is tiled again inside a kernel's tile."""
    assert group.choice is not None and group.choice.inner is not None
    inner = group.choice.inner
    names = [n.tensor.name for n in held_inside(group.nests, inner.first, inner.last, costs.stored(group.nests))]
    parts = " ".join(f"{axis}:{n}" for axis, n in inner.tile)
    times = f"{microseconds(group.choice.seconds)} us against {microseconds(inner.without)} us"
    return f"tiled again at {inner.level} in parts of [{parts}], which keeps {', '.join(names)} there: {times}"


def inner_of(kernel: Tile) -> Inner | None:
    """The tile inside a kernel's that keeps some of its results nearer; None where there is none."""
    place = 0
    for node in kernel.body:
        if isinstance(node, Leaf):
            place += 1
        elif isinstance(node, Tile) and node.level != kernel.level and _is_plain(node):
            by_name = {a.name: a for a in kernel.axes}
            last = kernel.leaves[-1].tensor
            sizes = tuple((b.axis, n) for name, n in node.sizes for b in by_name[name].binds if b.tensor == last)
            return Inner(place, place + len(node.body), sizes, node.level, 0)
        else:
            return None
    return None


def _is_plain(tile: Tile) -> bool:
    return tile.over == "order" and tile.runs == "order" and all(isinstance(n, Leaf) for n in tile.body) and all(
        h.mode == "store" and h.fill is None and h.stages == 1 for h in tile.holds
    )  # fmt: skip
