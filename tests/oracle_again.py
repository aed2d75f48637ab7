"""Tiles inside tiles for the brute force: every run of a kernel's nests in parts of every size, in tiles also other
than the one that is best without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from tilewright.backend.cpu.kernel import inner
from tilewright.backend.cpu.kernel.tile import predict
from tilewright.backend.protocol import Choice, Inner
from tilewright.ir.forms.expr import Axis
from tilewright.schedule.connect import Connector, Group
from tilewright.schedule.inner_tiles import tiled_again
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf

_MOST_PARTS = 1000
_BEST, _OTHERS = 24, 24  # tiles: those that take least as they are, and others evenly over all that there are
_EVERY_GROUP = 1 << 20

_usual_parts = inner._candidates
_Sizes = Callable[[Nest, Leaf, Mapping[str, int], int], list[np.ndarray]]


def score_again(connector: Connector, groups: Sequence[Group]) -> float:
    """What the search's groups take, tiled again as the planner does it."""
    costs = connector.costs
    found = tiled_again(groups, {}, costs, costs.context, _EVERY_GROUP)
    return sum(g.score if g.choice is None or g.choice.inner is None else _scored(connector, g.nests, g.choice)
               for g in found)  # fmt: skip


def best_score_again(connector: Connector, group: Group, sizes: _Sizes) -> float:
    """What a group takes at best, as one tile or tiled again, in tiles of some of these `sizes` and in its own."""
    costs, nests = connector.costs, group.nests
    if len(nests) == 1 or group.choice is None or costs.repeated:
        return group.score
    stored, leaves = costs.stored(nests), [costs.plans[n] for n in nests]
    runs = [(first, last) for first in range(len(nests)) for last in range(first + 2, len(nests) + 1)]
    best = group.score
    for choice in _choices(connector, group, sizes):
        for first, last in runs:
            run = Inner(first, last, (), "", 0)
            found = costs.backend.tile_again(nests, leaves, costs.context, stored, choice, run)
            if found is not None:
                best = min(best, _scored(connector, nests, found))
    return best


def every_part(root: Nest, whole: dict[Axis, int]) -> list[tuple[int, ...]]:
    """Parts of every shape that fill a tile, evenly fewer where those are too many, all that are rows of it, and those
    that the search looks at."""
    along = [[n for n in range(1, size + 1) if size == extent_of(a.extent) or size % n == 0]
             for a, size in whole.items()]  # fmt: skip
    rows = [(*(1 for _ in along[:place]), n, *(c[-1] for c in along[place + 1 :]))
            for place, sizes in enumerate(along) for n in sizes]  # fmt: skip
    while prod(len(c) for c in along) > _MOST_PARTS:
        longest = max(range(len(along)), key=lambda i: len(along[i]))
        along[longest] = sorted({*along[longest][::2], along[longest][-1]})
    found = dict.fromkeys([*rows, *_usual_parts(root, whole), *product(*along)])
    return [part for part in found if part != tuple(whole.values())]


def _scored(connector: Connector, nests: Sequence[Nest], choice: Choice) -> float:
    return choice.seconds * (1 + connector._error(nests, choice)) + connector._displaced(nests, choice)


def _choices(connector: Connector, group: Group, sizes: _Sizes) -> list[Choice]:
    """Tiles of a group whose intermediates fit before they are tiled again."""
    costs, nests = connector.costs, group.nests
    context, root, stored = costs.context, nests[-1], costs.stored(nests)
    fixed = costs._uncut(nests, stored)
    assert fixed is not None and group.choice is not None
    along = sizes(root, costs.plans[root], fixed, context.target.units)
    known = context.memo.tiles.boxes
    columns = [known.size(each.ravel()) for each in np.meshgrid(*along, indexing="ij")]
    by_axis = dict(zip(root.axes, columns, strict=True))
    times = predict(nests, [costs.plans[n] for n in nests], context, stored, by_axis)
    order = np.lexsort((times.tiles, np.round(times.seconds * 1e9)))[: np.isfinite(times.seconds).sum()]
    kept = {*order[:_BEST].tolist(), *order[:: max(1, len(order) // _OTHERS)].tolist()}
    level = context.target.local
    outer = context.target.shared_cache
    found = [group.choice] if not group.choice.block and not group.choice.step else []
    for place in sorted(kept):
        tile = tuple((f"o{i}", int(c[place])) for i, (a, c) in enumerate(zip(root.axes, columns, strict=True))
                     if c[place] < extent_of(a.extent))  # fmt: skip
        held = int(times.held[place])
        name = outer.name if outer is not None and held > level.capacity // 2 else ""
        found.append(Choice(tile, float(times.seconds[place]), int(times.tiles[place]), held, level=name))
    return found
