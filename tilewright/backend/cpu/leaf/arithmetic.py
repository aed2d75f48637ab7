"""What a leaf keeps a core busy on candidate tiles: its register tile and the tile's sizes may be arrays.

Blocks are those that the lowering cuts a whole tile into; what tiles at the end of an axis have less is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import gcd

import numpy as np

from tilewright.backend.cpu.leaf.busy import AxisRegisters, Busy, LoweredLeaf, Shape, blocks_of
from tilewright.backend.cpu.leaf.strides import lines_of, squares_along
from tilewright.backend.cpu.leaf.window_ends import WindowEnds
from tilewright.backend.cpu.vector.crowding import crowded_seconds
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Load, Var, axes_of, loads, var
from tilewright.lower.placed import Numbers
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext, stride, walked_on
from tilewright.tile_graph.algebra.cuts import cut
from tilewright.tile_graph.algebra.nest import Nest, period
from tilewright.tile_graph.algebra.propagate import Size, extent_of, whole
from tilewright.tile_graph.algebra.runs import stretch
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.tile_graph.traffic.touch import chosen, inside_share, least, most

Parts = list[tuple[Size, AxisRegisters]]


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """A leaf but for its sizes: what its blocks do, and how an axis is cut into them."""

    form: LoweredLeaf
    target: Target
    around: Mapping[Axis, Sequence[Axis]]  # axes that blocks walk on to, by the one that they begin along
    reduction: Sequence[Axis]  # the axes of a sum, the innermost last
    known: dict[tuple[int, ...], WindowEnds] = field(default_factory=dict)

    @cached_property
    def busy(self) -> Busy:
        return Busy(self.form, self.target)

    def seconds(
        self, register: Mapping[Axis, Size], tile: Mapping[Axis, Size], chains: Size = 1, passes: Size = 1
    ) -> Size:
        """On tiles of these sizes, in blocks of so many elements."""
        form, nest = self.form, self.form.nest
        single: Size = 1.0
        starts: Size = 1.0
        cuts: dict[Axis, Parts] = {}
        walked = {a for axis in form.blocked for a in self.around.get(axis, ())}
        for axis in nest.axes:
            if axis in form.blocked:
                length, times = self._along(axis, tile)
                cuts[axis] = self._parts(axis, length, register[axis])
                single = single * times
                count: Size = 0.0
                for number, _ in cuts[axis]:
                    count = count + number
                is_inner = axis is form.vector or bool(self.around.get(axis))
                starts = starts * (chosen(count > 1, 1.0, 0.0) if is_inner else count)
            elif axis not in walked:
                single = single * (tile[axis] / nest.unswitched.get(axis, 1))
        inner: dict[Axis, Size] = {a: extent_of(a.extent) for a in self.reduction}
        blocks = [(n, block) for n, block in blocks_of(cuts, single) if np.any(n)]
        share = self._at_ends(register, WindowEnds.most_share) if self._is_open else 1.0
        shape = Shape(blocks, inner, share, cache(lambda node: self._distinct(node, register)), starts * single,
                      chains, passes)  # fmt: skip
        return self.busy.cycles(shape) / self.target.fma_clock

    def _along(self, axis: Axis, tile: Mapping[Axis, Size]) -> tuple[Size, Size]:
        """How far blocks along an axis reach on a tile, and how often: they end with a group."""
        group = self._groups.get(axis)
        if group is None:
            return stretch(axis, self.around.get(axis, ()), tile)
        return least(tile[axis], group), most(1, -(-tile[axis] // group))

    @cached_property
    def _groups(self) -> dict[Axis, int]:
        found = {a: period(self.form.nest, a) for a in self.form.blocked}
        return {a: n for a, n in found.items() if n is not None}

    @cached_property
    def _ends(self) -> dict[Axis, tuple[int, ...]]:
        """What axes are cut into where conditions change along them."""
        form, nest = self.form, self.form.nest
        found = {}
        for axis in form.blocked:
            cutting = axis is form.vector or (nest.monoid is None and not nest.unswitched)
            if cutting and axis in nest.axes and not self.around.get(axis) and axis not in self._groups:
                parts = cut(whole(extent_of(axis.extent)), axis, nest, form.lanes)
                if len(parts) > 1:
                    found[axis] = tuple(int(p.size) for p in parts)
        return found

    def _parts(self, axis: Axis, length: Size, block: Size) -> Parts:
        """The blocks of an axis, how many of each: what is left of a map's vectors, or of a sum's where conditions
        change, fills some and a part of one, that of other sums a whole one more."""
        form = self.form
        lanes = form.lanes if axis is form.vector else 1
        found: Parts = []
        ends = self._ends.get(axis, ())
        share = length / extent_of(axis.extent) if ends else 1.0
        for size in ends or (length,):
            rest = size % block
            found.append((share * (size // block), AxisRegisters(block // lanes, lanes)))
            if lanes == 1 or (form.nest.monoid is not None and not ends):
                left = -(-rest // lanes)
                found.append((share * least(left, 1), AxisRegisters(most(left, 1), lanes)))
                continue
            vectors, last = rest // lanes, rest % lanes
            found.append((share * least(vectors, 1), AxisRegisters(most(vectors, 1), lanes)))
            found.append((share * least(last, 1), AxisRegisters(1, most(last, 1))))
        return [(count, part) for count, part in found if np.any(count)]

    def _at_ends(self, register: Mapping[Axis, Size], of: Callable[[WindowEnds], float]) -> Size:
        """Something that depends on where windows reach over the ends of what they read, of every block's rows."""
        rows = [a for a in self.form.blocked if a is not self.form.vector]
        sizes = [register[a] for a in rows]
        if not any(isinstance(n, np.ndarray) for n in sizes):
            return of(self._ends_of(tuple(int(n) for n in sizes)))
        every, which = np.unique(np.stack(np.broadcast_arrays(*sizes)), axis=1, return_inverse=True)
        found = np.array([of(self._ends_of(tuple(column))) for column in every.T.tolist()])
        return found[which.ravel()]

    def _ends_of(self, sizes: tuple[int, ...]) -> WindowEnds:
        """Of blocks with so many rows, all over the axes of the whole."""
        if sizes not in self.known:
            rows = dict(zip((a for a in self.form.blocked if a is not self.form.vector), sizes, strict=True))
            self.known[sizes] = WindowEnds(self.form, self.reduction, lambda axis: _starts(axis, rows[axis]))
        return self.known[sizes]

    @cached_property
    def _is_open(self) -> bool:
        """Whether windows reach over an end."""
        return any(inside_share(i, extent_of(e)) < 1.0 for n in loads(*self.form.nest.elements)
                   for i, e in zip(n.indices, n.source.shape, strict=True))  # fmt: skip

    def _distinct(self, node: Load, register: Mapping[Axis, Size]) -> Size:
        """Of the reads of a block with parts of the sum written out, those at places of their own."""
        form = self.form
        if not form.unrolled:
            return 1.0
        if self._is_open and self._ends_of((1,) * sum(a is not form.vector for a in form.blocked)).distinct(node):
            return self._at_ends(register, lambda ends: ends.distinct(node) or 1.0)
        sizes: dict[Axis, Size] = {a: extent_of(a.extent) for a in form.unrolled}
        for axis in form.blocked:
            sizes[axis] = most(register[axis] // (form.lanes if axis is form.vector else 1), 1)
        share: Size = 1.0
        for index in node.indices:
            terms = linear(simplify(index)).terms
            if not all(isinstance(t, Var) for t in terms):
                return 1.0
            steps = [(abs(by) * (form.lanes if t.axis is form.vector else 1), sizes[t.axis]) for t, by in terms.items()
                     if isinstance(t, Var) and t.axis in sizes]  # fmt: skip
            share = share * _places(sorted(steps, key=lambda pair: pair[0]))
        return share


def _starts(axis: Axis, block: int) -> list[tuple[int, Numbers]]:
    """Where blocks along all of an axis begin, those of each size together."""
    extent = extent_of(axis.extent)
    whole = extent // block * block
    found = [(block, np.arange(0, whole, block))] if whole else []
    return [*found, (extent - whole, np.array([whole]))] if extent > whole else found


def _places(steps: Sequence[tuple[int, Size]]) -> Size:
    """Of the sums of several walks by steps, the shortest first, the part that differ."""
    count: Size = 1
    reach: Size = 1
    every: Size = 1
    unit = max(1, gcd(*(step for step, _ in steps)))
    for step, size in steps:
        more = step // unit * (size - 1)
        count = chosen(step // unit <= reach, least(count + more, reach + more), count * size)
        reach, every = reach + more, every * size
    return count / every


def arithmetic_of(
    nest: Nest, vector: Axis | None, lanes: int, blocked: Sequence[Axis], reduction: Sequence[Axis],
    unrolled: Sequence[Axis], row_lanes: int, around: Mapping[Axis, Sequence[Axis]],
    context: NestContext, transposed: Axis | None = None,
) -> Arithmetic:  # fmt: skip
    """What a leaf takes that is not chosen yet; its constants are packed to be read along the vector."""
    run = next(((*reversed(tuple(axes)), axis) for axis, axes in around.items() if axes and axis in blocked), ())

    def along(node: Load) -> int | None:
        assert vector is not None
        if node.source in nest.accumulated:
            return 1
        if any(i.reads and vector in axes_of(i) for i in node.indices):
            return None
        return stride(node, vector, context)

    def lines(node: Load) -> float:
        if vector is None or node.source in nest.accumulated or context.packable(node.source):
            return 1.0
        offset = context.offset(node.source, node.indices)
        return lines_of(offset, vector, node.source.dtype.bytes, context.target)

    places = [context.offset(t, nest.place) for t in nest.stores]
    stored = [1 if vector is None else p.terms.get(var(vector), 0) for p in places]
    squares = squares_along(nest, vector, blocked, places)
    form = LoweredLeaf(nest, vector, lanes, run, tuple(blocked), frozenset(unrolled), 1, row_lanes, transposed, along,
                       lines, stored, squares,
                       lambda reads: crowded_seconds(nest, reads, context.target, context.offset))  # fmt: skip
    return Arithmetic(form, context.target, around, tuple(reduction))


def leaf_arithmetic(nest: Nest, plan: Leaf, context: NestContext) -> Arithmetic:
    """What a map takes, or a reduction that is no contraction."""
    vector = nest.named(plan.vector) if plan.vector else None
    order = [nest.named(a) for a in plan.order]
    blocked = [a for a in (nest.named(name) for name, _ in plan.register) if a in nest.axes]
    context = replace(context, constants=frozenset(), staged=frozenset())  # nothing is packed for it
    is_plain = nest.monoid is None and not nest.unswitched
    transposed = next((a for a in blocked if a is not vector), None) if is_plain else None
    walks_on = vector is not None and vector in nest.axes and not nest.unswitched and transposed is None
    around = dict(walked_on(nest, vector, None, context)) if walks_on else {}
    options = plan.options(VectorForm)
    unroll, along = [nest.named(a) for a in options.unroll], [a for a in order if a in nest.reduce_axes]
    return arithmetic_of(
        nest, vector, plan.lanes, blocked, along, unroll, options.row_lanes, around, context, transposed
    )
