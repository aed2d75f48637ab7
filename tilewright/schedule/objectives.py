"""Plans by what they are wanted for: objectives in an order, each of which keeps the plans that are near its best.

The search stays the one there is. An objective moves it: it says what not storing a tensor is worth beyond what is
predicted, or which machine or schedule to plan for. What is found is compared by what is predicted of it on the machine
that it is for, and counted in its Loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from tilewright.backend import backend_for
from tilewright.backend.seconds import price
from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.loops import LoopProgram, statements
from tilewright.lower.memory import alive, arena, scratch
from tilewright.lower.program import lower_program
from tilewright.schedule.constants import HOT, OBJECTIVE_PLANS, SLACK, SMALLER
from tilewright.schedule.planner import kernel_seconds, make_plan, plan_seconds
from tilewright.schedule.price import wholly_priced
from tilewright.target import Target
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan


@dataclass(frozen=True, eq=False)
class Looked:
    """A plan and what it comes to."""

    program: Program
    plan: Plan
    target: Target

    @cached_property
    def loops(self) -> LoopProgram:
        return lower_program(self.program, self.plan, backend_for(self.target).lower_kernel)

    @cached_property
    def seconds(self) -> float:
        return plan_seconds(self.plan, self.program)

    @cached_property
    def arena(self) -> int:
        """Bytes of what is kept between kernels."""
        return arena(self.loops)[1]

    @cached_property
    def memory(self) -> int:
        """These, and every unit's scratch."""
        return self.arena + self.target.units * max((scratch(k)[1] for k in self.loops.kernels), default=0)

    @cached_property
    def moved(self) -> float:
        """Bytes that come from beyond what a unit has to itself, or go there."""
        beyond = len(self.target.beyond(self.target.local))
        terms = price(self.program, self.plan, self.target).kernels.values()
        return sum(float(level.read + level.written) for t in terms for level in t.by_level[-beyond:])

    @cached_property
    def idle(self) -> float:
        """Seconds that units are predicted to wait for the last tiles of kernels."""
        units, seconds = self.target.units, kernel_seconds(self.plan, self.program)
        tiles = {kernel.name: max(1, kernel.tiles) for kernel in self.plan.kernels}
        return sum(s * (1 - tiles[name] / (-(-tiles[name] // units) * units)) for name, s in seconds.items())

    @cached_property
    def length(self) -> int:
        """Of what is compiled: its time is that of its text."""
        return sum(1 for kernel in self.loops.kernels for _ in statements(kernel.body))


MEASURES: Mapping[str, Callable[[Looked], float]] = {
    "latency": lambda looked: looked.seconds,
    "footprint": lambda looked: looked.memory,
    "reuse": lambda looked: looked.moved,
    "fusion": lambda looked: len(looked.loops.calls),
    "parallelism": lambda looked: looked.idle,
    "compile": lambda looked: looked.length,
}


def plan_for(order: Sequence[str], program: Program, quickest: Plan, target: Target, memo: Memo) -> Plan:
    """The plan that objectives lead to in their order, of at most eight with the quickest."""
    if tuple(order) == ("latency",):
        return quickest
    search = _Search(order, program, Looked(program, quickest, target), memo)
    looked = [search.quickest, *islice(search.plans(), OBJECTIVE_PLANS - 1)]
    return preferred(order, looked).plan


def preferred(order: Sequence[str], looked: Sequence[Looked]) -> Looked:
    """Every objective but the last keeps what is within a twentieth of its best; the last has the best of those, and
    of equal ones the quickest is taken."""
    left = list(looked)
    for name in order[:-1]:
        measure = MEASURES[name]
        most = (1 + SLACK) * min(map(measure, left))
        left = [one for one in left if measure(one) <= most]
    return min(left, key=lambda one: (MEASURES[order[-1]](one), one.seconds))


@dataclass(frozen=True, eq=False)
class _Search:
    order: Sequence[str]
    program: Program
    quickest: Looked
    memo: Memo

    @property
    def room(self) -> float:
        """Seconds that another objective may cost: little where time comes before it."""
        return self.quickest.seconds * (SLACK if self.order[0] == "latency" else 1.0)

    def plans(self) -> Iterator[Looked]:
        """Of each objective in turn, all that its moves lead to; none comes twice."""
        moves: Mapping[str, Callable[[], Iterator[Looked]]] = {
            "footprint": self._sparing, "fusion": self._joined, "reuse": self._joined_by_bytes,
            "parallelism": self._in_smaller_tiles, "compile": self._by_itself,
        }  # fmt: skip
        met = {self.quickest.plan}
        for name in self.order:
            for looked in moves[name]() if name in moves else ():
                if looked.plan not in met:
                    met.add(looked.plan)
                    yield looked

    def _sparing(self) -> Iterator[Looked]:
        """What is alive where most is, is worth something not to be stored; then where most is in what that gives."""
        best = self.quickest
        worth: dict[str, float] = {}
        way = 0
        while way < len(HOT):
            moments = alive(best.loops)
            part, is_shared = HOT[way]
            least = part * max((size for _, size in moments), default=0)
            hot = [names for names, size in moments if size > least]
            way += 1
            room = self.quickest.seconds + self.room - best.seconds
            new = {name: room / (len(hot) if is_shared else 1) for names in hot for name in names}
            if all(worth.get(name, 0.0) >= seconds for name, seconds in new.items()):
                continue
            tried = {**worth, **{name: max(seconds, worth.get(name, 0.0)) for name, seconds in new.items()}}
            looked = self._looked(dear=tried)
            if looked is None:
                continue
            yield looked
            if looked.memory < best.memory and looked.seconds <= self.quickest.seconds + self.room:
                best, worth, way = looked, tried, 0

    def _joined(self) -> Iterator[Looked]:
        stored = {name for names, _ in alive(self.quickest.loops) for name in names}
        yield from self._one(dear=dict.fromkeys(stored, self.room / max(1, len(stored))))

    def _joined_by_bytes(self) -> Iterator[Looked]:
        sizes = {t.name: t.most_bytes for t in self.program.tensors()}
        stored = {name for names, _ in alive(self.quickest.loops) for name in names if name in sizes}
        whole = max(1, sum(sizes[name] for name in stored))
        yield from self._one(dear={name: self.room * sizes[name] / whole for name in stored})

    def _in_smaller_tiles(self) -> Iterator[Looked]:
        target = self.quickest.target
        yield from self._one(target=target.with_level(target.local, capacity=int(target.local.capacity * SMALLER)))

    def _by_itself(self) -> Iterator[Looked]:
        yield from self._one(schedule="register")

    def _one(self, **move: object) -> Iterator[Looked]:
        looked = self._looked(**move)  # type: ignore[arg-type]
        if looked is not None:
            yield looked

    def _looked(
        self, dear: Mapping[str, float] | None = None, target: Target | None = None, schedule: str = "connected"
    ) -> Looked | None:
        """None where no plan is found, by a mistake of the planner's, which others find: those before it stand."""
        own = self.quickest.target
        try:
            memo = self.memo if target is None else Memo()
            plan = make_plan(self.program, target or own, schedule, memo=memo, dear=dear)
            if target is not None:
                plan = wholly_priced(self.program, plan, own)
            check_plan(plan, self.program, own, measured=False)
            looked = Looked(self.program, plan, own)
            backend_for(own).check_limits(looked.loops, own)
        except InternalError:
            return None
        return looked


def one_of_many(target: Target) -> Target:
    """What is left of a machine to one unit where all others have calls of their own."""
    levels = tuple(replace(level, alone=level.bandwidth, shared_by=1) for level in target.levels)
    return replace(target, units=1, fma_alone=target.fma_rate, levels=levels)
