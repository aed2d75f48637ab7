"""What windows that reach over the ends of what they read do to the blocks of a sum: nothing is computed outside, and a
block that is partly outside goes position by position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tilewright.backend.cpu.leaf.busy import LoweredLeaf
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, axes_of, loads, var
from tilewright.lower.placed import Numbers
from tilewright.tile_graph.algebra.nest import moves
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.traffic.touch import inside_share

Starts = Callable[[Axis], Sequence[tuple[int, Numbers]]]
"""Where the blocks of all tiles begin along an axis, those of each size together."""


class WindowEnds:
    """The reads of a leaf's sum under blocks that begin at known places."""

    def __init__(self, form: LoweredLeaf, reduction: Sequence[Axis], starts: Starts) -> None:
        self.form, self.nest, self.reduction, self.starts = form, form.nest, reduction, starts
        self.written = [a for a in self.nest.reduce_axes if a in form.unrolled]

    def share(self, node: Load) -> float:
        """The part of a sum's elements for which a read is made. None is computed that lies outside of what is read;
        a block that is partly outside goes position by position, each with all it reads."""
        share = 1.0
        seen = set()
        for other in loads(*self.nest.elements):
            for index, extent in zip(other.indices, other.source.shape, strict=True):
                if index in seen:
                    continue
                seen.add(index)
                inside = inside_share(index, extent_of(extent))
                if inside == 1.0:
                    continue
                rows = [a for a in self.form.blocked if a in axes_of(index)]
                if self.form.vector in rows:
                    share *= inside if other is node else 1.0  # lanes ask by themselves
                elif rows and not any(self._moves(node, a) for a in rows):
                    share *= self._by_block(index, rows[0], extent_of(extent))
                else:
                    share *= inside
        return share

    def most_share(self) -> float:
        """The same of the read that is made most often."""
        return max((self.share(n) for n in loads(*self.nest.elements)), default=1.0)

    def distinct(self, node: Load) -> float | None:
        """Of the reads of a block that has been written out with parts of the sum, the part at places of its own, where
        copies that check stand apart; None where none does."""
        checked = self._checked(node)
        if checked is not None:
            return self._runs(*checked)
        others = (n for n in loads(*self.nest.elements) if n is not node)
        return 1.0 if any(self._checked(n) for n in others) else None

    def _moves(self, node: Load, axis: Axis) -> bool:
        return any(moves(node, a) for a in (self.form.run if axis in self.form.run else (axis,)))

    def _by_block(self, index: Expr, row: Axis, extent: int) -> float:
        """How often a block reads what does not move along its rows: once where all of them are inside."""
        found = linear(simplify(index))
        step = found.terms.get(var(row), 0)
        others = [(t.axis, c) for t, c in found.terms.items() if isinstance(t, Var) and t.axis is not row]
        places = np.array([found.constant])
        for axis, each in others:
            places = np.add.outer(places, np.arange(extent_of(axis.extent)) * each).ravel()
        innermost = list(self.reduction[-1:]) == [a for a, _ in others][-1:]
        written = all(a in self.form.unrolled for a, _ in others)
        reads, blocks = 0, 0
        for size, starts in self.starts(row):
            at = places[:, None, None] + (starts[:, None] + np.arange(size)) * step
            inside = (at >= 0) & (at < extent)  # of each place of the sum, block and row
            whole = inside.all(axis=2)
            if not innermost and size > 2:
                whole |= inside[:, :, 1:].all(axis=2) | inside[:, :, :-1].all(axis=2)
            # where the sum is written out, rows that are inside in every block need no check, and stay together
            sure = np.logical_and(inside.all(axis=1, keepdims=True), written)
            reads += int(np.where(whole, 1, (inside & ~sure).sum(axis=2) + sure.any(axis=2)).sum())
            blocks += inside.shape[0] * inside.shape[1]
        return reads / max(1, blocks)

    def _checked(self, node: Load) -> tuple[Expr, int, Axis, Axis] | None:
        """An index whose blocks check which of their rows are inside, in copies of one axis of the sum: with its
        extent, the rows and that axis. None where there is none."""
        rows = [a for a in self.form.blocked if a is not self.form.vector]
        for index, extent in zip(node.indices, node.source.shape, strict=True):
            used = axes_of(index)
            row = next((a for a in rows if a in used), None)
            copied = next((a for a in self.written if a in used), None)
            if row is not None and copied is not None and inside_share(index, extent_of(extent)) < 1.0:
                return index, extent_of(extent), row, copied
        return None

    def _runs(self, index: Expr, extent: int, row: Axis, copied: Axis) -> float:
        """Of the reads of blocks with a sum written out, the part at places of its own: copies without a check follow
        each other and share what they read, one that checks stands by itself."""
        found = linear(simplify(index))
        step, each = found.terms.get(var(row), 0), found.terms.get(var(copied), 0)
        counted, whole = 0, 0
        for size, starts in self.starts(row):
            if not len(starts):
                continue
            first, last = int(starts.min()) * step, (int(starts.max()) + size - 1) * step
            alone, shared = 0, set[int]()
            for copy in range(extent_of(copied.extent)):
                at = found.constant + copy * each
                if at + min(first, last) < 0 or at + max(first, last) >= extent:
                    alone += size + len(shared)
                    shared = set()
                else:
                    shared.update(place * step + copy * each for place in range(size))
            counted += (alone + len(shared)) * len(starts)
            whole += size * extent_of(copied.extent) * len(starts)
        return counted / max(1, whole)
