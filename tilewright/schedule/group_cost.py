"""What nests cost as one kernel: everything resident at the tile level, streamed in blocks, or under a window of rows;
and why they cannot be one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.backend.protocol import Backend, Choice
from tilewright.ir.forms.expr import Axis, Var, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.schedule.constants import STREAM_BLOCKS, STREAM_PAYS
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.memo import Tiles
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of, propagate, whole
from tilewright.tile_graph.algebra.rolling import find_overlaps
from tilewright.tile_graph.algebra.signature import signature, signature_by
from tilewright.tile_graph.algebra.streams import Stream, find_stream
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.traffic.moving import footprint


@dataclass
class GroupCost:
    """Prices groups of nests; `kept` tensors are read outside these nests and must be stored."""

    backend: Backend
    context: NestContext
    plans: Mapping[Nest, Leaf]
    kept: frozenset[Tensor]
    readers: Mapping[Tensor, Sequence[Nest]]
    streaming: str = "auto"  # "always" and "never" are for tests and for seeing the difference
    repeated: bool = False  # nests of a Scan's step
    known: dict[tuple[Nest, ...], Choice | None] = field(default_factory=dict)
    streams: dict[tuple[Nest, ...], Stream | None] = field(default_factory=dict)
    numbers: dict[Tensor, int] = field(default_factory=dict)

    def stored(self, nests: Sequence[Nest]) -> frozenset[Tensor]:
        """Results of a group that must reach main memory."""
        inside = set(nests)
        return frozenset(
            t for n in nests for t in n.stores
            if n is nests[-1] or t in self.kept or any(r not in inside for r in self.readers.get(t, []))
        )  # fmt: skip

    def cost(self, nests: Sequence[Nest]) -> Choice | None:
        """The best way to run nests as one kernel; None where there is none."""
        members = tuple(nests)
        if members not in self.known:
            self.known[members] = self._shared(members) if _tied(members) else None
        return self.known[members]

    def stream(self, nests: Sequence[Nest]) -> Stream | None:
        """How nests can be streamed as one kernel; None where they cannot."""
        members = tuple(nests)
        if members not in self.streams:
            streamable, key = self.context.memo.streamable, signature(members, lambda _: None)
            self.streams[members] = find_stream(members) if streamable.get(key, True) else None
            streamable[key] = self.streams[members] is not None
        return self.streams[members]

    def over_weights(self, nests: Sequence[Nest]) -> bool:
        return any(is_contraction(n) and any(t in self.context.constants for t in n.reads()) for n in nests)

    def why_not(self, nests: Sequence[Nest]) -> str:
        """Why no tile will do for nests that could be one kernel."""
        root, stored = nests[-1], self.stored(nests)
        if not _tied(nests):
            return "it has no tile in common"
        if self._uncut(nests, stored) is None:
            written = next(t.name for n in nests[:-1] for t in n.stores if t in stored)
            return f"tiles of {root.tensor.name} overlap in {written}, which is stored"
        box: Box = tuple(Range(var(Axis(f"origin_{i}", extent_of(a.extent))), 1, extent_of(a.extent))
                         for i, a in enumerate(root.axes))  # fmt: skip
        least = int(footprint(nests, propagate(nests, box), stored, None))
        level = self.backend.farthest_hold(nests, self.context, stored)
        if least <= level.capacity // 2:  # what a kernel may take
            return f"no tile that {root.tensor.name} can be cut into leaves room at {level.name} for what it would hold"
        return f"a single element of {root.tensor.name} needs {least} bytes at {level.name}, which has {level.capacity}"

    def _shared(self, nests: tuple[Nest, ...]) -> Choice | None:
        """The cost of a group; equal groups share the work."""
        known: dict[Hashable, Choice | None] = self.context.memo.choices
        key = self.key(nests)
        if key in known:
            return known[key]
        self.context.memo.trim()
        found = known[key] = self._best(nests, self.stored(nests))
        return found

    def key(self, nests: tuple[Nest, ...]) -> Hashable:
        """The same for groups that are planned alike."""
        stored = self.stored(nests)
        return (
            signature_by(nests, lambda t: 2 * self._number(t) + (t in stored)),
            tuple([self.plans[n].unnamed for n in nests]), self.streaming, self.repeated, self.context.weights_fit,
        )  # fmt: skip

    def priced(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        choice: Choice,
    ) -> Choice | None:  # fmt: skip
        """The same choice under other leaves, where nothing is streamed."""
        root, cut = nests[-1], dict(choice.tile)
        sizes = {f"o{i}": cut.get(f"o{i}", max(1, extent_of(a.extent))) for i, a in enumerate(root.axes)}
        if choice.step:
            overlaps = find_overlaps(nests, context.memo.tiles)
            return self.backend.choose_window(nests, leaves, context, stored, overlaps, sizes, choice.step)
        return self.backend.choose_tile(nests, leaves, context, stored, sizes)

    def chosen(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        choice: Choice,
    ) -> Choice | None:  # fmt: skip
        """The best choice of the same kind under other leaves, where nothing is streamed."""
        if choice.step:
            overlaps = find_overlaps(nests, context.memo.tiles)
            return self.backend.choose_window(nests, leaves, context, stored, overlaps)
        fixed = self._uncut(nests, stored)
        return None if fixed is None else self.backend.choose_tile(nests, leaves, context, stored, fixed)

    def _number(self, tensor: Tensor) -> int:
        """The same for tensors of which all that planning asks is the same; whether they are stored is not among it."""
        found = self.numbers.get(tensor)
        if found is None:
            context = self.context
            facts = (tensor.shape, tensor.dtype.name, tensor in context.constants, tensor in context.staged,
                     context.layout(tensor), context.stepped.get(tensor))  # fmt: skip
            found = self.numbers[tensor] = context.memo.tensors.setdefault(facts, len(context.memo.tensors))
        return found

    def _best(self, nests: Sequence[Nest], stored: frozenset[Tensor]) -> Choice | None:
        fixed = self._uncut(nests, stored)
        if fixed is None:
            return None
        return self._windowed(nests, stored, self._choose(nests, stored, fixed))

    def _uncut(self, nests: Sequence[Nest], stored: frozenset[Tensor]) -> dict[str, int] | None:
        """Root axes to leave uncut; None where stored intermediates would be written twice whatever the cut."""
        if len(nests) == 1 or _all_inside(nests, stored):
            return {}
        return _partition_axes(nests, stored, self.context.memo.tiles)

    def _choose(self, nests: Sequence[Nest], stored: frozenset[Tensor], fixed: Mapping[str, int]) -> Choice | None:
        """The best tile with everything resident, or streamed where the intermediates would crowd the tile level."""
        plans = [self.plans[n] for n in nests]
        resident = self.backend.choose_tile(nests, plans, self.context, stored, fixed)
        roomy = resident is not None and resident.footprint <= self.context.target.local.capacity // 4
        if len(nests) == 1 or self.streaming == "never":
            return resident
        in_registers = self.backend.stream_in_registers(nests, plans)  # needs no room at the tile level
        near = resident is not None and not resident.level  # else a stream keeps its blocks nearer
        bound = near and resident is not None and resident.unhindered > STREAM_PAYS * resident.seconds
        if (roomy or bound) and self.streaming == "auto" and in_registers is None:
            return resident
        stream = in_registers or self.stream(nests)
        if stream is None or any(
            t in stored for n in (*stream.wide, *stream.reducers) for t in n.stores if n is not nests[-1]
        ):
            return resident
        blocks = self._blocks(stream)
        best = self.backend.choose_tile(nests, plans, self.context, stored, fixed, stream, blocks) if blocks else None
        if best is None or resident is None:
            return resident or best
        if self.streaming == "always" or best.seconds < resident.seconds * self.backend.stream_worth:
            return replace(best, seconds=min(best.seconds, resident.seconds))  # joining is not to depend on it
        return resident

    def _windowed(
        self, nests: Sequence[Nest], stored: frozenset[Tensor], resident: Choice | None
    ) -> Choice | None:
        """Windows over rows that tiles would compute again, where that is predicted to be faster."""
        if len(nests) == 1 or self.repeated or any(t in stored for n in nests[:-1] for t in n.stores):
            return resident
        overlaps = find_overlaps(nests, self.context.memo.tiles)
        if not overlaps:
            return resident
        moving = self.backend.choose_window(nests, [self.plans[n] for n in nests], self.context, stored, overlaps)
        if moving is None or (resident is not None and resident.seconds <= moving.seconds):
            return resident
        return moving

    def _blocks(self, stream: Stream) -> list[int]:
        """Sizes of a streamed axis' parts worth a look, also as whole register tiles of the nests cut along it."""
        widths = [dict(self.plans[n].register).get(n.axis_names()[axis], 1) for n, axis in stream.wide.items()]
        width = max(widths)
        sizes = {b for size in STREAM_BLOCKS for b in (size, -(-size // width) * width)}
        return sorted(b for b in sizes if b < stream.extent)


def _tied(nests: Sequence[Nest]) -> bool:
    """Whether the last nest's tile determines that of every other: it feeds another of the group, or reads what one
    does."""
    read = {t for n in nests for t in n.reads()}
    inside = {t for n in nests for t in n.stores}
    return all(any(t in read for t in n.stores) or any(t in inside for t in n.reads()) for n in nests[:-1])


def _all_inside(nests: Sequence[Nest], stored: frozenset[Tensor]) -> bool:
    """Whether nothing but the root's results is stored."""
    return all(t not in stored for n in nests[:-1] for t in n.stores)


def _partition_axes(nests: Sequence[Nest], stored: frozenset[Tensor], tiles: Tiles) -> dict[str, int] | None:
    """Root axes to leave uncut so that stored intermediates are written once; None when none will do.

    An intermediate stored beside the root is cut along the root's axes that its origin follows one to one;
    along every other root axis all tiles would write the same piece. All its elements must be written: a root that
    reads a slice would leave the others out.
    """
    root, origins = nests[-1], tiles.origins(nests[-1])
    box: Box = tuple(Range(var(o), 1, extent_of(a.extent)) for o, a in zip(origins, root.axes, strict=True))
    boxes = propagate(nests, box, known=tiles.boxes)
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
    return fixed if _are_whole(nests, stored, tiles) else None


def _are_whole(nests: Sequence[Nest], stored: frozenset[Tensor], tiles: Tiles) -> bool:
    """Whether the whole root needs all of every stored intermediate. Of a single place it may seem so where it does
    not: ranges that begin apart by what is not known there are taken for the whole axis."""
    box = tuple(whole(extent_of(a.extent)) for a in nests[-1].axes)
    boxes = propagate(nests, box, known=tiles.boxes)
    kept = [n for n in nests[:-1] if any(t in stored for t in n.stores)]
    return all(part.size >= part.extent for n in kept for part in boxes[n])
