"""Graph connecting (Welder, section 4.3): neighbours join one kernel when the tile graph predicts less time.

Kernels start as one nest each. In dependency order every kernel tries to take in the kernels that feed it; the
intermediate then lives at the tile level (L2 on a CPU, shared memory on a GPU) and never reaches main memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.backend.protocol import Backend, Choice
from tilewright.ir.expr import Axis, Var, var
from tilewright.ir.tensor import Tensor
from tilewright.tile_graph.context import NestContext, is_contraction
from tilewright.tile_graph.moving import footprint
from tilewright.tile_graph.nest import Nest, roots_of
from tilewright.tile_graph.plan import Leaf
from tilewright.tile_graph.propagate import Box, Range, extent_of, propagate, whole
from tilewright.tile_graph.rolling import find_overlap
from tilewright.tile_graph.signature import signature
from tilewright.tile_graph.streams import Stream, find_stream

_MOST_NESTS = 48  # of maps and plain reductions
_MOST_WITH_PRODUCTS = 16  # nests of a kernel, also where it is looked at for a stream: each gives up a tile of its own
_MOST_SIBLINGS = 3  # other readers of a result that are joined with it all at once
_BLOCKS = (32, 64, 128, 256)  # of a streamed axis
# Joining a contraction over weights gives up its own best tile; a smaller gain than this is within the model's error.
_LEAST_GAIN = 0.035


@dataclass
class Group:
    """Nests that share a kernel, in dependency order; the last is the root."""

    nests: list[Nest]
    choice: Choice | None = None


@dataclass
class Connector:
    """Joins nests into groups; `kept` tensors are read outside these nests and must be stored."""

    backend: Backend
    context: NestContext
    plans: Mapping[Nest, Leaf]
    kept: frozenset[Tensor]
    readers: dict[Tensor, list[Nest]] = field(default_factory=dict)
    streaming: str = "auto"  # "always" and "never" are for tests and for seeing the difference
    repeated: bool = False  # nests of a Scan's step
    refused: dict[Nest, str] = field(default_factory=dict)  # by root of a feeder: why its reader did not take it in
    behind: Mapping[Tensor, Sequence[Tensor]] = field(default_factory=dict)  # results of Scans: what those wait for
    followers: dict[Tensor, list[Nest]] = field(default_factory=dict)  # nests that wait for a tensor, a Scan between

    def connect(self, nests: Sequence[Nest], joining: bool) -> list[Group]:
        for nest in nests:
            for tensor in nest.reads():
                self.readers.setdefault(tensor, []).append(nest)
                for early in self.behind.get(tensor, ()):
                    self.followers.setdefault(early, []).append(nest)
        order = {n: i for i, n in enumerate(nests)}
        producer = {t: n for n in nests for t in n.stores}
        groups = {n: Group([n], self.cost([n])) for n in nests}
        if joining:
            for nest in nests:
                self._take_in(nest, groups, producer, order)
        distinct: dict[int, Group] = {id(g): g for g in groups.values()}
        return sorted(distinct.values(), key=lambda g: order[g.nests[-1]])

    def stored(self, nests: Sequence[Nest]) -> frozenset[Tensor]:
        """Results of a group that must reach main memory."""
        inside = set(nests)
        return frozenset(
            t for n in nests for t in n.stores
            if n is nests[-1] or t in self.kept or any(r not in inside for r in self.readers.get(t, []))
        )  # fmt: skip

    def cost(self, nests: Sequence[Nest]) -> Choice | None:
        if not _tied(nests):
            return None
        stored = self.stored(nests)
        context = self.context
        known: dict[Hashable, Choice | None] = context.memo.choices
        key = (
            signature(nests, lambda t: (t in stored, t in context.constants, t in context.staged, context.layout(t),
                                        context.stepped.get(t))),
            tuple(_shape_of(self.plans[n]) for n in nests), self.streaming,
        )  # fmt: skip
        if key not in known:
            fixed = {}
            if len(nests) > 1 and not self._partitions(nests, stored, {}):
                fixed_or_none = self._partition_axes(nests, stored)
                if fixed_or_none is None:
                    known[key] = None
                    return None
                fixed = fixed_or_none
            known[key] = self._windowed(nests, stored, self._choose(nests, stored, fixed))
        return known[key]

    def _choose(self, nests: Sequence[Nest], stored: frozenset[Tensor], fixed: Mapping[str, int]) -> Choice | None:
        """The best tile with everything resident, or streamed where the intermediates would crowd the tile level."""
        plans = [self.plans[n] for n in nests]
        resident = self.backend.choose_tile(nests, plans, self.context, stored, fixed)
        roomy = resident is not None and resident.footprint <= self.context.target.tile_level.capacity // 4
        if len(nests) == 1 or self.streaming == "never" or (roomy and self.streaming == "auto"):
            return resident
        stream = find_stream(nests)
        if stream is None or any(
            t in stored for n in (*stream.wide, *stream.reducers) for t in n.stores if n is not nests[-1]
        ):
            return resident
        blocks = self._blocks(stream)
        choose = self.backend.choose_tile
        streamed = [choose(nests, plans, self.context, stored, fixed, stream, b) for b in blocks]
        found = [c for c in streamed if c is not None]
        if not found:
            return resident
        best = min(found, key=lambda c: c.seconds)
        if resident is None:
            return best
        if self.streaming == "always" or best.seconds < resident.seconds * self.backend.stream_worth:
            return replace(best, seconds=min(best.seconds, resident.seconds))  # joining is not to depend on it
        return resident

    def _windowed(
        self, nests: Sequence[Nest], stored: frozenset[Tensor], resident: Choice | None
    ) -> Choice | None:
        """A window over rows that tiles would compute again, where that is predicted to be faster."""
        if len(nests) == 1 or self.repeated or any(t in stored for n in nests[:-1] for t in n.stores):
            return resident
        overlap = find_overlap(nests)
        if overlap is None:
            return resident
        moving = self.backend.choose_window(nests, [self.plans[n] for n in nests], self.context, stored, overlap)
        if moving is None or (resident is not None and resident.seconds <= moving.seconds):
            return resident
        return moving

    def _blocks(self, stream: Stream) -> list[int]:
        """Sizes of a streamed axis' parts worth a look, also as whole register tiles of the nests cut along it."""
        widths = [dict(self.plans[n].register).get(n.axis_names()[axis], 1) for n, axis in stream.wide.items()]
        width = max(widths)
        sizes = {b for size in _BLOCKS for b in (size, -(-size // width) * width)}
        return sorted(b for b in sizes if b < stream.extent)

    def _take_in(
        self, nest: Nest, groups: dict[Nest, Group], producer: Mapping[Tensor, Nest], order: Mapping[Nest, int]
    ) -> None:
        while True:
            group = groups[nest]
            if group.nests[-1] is not nest:
                return
            feeders = {
                id(groups[producer[t]]): groups[producer[t]] for n in group.nests for t in n.reads() if t in producer
            }
            feeders.pop(id(group), None)
            best: Group | None = None
            gain = 0.0
            for feeder in (*feeders.values(), *self._with_siblings(feeders.values(), group, groups, order)):
                merged = sorted({*feeder.nests, *group.nests}, key=lambda n: order[n])
                most = _MOST_WITH_PRODUCTS if self._over_weights(merged) else _MOST_NESTS
                unable = self._unable(merged, nest, groups, order, most)
                if unable is not None:
                    self.refused.setdefault(feeder.nests[-1], f"with {nest.tensor.name} {unable}")
                    continue
                choice = self.cost(merged)
                if choice is None or feeder.choice is None or group.choice is None:
                    self.refused[feeder.nests[-1]] = f"with {nest.tensor.name} {self._why_not(merged)}"
                    continue
                apart = (feeder.choice.seconds, group.choice.seconds)
                saved = sum(apart) - choice.seconds
                together = f"{microseconds(choice.seconds)} us against {microseconds(*apart)} us apart"
                self.refused[feeder.nests[-1]] = f"with {nest.tensor.name} the prediction is {together}"
                if saved > max(gain, self._least_gain(feeder, group, choice) * choice.seconds):
                    best, gain = Group(merged, choice), saved
            best = best or self._streamed(nest, groups, producer, order)
            if best is None:
                return
            for member in best.nests:
                groups[member] = best

    def _unable(
        self, merged: Sequence[Nest], nest: Nest, groups: Mapping[Nest, Group], order: Mapping[Nest, int], most: int
    ) -> str | None:
        """Why nests cannot be one kernel whatever their tiles; None where they can."""
        if len(merged) > most:
            return f"it would be a kernel of {len(merged)} nests, more than the {most} that are tried"
        if merged[-1] is not nest:
            return f"{merged[-1].tensor.name} would have to come first"
        if self._cyclic(merged, groups, order):
            return "it would wait for a kernel that waits for it"
        return None

    def _why_not(self, nests: Sequence[Nest]) -> str:
        """Why no tile will do for nests that could be one kernel."""
        root, stored = nests[-1], self.stored(nests)
        if not _tied(nests):
            return "it has no tile in common"
        if len(nests) > 1 and not self._partitions(nests, stored, {}) and self._partition_axes(nests, stored) is None:
            written = next(t.name for n in nests[:-1] for t in n.stores if t in stored)
            return f"tiles of {root.tensor.name} overlap in {written}, which is stored"
        box: Box = tuple(Range(var(Axis(f"origin_{i}", extent_of(a.extent))), 1, extent_of(a.extent))
                         for i, a in enumerate(root.axes))  # fmt: skip
        least = int(footprint(nests, propagate(nests, box), stored, None))
        level = self.context.target.tile_level
        return f"a single element of {root.tensor.name} needs {least} bytes at {level.name}, which has {level.capacity}"

    def _with_siblings(
        self, feeders: Iterable[Group], group: Group, groups: Mapping[Nest, Group], order: Mapping[Nest, int]
    ) -> list[Group]:
        """Each feeder together with the others that read it: what all of them hold need not be stored at all."""
        found = []
        last = order[group.nests[-1]]
        for feeder in feeders:
            if any(t in self.kept for t in feeder.nests[-1].stores):
                continue
            readers = [r for t in feeder.nests[-1].stores for r in self.readers.get(t, []) if r not in group.nests]
            others = {id(groups[r]): groups[r] for r in readers if groups[r] is not feeder}
            if not 0 < len(others) <= _MOST_SIBLINGS:
                continue
            if any(order[g.nests[-1]] >= last or g.choice is None for g in others.values()):
                continue
            if feeder.choice is None:
                continue
            together = [feeder, *others.values()]
            nests = [n for g in together for n in g.nests]
            seconds = sum(g.choice.seconds for g in together if g.choice is not None)
            found.append(Group(nests, replace(feeder.choice, seconds=seconds)))
        return found

    def _streamed(
        self, nest: Nest, groups: Mapping[Nest, Group], producer: Mapping[Tensor, Nest], order: Mapping[Nest, int]
    ) -> Group | None:
        """A product of two intermediates joined with all that leads to it, where that can be streamed: neighbours by
        themselves may each lose by it, since only with the first and the last of them nothing wide is stored."""
        if not is_contraction(nest) or any(t not in producer for t in nest.reads() if t in self.context.constants):
            return None
        taken = [groups[nest]]
        while True:
            inside = {n for g in taken for n in g.nests}
            around = {id(g): g for n in inside for t in n.reads() if t in producer for g in (groups[producer[t]],)}
            more = [g for g in around.values() if g not in taken]
            taken += more
            merged = sorted({n for g in taken for n in g.nests}, key=lambda n: order[n])
            if not more or len(merged) > _MOST_WITH_PRODUCTS or merged[-1] is not nest:
                return None
            if find_stream(merged) is None or self._cyclic(merged, groups, order):
                continue
            choice = self.cost(merged)
            apart = [g.choice.seconds for g in taken if g.choice is not None]
            if choice is None or not choice.block:
                continue
            if self.streaming == "always" or choice.seconds < sum(apart):
                return Group(merged, choice)

    def _least_gain(self, feeder: Group, group: Group, joined: Choice) -> float:
        """A step that is cut as before gives nothing up, and saves a meeting of the workers at every step. A copy that
        is stored all the same gains no more than a meeting."""
        if self.repeated and feeder.choice is not None and joined.tiles == feeder.choice.tiles:
            return 0.0
        if roots_of([*feeder.nests, *group.nests])[:-1]:  # all readers inside: what they read is not stored any more
            return 0.0
        nests = [*feeder.nests, *(group.nests if feeder.nests[-1].tensor in self.context.staged else ())]
        return _LEAST_GAIN if self._over_weights(nests) else 0.0

    def _over_weights(self, nests: Sequence[Nest]) -> bool:
        return any(is_contraction(n) and any(t in self.context.constants for t in n.reads()) for n in nests)

    def _cyclic(self, merged: Sequence[Nest], groups: Mapping[Nest, Group], order: Mapping[Nest, int]) -> bool:
        """Whether something outside, a Scan too, reads from the group and feeds it: then they cannot be one kernel.

        Nests after the group's last are still alone, and feed only what comes after them: no way leads back from there.
        """
        inside = set(merged)
        last = order[merged[-1]]
        stack = [r for n in merged for t in n.stores for r in self.readers.get(t, []) if r not in inside]
        stack.extend(r for n in merged for t in n.stores for r in self.followers.get(t, []))
        seen: set[Nest] = set()
        while stack:
            nest = stack.pop()
            if nest in inside:
                return True
            if nest in seen or order[nest] > last:
                continue
            seen.add(nest)
            mates = groups[nest].nests
            stack.extend(m for m in mates if m not in seen)
            stack.extend(r for m in mates for t in m.stores for r in self.readers.get(t, []))
            stack.extend(r for m in mates for t in m.stores for r in self.followers.get(t, []))
        return False

    def _partitions(self, nests: Sequence[Nest], stored: frozenset[Tensor], fixed: Mapping[str, int]) -> bool:
        """Whether every stored intermediate is cut into disjoint pieces by the root's tiles."""
        return all(t not in stored for n in nests[:-1] for t in n.stores)

    def _partition_axes(self, nests: Sequence[Nest], stored: frozenset[Tensor]) -> dict[str, int] | None:
        """Root axes to leave uncut so that stored intermediates are written once; None when none will do.

        An intermediate stored beside the root is cut along the root's axes that its origin follows one to one;
        along every other root axis all tiles would write the same piece. All its elements must be written: a root that
        reads a slice would leave the others out.
        """
        root = nests[-1]
        origins = [Axis(f"origin_{i}", extent_of(a.extent)) for i, a in enumerate(root.axes)]
        box: Box = tuple(Range(var(o), 1, extent_of(a.extent)) for o, a in zip(origins, root.axes, strict=True))
        boxes = propagate(nests, box)
        fixed: dict[str, int] = {}
        for nest in nests[:-1]:
            if not any(t in stored for t in nest.stores):
                continue
            followed: set[Axis] = set()
            for part in boxes[nest]:
                if isinstance(part.low, Var) and part.size == 1 and part.low.axis in origins:
                    if extent_of(part.low.axis.extent) < part.extent:  # the root reads a slice, others want the rest
                        return None
                    followed.add(part.low.axis)
                elif part.size < part.extent:
                    return None
            for number, (origin, axis) in enumerate(zip(origins, root.axes, strict=True)):
                if origin not in followed:
                    fixed[f"o{number}"] = extent_of(axis.extent)
        return fixed if _are_whole(nests, stored) else None


def microseconds(*seconds: float) -> str:
    """A sum as text, to tenths: times are predicted, and predictions have no more digits."""
    return " + ".join(f"{1e6 * s:.1f}" for s in seconds)


def _tied(nests: Sequence[Nest]) -> bool:
    """Whether the last nest's tile determines that of every other: it feeds another of the group, or reads what one
    does."""
    read = {t for n in nests for t in n.reads()}
    inside = {t for n in nests for t in n.stores}
    return all(any(t in read for t in n.stores) or any(t in inside for t in n.reads()) for n in nests[:-1])


def _are_whole(nests: Sequence[Nest], stored: frozenset[Tensor]) -> bool:
    """Whether the whole root needs all of every stored intermediate. Of a single place it may seem so where it does
    not: ranges that begin apart by what is not known there are taken for the whole axis."""
    boxes = propagate(nests, tuple(whole(extent_of(a.extent)) for a in nests[-1].axes))
    kept = [n for n in nests[:-1] if any(t in stored for t in n.stores)]
    return all(part.size >= part.extent for n in kept for part in boxes[n])


def _shape_of(plan: Leaf) -> Hashable:
    """A nest plan without its names."""
    return (plan.vector, plan.lanes, plan.register, plan.order, plan.unroll, plan.cut)
