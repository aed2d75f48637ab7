"""The integer program of a stage: a strategy a compute, so that computing and exchanging together take least.

Every tensor that a chosen strategy leaves in one spread and others need in another is exchanged once for all that need
the same. Trying everything is for small problems, and what tests compare the integer program with. How long a solver
searches is bounded by what it does, not by seconds, so that the same problem has the same answer everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from tilewright.errors import ToolError
from tilewright.schedule.constants import SOLVED_GAP

_WORK = 2_000_000  # variables times the linear programs of one integer program; a layer takes a few of these
_VARIABLES = 50_000  # above which already the first linear program takes minutes
_DONE, _IMPOSSIBLE = 0, 2  # as scipy says how a search ended
_SWEEPS = 20  # over all nodes, of looking for better choices one by one


class FoundChoices(NamedTuple):
    """A choice of every node and its seconds; the least there are, unless a search ended at its bound."""

    seconds: float
    chosen: tuple[int, ...]
    is_least: bool = True


@dataclass(frozen=True)
class TensorReader:
    """A node that reads a tensor; `needs` has for each of its choices which of the hub's needs that is."""

    node: int
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Hub:
    """A tensor between the node that makes it and those that read it. `gives` has for each choice of the maker which of
    the hub's spreads it leaves it in; a maker outside of the problem, None, has one choice. `seconds[spread][need]`."""

    maker: int | None
    gives: tuple[int, ...]
    readers: tuple[TensorReader, ...]
    seconds: tuple[tuple[float, ...], ...]

    def cost(self, chosen: Sequence[int]) -> float:
        given = self.gives[0 if self.maker is None else chosen[self.maker]]
        wanted = {reader.needs[chosen[reader.node]] for reader in self.readers}
        return sum(self.seconds[given][need] for need in sorted(wanted))


@dataclass(frozen=True)
class Choices:
    """Nodes with the seconds and bytes of weights of each of their choices; hubs between them; the most bytes."""

    seconds: tuple[tuple[float, ...], ...]
    bytes: tuple[tuple[int, ...], ...]
    hubs: tuple[Hub, ...]
    most_bytes: float = inf

    def cost(self, chosen: Sequence[int]) -> float:
        """Seconds of a choice of every node; infinite where the weights are too many."""
        if sum(b[c] for b, c in zip(self.bytes, chosen, strict=True)) > self.most_bytes:
            return inf
        total = sum(s[c] for s, c in zip(self.seconds, chosen, strict=True))
        return total + sum(hub.cost(chosen) for hub in self.hubs)


def solve_by_trying(problem: Choices) -> FoundChoices | None:
    best: FoundChoices | None = None
    for chosen in product(*(range(len(each)) for each in problem.seconds)):
        cost = problem.cost(chosen)
        if cost < inf and (best is None or cost < best.seconds):
            best = FoundChoices(cost, chosen)
    return best


def solve_step_by_step(problem: Choices, start: Sequence[int] | None = None) -> FoundChoices | None:
    """From a choice, or that with the fewest bytes, to better ones by changing one node at a time: good, not least."""
    chosen = [each.index(min(each)) for each in problem.bytes] if start is None else list(start)
    if problem.cost(chosen) == inf:
        return None
    around: list[list[Hub]] = [[] for _ in problem.seconds]
    for hub in problem.hubs:
        for node in dict.fromkeys((*([] if hub.maker is None else [hub.maker]), *(r.node for r in hub.readers))):
            around[node].append(hub)
    left = problem.most_bytes - sum(sizes[c] for sizes, c in zip(problem.bytes, chosen, strict=True))
    for _ in range(_SWEEPS):
        before = tuple(chosen)
        for node, (seconds, sizes) in enumerate(zip(problem.seconds, problem.bytes, strict=True)):
            own = chosen[node]
            costs = {}
            for choice in (own, *range(len(seconds))):  # its own first: it stays where none is better
                chosen[node] = choice
                if sizes[choice] - sizes[own] <= left:
                    costs[choice] = seconds[choice] + sum(hub.cost(chosen) for hub in around[node])
            chosen[node] = min(costs, key=lambda choice: costs[choice])
            left -= sizes[chosen[node]] - sizes[own]
        if tuple(chosen) == before:
            break
    return FoundChoices(problem.cost(chosen), tuple(chosen), is_least=False)


