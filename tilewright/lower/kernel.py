"""Lowers one kernel of a Plan: one recursion over its Tiles, a place for every tensor, then leaf after leaf.

What a leaf becomes, and how tiles are handed out, the backends say: they derive from `KernelLowering`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import bounds
from tilewright.ir.forms.expr import Axis, Expr, all_of, const, load, lt, minimum, substitute, var
from tilewright.ir.forms.loops import Buffer, Kernel, Memory, Stmt
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.access import Access, Place, global_place
from tilewright.lower.items import Ahead, GridBarrier, Item, Loop, Together, works
from tilewright.lower.live import StreamLoop
from tilewright.lower.nesting import trip_count
from tilewright.lower.register_block import BufferNames
from tilewright.target.instruction_sets import PACKET_BYTES
from tilewright.tile_graph.algebra.in_results import kept_in_results
from tilewright.tile_graph.algebra.nest import Nest, reduced_below, roots_of
from tilewright.tile_graph.algebra.parts import between_barriers, boxes_at
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of, propagate, whole
from tilewright.tile_graph.algebra.rolling import RollingWindow, moving_boxes, reads_of
from tilewright.tile_graph.algebra.streams import Carrier, Work, stream_of
from tilewright.tile_graph.plan.form import IN_REGISTERS, PADDED, Leaf, Tile, TileAxis, UnitBarrier


@dataclass(frozen=True)
class Binding:
    """A kernel and the tensors its parameters stand for; `held` are places in buffers of its own, each the same as long
    as a tile or a block of its stream runs, with the tensors that it keeps parts of there, or the states of; its
    `stream` may have less to walk than there is room for."""

    kernel: Kernel
    arguments: tuple[str, ...]
    held: Sequence[tuple[Tensor, Place]] = ()
    stream: StreamLoop | None = None


@dataclass(frozen=True)
class ScanView:
    """How a kernel inside a Scan sees it: the step, and outputs that keep every step."""

    step: Axis
    stacked: Mapping[Tensor, Tensor]  # body tensor -> output with the step as first axis
    # where the kernel walks the steps itself: what it takes along, in two places in turn, and where that ends
    states: Mapping[Tensor, Tensor] = field(default_factory=dict)
    initial: Mapping[Tensor, Tensor] = field(default_factory=dict)
    finals: Mapping[Tensor, Tensor] = field(default_factory=dict)
    index: Expr | None = None  # of the step, where it is not the step itself


class KernelLowering:
    """A kernel's Tile as loops: who runs which part, where every tensor is, and what each leaf does there."""

    memory = Memory.SCRATCH  # of what a kernel holds
    leaves_out = False  # leaves of which a tile needs nothing

    def __init__(
        self, tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None
    ) -> None:
        self.plan = tile
        self.nests = nests
        self.layout = layout
        self.scan = scan
        self.names = BufferNames()
        self.access = Access()
        self.params: list[Buffer] = []
        self.arguments: list[str] = []
        self.kept: list[Buffer] = []  # buffers of what the kernel holds
        self.held: dict[Tensor, Box] = {}  # the part of each tensor that a Tile holds
        self.within: dict[Tensor, Tensor] = {}  # what lies in the memory of a result until that is stored
        self.padded: set[Tensor] = set()  # of those, what lies in lines of an odd number of packets
        self.own: dict[Tensor, Buffer] = {}  # and what each thread has in a register
        self.begun: list[dict[Tensor, Box]] = []  # the same in the prologue of each window, before its first step
        self.moved: dict[Tensor, tuple[Tensor, RollingWindow]] = {}  # copies inside a window's buffer
        self.staged: dict[Tensor, tuple[int, Axis]] = {}  # parts of it that are there at a time, and what walks them
        self.begins: dict[Tensor, Tensor] = {}  # by what a Scan's states are begun with: the states
        self.shifts: list[dict[Axis, Expr]] = []  # loops at another part, for what runs ahead
        self.prologue: list[Item] = []
        self.by_name = {n.tensor.name: n for n in nests}
        self.leaves = dict(zip(nests, tile.leaves, strict=True))
        possible = kept_in_results(tile, nests, layout)
        for hold in tile.holds:
            if hold.within is not None and possible.get(hold.tensor) != hold.within:
                raise InternalError(f"kernel '{tile.name}': '{hold.tensor}' cannot lie within '{hold.within}'")
        self.between = between_barriers(tile, self.by_name)  # nests from barrier to barrier
        self.roots = [root for group in self.between for root in roots_of(group)]
        self.tile_axes: dict[str, TileAxis] = {}
        stream = stream_of(tile, nests)
        self.carrier = None if stream is None else Carrier(stream, self.leaves)
        self.blocks: tuple[Axis, int] | None = None  # the loop over those of a stream, and what one has of it

    @property
    def step(self) -> Axis | None:
        return self.scan.step if self.scan else None

    @property
    def is_persistent(self) -> bool:
        """Whether the kernel walks the steps of a Scan itself."""
        return self.scan is not None and bool(self.scan.states)

    def binding(self) -> Binding:
        index, items = self.items()
        body = self.grid(index, items)
        step = None if self.is_persistent else self.step
        kernel = Kernel(self.plan.name, tuple(self.params), body, (), step)
        return Binding(kernel, tuple(self.arguments), self._held_places(), self._walk())

    def _held_places(self) -> list[tuple[Tensor, Place]]:
        if self.begun or self.shifts or self.moved or self.scan is not None:
            return []  # what lies there changes
        found = {t: t for t in self.held}
        if self.carrier is not None:
            found |= {state: nest.tensor for nest, states in self.carrier.states.items() for state in states}
            for values in (self.carrier.current, self.carrier.previous):
                found |= {value: nest.tensor for nest, value in values.items()}
        return [(of, self.access.read[t]) for t, of in found.items() if t in self.access.read and t.shape == of.shape]

    def _walk(self) -> StreamLoop | None:
        """The walk over a stream of which a run may tell how much there is."""
        if self.carrier is None or self.blocks is None:
            return None
        found = {reduced_below(nest, axis) for nest, axis in self.carrier.stream.reducers.items()}
        limit = found.pop()
        if limit is None or found:
            return None
        loop, size = self.blocks
        return StreamLoop(loop, simplify((self.access.lower(limit) + (size - 1)) // size))

    def items(self) -> tuple[Axis, tuple[Item, ...]]:
        """The flat index of a kernel's tiles, and what one of them runs; every tensor has its place then."""
        index, ranges = self._handed_out()
        items = self._body(self.plan, ranges)
        for work in works(items):
            self._bind_reads(work, {t for w in works(items) for t in w.nest.stores})
        for work in works(items):
            self._bind_writes(work)
        self.begun_access = [self._at_first(begun) for begun in self.begun]
        self.shifted_access = [self._shifted(shift) for shift in self.shifts]
        return index, items

    def turn(self, index: Axis) -> Expr:
        """The number of the tile that is handed out at a place of the order."""
        return var(index)

    def grid(self, index: Axis, items: Sequence[Item]) -> tuple[Stmt, ...]:
        """The loop over a kernel's tiles, and all that one of them does."""
        raise NotImplementedError

    # --- the tree

    def _handed_out(self) -> tuple[Axis, dict[str, Range]]:
        """The flat index of a kernel's tiles, and the part of each axis that it stands for; the last moves fastest."""
        self.tile_axes.update({a.name: a for a in self.plan.axes})
        index = Axis("tile", self.plan.tiles)
        position = self.turn(index)
        ranges: dict[str, Range] = {}
        for name, size in reversed(self.plan.sizes):
            extent = max(1, self.tile_axes[name].extent)
            count = -(-extent // size)
            if count == 1:
                continue
            ranges[name] = Range(simplify((position % count) * size), size, extent)
            position = simplify(position // count)
        return index, ranges

    def _body(self, tile: Tile, ranges: Mapping[str, Range]) -> tuple[Item, ...]:
        """What one part of a Tile runs, in order."""
        boxes, limits = self._boxes(ranges)
        for hold in tile.holds:
            nest = self.by_name.get(hold.tensor)
            if nest is not None and hold.layout == PADDED:
                self.padded.update(nest.stores)
                if hold.mode == "carry" and self.carrier is not None:
                    self.padded.update(self.carrier.kept(nest))
            if nest is not None and hold.within is not None:
                self.within[nest.tensor] = self.by_name[hold.within].tensor
            elif nest is not None and hold.layout == IN_REGISTERS:
                self.own.update({t: Buffer(self.names.fresh("own"), (1,) * t.rank, t.dtype, Memory.REGISTER)
                                 for t in nest.stores})  # fmt: skip
            elif nest is not None and hold.mode == "store" and hold.fill is None:
                self.held.update(dict.fromkeys(nest.stores, boxes[nest]))
        items: list[Item] = []
        beyond = self._beyond(tile, ranges)
        for node in tile.body:
            if isinstance(node, Leaf):
                nest = self.by_name[node.tensor]
                works = self._leaf(node, nest, boxes[nest], limits.get(nest, {}))
                needed = self._needed(nest, beyond)
                items.extend((Ahead(needed, tuple(works)),) if needed is not None else works)
            elif isinstance(node, UnitBarrier):
                items.append(GridBarrier())
            elif node.over == "steps":
                items.extend(self._steps(node, ranges))
            elif node.over in ("lanes", "warps") or not node.sizes:
                items.extend(self._body(node, ranges))
            else:
                loop = self._in_order(node, dict(ranges), list(node.sizes))
                items.extend((*self.prologue, loop))
                self.prologue = []
        return tuple(items)

    def _beyond(self, tile: Tile, ranges: Mapping[str, Range]) -> Mapping[Nest, Box]:
        """What every nest of a Tile would compute if its axes had no ends."""
        moves = any(h.stages > 1 or h.mode != "store" for h in tile.holds)
        if not self.leaves_out or moves or self.carrier is not None or self.scan is not None:
            return {}
        return boxes_at(self.between, ranges, self.tile_axes, clip=False)[0]

    def _needed(self, nest: Nest, beyond: Mapping[Nest, Box]) -> Expr | None:
        """When any of what a nest is to compute for others of its tile lies inside its axes, if not always: a tile of
        what is put together of several lies in one of them mostly."""
        if nest.tensor not in self.held:
            return None
        conditions: list[Expr] = []
        for part in beyond.get(nest, ()):
            if bounds.upper(part.low) >= part.extent:
                conditions.append(simplify(lt(part.low, part.extent)))
            # of several reads together the size is an axis's at most
            if part.size < part.extent and bounds.lower(part.low) + part.size <= 0:
                conditions.append(simplify(lt(0, simplify(part.low + part.size))))
        return all_of(conditions) if conditions else None

    def _in_order(self, tile: Tile, ranges: dict[str, Range], left: list[tuple[str, int]]) -> Loop:
        """Loops over the parts of a Tile, outermost first."""
        self.tile_axes.update({a.name: a for a in tile.axes})
        (name, size), rest = left[0], left[1:]
        axis = self.tile_axes[name]
        around = ranges.get(name, whole(axis.extent))
        is_carried = any(b.axis[0] == "r" for b in axis.binds)
        trips = -(-axis.extent // size) if is_carried else trip_count(_parts(around, size))
        loop = Axis("block" if is_carried else name, trips)
        if is_carried:
            self.blocks = loop, size
        if size < axis.extent:
            low = simplify(around.low + var(loop) * size)
            is_plain = not is_carried and all(h.mode == "store" for h in tile.holds)
            if is_plain and bounds.upper(low) >= axis.extent:
                # no part begins beyond the end: said here, since the number of parts of a last, short part around is
                # not known before it runs, and boxes that seem to would be moved back out of what is held around them
                low = minimum(low, axis.extent - 1)
            ranges[name] = Range(low, size, axis.extent)
        if rest:
            return Loop(loop, (self._in_order(tile, ranges, rest),))
        rolling = [self.by_name[h.tensor] for h in tile.holds if h.mode == "rolling"]
        if rolling:
            return Loop(loop, self._moving(tile, ranges, rolling, loop))
        stages = max((h.stages for h in tile.holds if h.fill is None), default=1)
        if stages > 1:
            return self._pipeline(tile, ranges, loop, stages)
        return Loop(loop, self._body(tile, ranges))

    def _pipeline(self, tile: Tile, ranges: Mapping[str, Range], loop: Axis, stages: int) -> Loop:
        """A step with some Holds in stages: what fills them runs ahead of the rest, on its own threads where children
        run together; its first parts before the loop."""
        staged = {h.tensor for h in tile.holds if h.stages > 1 and h.fill is None}
        tensors = [t for name in staged for t in self.by_name[name].stores]
        self.staged.update(dict.fromkeys(tensors, (stages, loop)))
        if tile.runs == "together":
            children = [n for n in tile.body if isinstance(n, Tile)]
            bodies = [(n.count, self._body(replace(tile, body=n.body), ranges)) for n in children]
        else:
            bodies = [(0, (item,)) for item in self._body(tile, ranges)]
        sides: list[tuple[int, tuple[Item, ...]]] = []
        for count, items in bodies:
            fills = any(t in self.staged and self.staged[t][1] is loop for w in works(items) for t in w.nest.stores)
            if not fills:
                sides.append((count, items))
                continue
            most = extent_of(loop.extent)
            for part in range(min(stages - 1, most)):
                first = tuple(self._shift(items, {loop: const(part)}))
                is_sure = isinstance(loop.extent, int)
                self.prologue += first if is_sure else (Ahead(lt(const(part), loop.extent), first),)
            later = simplify(var(loop) + (stages - 1))
            after = (Ahead(lt(later, loop.extent), tuple(self._shift(items, {loop: later}))),) if stages <= most else ()
            sides.append((count, after))
        if tile.runs == "together":
            return Loop(loop, (Together(tuple(sides)),), frozenset(tensors))
        return Loop(loop, tuple(item for _, items in sides for item in items), frozenset(tensors))

    def _shift(self, items: Sequence[Item], shift: dict[Axis, Expr]) -> list[Item]:
        """Leaves at another part of a loop."""
        self.shifts.append(shift)
        result: list[Item] = []
        for work in items:
            if not isinstance(work, Work):
                raise InternalError(f"kernel '{self.plan.name}': what fills a Hold in stages is one leaf")
            limits = dict(zip(work.limits, _at(tuple(work.limits.values()), shift), strict=True))
            result.append(replace(work, box=_at(work.box, shift), limits=limits, shifted=len(self.shifts)))
        return result

    def _steps(self, tile: Tile, ranges: Mapping[str, Range]) -> list[Item]:
        """The steps of a Scan, walked by the kernel itself: what it begins with is copied to where the step before the
        first would have left it, and what each part ends with is copied out."""
        if self.scan is None or not self.scan.states:
            raise InternalError(f"kernel '{self.plan.name}': nobody walks the steps of '{tile.scan}'")
        boxes, _ = self._boxes(ranges)
        items: list[Item] = []
        for following, given in self.scan.initial.items():
            nest = next(n for n in self.nests if following in n.stores)
            axes = tuple(Axis(a.name, a.extent) for a in nest.axes)
            begun = Tensor(f"{following.name}@begun", following.shape, following.dtype)
            self.begins[begun] = self.scan.states[following]
            copy = Nest((begun,), axes, (), (), None, (), (load(given, [var(a) for a in axes]),), begun.name)
            items.append(Work(copy, self._like(nest, begun.name), boxes[nest]))
        if items and any(isinstance(n, UnitBarrier) for n in tile.body):
            items.append(GridBarrier())
        items.append(Loop(self.scan.step, self._body(tile, ranges)))
        for following, final in self.scan.finals.items():
            nest = next(n for n in self.nests if following in n.stores)
            axes = tuple(Axis(a.name, a.extent) for a in nest.axes)
            steps = extent_of(self.scan.step.extent)
            value = load(self.scan.states[following], [const((steps - 1) % 2), *(var(a) for a in axes)])
            copy = Nest((final,), axes, (), (), None, (), (value,), final.name)
            items.append(Work(copy, self._like(nest, final.name), boxes[nest]))
        return items

    def _moving(self, tile: Tile, ranges: Mapping[str, Range], rolling: Sequence[Nest], loop: Axis) -> tuple[Item, ...]:
        """A step with windows over what some nests store: only what is new of each is computed, what is shared is
        copied to the window's front for the next step; what the first step shares is computed before the loop."""
        whole_step, limits = self._boxes(ranges)
        boxes, windows = moving_boxes(self.nests, {r: whole_step[r] for r in self.roots}, rolling, loop)
        for nest in rolling:
            if nest not in windows or limits:
                raise InternalError(f"kernel '{self.plan.name}': no window moves over '{nest.tensor.name}'")
        for hold in tile.holds:
            held = self.by_name[hold.tensor]
            self.held.update(dict.fromkeys(held.stores, boxes[held]))
        leaves = [n for n in tile.body if isinstance(n, Leaf)]
        copies = []
        for nest, window in windows.items():
            seen = window.of(boxes[nest], window.whole())
            self.held.update(dict.fromkeys(nest.stores, seen))
            self.prologue += self._begun(tile, leaves, nest, window, seen, loop)
            copies.append(self._copied(nest, window, seen))
        steps = [Work(self.by_name[x.tensor], x, boxes[self.by_name[x.tensor]]) for x in leaves]
        return (*steps, *copies)

    def _begun(
        self, tile: Tile, leaves: Sequence[Leaf], nest: Nest, window: RollingWindow, seen: Box, loop: Axis
    ) -> list[Work]:
        """What the first step of a window shares with the one before it, which there is not, and all that leads to it:
        windows that begin later may use the same places for it, since they begin after it."""
        first = {loop: const(0)}
        begun = propagate(reads_of(nest, self.nests), _at(window.of(seen, window.first(loop)), first))
        held = [self.by_name[h.tensor] for h in tile.holds]
        places = {t: _at(begun[n], first) for n in held if n in begun for t in n.stores}
        places.update(dict.fromkeys(nest.stores, _at(seen, first)))
        self.begun.append(places)
        return [Work(n, x, _at(begun[n], first), prologue=len(self.begun))
                for x in leaves for n in (self.by_name[x.tensor],) if n in begun]  # fmt: skip

    def _copied(self, nest: Nest, window: RollingWindow, seen: Box) -> Work:
        """The end of a window to its front: the same buffer, whose first element is later by what the window moves."""
        (tensor,) = nest.stores
        moved = Tensor(f"{tensor.name}@next", tensor.shape, tensor.dtype)
        self.moved[moved] = (tensor, window)
        axes = tuple(Axis(a.name, a.extent) for a in nest.axes)
        value = load(tensor, [var(a) for a in axes])
        copy = Nest((moved,), axes, (), (), None, (), (value,), moved.name)
        return Work(copy, self._like(nest, moved.name), window.of(seen, window.kept()))

    def _like(self, nest: Nest, name: str) -> Leaf:
        """How what a nest has stored is copied: along the same vectors."""
        given = self.leaves[nest]
        vector = given.vector if given.vector and given.vector[0] == "o" else None
        order = tuple(a for a in given.order if a[0] == "o")
        if vector is not None:
            order = (*(a for a in order if a != vector), vector)
        return Leaf(name, name, vector=vector, lanes=given.lanes if vector else 1,
                    register=((vector, given.lanes),) if vector else (), order=order)  # fmt: skip

    def _boxes(self, ranges: Mapping[str, Range]) -> tuple[dict[Nest, Box], dict[Nest, dict[Axis, Range]]]:
        """The box of every nest where axes of the tree run over these parts, and parts of reductions."""
        return boxes_at(self.between, ranges, self.tile_axes)

    def _leaf(self, leaf: Leaf, nest: Nest, box: Box, limits: Mapping[Axis, Range]) -> list[Work]:
        carrier = self.carrier
        if leaf.part in ("whole", "copy"):
            if carrier is not None and nest in carrier.stream.wide:
                return carrier.wide(nest, box)
            return [Work(nest, leaf, box, limits)]
        if carrier is None or nest not in carrier.stream.reducers:
            raise InternalError(f"kernel '{self.plan.name}': nothing carries '{leaf.tensor}'")
        if leaf.part == "start":
            return carrier.start(nest, box)
        return carrier.finish(nest, box) if leaf.part == "finish" else carrier.step(nest, box, limits)

    # --- places

    def access_of(self, work: Work) -> Access:
        if work.shifted:
            return self.shifted_access[work.shifted - 1]
        return self.begun_access[work.prologue - 1] if work.prologue else self.access

    def _at_first(self, begun: Mapping[Tensor, Box]) -> Access:
        """Places as they are before the first step of a window."""
        read, write = dict(self.access.read), dict(self.access.write)
        for tensor, box in begun.items():
            place = replace(self.access.read[tensor], lows=tuple(part.low for part in box))
            read[tensor], write[tensor] = place, [place]
        return Access(read, write)

    def _shifted(self, shift: Mapping[Axis, Expr]) -> Access:
        """Places as they are at another part of a loop."""

        def moved(place: Place) -> Place:
            lows, prefix = (tuple(simplify(substitute(e, shift)) for e in part) for part in (place.lows, place.prefix))
            return replace(place, lows=lows, prefix=prefix)

        return Access({t: moved(p) for t, p in self.access.read.items()},
                      {t: [moved(p) for p in places] for t, places in self.access.write.items()})  # fmt: skip

    def placed(self, tensor: Tensor, name: str) -> Place:
        """A parameter as it lies in memory."""
        return global_place(tensor, self.layout(tensor), name)

    def _parameter(self, tensor: Tensor) -> Place:
        place = self.placed(tensor, f"p{len(self.params)}")
        self.params.append(place.buffer)
        self.arguments.append(tensor.name)
        return place

    def _bind_reads(self, work: Work, inside: set[Tensor]) -> None:
        for tensor in work.nest.reads():
            if tensor not in inside and tensor not in self.access.read:
                self.access.read[tensor] = self._parameter(tensor)

    def _bind_writes(self, work: Work) -> None:
        for tensor in work.nest.stores:
            if tensor in self.access.read:
                continue
            if tensor in self.moved:
                source, window = self.moved[tensor]
                place = self.access.read[source]
                lows = tuple(simplify(low + window.advance) if d == window.dim else low
                             for d, low in enumerate(place.lows))  # fmt: skip
                self.access.put(tensor, Place(place.buffer, place.layout, lows, dropped=place.dropped))
                continue
            if tensor in self.within:
                result = self.within[tensor]
                if result not in self.access.read:
                    self.access.put(result, self._parameter(result))
                self.access.put(tensor, self.access.read[result])
                continue
            if tensor in self.own:
                self.access.put(tensor, Place(self.own[tensor], self.layout(tensor), is_own=True))
                continue
            if work.owner is not None or tensor in self.held:
                box = self.held.get(tensor, work.box)
                order = self.layout(tensor)
                sizes = [min(int(r.size), r.extent) for r in box]
                for begun in self.begun:
                    if tensor in begun:
                        sizes = [max(n, int(r.size)) for n, r in zip(sizes, begun[tensor], strict=True)]
                if tensor in self.padded:
                    order = replace(order, gap=PACKET_BYTES // tensor.dtype.bytes)
                shape = order.storage_shape(tuple(sizes))
                prefix: tuple[Expr, ...] = ()
                if tensor in self.staged:
                    stages, loop = self.staged[tensor]
                    shape, prefix = (stages, *shape), (var(loop) % stages,)
                buffer = Buffer(f"s{len(self.kept)}", shape, tensor.dtype, self.memory)
                self.kept.append(buffer)
                self.access.put(tensor, Place(buffer, order, tuple(r.low for r in box), prefix))
                continue
            if tensor in self.begins:
                turn = self.access.read[self.begins[tensor]]
                self.access.put(tensor, Place(turn.buffer, Layout.natural(tensor.rank), (), (const(1),), turn.dropped))
                continue
            state = self.scan.states.get(tensor) if self.scan else None
            if state is not None and self.scan is not None:
                turn = self.access.read[state] if state in self.access.read else self._parameter(state)
                turned = (var(self.scan.step) % 2,)
                self.access.put(tensor, Place(turn.buffer, Layout.natural(tensor.rank), (), turned, turn.dropped))
            else:
                self.access.put(tensor, self._parameter(tensor))
            stacked = self.scan.stacked.get(tensor) if self.scan else None
            if stacked is not None and self.scan is not None:
                out = self._parameter(stacked)
                index = var(self.scan.step) if self.scan.index is None else self.scan.index
                place = Place(out.buffer, Layout.natural(tensor.rank), (), (index,), out.dropped)
                self.access.write[tensor].append(place)


def _at(box: Box, place: Mapping[Axis, Expr]) -> Box:
    return tuple(Range(simplify(substitute(part.low, place)), part.size, part.extent) for part in box)


def _parts(around: Range, size: int) -> Expr:
    """How many parts of a size a range has."""
    return simplify((around.count + (size - 1)) // size)
