"""What a Plan's kernels would cost otherwise: neighbours as one kernel, or a kernel cut in two between neighbours.

Looked at after the search, for people: the same cost, the same refusals, whatever the search came by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.backend import backend_for
from tilewright.backend.protocol import Choice, Inner
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.schedule.connect import Connector, Group, readers_of
from tilewright.schedule.group_cost import GroupCost
from tilewright.schedule.inner_tiles import inner_of
from tilewright.schedule.planner import kept_in_memory, parts_of, search_context
from tilewright.schedule.price import is_comparable, kernel_choice, plan_context
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests


@dataclass(frozen=True)
class JoinTrial:
    """Neighbours as one kernel, and as two."""

    level: str  # where what they share lives in one kernel
    together: float | None  # predicted seconds; None: not possible
    apart: float | None
    reason: str = ""  # why it is not done


@dataclass
class _Side:
    """The kernels of a model outside its Scans, or of one Scan's step, as the search saw them."""

    connector: Connector
    groups: dict[str, Group]  # by kernel
    placed: list[Group]  # by number of the nest


class Trials:
    """Tries neighbours of a Plan, each when it is asked for."""

    def __init__(self, program: Program, plan: Plan, target: Target) -> None:
        self._target = target
        self._scans = {kernel.name: steps.scan if steps else None for kernel, steps in plan.launches()}
        self._sides: dict[str | None, _Side] = {}
        backend, computes = backend_for(target), all_computes(program)
        context = plan_context(program, plan, target)
        for part in parts_of(program):
            scan = None if part.scan is None else part.scan.outputs[0].name
            kernels = [k for k in plan.kernels if self._scans[k.name] == scan]
            nests = {k.name: plan_nests(k, computes) for k in kernels}
            # without names, so that equal layers share their costs
            plans: dict[Nest, Leaf] = {
                n: leaf for k in kernels for n, leaf in zip(nests[k.name], kernel_leaves(k), strict=True)
            }
            costs = GroupCost(backend, search_context(part, context), plans, kept_in_memory(part, context),
                              readers_of(list(plans)), repeated=scan is not None)  # fmt: skip
            connector = Connector(costs, list(plans), part.behind)
            groups = {k.name: connector.group(nests[k.name]) for k in kernels}
            self._sides[scan] = _Side(connector, groups, [groups[k.name] for k in kernels for _ in nests[k.name]])

    def joined(self, feeder: Tile, reader: Tile) -> JoinTrial:
        """Two kernels of which one reads from the other, as one."""
        level = self._target.local.name
        if self._scans[feeder.name] != self._scans[reader.name]:
            return JoinTrial(level, None, None, "one of the two is part of a Scan's steps, the other is not")
        side = self._sides[self._scans[feeder.name]]
        connector, first, second = side.connector, side.groups[feeder.name], side.groups[reader.name]
        apart = _seconds(_as_planned(feeder, first), _as_planned(reader, second))
        merged = sorted({*first.nests, *second.nests}, key=lambda n: connector.order[n])
        unable = connector.unable(merged, second.nests[-1], side.placed)
        if unable is not None:
            return JoinTrial(level, None, apart, unable)
        one = connector.group(merged)
        if one.choice is None or apart is None:
            return JoinTrial(level, None, apart, connector.costs.why_not(merged))
        reason = _too_little(one, apart, first.score + second.score)
        if self._scans[feeder.name] is not None:
            reason += ", each step by itself"
        return JoinTrial(one.choice.level or level, one.choice.seconds, apart, reason)

    def parted(self, kernel: Tile, made: str) -> JoinTrial:
        """A kernel, against two of which the first ends with what one of its leaves stores."""
        scan = self._scans[kernel.name]
        if scan is not None:  # steps are planned with what one leaves near for the next, which costs here do not know
            return JoinTrial(kernel.level, kernel.estimate.seconds, None)
        side = self._sides[scan]
        group = side.groups[kernel.name]
        first = _leading_to(next(n for n in group.nests if n.tensor.name == made), group.nests)
        rest = [n for n in group.nests if n not in first]
        whole = _seconds(_as_planned(kernel, group))
        parts = [side.connector.group(part) for part in (first, rest) if part]
        apart = _seconds(*(p.choice for p in parts)) if len(parts) == 2 else None
        reason = ""
        if whole is not None and apart is not None and apart < whole:
            stored = "what it would store takes the place of what others read"
            dearer = sum(p.score for p in parts) >= group.score
            reason = stored if dearer else "the search went another way"
        return JoinTrial(kernel.level, whole, apart, reason)

    def nearer(self, kernel: Tile, made: str) -> JoinTrial | None:
        """What a kernel takes with one of its results kept at a nearer level, by a tile inside its own from where it is
        made to where it is read for the last time, and with one tile; None where there is no nearer cache."""
        side = self._sides[self._scans[kernel.name]]
        costs, nests = side.connector.costs, side.groups[kernel.name].nests
        level = self._nearer_level(kernel)
        choice = kernel_choice(kernel, nests, costs.context, with_inner=False) if is_comparable(kernel) else None
        if level is None or choice is None:
            return None
        first = next(i for i, n in enumerate(nests) if n.tensor.name == made)
        last = 1 + max(i for i, n in enumerate(nests) if any(t in n.reads() for t in nests[first].stores))
        given = inner_of(kernel)
        if given is not None and given.first <= first and last <= given.last:
            return JoinTrial(level, kernel.estimate.seconds, choice.seconds)
        if choice.footprint <= self._target.level(level).capacity // 2:
            return JoinTrial(level, None, choice.seconds, "all that the tile holds fits it as it is")
        if choice.block or choice.step:
            walk = "a stream" if choice.block else "windows"
            return JoinTrial(level, None, choice.seconds, f"the kernel is walked in {walk} already")
        found = costs.backend.tile_again(nests, kernel_leaves(kernel), costs.context, costs.stored(nests), choice,
                                         Inner(first, last, (), level, 0))  # fmt: skip
        if found is None:
            return JoinTrial(level, None, choice.seconds, "no parts of the tile fit there and are all that others read")
        faster = found.seconds < choice.seconds
        reason = "it saves less than predictions of such kernels err" if faster else "it is predicted to be no faster"
        return JoinTrial(level, found.seconds, choice.seconds, reason)

    def _nearer_level(self, kernel: Tile) -> str | None:
        """The cache inside that of a kernel's tile."""
        places = [cache.name for cache in self._target.caches]
        place = places.index(kernel.level) if kernel.level in places else 0
        return places[place - 1] if place else None


