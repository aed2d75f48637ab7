"""Lowers one kernel of a Plan for a GPU: a block a tile, what it holds in shared memory, barriers where leaves meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.backend.gpu.kernel.early import Early
from tilewright.backend.gpu.kernel.leaf import leaf_statements
from tilewright.backend.gpu.kernel.once import fetched_once
from tilewright.backend.gpu.kernel.room import RoomHazards
from tilewright.backend.gpu.kernel.shared_arena import touched
from tilewright.backend.gpu.stream.group import stream_form
from tilewright.backend.gpu.stream.lower import stream_tile
from tilewright.backend.gpu.threads.in_step import BlockElements, Elements, knows, reads_own
from tilewright.backend.gpu.threads.nest import GpuNest
from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Expr, loads, lt, var
from tilewright.ir.forms.loops import Alloc, Barrier, Buffer, For, ForKind, If, Memory, Scope, Stmt, statements
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.access import Place, flat_place, global_place
from tilewright.lower.items import Ahead, GridBarrier, Item, Loop, Together, works
from tilewright.lower.kernel import Binding, KernelLowering, ScanView
from tilewright.lower.nesting import alloc
from tilewright.lower.unroll import at
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.streams import Work
from tilewright.tile_graph.plan.form import Hold, Tile
from tilewright.tile_graph.plan.leaf_form import ThreadForm


class GpuKernel(KernelLowering):
    """Tiles handed out to blocks; the threads of a block take up every leaf together."""

    memory = Memory.SHARED

    def placed(self, tensor: Tensor, name: str) -> Place:
        """Packets are neighbours of the last dimension: of the whole, where they run on over the ends of rows."""
        (first, *others), nest = self.plan.leaves, self.nests[0]
        if first.options(ThreadForm).flat and not others and tensor.shape == tuple(a.extent for a in nest.axes):
            return flat_place(tensor, self.layout(tensor), name)
        return global_place(tensor, self.layout(tensor), name, squeezed=True)

    def turn(self, index: Axis) -> Expr:
        """Where rows see a part of a streamed axis, last rows first: what begins last should not take longest."""
        warps = stream_tile(self.plan)
        if warps is None or warps.stream is None or warps.stream.until is None or not self.plan.sizes:
            return var(index)
        name, size = self.plan.sizes[-1]
        axis = next(a for a in self.plan.axes if a.name == name)
        if not set(axis.binds) & set(warps.axes[0].binds):
            return var(index)
        count = -(-axis.extent // size)
        beside = self.plan.tiles // count
        return simplify(var(index) % beside * count + (count - 1 - var(index) // beside))

    def grid(self, index: Axis, items: Sequence[Item]) -> tuple[Stmt, ...]:
        (lanes,) = (n for n in self.plan.body if isinstance(n, Tile) and n.over == "lanes")
        self.thread, self.warp = Axis("thread", lanes.count), lanes.warp
        self.shared: list[Buffer] = []  # of a stream's operands
        self.hazards: RoomHazards[Buffer] = RoomHazards()
        self.last: Work | None = None  # since the last barrier, and the threads that it has
        self.occupied = 0
        self.elements = BlockElements(self.thread)
        self.made: dict[Tensor, tuple[Nest, Elements | None]] = {}  # since the last barrier, or in registers: by whom
        self.staged_buffers: frozenset[Buffer] = frozenset()  # of the loops around: each part at a place of its own
        warps = stream_tile(self.plan)
        if warps is not None:  # nothing that is held leaves the registers
            streamed = stream_form(warps)(self, warps, items).statements()
            return (For(index, ForKind.BLOCK, alloc(self.shared, (For(self.thread, ForKind.THREAD, streamed),))),)
        body = alloc(tuple(self.own.values()), fetched_once(self._statements(items)))
        inside = (For(self.thread, ForKind.THREAD, body),)
        used = {b for s in statements(inside) for b in touched(s)}
        return (For(index, ForKind.BLOCK, alloc([b for b in self.kept if b in used], inside)),)

    def _statements(self, items: Sequence[Item]) -> list[Stmt]:
        body: list[Stmt] = []
        early, start = Early(self.names, self.thread), 0  # where the last barrier is behind, or a loop
        for before, item in zip((None, *items), items, strict=False):
            if not isinstance(before, Work):
                early, start = replace(early, place=None), len(body)
            if isinstance(item, Loop):
                body.extend(self._loop(item))
                continue
            if isinstance(item, Ahead):
                if self._meets(item):
                    body.append(self._wait())
                body.append(If(item.condition, tuple(self._statements(item.body))))
                continue
            if isinstance(item, Together):
                body.extend(self._together(item))
                continue
            if isinstance(item, GridBarrier):
                body.append(Barrier(Scope.GRID))
                self._met()
                continue
            reads, writes = self._touched(item)
            warps, operands = self._fragments(item)
            found = None if warps is not None else self.elements.of(self._nest(item, None, (), 0))
            own = {self.access.read[t].buffer for t in self._own_elements(item, found)}
            # what threads keep is with the first ones, and so is what they have stored for themselves
            is_kept = not self.own.keys().isdisjoint((*item.nest.reads(), *item.nest.stores))
            begun = 0 if own or is_kept or self.hazards.meets(reads - own, writes) else self.occupied
            lowered = self._nest(item, warps, operands, begun)
            made = leaf_statements(lowered)
            # shares of sums have memory of their own each
            has_own = bool(lowered.shared) and not (lowered.options.split > 1 and not lowered.options.step)
            if self.hazards.meets(reads - own, writes, has_own):
                early = replace(early, place=start, unsettled=frozenset(self.hazards.written))
                body.append(self._wait())
                start = len(body)
            asked, made = early.asked(made, self.hazards.written)
            if asked:
                body[early.place : early.place] = asked
                start += len(asked)
            body.extend(made)
            if lowered.options.split > self.warp:  # it meets inside, and what follows may have been asked for before
                early = replace(early, place=start)
            self.hazards.add(reads, writes, has_own)
            made_by = (item.nest, None if lowered.first else found)
            self.made.update(dict.fromkeys(item.nest.stores, made_by))
            self.last, self.occupied = item, lowered.end
        return list(alloc(early.kept, body))

    def _nest(self, item: Work, warps: Tile | None, operands: Sequence[Hold], begun: int) -> GpuNest:
        return GpuNest(item.nest, item.leaf, item.box, dict(item.limits), self.access_of(item), self.names,
                       self.thread, warps, operands, self.warp, begun)  # fmt: skip

    def _own_elements(self, work: Work, read: Elements | None) -> set[Tensor]:
        """What a leaf reads of those before it where the same thread has written it since the last barrier."""
        nest, before = work.nest, self.last
        own: set[Tensor] = set()
        if before is not None and _alike(before, work):
            elsewhere = {n.source for n in loads(*nest.values) if n.indices != nest.place}
            own.update(t for t in before.nest.stores if t not in elsewhere)
        for tensor in nest.reads():
            if tensor not in self.made:
                continue
            writer, stored = self.made[tensor]
            if tensor in self.own:
                if not knows(writer, stored, nest, read, tensor):
                    raise InternalError(f"kernel '{self.plan.name}': not all threads that read '{tensor.name}' know it")
            elif reads_own(writer, stored, nest, read, tensor):
                own.add(tensor)
        return own

    def _meets(self, item: Loop | Ahead) -> bool:
        return any(self.hazards.meets(*self._touched(work)) for work in works(item.body))

    def _wait(self) -> Barrier:
        self._met()
        return Barrier(Scope.BLOCK)

    def _met(self) -> None:
        self.hazards.clear()
        self.made = {t: by for t, by in self.made.items() if t in self.own}
        self.last, self.occupied = None, 0

    def _together(self, item: Together) -> tuple[Stmt, ...]:
        """Each side on threads of its own, numbered from the first of them."""
        block, first = self.thread, sum(count for count, _ in item.sides)
        chosen: tuple[Stmt, ...] = ()
        for count, items in reversed(item.sides):
            first -= count
            self.thread, self.last, self.occupied = Axis("side", count), None, 0
            body = at(tuple(self._statements(items)), {self.thread: simplify(var(block) - first)})
            chosen = (If(lt(var(block), first + count), body, chosen),)
        self.thread, self.last, self.occupied = block, None, 0
        return chosen

    def _fragments(self, work: Work) -> tuple[Tile | None, tuple[Hold, ...]]:
        """The Tile over warps around a leaf, and how its operands come."""
        if work.leaf.instruction is None:
            return None, ()
        name = (work.owner or work.nest).tensor.name
        for tile in (t for t in self.plan.walk() if isinstance(t, Tile)):
            for inner in tile.body:
                if isinstance(inner, Tile) and inner.over == "warps" and inner.leaves[0].tensor == name:
                    return inner, tile.holds
        raise InternalError(f"kernel '{self.plan.name}': no warps take '{name}'")

    def _loop(self, loop: Loop) -> list[Stmt]:
        body: list[Stmt] = []
        if self._meets(loop):
            body.append(self._wait())
        outer = self.staged_buffers
        self.staged_buffers = outer | {self.access.read[t].buffer for t in loop.staged}
        # the next part writes what this one still reads
        inner = self._statements(loop.body)
        if not _ends_with_barrier(inner):
            inner.append(self._wait())
        self.staged_buffers = outer
        return [*body, For(loop.axis, ForKind.SERIAL, tuple(inner))]

    def _touched(self, work: Work) -> tuple[set[Buffer], set[Buffer]]:
        reads = {self.access.read[t].buffer for t in work.nest.reads() if t not in self.own}
        writes = {p.buffer for t in work.nest.stores if t not in self.own for p in self.access.write[t]}
        return reads - self.staged_buffers, writes - self.staged_buffers


def _alike(one: Work, two: Work) -> bool:
    """Whether two maps hand the same elements to the same threads."""
    if one.nest.monoid is not None or two.nest.monoid is not None or one.box != two.box or one.owner or two.owner:
        return False
    forms = [leaf.options(ThreadForm) for leaf in (one.leaf, two.leaf)]
    return len({(form.at_once, form.flat) for form in forms}) == 1 and all(
        getattr(one.leaf, n) == getattr(two.leaf, n) for n in ("order", "vector", "lanes")
    )


def _ends_with_barrier(body: Sequence[Stmt]) -> bool:
    last = body[-1]
    return isinstance(last, Barrier) or (isinstance(last, Alloc) and _ends_with_barrier(last.body))


def lower_gpu_kernel(
    tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None
) -> Binding:
    return GpuKernel(tile, nests, layout, scan).binding()
