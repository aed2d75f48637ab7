"""Graph connecting (Welder, section 4.3): neighbours join one kernel where that is predicted to take less time.

Kernels start as one nest each. In dependency order every kernel tries to take in the kernels that feed it; the
intermediate then lives at the tile level (L2 on a CPU, shared memory on a GPU), or in a CPU's outer cache where it is
too much for that as a whole, and never reaches main memory.
The few best partitions of what was looked at so far are kept: an early join does not forbid a better one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.backend.protocol import Choice
from tilewright.ir.forms.expr import loads
from tilewright.ir.forms.tensor import Tensor
from tilewright.schedule.constants import (
    DISPLACED,
    JOIN_GAIN,
    KEPT,
    MOST_LOSS,
    MOST_NESTS,
    MOST_SIBLINGS,
    MOST_WITH_PRODUCTS,
)
from tilewright.schedule.group_cost import GroupCost
from tilewright.tile_graph.algebra.context import is_contraction
from tilewright.tile_graph.algebra.nest import Nest, roots_of


@dataclass(eq=False)
class Group:
    """Nests that share a kernel, in dependency order; the last is the root."""

    nests: list[Nest]
    choice: Choice | None = None
    score: float = 0.0  # seconds, with what a join must gain beyond the model's error and what it costs others


@dataclass(eq=False)
class _Partition:
    """The nests looked at so far as groups, by number of the nest, and what those take together."""

    groups: list[Group]
    score: float


@dataclass(frozen=True)
class _Join:
    """A partition with some of its groups made one."""

    before: _Partition
    parts: tuple[Group, ...]
    group: Group

    @property
    def score(self) -> float:
        return self.before.score - sum(g.score for g in self.parts) + self.group.score


@dataclass
class Connector:
    """Joins nests into groups."""

    costs: GroupCost
    nests: Sequence[Nest]
    behind: Mapping[Tensor, frozenset[Tensor]] = field(default_factory=dict)  # by what a Scan gives: what it waits for
    dear: Mapping[str, float] = field(default_factory=dict)  # by name: seconds that not storing a tensor is worth
    kept: int = KEPT
    order: dict[Nest, int] = field(init=False)
    last_read: list[int] = field(init=False)  # the last nest that reads from one
    producer: dict[Tensor, Nest] = field(init=False)
    waiting: dict[Tensor, list[Nest]] = field(default_factory=dict)  # who reads what a Scan makes of a tensor
    known: dict[tuple[Nest, ...], Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = {n: i for i, n in enumerate(self.nests)}
        self.producer = {t: n for n in self.nests for t in n.stores}
        self.last_read = [max((self.order[r] for t in n.stores for r in self._readers(t)), default=-1)
                          for n in self.nests]  # fmt: skip
        for nest in self.nests:
            for source in (s for t in nest.reads() for s in self.behind.get(t, ())):
                self.waiting.setdefault(source, []).append(nest)

    def connect(self) -> list[Group]:
        """The groups of the best partition, in dependency order."""
        best = [_Partition([self.group([n]) for n in self.nests], 0.0)]
        alive: list[int] = []  # nests that a later one reads
        for number, nest in enumerate(self.nests):
            alive = [i for i in (*alive, number) if self.last_read[i] > number]
            best = self._extended(best, nest, alive)
        return sorted({id(g): g for g in best[0].groups}.values(), key=lambda g: self.order[g.nests[-1]])

    def separate(self) -> list[Group]:
        """Every nest a group of its own."""
        return [self.group([n]) for n in self.nests]

    def group(self, nests: Sequence[Nest]) -> Group:
        members = tuple(nests)
        if members not in self.known:
            choice = self.costs.cost(members)
            seconds = float("inf") if choice is None else choice.seconds
            score = seconds * (1 + self._error(members, choice)) + self._displaced(members, choice)
            self.known[members] = Group(list(members), choice, score)
        return self.known[members]

    def refusals(self, groups: Sequence[Group]) -> dict[Nest, str]:
        """By root of a group: why none of the groups that read it takes it in."""
        mates = {n: g for g in groups for n in g.nests}
        placed = [mates[n] for n in self.nests]
        found: dict[Nest, str] = {}
        for group in groups:
            readers = {id(mates[r]): mates[r] for n in group.nests for t in n.stores for r in self._readers(t)}
            for reader in readers.values():
                if reader is not group and group.nests[-1] not in found:
                    why = self._refusal(group, reader, placed)
                    found[group.nests[-1]] = f"with {reader.nests[-1].tensor.name} {why}"
        return found

    def _refusal(self, feeder: Group, reader: Group, placed: Sequence[Group]) -> str:
        merged = self._sorted(feeder, reader)
        unable = self.unable(merged, reader.nests[-1], placed)
        if unable is not None:
            return unable
        choice = self.costs.cost(merged)
        if choice is None or feeder.choice is None or reader.choice is None:
            return self.costs.why_not(merged)
        apart = microseconds(feeder.choice.seconds, reader.choice.seconds)
        return f"the prediction is {microseconds(choice.seconds)} us against {apart} us apart"

    def _extended(self, best: Sequence[_Partition], nest: Nest, alive: Sequence[int]) -> list[_Partition]:
        """The best partitions with one more nest, alone or with groups that feed it."""
        found: dict[frozenset[int], _Partition] = {}
        current: list[_Partition] = []
        for partition in best:
            partition.score += partition.groups[self.order[nest]].score
            current.append(partition)
            self._enter(found, partition, alive)
        while current:
            joins = sorted((j for p in current for j in self._joins(p, nest)), key=lambda j: j.score)
            current = []
            for join in joins:
                if len(current) == self.kept:
                    break
                made = self._made(join)
                if self._enter(found, made, alive):
                    current.append(made)
        return sorted(found.values(), key=lambda p: p.score)[: self.kept]

    def _enter(self, found: dict[frozenset[int], _Partition], partition: _Partition, alive: Sequence[int]) -> bool:
        """Of partitions that are the same to all nests still to come the better one is kept."""
        key = frozenset(id(partition.groups[i]) for i in alive)
        if key in found and found[key].score <= partition.score:
            return False
        found[key] = partition
        return True

    def _made(self, join: _Join) -> _Partition:
        groups = join.before.groups.copy()
        for nest in join.group.nests:
            groups[self.order[nest]] = join.group
        return _Partition(groups, join.score)

    def _joins(self, partition: _Partition, nest: Nest) -> Iterator[_Join]:
        """The nest's group with one that feeds it, with its other readers too, or with all that can be streamed."""
        groups = partition.groups
        group = groups[self.order[nest]]
        feeders = {
            id(g): g for n in group.nests for t in n.reads() if t in self.producer
            for g in (groups[self.order[self.producer[t]]],) if g is not group
        }  # fmt: skip
        alone = [(feeder,) for feeder in feeders.values()]
        for parts in (*alone, *self._with_siblings(list(feeders.values()), group, groups)):
            merged = self._sorted(group, *parts)
            if self.unable(merged, nest, groups) is None:
                joined = self.group(merged)
                if joined.score <= MOST_LOSS * (group.score + sum(g.score for g in parts)):
                    yield _Join(partition, (group, *parts), joined)
        yield from self._streamed(partition, nest)

    def _sorted(self, *groups: Group) -> list[Nest]:
        return sorted({n for g in groups for n in g.nests}, key=lambda n: self.order[n])

    def unable(self, merged: Sequence[Nest], nest: Nest, groups: Sequence[Group]) -> str | None:
        """Why nests cannot be one kernel whatever their tiles; None where they can."""
        most = MOST_WITH_PRODUCTS if self.costs.over_weights(merged) else MOST_NESTS
        if len(merged) > most:
            return f"it would be a kernel of {len(merged)} nests, more than the {most} that are tried"
        if merged[-1] is not nest:
            return f"{merged[-1].tensor.name} would have to come first"
        if self._cyclic(merged, groups):
            return "it would wait for a kernel that waits for it"
        return None

    def _with_siblings(
        self, feeders: Sequence[Group], group: Group, groups: Sequence[Group]
    ) -> Iterator[tuple[Group, ...]]:
        """Each feeder together with the others that read it: what all of them hold need not be stored at all."""
        last = self.order[group.nests[-1]]
        for feeder in feeders:
            if any(t in self.costs.kept for t in feeder.nests[-1].stores):
                continue
            readers = [r for t in feeder.nests[-1].stores for r in self._readers(t) if r not in group.nests]
            found = {id(g): g for r in readers for g in (groups[self.order[r]],) if g is not feeder}
            if 0 < len(found) <= MOST_SIBLINGS and all(self.order[g.nests[-1]] < last for g in found.values()):
                yield (feeder, *found.values())

    def _streamed(self, partition: _Partition, nest: Nest) -> Iterator[_Join]:
        """A product of two intermediates joined with all that leads to it, where that can be streamed: neighbours by
        themselves may each lose by it, since only with the first and the last of them nothing wide is stored."""
        groups = partition.groups
        if not is_contraction(nest) or any(t in self.costs.context.constants for t in nest.reads()):
            return
        yield from self._kept_in_registers(partition, nest)
        taken = [groups[self.order[nest]]]
        while True:
            inside = {n for g in taken for n in g.nests}
            around = {id(g): g for n in inside for t in n.reads() if t in self.producer
                      for g in (groups[self.order[self.producer[t]]],)}  # fmt: skip
            more = [g for g in around.values() if g not in taken]
            taken += more
            merged = self._sorted(*taken)
            if not more or len(merged) > MOST_WITH_PRODUCTS or merged[-1] is not nest:
                return
            if self.costs.stream(merged) is None or self._cyclic(merged, groups):
                continue
            joined = self.group(merged)
            if joined.choice is not None and joined.choice.block:
                yield _Join(partition, tuple(taken), joined)

    def _kept_in_registers(self, partition: _Partition, nest: Nest) -> Iterator[_Join]:
        """A product with all that leads to one of its operands from other products, where they pass everything to each
        other in registers; what those products read is stored by others."""
        groups = partition.groups
        if not self.costs.backend.streams_in_registers:
            return
        for start in {n.source: None for n in loads(*nest.elements) if n.source in self.producer}:
            taken = {id(groups[self.order[nest]]): groups[self.order[nest]]}
            stack = [start]
            while stack:
                group = groups[self.order[self.producer[stack.pop()]]]
                if id(group) not in taken:
                    taken[id(group)] = group
                    behind = (t for n in group.nests if not is_contraction(n) for t in n.reads())
                    stack.extend(t for t in behind if t in self.producer)
            parts = self._without_sources(list(taken.values()))
            merged = self._sorted(*parts)
            leaves = [self.costs.plans[n] for n in merged]
            if len(parts) < 2 or len(merged) > MOST_WITH_PRODUCTS or merged[-1] is not nest:
                continue
            if self.costs.backend.stream_in_registers(merged, leaves) is None or self._cyclic(merged, groups):
                continue
            joined = self.group(merged)
            if joined.choice is not None and joined.choice.block:
                yield _Join(partition, tuple(parts), joined)

    def _without_sources(self, groups: list[Group]) -> list[Group]:
        """Without maps of what comes from outside alone: they are as good where they are."""
        while True:
            inside = {t for g in groups for n in g.nests for t in n.stores}
            kept = [g for g in groups if any(n.monoid is not None for n in g.nests)
                    or any(t in inside for n in g.nests for t in n.reads())]  # fmt: skip
            if len(kept) == len(groups):
                return kept
            groups = kept

    def _error(self, nests: Sequence[Nest], choice: Choice | None) -> float:
        """What a group must gain over its parts to be believed, of its time."""
        if len(nests) == 1 or roots_of(nests)[:-1]:  # all readers inside: what they read is not stored any more
            return 0.0
        if choice is not None and choice.block:  # blocks of a stream are whole register tiles of its products
            return 0.0
        if self.costs.repeated and choice is not None:
            # a step that is cut as before gives nothing up, and saves a barrier at every step
            alone = [self.costs.cost([n]) for n in nests if self.costs.over_weights([n])]
            if any(c is not None and c.tiles == choice.tiles for c in alone):
                return 0.0
        if self.costs.over_weights(nests[:-1]):
            return JOIN_GAIN
        # a copy that is stored all the same gains no more than a barrier
        copied = any(n.tensor in self.costs.context.staged for n in nests[:-1])
        return JOIN_GAIN if copied and self.costs.over_weights(nests[-1:]) else 0.0

    def _displaced(self, nests: Sequence[Nest], choice: Choice | None) -> float:
        """What stored intermediates cost other kernels: they push out of the caches what those would find there. So do
        tiles of intermediates that are kept in the outer cache, once for each unit."""
        stored = [t for t in self.costs.stored(nests) if t not in self.costs.kept]
        target = self.costs.context.target
        moved = 2 * sum(t.most_bytes for t in stored)
        if choice is not None and choice.level:
            moved += 2 * choice.footprint * target.units
        worth = sum(self.dear.get(t.name, 0.0) for t in stored)
        return worth + DISPLACED * moved / (target.main.bandwidth * target.units)

    def _cyclic(self, merged: Sequence[Nest], groups: Sequence[Group]) -> bool:
        """Whether something outside, a Scan too, reads from the group and feeds it: then they cannot be one kernel.

        Nests after the group's last are still alone, and feed only what comes after them: no way leads back from there.
        """
        inside = set(merged)
        last = self.order[merged[-1]]
        stack = [r for n in merged for t in n.stores for r in self._readers(t) if r not in inside]
        stack += [w for n in merged for t in n.stores for w in self.waiting.get(t, ())]  # the Scan is outside
        seen: set[Nest] = set()
        while stack:
            nest = stack.pop()
            if nest in inside:
                return True
            if nest in seen or self.order[nest] > last:
                continue
            seen.add(nest)
            mates = groups[self.order[nest]].nests
            stack.extend(m for m in mates if m not in seen)
            stack.extend(r for m in mates for t in m.stores for r in (*self._readers(t), *self.waiting.get(t, ())))
        return False

    def _readers(self, tensor: Tensor) -> Sequence[Nest]:
        return self.costs.readers.get(tensor, ())


def microseconds(*seconds: float) -> str:
    """A sum as text, to tenths: times are predicted, and predictions have no more digits."""
    return " + ".join(f"{1e6 * s:.1f}" for s in seconds)


def readers_of(nests: Sequence[Nest]) -> Mapping[Tensor, Sequence[Nest]]:
    found: dict[Tensor, list[Nest]] = {}
    for nest in nests:
        for tensor in nest.reads():
            found.setdefault(tensor, []).append(nest)
    return found