def solve_as_program(problem: Choices, work: int = _WORK, variables: int = _VARIABLES) -> FoundChoices | None:
    """The same as an integer program: one variable a choice, one a pair of spread and need of every reader, and one a
    pair of every hub that is at least each of its readers'. Its search ends after so many variables of
    linear programs together, and is not begun where one has more than `variables`."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix
    except ImportError as error:
        raise ToolError("sharing a model out needs scipy: pip install 'tilewright[cluster]'") from error
    program = _Program(problem)
    if len(program.objective) > variables:
        return solve_step_by_step(problem)
    rows = csr_matrix((program.values, (program.rows, program.columns)), (len(program.low), len(program.objective)))
    limits = LinearConstraint(rows, np.array(program.low), np.array(program.high))
    scale = max(program.objective, default=0.0) or 1.0  # seconds are too small for a solver's tolerances
    bound = {"mip_rel_gap": SOLVED_GAP, "node_limit": work // max(1, len(program.objective))}
    found = milp(np.array(program.objective) / scale, integrality=np.array(program.whole), bounds=Bounds(0, 1),
                 constraints=limits, options=bound)  # fmt: skip
    if found.x is None:
        return None if found.status == _IMPOSSIBLE else solve_step_by_step(problem)
    chosen = tuple(int(np.argmax(found.x[start : start + len(each)]))
                   for start, each in zip(program.starts, problem.seconds, strict=True))  # fmt: skip
    if found.status != _DONE:
        return solve_step_by_step(problem, chosen)
    cost = problem.cost(chosen)
    return FoundChoices(cost, chosen) if cost < inf else None


class _Program:
    """Variables and rows, one after the other."""

    def __init__(self, problem: Choices) -> None:
        self.objective: list[float] = []
        self.whole: list[int] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.starts = [self._variables(seconds, whole=1) for seconds in problem.seconds]
        for start, seconds in zip(self.starts, problem.seconds, strict=True):
            self._row([(start + i, 1.0) for i in range(len(seconds))], 1.0, 1.0)
        if problem.most_bytes < inf:
            scale = max(1.0, problem.most_bytes)
            terms = [(start + i, b / scale) for start, each in zip(self.starts, problem.bytes, strict=True)
                     for i, b in enumerate(each) if b]  # fmt: skip
            self._row(terms, -inf, problem.most_bytes / scale)
        for hub in problem.hubs:
            self._hub(hub)

    def _variables(self, seconds: Sequence[float], whole: int) -> int:
        start = len(self.objective)
        self.objective.extend(seconds)
        self.whole.extend([whole] * len(seconds))
        return start

    def _row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.rows.extend([len(self.low)] * len(terms))
        self.columns.extend(column for column, _ in terms)
        self.values.extend(value for _, value in terms)
        self.low.append(low)
        self.high.append(high)

    def _hub(self, hub: Hub) -> None:
        spreads, needs = len(hub.seconds), len(hub.seconds[0])
        flat = [cost for each in hub.seconds for cost in each]
        if not any(flat):
            return
        shared = self._variables(flat, whole=0)
        for reader in hub.readers:
            own = shared if len(hub.readers) == 1 else self._variables([0.0] * len(flat), whole=0)
            for spread in range(spreads):
                given: list[tuple[int, float]] = [] if hub.maker is None else [
                    (self.starts[hub.maker] + c, -1.0) for c, g in enumerate(hub.gives) if g == spread
                ]  # fmt: skip
                known = 1.0 if hub.maker is None and hub.gives[0] == spread else 0.0
                self._row([*((own + spread * needs + n, 1.0) for n in range(needs)), *given], known, known)
            for need in range(needs):
                wanted = [(self.starts[reader.node] + c, -1.0) for c, n in enumerate(reader.needs) if n == need]
                self._row([*((own + s * needs + need, 1.0) for s in range(spreads)), *wanted], 0.0, 0.0)
            if own != shared:
                for place in range(len(flat)):
                    self._row([(shared + place, 1.0), (own + place, -1.0)], 0.0, inf)
