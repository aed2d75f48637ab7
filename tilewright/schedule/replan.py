"""Leaves planned again for the shapes that the tiles of a chosen kernel give them.

A nest's leaf is chosen while the nest is alone. Connected to others it gets fewer rows, or other panels: for the
contractions of a kernel the backend names leaves that suit such parts better, and the kernel's own prediction decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.backend.protocol import Choice
from tilewright.ir.forms.expr import Axis, var
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.schedule.connect import Group, microseconds
from tilewright.schedule.constants import LEAST_GAIN, LEAST_SHARE, REFINED
from tilewright.schedule.group_cost import GroupCost
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Range, extent_of
from tilewright.tile_graph.algebra.rolling import find_overlaps, step_boxes
from tilewright.tile_graph.plan.form import Leaf


@dataclass(frozen=True)
class Replanned:
    """Groups with what they take now, the leaves that are others, how their constants lie, and reasons by root."""

    groups: list[Group]
    leaves: dict[Nest, Leaf]
    layouts: dict[Tensor, Layout]
    reasons: dict[Nest, str]


@dataclass(frozen=True)
class _Found:
    """A kernel's best: its choice, and the leaves that are others, by place and without names."""

    choice: Choice
    leaves: tuple[tuple[int, Leaf], ...]


@dataclass
class Replanner:
    """Plans leaves of chosen kernels again; `packed` are the constants that lie as a nest's leaf wants them."""

    costs: GroupCost
    packed: Mapping[Nest, frozenset[Tensor]]

    def replan(self, groups: Sequence[Group], most: int) -> Replanned:
        """The groups with at most so many distinct kernels planned again, those that take most time first."""
        alike: dict[Hashable, list[int]] = {}
        for place, group in enumerate(groups):
            if self._is_open(group):
                alike.setdefault(self._key(group), []).append(place)
        taken = {key: sum(group_seconds(groups[i]) for i in places) for key, places in alike.items()}
        least = LEAST_SHARE * sum(map(group_seconds, groups))
        result = Replanned(list(groups), {}, {}, {})
        known = self.costs.context.memo.replanned
        for key in sorted(alike, key=lambda k: -taken[k])[:most]:
            if taken[key] < least:
                break
            if key not in known:
                known[key] = self._best(groups[alike[key][0]])
            if known[key] is not None:
                for place in alike[key]:
                    self._apply(known[key], place, result)
        return result

    def _apply(self, found: _Found, place: int, result: Replanned) -> None:
        group = result.groups[place]
        texts = []
        for number, leaf in found.leaves:
            nest = group.nests[number]
            result.leaves[nest] = leaf.renamed(nest.tensor.name, nest.core, nest.epilogue)
            result.layouts.update(self._packed_for(nest, result.leaves[nest]))
            texts.append(f"{nest.tensor.name} in {_form_text(leaf)} instead of {_form_text(self.costs.plans[nest])}")
        result.groups[place] = Group(group.nests, found.choice, group.score)
        times = f"{microseconds(found.choice.seconds)} us against {microseconds(group_seconds(group))} us"
        result.reasons[group.nests[-1]] = f"planned again for the tile: {', '.join(texts)}, {times}"

    def _is_open(self, group: Group) -> bool:
        """Whether leaves of a kernel may be others; those of a Scan's step stay as its steps are planned, and
        predictions do not tell leaves of a stream apart."""
        choice = group.choice
        return (
            choice is not None and not choice.block and len(group.nests) > 1 and not self.costs.repeated
            and any(is_contraction(n) for n in group.nests)
        )  # fmt: skip

    def _key(self, group: Group) -> Hashable:
        free = tuple([tuple([t in self.packed[n] for t in n.reads()]) for n in group.nests])
        return self.costs.key(tuple(group.nests)), free

    def _best(self, group: Group) -> _Found | None:
        """The kernel with other leaves for its contractions, one after the other; None where its own are best."""
        nests, choice = group.nests, group.choice
        assert choice is not None
        costs, stored = self.costs, self.costs.stored(group.nests)
        leaves = [costs.plans[n] for n in nests]
        shapes = _shapes(nests, choice, costs)
        lying: dict[Tensor, Layout] = {}
        changed: dict[int, Leaf] = {}
        for number, nest in enumerate(nests):
            for leaf in costs.backend.other_leaves(nest, leaves[number], shapes[nest], self._free(nest)):
                packed = {**lying, **self._packed_for(nest, leaf)}
                tried = [*leaves[:number], leaf, *leaves[number + 1 :]]
                found = costs.priced(nests, tried, _with(costs.context, packed), stored, choice)
                if found is not None and found.seconds < min(REFINED * choice.seconds, choice.seconds - LEAST_GAIN):
                    choice = replace(choice, seconds=found.seconds)
                    leaves, lying, changed[number] = tried, packed, leaf
                    break
        if not changed:
            return None
        context = _with(costs.context, lying)
        again = costs.chosen(nests, leaves, context, stored, choice)  # a tile that suits them better
        if again is not None and again.seconds < choice.seconds:
            choice = again
        return _Found(choice, tuple([(number, leaf.unnamed) for number, leaf in changed.items()]))

    def _free(self, nest: Nest) -> NestContext:
        """As the nest was planned first: its own constants may be packed as a leaf wants them."""
        natural = {t: self.costs.context.memo.layout(Layout.natural(t.rank)) for t in self.packed[nest]}
        return _with(self.costs.context, natural)

    def _packed_for(self, nest: Nest, leaf: Leaf) -> dict[Tensor, Layout]:
        memo = self.costs.context.memo
        found = self.costs.backend.constant_layouts(nest, leaf, self._free(nest))
        return {t: memo.layout(found.get(t) or Layout.natural(t.rank)) for t in self.packed[nest]}


def packed_alone(
    packed: Mapping[Nest, Sequence[Tensor]], constants: Container[Tensor]
) -> dict[Nest, frozenset[Tensor]]:
    """By nest the constants that it alone reads, and that were packed for its leaf."""
    readers = Counter(t for nest in packed for t in nest.reads())
    return {n: frozenset(t for t in own if t in constants and readers[t] == 1) for n, own in packed.items()}


def _shapes(nests: Sequence[Nest], choice: Choice, costs: GroupCost) -> dict[Nest, dict[Axis, int]]:
    """What each nest computes at a time: on a tile, or in a step of a window."""
    root, cut, tiles = nests[-1], dict(choice.tile), costs.context.memo.tiles
    overlaps = find_overlaps(nests, tiles) if choice.step else ()
    sizes = [cut.get(f"o{i}", max(1, extent_of(a.extent))) for i, a in enumerate(root.axes)]
    if overlaps:
        sizes[overlaps[0].axis] = choice.step
    box = tuple(
        Range(var(origin) * root.unswitched.get(axis, 1), size, extent_of(axis.extent))
        for origin, axis, size in zip(tiles.origins(root), root.axes, sizes, strict=True)
    )
    boxes, _ = step_boxes(nests, box, overlaps, tiles.boxes)
    return {n: {a: int(part.size) for a, part in zip(n.axes, boxes[n], strict=True)} for n in nests}


def _with(context: NestContext, layouts: Mapping[Tensor, Layout]) -> NestContext:
    return context.with_layouts(lambda t: layouts.get(t) or context.layout(t)) if layouts else context


def group_seconds(group: Group) -> float:
    return 0.0 if group.choice is None else group.choice.seconds


def _form_text(leaf: Leaf) -> str:
    register = " ".join(f"{axis}:{n}" for axis, n in leaf.register)
    return f"[{register}] by {' '.join(leaf.order)}{leaf.form.text()}"
