"""Lowers a stream whose products four warps run as one: the tensor cores multiply while threads compute between.

A block of the streamed axis is three things: scores, products with results along the axis; what threads make of them;
and sums along the axis, products of that. Of scores the next block's are multiplied while this block's are summed up,
and threads go on with the next block's as soon as they are there, under the sums. A warp stands still until its own
products are taken up, so that threads work under the products of other groups: of those of a block every second one is
half a turn behind. They meet once a block, the first before its products and the second behind its scores; then what
was copied is there for all, and places are free of which the second group's sums do not read: rings have three places
for several groups, two for one. Rows of a sum's product stay in registers, and are overwritten when the sums before
are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilewright.backend.gpu.matrix.group import GroupContract
from tilewright.backend.gpu.stream.form import COLUMN
from tilewright.backend.gpu.stream.lower import (
    PAIR,
    FragmentElements,
    KernelOfThreads,
    RegisterStream,
    as_power_of_two,
    unscaled,
)
from tilewright.backend.gpu.stream.visible import ROW, STREAM, conditions
from tilewright.backend.gpu.threads.pipeline import commit, sync, wait, where
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Map
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    all_of,
    cast,
    const,
    eq,
    load,
    lt,
    maximum,
    minimum,
    op,
    replace_nodes,
    rewrite,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.loops import Buffer, For, ForKind, Instruction, Memory, Operand, Stmt, Store
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.instruct import WARP
from tilewright.lower.items import Item
from tilewright.lower.nesting import alloc, unrolled
from tilewright.tile_graph.algebra.nest import inline
from tilewright.tile_graph.algebra.propagate import Range, extent_of
from tilewright.tile_graph.algebra.streams import Work
from tilewright.tile_graph.plan.form import Tile


class GroupStream(RegisterStream):
    """A kernel whose warps keep a stream in registers, and multiply in groups of four."""

    contract = GroupContract

    def __init__(self, kernel: KernelOfThreads, warps: Tile, items: Sequence[Item]) -> None:
        super().__init__(kernel, warps, items)
        self.scores, self.sums = self._products(STREAM), self._products(COLUMN)
        products = {w.nest.tensor for w in (*self.scores, *self.sums)}
        self.factors: dict[Tensor, Const] = {}  # that scores are multiplied by where they are read
        self.scores = [self._unscaled(work) for work in self.scores]
        others = [w for w in self.loop.works() if w.nest.tensor not in products]
        self.late = {w.nest.tensor: Map(w.nest.tensor, w.nest.axes, w.nest.values[0])
                     for w in others if self._is_operand(w, others)}  # fmt: skip
        self.others = [w for w in others if w.nest.tensor not in self.late]
        for tensor in self.late:
            self.registers.pop(tensor, None)
        if self.until is not None and not any(
            any(conditions(v, self.roles, self.until)) for w in self.loop.works() for v in w.nest.values
        ):
            raise InternalError(f"kernel '{kernel.plan.name}': its rows see more than {self.until} places behind them")
        self.ends = self._ends()
        self.parity = Buffer(kernel.names.fresh("parity"), (), dtypes.int32, Memory.REGISTER)
        fresh, shape = kernel.names.fresh, (self.fragments, self.block // 16, PAIR)
        self.totals = {w.nest.tensor: Buffer(fresh("scores"), shape, dtypes.float32, Memory.REGISTER)
                       for w in self.scores}  # fmt: skip
        self.operands = {w.nest.tensor: Buffer(fresh("rows"), shape, self.form.operand, Memory.REGISTER)
                         for w in self.sums}  # fmt: skip

    def _unscaled(self, work: Work) -> Work:
        """Scores without the number that they are multiplied by: readers have better places for it."""
        found = unscaled(work.nest.values[0]) if len(work.nest.values) == 1 else None
        if found is None or work.nest.tensor.dtype is not dtypes.float32:
            return work
        self.factors[work.nest.tensor] = found[1]
        return replace(work, nest=replace(work.nest, values=(found[0],)))

    def _read(self, node: Load, tile: FragmentElements) -> Expr | None:
        found = super()._read(node, tile)
        factor = self.factors.get(node.source) if isinstance(node.source, Tensor) else None
        return found if found is None or factor is None else op("mul", found, factor)

    def _is_operand(self, work: Work, others: Sequence[Work]) -> bool:
        """Whether a map is nothing but the rows' operand of sums: it is computed when that may be overwritten."""
        stored = work.nest.stores
        if work.nest.monoid is not None or len(stored) != 1 or self._kind(work) != STREAM:
            return False
        return not any(stored[0] in w.nest.reads() for w in others)

    def _ends(self) -> Expr:
        """Blocks that the last row sees."""
        if self.until is None:
            return const(self.trips)
        seen = (self._first_row() + (self.rows + self.until + self.block - 1)) // self.block
        return simplify(minimum(const(self.trips), seen))

    # --- the whole

    def statements(self) -> tuple[Stmt, ...]:
        place = self.items.index(self.loop)
        first, last = const(0), simplify(self.ends - 1)
        body = [*self._numbered(), *self._rows_copied(self.scores), *self._copies(first, self.scores), commit()]
        body.extend(self._copies(first, self.sums))
        if self.trips > 1:
            body.extend(where(lt(const(0), last), self._copies(const(1), self.scores)))
        body.append(commit())
        body.extend(s for work in self.items[:place] for s in self._work(work))
        body.extend((wait(1), Instruction("async_fence", ()), sync()))
        body.extend((*self._begun(first), *self._waited(0), *self._between(first), *self._of_odd(self._met(first))))
        body.extend(self._turns(last) if self.trips > 1 else ())
        body.extend((*self._ready(last), *self._of_even(_meeting()), *self._summed(last), *self._done()))
        body.extend(s for work in self.items[place + 1 :] for s in self._work(work))
        kept = [b for _, b in self.registers.values()]
        return alloc([self.parity, *kept, *self.totals.values(), *self.operands.values()], body)

    def _turns(self, last: Expr) -> list[Stmt]:
        """All blocks but the last: first those behind which comes one that is seen whole, without conditions."""
        whole = simplify(minimum(last, self._seen_whole() - 1))
        if self.until is not None:
            whole = simplify(maximum(whole, const(0)))
        body: list[Stmt] = []
        for first, count, is_whole in ((const(0), whole, True), (whole, simplify(last - whole), False)):
            known = static(count)
            if known == 1:
                body.extend(self._turn(first, is_whole))
            elif known != 0:
                axis = Axis(self.loop.axis.name, count if known is None else known)
                body.append(For(axis, ForKind.SERIAL, tuple(self._turn(simplify(first + var(axis)), is_whole))))
        return body

    def _seen_whole(self) -> Expr:
        """Blocks from the first on that end inside the axis, before the place that the first row sees last."""
        cut = any(part.extent % int(part.size) for work in self.scores for part in work.box)
        inside = const(self.trips - 1 if cut else self.trips)
        if self.until is None:
            return inside
        return simplify(minimum(inside, (self._first_row() + (self.until + 1)) // self.block))

    def _first_row(self) -> Expr:
        """Of all that the block has."""
        ranges = self._ranges(self.scores[0])
        return next(part.low for axis, part in ranges.items() if self.roles.get(axis) == ROW)

    def _turn(self, block: Expr, is_whole: bool) -> list[Stmt]:
        """The sums of a block under the scores of the next, which may be seen whole, and what threads make of them."""
        following = simplify(block + 1)
        return [
            *self._ready(block),
            *self._of_even(self._met(block)),
            *self._begun(following),
            *self._summed(block),
            *self._waited(1),
            *self._of_odd(self._met(following)),
            *self._between(following, is_whole),
        ]

    def _ready(self, block: Expr) -> list[Stmt]:
        """Operands of a block's sums are where they are read from, and what was summed up has followed what threads
        found. The wait for the sums before stands first in a turn and not last in the one before: an assembler moves it
        up as far as it can, to before what should run meanwhile, but into no other turn. And it lets products wait for
        each other if sums of any of them are touched while some are under way."""
        return [*self._done(), *self._rows(block), *self._followed(block)]

    def _met(self, block: Expr) -> list[Stmt]:
        """All groups have what they multiply next, and what is multiplied after that is on its way."""
        following, later = simplify(block + 1), simplify(block + 2)
        copies = [*where(lt(later, self.ends), self._copies(later, self.scores)),
                  *where(lt(following, self.ends), self._copies(following, self.sums))]  # fmt: skip
        return [*_meeting(), *(copies if self.trips > 1 else ()), commit()]

    def _of_even(self, body: Sequence[Stmt]) -> list[Stmt]:
        return self._of_some(body, 0)

    def _of_odd(self, body: Sequence[Stmt]) -> list[Stmt]:
        return self._of_some(body, 1)

    def _of_some(self, body: Sequence[Stmt], remainder: int) -> list[Stmt]:
        """What every second group of warps does, from the first or the second on."""
        if self.rows == self.form.c.rows * self.form.warps:
            return list(body) if remainder == 0 else []
        return where(eq(load(self.parity, ()), remainder), body)

    def _numbered(self) -> list[Stmt]:
        """Whether a warp is of an odd group: read from its first lane, so that compilers know that warps agree."""
        if self.rows == self.form.c.rows * self.form.warps:
            return []
        own = Buffer(self.kernel.names.fresh("own"), (), dtypes.int32, Memory.REGISTER)
        parity = simplify(var(self.kernel.thread) // (WARP * self.form.warps) % 2)
        body = (Store(own, (), cast(parity, dtypes.int32)),
                Instruction("shuffle", (Operand(self.parity, ()), Operand(own, ())), (const(0),)))  # fmt: skip
        return list(alloc([own], body))

    def _at(self, work: Work, block: Expr, is_whole: bool = False) -> Work:
        """A work of the loop at one of its parts; conditions that always hold where it is seen whole are left out."""

        def moved(part: Range) -> Range:
            return Range(simplify(substitute(part.low, {self.loop.axis: block})), part.size, part.extent)

        if is_whole and self.until is not None:
            work = replace(work, nest=replace(work.nest, values=tuple(self._opened(v) for v in work.nest.values)))
        limits = {a: moved(part) for a, part in work.limits.items()}
        return replace(work, box=tuple(moved(part) for part in work.box), limits=limits)

    def _opened(self, value: Expr) -> Expr:
        assert self.until is not None
        known: dict[Expr, Expr] = dict.fromkeys(conditions(value, self.roles, self.until), const(True, dtypes.bool_))
        return simplify(replace_nodes(value, known))

    # --- products

    def _begun(self, block: Expr) -> list[Stmt]:
        """Scores of a block are under way."""
        made: list[Stmt] = [Instruction("wgmma_fence", ())]
        for work in self.scores:
            contract, total = self._group(work), self.totals[work.nest.tensor]
            steps = range(contract.step // self.form.depth)
            made.extend(contract.product(total, self._slot(block), step, goes_on=step > 0) for step in steps)
        return [*made, _committed(self.totals[self.scores[0].nest.tensor])]

    def _waited(self, pending: int) -> list[Stmt]:
        """Scores are there, while so many groups of products that were committed later may go on."""
        return [_finished(self.totals[work.nest.tensor], pending) for work in self.scores]

    def _between(self, block: Expr, is_whole: bool = False) -> list[Stmt]:
        """What threads make of scores that are there."""
        made: list[Stmt] = []
        for work in self.scores:
            total, tile = self.totals[work.nest.tensor], self._elements(STREAM)
            made.extend(unrolled(tile.loops, self._results(self._at(work, block, is_whole), total, tile.index, tile)))
        return [*made, *(s for work in self.others for s in self._work(self._at(work, block, is_whole)))]

    def _followed(self, block: Expr) -> list[Stmt]:
        """What was summed up before a block follows what threads found in it."""
        made: list[Stmt] = []
        for work in self.sums:
            tile = self._elements(COLUMN)
            first = self._value(self._at(work, block), work.nest.initial[0], tile)
            made.extend(unrolled(tile.loops, (Store(self._state(work), tile.index, first),)))
        return made

    def _summed(self, block: Expr) -> list[Stmt]:
        """Sums with a block are under way."""
        made: list[Stmt] = [Instruction("wgmma_fence", ())]
        for work in self.sums:
            contract, operand = self._group(work), self.operands[work.nest.tensor]
            for step in range(contract.step // self.form.depth):
                rows = Operand(operand, (const(0), const(step), const(0)))
                made.append(contract.product_of_kept(self._state(work), rows, self._slot(block), step))
        return [*made, _committed(self._state(self.sums[0]))]

    def _done(self) -> list[Stmt]:
        return [_finished(self._state(work), 0) for work in self.sums]

    def _rows(self, block: Expr) -> list[Stmt]:
        """The rows' operands of sums with a block."""
        tile = self._elements(STREAM)
        made: list[Stmt] = []
        for given in self.sums:
            work, operand = self._at(given, block), self.operands[given.nest.tensor]
            body: list[Stmt] = []
            own: list[Buffer] = []
            value = rewrite(inline(self._group(given).sides.rows.value, self.late), as_power_of_two)
            value = self._value(work, self._rows_first(work, value, tile, body, own), tile)
            inside = self._stream_inside(work, tile)
            if inside:
                value = select(all_of(inside), value, const(0, value.dtype))
            made.extend(alloc(own, (*body, *unrolled(tile.loops, (Store(operand, tile.index, value),)))))
        return made

    def _state(self, work: Work) -> Buffer:
        return self.registers[work.nest.stores[0]][1]

    def _group(self, work: Work) -> GroupContract:
        found = self.contracts[work.nest.tensor]
        assert isinstance(found, GroupContract)
        return found


def _meeting() -> list[Stmt]:
    """Copies that were issued have landed for all groups, each of which comes from a place of its own."""
    return [wait(0), Instruction("async_fence", ()), Instruction("meet", ())]


def _first(total: Buffer) -> Operand:
    return Operand(total, (const(0), const(0), const(0)))


def _committed(total: Buffer) -> Stmt:
    return Instruction("wgmma_commit", (_first(total),))


def _finished(total: Buffer, pending: int) -> Stmt:
    """A wait for these sums, while so many groups that were committed later may go on."""
    return Instruction("wgmma_wait", (_first(total),), (const(pending), const(_count(total))))


def _count(buffer: Buffer) -> int:
    return prod(extent_of(e) for e in buffer.shape)


def stream_form(warps: Tile) -> type[RegisterStream]:
    """How a Tile over warps with a stream inside is lowered: each warp by itself, or four as one."""
    forms = [FORMS[leaf.instruction or ""] for leaf in warps.leaves if leaf.instruction in FORMS]
    return GroupStream if forms[0].warps > 1 else RegisterStream
