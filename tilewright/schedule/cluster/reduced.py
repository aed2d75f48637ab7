"""Choices with fewer nodes and the same optimum: a node between at most two others is decided by theirs.

Most computes only pass on what one other gives to one other. For every pair of choices of those two the best one of the
node between is known beforehand, so that the integer program is left with what is connected in more than one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilewright.schedule.cluster.choices import (
    Choices,
    FoundChoices,
    Hub,
    TensorReader,
    solve_as_program,
    solve_by_trying,
)

_FEW = 512  # choices that are sooner tried than formulated

Table = NDArray[np.float64]


def solve(problem: Choices) -> FoundChoices | None:
    """The least seconds and the choices that take them; None where no choice has few enough weights."""
    reduced = Reduced(problem)
    left, nodes = reduced.left()
    found = (solve_by_trying if prod(len(each) for each in left.seconds) <= _FEW else solve_as_program)(left)
    if found is None:
        return None
    chosen = reduced.whole(nodes, found.chosen)
    return FoundChoices(problem.cost(chosen), chosen, found.is_least)


@dataclass
class Reduced:
    """Node costs, tables of pairs of nodes, and the hubs that stay; what was left out, and how it follows."""

    problem: Choices
    costs: list[Table] = field(init=False)
    pairs: dict[tuple[int, int], Table] = field(default_factory=dict)
    hubs: list[Hub] = field(default_factory=list)
    gone: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = field(default_factory=list)  # node, by whom, the best

    def __post_init__(self) -> None:
        self.costs = [np.array(each) for each in self.problem.seconds]
        for hub in self.problem.hubs:
            if len(hub.readers) == 1:
                self._take(hub)
            else:
                self.hubs.append(hub)
        self._eliminate()

    def _take(self, hub: Hub) -> None:
        """A tensor with one reader is a table of pairs."""
        reader = hub.readers[0]
        table = np.array(hub.seconds)[np.ix_(hub.gives, reader.needs)]
        if hub.maker is None:
            self.costs[reader.node] = self.costs[reader.node] + table[0]
        else:
            self._add(hub.maker, reader.node, table)

    def _add(self, first: int, second: int, table: Table) -> None:
        key, turned = ((first, second), table) if first < second else ((second, first), table.T)
        self.pairs[key] = self.pairs[key] + turned if key in self.pairs else turned

    def _eliminate(self) -> None:
        fixed = {node for hub in self.hubs for node in (hub.maker, *(r.node for r in hub.readers)) if node is not None}
        weighs = self.problem.most_bytes < float("inf")
        fixed |= {i for i, sizes in enumerate(self.problem.bytes) if weighs and len(set(sizes)) > 1}
        around: dict[int, set[int]] = {node: set() for node in range(len(self.costs))}
        for first, second in self.pairs:
            around[first].add(second)
            around[second].add(first)
        waiting = [node for node in around if node not in fixed]
        while waiting:
            node = waiting.pop()
            if node in fixed or len(around[node]) > 2:
                continue
            fixed.add(node)
            others = tuple(sorted(around.pop(node)))
            self._leave_out(node, others)
            for other in others:
                around[other].discard(node)
                around[other].update(set(others) - {other})
                waiting.append(other)

    def _leave_out(self, node: int, others: tuple[int, ...]) -> None:
        """The least over a node's choices, for each choice of those around it."""
        tables = [self.pairs.pop((node, o)) if node < o else self.pairs.pop((o, node)).T for o in others]
        total = self.costs[node].reshape(-1, *[1] * len(others))
        for place, table in enumerate(tables):
            shape = [len(table), *[1] * len(others)]
            shape[place + 1] = table.shape[1]
            total = total + table.reshape(shape)
        self.gone.append((node, others, np.argmin(total, axis=0)))
        least = total.min(axis=0)
        if len(others) == 1:
            self.costs[others[0]] = self.costs[others[0]] + least
        elif len(others) == 2:
            self._add(others[0], others[1], least)

    def left(self) -> tuple[Choices, list[int]]:
        """The problem that is left, and which nodes it has."""
        gone = {node for node, _, _ in self.gone}
        nodes = [node for node in range(len(self.costs)) if node not in gone]
        number = {node: i for i, node in enumerate(nodes)}
        hubs = []
        for hub in self.hubs:
            readers = tuple(TensorReader(number[r.node], r.needs) for r in hub.readers)
            hubs.append(Hub(None if hub.maker is None else number[hub.maker], hub.gives, readers, hub.seconds))
        for (first, second), table in self.pairs.items():
            rows = tuple(tuple(float(x) for x in row) for row in table)
            reader = TensorReader(number[second], tuple(range(table.shape[1])))
            hubs.append(Hub(number[first], tuple(range(table.shape[0])), (reader,), rows))
        fixed = sum(min(self.problem.bytes[node]) for node in gone)
        seconds = tuple(tuple(float(x) for x in self.costs[node]) for node in nodes)
        return Choices(seconds, tuple(self.problem.bytes[n] for n in nodes), tuple(hubs),
                       self.problem.most_bytes - fixed), nodes  # fmt: skip

    def whole(self, nodes: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
        """A choice of every node from one of those that are left."""
        found = dict(zip(nodes, chosen, strict=True))
        for node, others, best in reversed(self.gone):
            found[node] = int(best[tuple(found[other] for other in others)])
        return tuple(found[node] for node in range(len(self.costs)))