def kernel_leaves(kernel: Tile) -> list[Leaf]:
    """Without names, so that equal layers share costs."""
    return [replace(leaf, composed=()) for leaf in kernel.leaves]


def _as_planned(kernel: Tile, group: Group) -> Choice | None:
    """What a group takes, with the tile inside its kernel's own, which the group does not know."""
    if group.choice is None or inner_of(kernel) is None:
        return group.choice
    return replace(group.choice, seconds=kernel.estimate.seconds)


def _too_little(one: Group, apart: float, score: float) -> str:
    """Why groups whose seconds and score are known are not one; what a join gains must be more than predictions err."""
    assert one.choice is not None
    if one.choice.seconds >= apart:
        return "it is predicted to be no faster"
    if one.score >= score:
        return "it saves less than predictions of such kernels err"
    return "what it saves is less than other joins save"


def _seconds(*choices: Choice | None) -> float | None:
    """The time of kernels one after the other; None where one of them is not possible."""
    known = [c.seconds for c in choices if c is not None]
    return sum(known) if len(known) == len(choices) else None


def _leading_to(last: Nest, nests: Sequence[Nest]) -> list[Nest]:
    """A nest and those it depends on, in order."""
    producer = {t: n for n in nests for t in n.stores}
    found = {last}
    stack = [last]
    while stack:
        more = {producer[t] for t in stack.pop().reads() if t in producer} - found
        found |= more
        stack.extend(more)
    return [n for n in nests if n in found]
