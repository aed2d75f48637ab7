"""Plans of single kernels inside a Program, measured: those that policies lead to beside many others.

In a round every kernel of the Program takes its next plan, and each is timed by its own calls beside the planner's
plan of the whole. What is best of some plans of every kernel is then measured together, in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from tilewright.backend.cpu.kernel.variants import CpuVariants
from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program
from tilewright.options import Options
from tilewright.schedule.policies import COUNTS, Policy, PolicyKernels, dependences
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune.answers import answers, are_same
from tilewright.tune.fresh import measured
from tilewright.tune.groups import KernelGroup, calls_of, find_groups, with_choices
from tilewright.tune.models import BuiltTrials, TrialBuilder, sat
from tilewright.tune.timing import Ratio

MOST_NEST_PLANS = 240  # of a kernel, that policies choose from
SLACKS = (0.05, 0.2, 0.5)
_LONGEST_ORDER = 3
_SECONDS = 0.25  # of a sitting
_SECONDS_TOGETHER = 3.0


def policies() -> list[Policy]:
    """All that the table is chosen from."""
    orders = [order for length in range(1, _LONGEST_ORDER + 1) for order in permutations(COUNTS, length)]
    return [Policy(order, slack) for order in orders for slack in SLACKS if len(order) > 1 or slack is SLACKS[0]]


@dataclass
class Nests:
    """A kernel with its plans, the planner's own first, and how long each was measured to take beside that."""

    group: KernelGroup
    kernels: PolicyKernels
    ratios: dict[Tile, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return dependences(self.kernels.nests)

    @property
    def told(self) -> dict[str, float]:
        """Ratios by number of the plan, to be written."""
        return {str(i): round(self.ratios[p], 5) for i, p in enumerate(self.kernels.plans) if p in self.ratios}

    def know(self, told: Mapping[str, float]) -> None:
        self.ratios.update({self.kernels.plans[int(i)]: ratio for i, ratio in told.items()})

    def best(self, plans: Sequence[Tile]) -> Tile:
        """Of some plans, those that are none left out, and the planner's own."""
        return min((p for p in (self.group.own, *plans) if p in self.ratios), key=lambda p: self.ratios[p])


class Study:
    """Measures plans of a Program's kernels."""

    def __init__(self, program: Program, plan: Plan, target: Target, options: Options) -> None:
        self.program, self.plan, self.target, self.options = program, plan, target, options
        self.builder = TrialBuilder(program, target, options)
        self.nests = [found for group in find_groups(program, plan, target) if (found := _nests(group)) is not None]

    def measure(self, wanted: Sequence[Sequence[Tile]]) -> None:
        """These plans of each kernel; what is wrong, or cannot be built, has no ratio."""
        with self.builder.built(self.plan) as own:
            expected = answers(own.runner, self.program)
            for number in range(max(map(len, wanted), default=0)):
                chosen = [(n, some[number]) for n, some in zip(self.nests, wanted, strict=True) if number < len(some)]
                self._round(own, expected, [(n, tile) for n, tile in chosen if tile not in n.ratios])

    def _round(self, own: BuiltTrials, expected: Sequence[np.ndarray], chosen: Sequence[tuple[Nests, Tile]]) -> None:
        if not chosen:
            return
        try:
            plan = self.together({id(n): tile for n, tile in chosen})
            with self.builder.built(plan) as other:
                if not are_same(self.program, expected, answers(other.runner, self.program), exact=False):
                    raise InternalError("answers differ")
                times = sat(self.program, own, other, _SECONDS)
                kernels = {id(n): [own.plan.kernels[m] for m in n.group.members] for n, _ in chosen}
                for nests, tile in chosen:
                    before = calls_of(kernels[id(nests)], self.program, own.loops)
                    after = calls_of([plan.kernels[m] for m in nests.group.members], self.program, other.loops)
                    nests.ratios[tile] = times.beside(before, after).ratio.middle
        except InternalError as error:
            if len(chosen) == 1:
                print(f"left out: {str(error)[:120]}", file=sys.stderr)
            for one in chosen if len(chosen) > 1 else ():
                self._round(own, expected, [one])

    def together(self, chosen: Mapping[int, Tile]) -> Plan:
        """The plan with these choices, by identity of the kernel's nests."""
        changed = [(n.group, chosen[id(n)]) for n in self.nests if chosen.get(id(n), n.group.own) != n.group.own]
        return with_choices(self.program, self.plan, changed)

    def beside(self, one: Mapping[int, Tile], other: Mapping[int, Tile]) -> Ratio | None:
        """How long the first takes over the second, all kernels together, in a process of its own."""
        plans = self.together(other), self.together(one)
        if plans[0] == plans[1]:
            return Ratio(1.0, 1.0, 1.0, 0.0, 0)
        times = measured(self.program, plans, self.target, self.options, _SECONDS_TOGETHER)
        return None if times is None else times.whole.ratio


def _nests(group: KernelGroup) -> Nests | None:
    variants = group.variants[0]
    if not isinstance(variants, CpuVariants):
        return None
    pool = variants.pool(lambda leaves: True, MOST_NEST_PLANS)
    found = Nests(group, PolicyKernels([group.own, *pool], variants.nests, variants.context))
    found.ratios[group.own] = 1.0
    return found


def others(nests: Nests, count: int, rng: np.random.Generator) -> Iterator[Tile]:
    """Half of them those that are predicted to be fastest, half drawn at random."""
    pool = nests.kernels.plans[1:]
    yield from pool[: count // 2]
    rest = pool[count // 2 :]
    yield from (rest[i] for i in rng.permutation(len(rest))[: count - count // 2])
