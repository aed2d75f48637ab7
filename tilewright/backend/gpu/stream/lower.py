"""Lowers a stream that lies in registers: a warp keeps its rows of everything that the nests pass to each other.

Blocks of the operands along the streamed axis come through rings in shared memory, later ones while one is used; one
barrier a block is enough (see pipeline.py). All else happens between the lanes that share a row: what is along the
rows and the streamed axis, or the columns, lies as the sums of two fragments beside each other do, which is how the
rows' operand of a product lies too. What is outside the streamed axis is left out of reductions and zero in products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Protocol

from tilewright.backend.gpu.maps.packets import chosen_places
from tilewright.backend.gpu.matrix.lower import MatrixContract
from tilewright.backend.gpu.matrix.sides import Sides, sides_of
from tilewright.backend.gpu.stream.form import COLUMN
from tilewright.backend.gpu.stream.visible import ROW, STREAM
from tilewright.backend.gpu.threads.nest import GpuNest, drop_true, guarded, quick_erf
from tilewright.backend.gpu.threads.pipeline import commit, sync, wait
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Monoid
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Var,
    all_of,
    axes_of,
    const,
    eq,
    is_op,
    load,
    loads,
    lt,
    minimum,
    op,
    replace_nodes,
    rewrite,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.loops import Buffer, For, ForKind, If, Instruction, Memory, Operand, Stmt, Store
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.instruct import WARP
from tilewright.lower.access import Access
from tilewright.lower.items import Item, Loop, works
from tilewright.lower.nesting import alloc, unrolled
from tilewright.lower.register_block import BufferNames
from tilewright.tile_graph.algebra.nest import Nest, inline
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of, whole
from tilewright.tile_graph.algebra.streams import Carrier, Work
from tilewright.tile_graph.plan.form import COPIES, Hold, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm

PAIR = 8  # elements that a lane keeps of two fragments of sums beside each other
_LOG2_E = 1.4426950408889634
_INFINITY = float("inf")
_LARGE = 1e18  # a factor below it leaves products with others of its kind finite
_QUAD = (1, 2)  # distances of the lanes that share a row


@dataclass(frozen=True)
class FragmentElements:
    """Elements of one kind that a lane keeps: the loops over them, where they are, and when that is inside."""

    kind: str
    loops: tuple[Axis, ...]
    index: tuple[Expr, ...]
    half: Expr  # which of a fragment's rows that a lane keeps
    places: Mapping[str, Expr]  # by role, relative to the block


def stream_tile(kernel: Tile) -> Tile | None:
    """The Tile over warps with a stream inside, where a kernel has one."""
    tiles = (t for t in kernel.walk() if isinstance(t, Tile))
    return next((t for t in tiles if t.over == "warps" and t.stream is not None), None)


class KernelOfThreads(Protocol):
    """The kernel around a stream: where its tensors are, and the threads of its blocks."""

    plan: Tile
    names: BufferNames
    access: Access
    held: dict[Tensor, Box]
    by_name: dict[str, Nest]
    thread: Axis
    shared: list[Buffer]
    carrier: Carrier | None


class RegisterStream:
    """A kernel whose warps keep a stream in registers."""

    contract: type[MatrixContract] = MatrixContract

    def __init__(self, kernel: KernelOfThreads, warps: Tile, items: Sequence[Item]) -> None:
        walked = warps.stream
        assert walked is not None
        self.kernel = kernel
        (_, self.warp_rows), (_, self.columns) = warps.sizes
        self.rows = warps.axes[0].extent
        bound = ((warps.axes[0], ROW), (warps.axes[1], COLUMN), *((a, STREAM) for a in walked.axes))
        self.roles = {kernel.by_name[b.tensor].named(b.axis): role for axis, role in bound for b in axis.binds}
        ((_, block),) = walked.sizes
        # warps that have the same rows, each of them a part of every block of the streamed axis
        self.split = max(leaf.options(FragmentForm).split for leaf in walked.leaves if leaf.instruction is not None)
        self.own = -(-block // (16 * self.split)) * 16
        self.block = self.own * self.split
        self.items = items
        (self.loop,) = (item for item in items if isinstance(item, Loop))
        self.trips = extent_of(self.loop.axis.extent)
        self.until = walked.until
        # maps that are computed where an operand is brought
        first = [w for w in items[: items.index(self.loop)] if isinstance(w, Work) and w.owner is None]
        self.composed = {w.nest.tensor: Map(w.nest.tensor, w.nest.axes, w.nest.values[0]) for w in first}
        products = [w for w in self.loop.works() if w.leaf.instruction is not None]
        self.form = FORMS[products[0].leaf.instruction or ""]
        thread = var(kernel.thread)
        self.lane, self.warp = simplify(thread % WARP), simplify(thread // WARP)
        self.part = simplify(self.warp % self.split) if self.split > 1 else const(0)
        self.origin = simplify(self.warp // self.split * self.warp_rows)
        self.fragments = self.warp_rows // self.form.c.rows
        brought = iter([h for h in walked.holds if h.fill in COPIES])
        rows = iter([h for h in warps.holds if h.fill in COPIES])
        self.contracts = {w.nest.tensor: self._contract(w, rows, brought) for w in products}
        self.stages = next(h.stages for h in walked.holds if h.fill in COPIES)
        self.registers: dict[Tensor, tuple[str, Buffer]] = {}
        for work in works(items):
            if work.nest.tensor not in self.composed:
                self._keep(work)
        self.row_fragments: dict[Tensor, list[Buffer]] = {}

    # --- the whole

    def statements(self) -> tuple[Stmt, ...]:
        place = self.items.index(self.loop)
        before, after = self.items[:place], self.items[place + 1 :]
        ahead = self.stages - 1
        body: list[Stmt] = []
        scores = self._products(STREAM)
        products = [*scores, *self._products(COLUMN)]
        body.extend(self._rows_copied(scores))
        for number in range(max(1, ahead)):
            body.extend(self._copies(const(number), products) if number < self.trips else ())
            body.append(commit())
        body.extend(s for work in before for s in self._work(work))
        body.extend((wait(max(0, ahead - 1)), sync()))
        for work in scores:
            body.extend(self._first_operand(work))
        block = var(self.loop.axis)
        inside: list[Stmt] = []
        if self.trips > 1:
            later = simplify(block + ahead)
            inside.extend((wait(ahead - 1), sync()))
            inside.extend((If(simplify(lt(later, self.trips)), tuple(self._copies(later, products))), commit()))
        inside.extend(s for work in self.loop.works() for s in self._work(work))
        body.extend((For(self.loop.axis, ForKind.SERIAL, tuple(inside)),) if self.trips > 1 else inside)
        ends = tuple(s for work in after for s in self._work(work))
        body.extend(ends if self.split == 1 else self._gathered(ends))
        kept = [b for _, b in self.registers.values()] + [b for bs in self.row_fragments.values() for b in bs]
        return alloc(kept, body)

    # --- what warps that have the same rows tell each other

    def _gathered(self, ends: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The states of all of them as those of the first, which ends the rows."""
        carrier = self.kernel.carrier
        assert carrier is not None
        values = [t for n in carrier.stream.reducers for t in (*carrier.states[n], *_one(carrier.current, n))]
        groups = self.rows // self.warp_rows
        tables: dict[Tensor, Buffer] = {}
        for tensor in values:
            _, kept = self.registers[tensor]
            shape = (self.split - 1, groups, prod(map(extent_of, kept.shape)), WARP)
            tables[tensor] = Buffer(self.kernel.names.fresh("met"), shape, kept.dtype, Memory.SHARED)
        self.kernel.shared.extend(tables.values())
        group = simplify(self.warp // self.split)

        def spot(tensor: Tensor, part: Expr, tile: FragmentElements) -> tuple[Expr, ...]:
            flat: Expr = const(0)
            for index, size in zip(tile.index, self.registers[tensor][1].shape, strict=True):
                flat = flat * size + index
            return part, group, simplify(flat), self.lane

        told: list[Stmt] = []
        for tensor, table in tables.items():
            kind, kept = self.registers[tensor]
            tile = self._elements(kind)
            told.extend(unrolled(tile.loops, (Store(table, spot(tensor, simplify(self.part - 1), tile),
                                                    load(kept, tile.index)),)))  # fmt: skip
        heard: list[Stmt] = []
        others = {t: Buffer(self.kernel.names.fresh("other"), self.registers[t][1].shape, self.registers[t][1].dtype,
                            Memory.REGISTER) for t in values}  # fmt: skip
        for number in range(self.split - 1):
            for tensor, table in tables.items():
                tile = self._elements(self.registers[tensor][0])
                found = load(table, spot(tensor, const(number), tile))
                heard.extend(unrolled(tile.loops, (Store(others[tensor], tile.index, found),)))
            heard.extend(self._joined(carrier, others))
        first = eq(self.part, 0)
        body = (sync(), If(simplify(lt(const(0), self.part)), tuple(told)), sync(), If(first, (*heard, *ends)))
        return alloc(list(others.values()), body)

    def _joined(self, carrier: Carrier, others: Mapping[Tensor, Buffer]) -> list[Stmt]:
        """States followed by those of another warp, as by those of a block."""
        body: list[Stmt] = []
        works = [w for w in self.loop.works() if w.owner is not None]
        made = {t: w for w in works for t in w.nest.stores}
        for nest in carrier.stream.reducers:
            monoid = nest.monoid
            assert monoid is not None
            (state,) = carrier.states[nest]
            if nest in carrier.current:
                body.extend(self._map(made[carrier.previous[nest]]))
            kind, kept = self.registers[state]
            tile = self._elements(kind)
            left: Expr = load(kept, tile.index)
            right: Expr = load(others[state], tile.index)
            shift = next((w for w in works if w.owner is nest and w.nest.tensor.name.endswith("@shift")), None)
            own: list[Buffer] = []
            if shift is not None:
                by = op_of_shift(monoid)
                (moved,) = shift.nest.stores
                body.extend(self._map(shift))
                left = op(by, left, self._of_row(self.registers[moved][1], tile))
                theirs = Buffer(self.kernel.names.fresh("shift"), self.registers[moved][1].shape, moved.dtype,
                                Memory.REGISTER)  # fmt: skip
                own.append(theirs)
                known = dict(self.registers)
                now = {carrier.previous[n]: (self.registers[t][0], others[t]) for n, t in carrier.current.items()}
                self.registers.update({**now, moved: (ROW, theirs)})
                told = self._map(shift)
                self.registers = known
                right = op(by, right, self._of_row(theirs, tile))
            else:
                told = ()
            total = Store(kept, tile.index, _combined(monoid, left, right))
            body.extend(alloc(own, (*told, *unrolled(tile.loops, (total,)))))
            if nest in carrier.current:
                body.extend(self._map(made[carrier.current[nest]]))
        return body

    def _of_row(self, kept: Buffer, tile: FragmentElements) -> Expr:
        return load(kept, tile.index if tile.kind == ROW else (tile.index[0], tile.half))

    def _work(self, work: Item) -> tuple[Stmt, ...]:
        if not isinstance(work, Work):
            raise InternalError(f"kernel '{self.kernel.plan.name}': a loop beside its stream")
        if work.nest.tensor in self.composed:
            return ()
        if work.nest.monoid is None:
            return self._map(work)
        if work.nest.tensor not in self.contracts:
            return self._reduction(work)
        return self._product(work)

    # --- what a lane keeps

    def _role(self, work: Work, number: int) -> str | None:
        return self.roles.get((work.along or work.nest.axes)[number])

    def _kind(self, work: Work) -> str:
        roles = {self._role(work, n) for n in range(len(work.nest.axes))}
        return STREAM if STREAM in roles else COLUMN if COLUMN in roles else ROW

    def _keep(self, work: Work) -> None:
        """Registers for what a nest hands to others."""
        kind = self._kind(work)
        wide = {STREAM: self.own, COLUMN: self.columns}.get(kind, 0)
        shape = (self.fragments, wide // 16, PAIR) if wide else (self.fragments, 2)
        for tensor in work.nest.stores:
            if (work.owner is not None or tensor in self.kernel.held) and tensor not in self.registers:
                buffer = Buffer(self.kernel.names.fresh("kept"), shape, tensor.dtype, Memory.REGISTER)
                self.registers[tensor] = (kind, buffer)

    def _elements(self, kind: str) -> FragmentElements:
        i = Axis("i", self.fragments)
        a = self.form.a  # sixteen columns of sums lie as the rows' operand does
        if kind == ROW:
            half = Axis("half", 2)
            row = simplify(self.origin + var(i) * a.rows + self.lane // 4 + var(half) * 8)
            return FragmentElements(kind, (i, half), (var(i), var(half)), var(half), {ROW: row})
        wide, first = (self.own, simplify(self.part * self.own)) if kind == STREAM else (self.columns, const(0))
        j, x = Axis("j", wide // a.columns), Axis("x", PAIR)
        row = simplify(self.origin + var(i) * a.rows + a.row(self.lane, var(x)))
        column = simplify(first + var(j) * a.columns + a.column(self.lane, var(x)))
        index = (var(i), var(j), var(x))
        return FragmentElements(kind, (i, j, x), index, simplify(var(x) // 2 % 2), {ROW: row, kind: column})

    def _ranges(self, work: Work) -> dict[Axis, Range]:
        ranges = dict(zip(work.nest.axes, work.box, strict=True))
        for axis in work.nest.reduce_axes:
            ranges[axis] = work.limits.get(axis, whole(extent_of(axis.extent)))
        return ranges

    def _env(
        self, work: Work, tile: FragmentElements, is_read: bool = False
    ) -> tuple[dict[Axis, Expr], dict[str, Expr]]:
        """Where the axes of a nest are at a tile, and by role when that is inside; for what is read the last place
        inside stands for those behind it: conditions around reads would be branches, each of which waits for memory."""
        axes = (*(work.along or work.nest.axes), *work.nest.reduce_axes)
        env: dict[Axis, Expr] = {}
        inside: dict[str, Expr] = {}
        for own, (axis, part) in zip(axes, self._ranges(work).items(), strict=True):
            role = self.roles.get(own)
            place = const(0) if role is None else tile.places.get(role)
            if place is None:
                continue
            if role is not None:
                inside[role] = simplify(lt(place, part.count))
                if is_read and drop_true([inside[role]]):
                    place = minimum(place, part.count - 1)
            env[axis] = simplify(part.low + place)
        return env, inside

    def _read(self, node: Load, tile: FragmentElements) -> Expr | None:
        """A read of what is kept in registers."""
        if not isinstance(node.source, Tensor) or node.source not in self.registers:
            return None
        kind, buffer = self.registers[node.source]
        if kind == ROW:
            return load(buffer, (tile.index[0], tile.half))
        if kind != tile.kind:
            raise InternalError(f"kernel '{self.kernel.plan.name}': '{node.source.name}' is not where it is read")
        return load(buffer, tile.index)

    def _value(self, work: Work, value: Expr, tile: FragmentElements) -> Expr:
        """An expression on what a lane keeps and what memory has; nothing is read outside. Behind the ends of rows and
        of the streamed axis it is some number, which is neither stored nor summed up."""
        here: dict[Expr, Expr] = {n: found for n in loads(value) if (found := self._read(n, tile)) is not None}
        env, _ = self._env(work, tile, is_read=True)
        return chosen_places(simplify(self.kernel.access.lower(substitute(replace_nodes(quick_erf(value), here), env))))

    def _stream_inside(self, work: Work, tile: FragmentElements) -> tuple[Expr, ...]:
        _, inside = self._env(work, tile)
        return drop_true([inside[STREAM]])

    # --- maps

    def _map(self, work: Work) -> tuple[Stmt, ...]:
        tile = self._elements(self._kind(work))
        body: list[Stmt] = []
        own: list[Buffer] = []
        for tensor, value in zip(work.nest.stores, work.nest.values, strict=True):
            value = rewrite(value, as_power_of_two)
            made = self._value(work, self._rows_first(work, value, tile, body, own), tile)
            made = rewrite(made, _of_one_factor)
            if tensor in self.registers:
                body.extend(unrolled(tile.loops, (Store(self.registers[tensor][1], tile.index, made),)))
            else:
                body.extend(self._stored(work, tensor, made, tile))
        return alloc(own, body)

    def _rows_first(self, work: Work, value: Expr, tile: FragmentElements, body: list[Stmt], own: list[Buffer]) -> Expr:
        """What is the same along a row is computed once, before all else."""
        if tile.kind == ROW:
            return value
        rows = self._elements(ROW)
        found: dict[Expr, Expr] = {}
        stack, seen = [value], set[Expr]()
        while stack:
            node = stack.pop()
            if node in seen or isinstance(node, Load | Const | Var):
                continue
            seen.add(node)
            if not self._is_of_rows(work, node):
                stack.extend(node.args)
                continue
            kept = Buffer(self.kernel.names.fresh("row"), (self.fragments, 2), node.dtype, Memory.REGISTER)
            own.append(kept)
            body.extend(unrolled(rows.loops, (Store(kept, rows.index, self._value(work, node, rows)),)))
            found[node] = load(kept, (tile.index[0], tile.half))
        return replace_nodes(value, found)

    def _is_of_rows(self, work: Work, node: Expr) -> bool:
        read = loads(node)
        if not read or any(self.registers.get(n.source, (COLUMN,))[0] != ROW for n in read):
            return False
        return not any(self.roles.get(_own(work, a)) in (STREAM, COLUMN) for a in axes_of(node))

    def _stored(self, work: Work, tensor: Tensor, value: Expr, tile: FragmentElements) -> tuple[Stmt, ...]:
        """To memory, two neighbours along the columns at a time where they lie beside each other."""
        env, inside = self._env(work, tile)
        conditions = drop_true(list(inside.values()))
        logical = tuple(env[a] for a in work.nest.axes)
        if tile.kind == ROW:  # all four lanes that share a row have it
            alone = [*conditions, eq(simplify(self.lane % 4), 0)]
            return unrolled(tile.loops, guarded(alone, self.kernel.access.stores(tensor, logical, value)))
        i, j, x = tile.loops
        high, lane = Axis("high", PAIR // 2), Axis("lane", 2)
        part = next(r for a, r in self._ranges(work).items() if self.roles.get(_own(work, a)) == tile.kind)
        if not _is_even(part):
            return unrolled(tile.loops, guarded(conditions, self.kernel.access.stores(tensor, logical, value)))
        at = {x: simplify(var(high) * 2 + var(lane))}
        kept = Buffer(self.kernel.names.fresh("pair"), (2,), value.dtype, Memory.REGISTER)
        made = simplify(substitute(value, at))
        moved = tuple(
            Store(s.buffer, tuple(simplify(substitute(n, at)) for n in s.indices), load(kept, (var(lane),)))
            for s in self.kernel.access.stores(tensor, logical, value)
        )
        body = alloc([kept], (For(lane, ForKind.UNROLL, (Store(kept, (var(lane),), made),)),
                              *(For(lane, ForKind.VECTOR, (s,)) for s in moved)))  # fmt: skip
        first = [simplify(substitute(substitute(c, at), {lane: const(0)})) for c in conditions]
        return unrolled([i, j, high], guarded(first, body))

    # --- reductions along the streamed axis to rows

    def _reduction(self, work: Work) -> tuple[Stmt, ...]:
        nest, names = work.nest, self.kernel.names
        monoid = nest.monoid
        assert monoid is not None
        across, rows = self._elements(STREAM), self._elements(ROW)
        element = self._value(work, nest.elements[0], across)
        element, factor = _factor_of_all(element, monoid)
        inside = self._stream_inside(work, across)
        if inside:
            element = select(all_of(inside), element, monoid.identity[0])
        i, j, x = across.loops
        _, half = rows.loops
        near, far = Axis("near", 2), Axis("far", 2)
        at = {x: simplify(var(far) * 4 + var(half) * 2 + var(near)), i: var(rows.loops[0])}
        # two at a time: each step of one waits for the one before
        totals = Buffer(names.fresh("acc"), (2,), monoid.left[0].dtype, Memory.REGISTER)
        other = Buffer(names.fresh("other"), (), totals.dtype, Memory.REGISTER)
        first, place = (const(0),), (var(near),)
        total = load(totals, first)
        add = Store(totals, place, _combined(monoid, load(totals, place), simplify(substitute(element, at))))
        body: list[Stmt] = [*unrolled([near], (Store(totals, place, monoid.identity[0]),)),
                            *unrolled([j, far, near], (add,)),
                            Store(totals, first, _combined(monoid, total, load(totals, (const(1),))))]  # fmt: skip
        for distance in _QUAD:
            body.append(Instruction("shuffle_xor", (Operand(other, ()), Operand(totals, first)), (const(distance),)))
            body.append(Store(totals, first, _combined(monoid, total, load(other, ()))))
        result: Expr = total
        if factor is not None:
            result = op("mul", result, factor)
        if nest.initial:
            result = _combined(monoid, self._value(work, nest.initial[0], rows), result)
        body.append(Store(totals, first, result))
        body.extend(self._results(work, totals, first, rows))
        return unrolled(rows.loops, alloc([totals, other], body))

    def _results(self, work: Work, total: Buffer, index: tuple[Expr, ...], tile: FragmentElements) -> list[Stmt]:
        """What a nest stores of a reduction that a lane has, into registers."""
        nest = work.nest
        monoid = nest.monoid
        assert monoid is not None
        here = [var(a) for a in nest.axes]
        done: dict[Expr, Expr] = {monoid.left[0]: load(total, index)}
        known: dict[Expr, Expr] = {load(nest.accumulated[0], here): replace_nodes(monoid.final[0], done)}
        made: list[Stmt] = []
        for tensor, value in zip(nest.stores, nest.values, strict=True):
            final = self._value(work, replace_nodes(value, known), tile)
            made.append(Store(self.registers[tensor][1], tile.index, final))
        return made

    # --- products

    def _contract(self, work: Work, rows: Iterator[Hold], brought: Iterator[Hold]) -> MatrixContract:
        kind = self._kind(work)
        sides = self._sides(work)
        width, own = (self.block, self.own) if kind == STREAM else (self.columns, self.columns)
        holds = (next(rows) if kind == STREAM else None, next(brought))
        made = self.contract(self._nest(work), sides, (self.rows, width), (self.warp_rows, own), holds)
        if kind == COLUMN and self.split > 1:
            made.warp, made.group = simplify(self.warp // self.split), self.part
        self.kernel.shared.extend(made.base.shared)
        return made

    def _sides(self, work: Work) -> Sides:
        kind = self._kind(work)
        last = next(a for a in work.nest.axes if self.roles.get(a) == kind)
        elements = tuple(inline(e, self.composed) for e in work.nest.elements)
        sides = sides_of(replace(work.nest, elements=elements), last)
        if sides is None:
            raise InternalError(f"'{work.nest.tensor.name}' is no product that {work.leaf.instruction} runs")
        return sides

    def _nest(self, work: Work, block: Expr | None = None) -> GpuNest:
        """A product's nest, at a block of the streamed axis that is not the current one where it is given."""
        kernel = self.kernel
        box, limits = work.box, dict(work.limits)
        if block is not None:
            box = tuple(self._moved(part, block) for part in box)
            limits = {a: self._moved(part, block) for a, part in limits.items()}
        return GpuNest(work.nest, work.leaf, box, limits, kernel.access, kernel.names, kernel.thread)

    def _moved(self, part: Range, block: Expr) -> Range:
        low = simplify(substitute(part.low, {self.loop.axis: block}))
        last = part.extent - int(part.size)
        if low is not part.low and part.extent % int(part.size) == 0:  # no block that is copied begins later
            sum_of = linear(low)
            unit = gcd(last, sum_of.constant, *sum_of.terms.values()) or 1
            begins = Linear({t: n // unit for t, n in sum_of.terms.items()}, sum_of.constant // unit).expr()
            low = simplify(minimum(begins, last // unit) * unit)  # seen to be so many whole packets
        return Range(low, part.size, part.extent)

    def _fixed(self, work: Work) -> dict[Axis, Expr]:
        ranges = self._ranges(work)
        return {a: ranges[a].low for a in self.contracts[work.nest.tensor].sides.others}

    def _products(self, kind: str) -> list[Work]:
        return [w for w in self.loop.works() if w.nest.tensor in self.contracts and self._kind(w) == kind]

    def _slot(self, block: Expr) -> Expr:
        return simplify(block % self.stages) if self.stages > 1 else const(0)

    def _copies(self, block: Expr, works: Sequence[Work]) -> list[Stmt]:
        """Operands along the streamed axis of one block into their rings."""
        made: list[Stmt] = []
        slot = self._slot(block)
        for work in works:
            contract = self.contracts[work.nest.tensor].of_part(self._nest(work, block))
            groups = contract.fill(1, const(0), slot, const(0), self._fixed(work), ())
            made.extend(s for group in groups for s in group)
        return made

    def _rows_copied(self, works: Sequence[Work]) -> list[Stmt]:
        """The rows' operands of products along the streamed axis."""
        here = const(0)
        filled = [self.contracts[w.nest.tensor].fill(0, here, here, here, self._fixed(w), ()) for w in works]
        return [s for groups in filled for group in groups for s in group]

    def _first_operand(self, work: Work) -> list[Stmt]:
        """The rows' operand of a product along the streamed axis, the same for all of it."""
        contract = self.contracts[work.nest.tensor]
        made: list[Stmt] = []
        kept: list[Buffer] = []
        for step in range(contract.step // self.form.depth):
            shape = (self.fragments, self.form.a.elements)
            kept.append(Buffer(self.kernel.names.fresh("rows"), shape, self.form.operand, Memory.REGISTER))
            made.extend(contract.row_fragments(kept[-1], const(0), const(step)))
        self.row_fragments[work.nest.tensor] = kept
        return made

    def _product(self, work: Work) -> tuple[Stmt, ...]:
        nest, names, form = work.nest, self.kernel.names, self.form
        monoid = nest.monoid
        assert monoid is not None
        contract = self.contracts[work.nest.tensor]
        kind = self._kind(work)
        tile = self._elements(kind)
        first = self._value(work, nest.initial[0], tile) if nest.initial else monoid.identity[0]
        depth = contract.step // form.depth // (self.split if kind == COLUMN else 1)
        begin = simplify(contract.group * depth) if kind == COLUMN else const(0)
        body: list[Stmt] = []
        rows: list[tuple[Buffer, tuple[Expr, ...]]]
        if kind == STREAM:
            shape = (self.fragments, self.own // 16, PAIR)
            total = Buffer(names.fresh("acc"), shape, dtypes.float32, Memory.REGISTER)
            own = [total]
            rows = [(b, ()) for b in self.row_fragments[work.nest.tensor]]
        else:
            total = self.registers[nest.stores[0]][1]
            operand = self._streamed_operand(work, contract, body)
            own = [operand]
            rows = [(operand, (const(t),)) for t in range(depth)]
        body.extend(unrolled(tile.loops, (Store(total, tile.index, first),)))
        sets = [
            Buffer(names.fresh("b"), (contract.fragments[1] // 2, 2 * form.b.elements), form.operand, Memory.REGISTER)
            for _ in range(2)
        ]
        slot = self._slot(var(self.loop.axis))
        body.extend(contract.column_fragments(sets[0], slot, begin))
        for step in range(depth):
            if step + 1 < depth:
                body.extend(contract.column_fragments(sets[(step + 1) % 2], slot, simplify(begin + (step + 1))))
            i, j, half = Axis("i", self.fragments), Axis("j", contract.fragments[1] // 2), Axis("half", 2)
            buffer, place = rows[step]
            operands = (
                Operand(total, (var(i), var(j), simplify(var(half) * form.c.elements))),
                Operand(buffer, (var(i), *place, const(0))),
                Operand(sets[step % 2], (var(j), simplify(var(half) * form.b.elements))),
            )
            body.extend(unrolled([i, j, half], (Instruction(form.name, operands),)))
        if kind == STREAM:
            body.extend(unrolled(tile.loops, self._results(work, total, tile.index, tile)))
        return alloc([*own, *sets], body)

    def _streamed_operand(self, work: Work, contract: MatrixContract, body: list[Stmt]) -> Buffer:
        """The rows' operand of a product that sums along the streamed axis, from what lanes keep."""
        tile = self._elements(STREAM)
        value = self._value(work, contract.sides.rows.value, tile)
        inside = self._stream_inside(work, tile)
        if inside:
            value = select(all_of(inside), value, const(0, value.dtype))
        shape = (self.fragments, self.own // 16, PAIR)
        operand = Buffer(self.kernel.names.fresh("a"), shape, self.form.operand, Memory.REGISTER)
        body.extend(unrolled(tile.loops, (Store(operand, tile.index, value),)))
        return operand


def op_of_shift(monoid: Monoid) -> str:
    """How a state follows what its reduction was scaled or moved by."""
    return "mul" if monoid.operator == "add" else "add"


def _one(values: Mapping[Nest, Tensor], nest: Nest) -> tuple[Tensor, ...]:
    return (values[nest],) if nest in values else ()


def as_power_of_two(node: Expr) -> Expr | None:
    """exp(a - b) as the instruction that there is has it, exact enough beside operands of 16 bits; b, which is mostly
    the same for a whole row, is scaled by itself, so that an element takes one multiply-add."""
    if not is_op(node, "exp") or node.dtype is not dtypes.float32:
        return None
    scale = const(_LOG2_E, node.dtype)
    inner = node.args[0]
    if is_op(inner, "sub"):
        return op("exp2", op("sub", op("mul", inner.args[0], scale), op("mul", inner.args[1], scale)))
    return op("exp2", op("mul", inner, scale))


def _of_one_factor(node: Expr) -> Expr | None:
    """exp2(x c d - b) with one number for two: a multiply-add of what products leave."""
    if not is_op(node, "exp2") or node.dtype is not dtypes.float32 or not is_op(node.args[0], "sub"):
        return None
    first, second = node.args[0].args
    scaled = _scaled(first)
    inner = None if scaled is None else _scaled(scaled[0])
    if scaled is None or inner is None:
        return None
    both = const(float(scaled[1].value) * float(inner[1].value), node.dtype)
    return op("exp2", op("sub", op("mul", inner[0], both), second))


def _factor_of_all(element: Expr, monoid: Monoid) -> tuple[Expr, Const | None]:
    """The largest of numbers times the same number is the largest of them times that: rounding keeps the order."""
    scaled = _scaled(element) if monoid.operator in ("max", "min") else None
    return (element, None) if scaled is None else scaled


def _scaled(value: Expr) -> tuple[Expr, Const] | None:
    """A value and the number above 0 that it is multiplied by; None where it is not."""
    if not is_op(value, "mul") or value.dtype is not dtypes.float32:
        return None
    first, second = value.args
    if isinstance(first, Const):
        first, second = second, first
    return (first, second) if isinstance(second, Const) and 0 < second.value < _LARGE else None


def unscaled(value: Expr) -> tuple[Expr, Const] | None:
    """The same, also of one that is -inf where a condition does not hold."""
    if is_op(value, "select") and isinstance(value.args[2], Const) and value.args[2].value == -_INFINITY:
        inner = _scaled(value.args[1])
        return None if inner is None else (select(value.args[0], inner[0], value.args[2]), inner[1])
    return _scaled(value)


def _own(work: Work, axis: Axis) -> Axis:
    """The owner's axis that an axis of a work's nest stands for."""
    return work.along[work.nest.axes.index(axis)] if work.along and axis in work.nest.axes else axis


def _is_even(part: Range) -> bool:
    even = [int(part.size)]
    if int(part.size) < part.extent:
        low = linear(part.low)
        even.extend((part.extent, low.constant, *low.terms.values()))
    return all(n % 2 == 0 for n in even)


def _combined(monoid: Monoid, left: Expr, right: Expr) -> Expr:
    return replace_nodes(monoid.combine[0], {monoid.left[0]: left, monoid.right[0]: right})
