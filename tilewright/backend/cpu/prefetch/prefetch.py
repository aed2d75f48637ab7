"""Asks early for what a kernel reads: one hint a cache line of the tile's part.

What the first nest reads is needed at once and asked for in front of it. What only later nests read is asked for while
the first one runs, a few lines in each turn of its outer loop: all at once they would take the place of its own reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Expr, minimum, var
from tilewright.ir.forms.loops import PREFETCH, For, ForKind, Instruction, Operand, Stmt
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.access import Access, Place
from tilewright.lower.items import Item, works
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.tile_graph.algebra.propagate import Box, merge, reads_box
from tilewright.tile_graph.algebra.streams import Work


def with_prefetches(
    body: Sequence[Stmt], wanted: Collection[str], items: Sequence[Item], access: Access
) -> tuple[Stmt, ...]:
    """A tile's statements, leaf after leaf, with hints for the parts of the named tensors that it reads."""
    if not wanted:
        return tuple(body)
    run = list(works(items))
    tensors = {t for work in run for t in work.nest.reads() if t.name in wanted}
    parts: dict[Tensor, Box] = {}
    for work in run:
        for tensor, box in reads_box(work.nest, work.box, work.limits, tensors).items():
            parts[tensor] = merge(parts[tensor], box) if tensor in parts else box
    lines = {t: _Lines.of(access.read[t], box, t.dtype.bytes) for t, box in parts.items()}
    first = body[0] if body and all(isinstance(item, Work) for item in items) else None
    if not isinstance(first, For) or first.kind is not ForKind.SERIAL or not isinstance(first.axis.extent, int):
        return (*(s for part in lines.values() for s in part.all()), *body)
    at_once = set(run[0].nest.reads())
    front = [s for t, part in lines.items() if t in at_once for s in part.all()]
    turns = first.axis.extent
    spread = [s for t, part in lines.items() if t not in at_once for s in part.in_turns(first.axis, turns)]
    return (*front, For(first.axis, first.kind, (*spread, *first.body)), *body[1:])


@dataclass(frozen=True)
class _Lines:
    """The cache lines of a box of a tensor."""

    place: Place
    lows: tuple[Expr, ...]
    steps: tuple[int, ...]  # from line to line, by dimension
    counts: tuple[int, ...]
    lasts: tuple[Expr | None, ...]  # the last place, where lines are counted from one that need not begin a line

    @classmethod
    def of(cls, place: Place, box: Box, element_bytes: int) -> _Lines:
        innermost = place.layout.order[-1].axis if box else None
        line = LINE_BYTES // element_bytes
        steps = tuple(line if d == innermost else 1 for d in range(len(box)))
        counts = [-(-int(part.size) // step) for part, step in zip(box, steps, strict=True)]
        lasts: list[Expr | None] = [None] * len(box)
        for d, (part, step) in enumerate(zip(box, steps, strict=True)):
            low = linear(part.low)
            if step > 1 and any(n % step for n in (low.constant, *low.terms.values())):
                counts[d] += 1
                lasts[d] = simplify(minimum(part.low + (int(part.size) - 1), part.extent - 1))
        return cls(place, tuple(part.low for part in box), steps, tuple(counts), tuple(lasts))

    def all(self) -> tuple[Stmt, ...]:
        return self._hints({})

    def in_turns(self, turn: Axis, turns: int) -> tuple[Stmt, ...]:
        """The part of them for one turn of a loop: an even share of the dimension with most lines."""
        if not self.counts:
            return self._hints({})
        widest = max(range(len(self.counts)), key=lambda d: self.counts[d])
        share = -(-self.counts[widest] // turns)
        ask = Axis("ask", share)
        number = simplify(var(turn) * share + (var(ask) if share > 1 else 0))
        if share * turns > self.counts[widest]:
            number = minimum(number, self.counts[widest] - 1)
        hints = self._hints({widest: number})
        return (For(ask, ForKind.SERIAL, hints),) if share > 1 else hints

    def _hints(self, fixed: dict[int, Expr]) -> tuple[Stmt, ...]:
        loops = {d: Axis(f"line{d}", n) for d, n in enumerate(self.counts) if n > 1 and d not in fixed}
        numbers = fixed | {d: var(axis) for d, axis in loops.items()}
        index = tuple(
            _up_to(simplify(low + numbers[d] * step), self.lasts[d]) if d in numbers else low
            for d, (low, step) in enumerate(zip(self.lows, self.steps, strict=True))
        )
        body: tuple[Stmt, ...] = (Instruction(PREFETCH, (Operand(self.place.buffer, self.place.indices(index)),)),)
        for loop in reversed(loops.values()):
            body = (For(loop, ForKind.SERIAL, body),)
        return body


def _up_to(place: Expr, last: Expr | None) -> Expr:
    return place if last is None else simplify(minimum(place, last))
