"""The best partition of small graphs by brute force: every partition, every tile, block and step, and where asked for
the tiles inside tiles, under the planner's own cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from tests.oracle_again import best_score_again, every_part, score_again
from tilewright.backend.cpu.kernel import inner as cpu_inner
from tilewright.backend.cpu.kernel import tile as cpu_tile
from tilewright.backend.gpu.kernel import tile as gpu_tile
from tilewright.ir.forms.compute import Program
from tilewright.schedule import connect, group_cost
from tilewright.schedule.connect import Connector, Group
from tilewright.schedule.planner import make_plan
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf

_MOST_TILES = 40_000


def found_by_search(program: Program, target: Target, again: bool = False) -> tuple[float, int]:
    """What the planner's partition is predicted to take, tiled `again` inside its tiles or not, and how many nests the
    graph has."""
    return _scored(program, target, Connector.connect, score_again if again else _score)


def planned_by_search(program: Program, target: Target) -> float:
    """The same of the whole plan: kernels' leaves are planned again for their tiles, which brute force does not."""
    return sum(kernel.estimate.seconds for kernel in make_plan(program, target).kernels)


def best_of_all(program: Program, target: Target, again: bool = False) -> float:
    """The same for the best of all partitions and tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_tile, "_axis_sizes", _every_size)
        patch.setattr(gpu_tile, "_candidates", lambda root, plan, fixed: _every_tile(root, plan, fixed))
        patch.setattr(group_cost, "STREAM_BLOCKS", tuple(range(16, 513, 16)))
        patch.setattr(cpu_tile, "STEP_ROWS", tuple(range(1, 65)))
        if not again:
            return _scored(program, target, _best_partition, _score)[0]
        patch.setattr(cpu_inner, "_candidates", every_part)
        return _scored(program, target, Connector.separate, lambda connector, _: _best_again(connector))[0]


def _score(_: Connector, groups: Sequence[Group]) -> float:
    return sum(g.score for g in groups)


def _best_again(connector: Connector) -> float:
    """What the best partition takes with the best tile inside each of its kernels."""
    known: dict[tuple[Nest, ...], float] = {}
    best = float("inf")
    for groups in _partitions(connector):
        for group in groups:
            if tuple(group.nests) not in known:
                known[tuple(group.nests)] = best_score_again(connector, group, _usual_sizes)
        best = min(best, sum(known[tuple(g.nests)] for g in groups))
    return best


def _scored(program: Program, target: Target, connecting, scoring) -> tuple[float, int]:  # type: ignore[no-untyped-def]
    scores: list[float] = []
    counts: list[int] = []

    def connected(self: Connector) -> list[Group]:
        groups: list[Group] = connecting(self)
        scores.append(scoring(self, groups))
        counts.append(len(self.nests))
        return groups

    original = Connector.connect
    with pytest.MonkeyPatch.context() as patch:
        connecting = original if connecting is original else connecting
        patch.setattr(connect.Connector, "connect", connected)
        make_plan(program, target)
    return sum(scores), max(counts)


def _best_partition(self: Connector) -> list[Group]:
    found = min(_partitions(self), key=lambda groups: sum(g.score for g in groups))
    return sorted(found, key=lambda g: self.order[g.nests[-1]])


def _partitions(connector: Connector) -> Iterator[list[Group]]:
    """Every way to put the nests into groups that can be kernels and be run one after the other."""
    for parts in _set_partitions(list(connector.nests)):
        groups = [connector.group(part) for part in parts]
        if all(g.choice is not None for g in groups) and _is_acyclic(connector, parts):
            yield groups


def _set_partitions(items: list[Nest]) -> Iterator[list[list[Nest]]]:
    if not items:
        yield []
        return
    *before, last = items
    for smaller in _set_partitions(before):
        yield [*smaller, [last]]
        for number, part in enumerate(smaller):
            yield [*smaller[:number], [*part, last], *smaller[number + 1 :]]


def _is_acyclic(connector: Connector, parts: Sequence[Sequence[Nest]]) -> bool:
    place = {n: i for i, part in enumerate(parts) for n in part}
    makers = {t: place[n] for n in connector.nests for t in n.stores}
    waits = {i: {makers[t] for n in part for t in n.reads() if t in makers} - {i} for i, part in enumerate(parts)}
    while waits:
        ready = [i for i, others in waits.items() if not others & waits.keys()]
        if not ready:
            return False
        for i in ready:
            del waits[i]
    return True


def _every_size(root: Nest, plan: Leaf, fixed: Mapping[str, int], units: int) -> list[np.ndarray]:
    """Every size along each axis, of packed weights every number of panels; evenly fewer where that is too much."""
    names = root.axis_names()
    usual = _usual_sizes(root, plan, fixed, units)
    panels = {plan.vector: dict(plan.register).get(plan.vector or "", 1)} if is_contraction(root) else {}
    extents = [max(1, extent_of(a.extent)) for a in root.axes]
    chosen = [[n] if names[a] in fixed else [*range(panels.get(names[a], 1), n, panels.get(names[a], 1)), n]
              for a, n in zip(root.axes, extents, strict=True)]  # fmt: skip
    chosen = [[min(n, fixed[names[a]]) for n in c] if names[a] in fixed else c
              for a, c in zip(root.axes, chosen, strict=True)]  # fmt: skip
    while np.prod([len(c) for c in chosen]) > _MOST_TILES:
        longest = max(range(len(chosen)), key=lambda i: len(chosen[i]))
        chosen[longest] = sorted({*chosen[longest][::2], chosen[longest][-1]})
    return [np.array(sorted({*few, *usual_sizes.tolist()})) for few, usual_sizes in zip(chosen, usual, strict=True)]


_usual_sizes = cpu_tile._axis_sizes
_usual_tiles = gpu_tile._candidates


def _every_tile(root: Nest, plan: Leaf, fixed: Mapping[str, int]) -> list[tuple[int, ...]]:
    grid = np.meshgrid(*_every_size(root, plan, fixed, 1), indexing="ij")
    return [*zip(*(g.ravel().tolist() for g in grid), strict=True), *_usual_tiles(root, plan, fixed)]
