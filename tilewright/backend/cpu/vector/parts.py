"""What every lowering of a nest on the CPU keeps: the ranges of its axes, its registers, accumulators and stores."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.backend.cpu.maps.lower_transposes import transposed_results, transposed_stores
from tilewright.backend.cpu.maps.rows import run_of_axes
from tilewright.backend.cpu.maps.sharing import shared_stores
from tilewright.backend.cpu.vector.remainders import AxisGroup
from tilewright.ir.analysis.decide import decide
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Monoid
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    is_op,
    load,
    lt,
    replace_nodes,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.loops import Alloc, Buffer, Memory, Stmt, Store
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.access import Access
from tilewright.lower.nesting import trip_count
from tilewright.lower.register_block import BufferNames, RegisterBlock
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of, whole
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm

_QUARTERS = 4


class NestParts:
    """A nest under its plan: the ranges of its axes, and statements that start, update and store its results."""

    def __init__(
        self, nest: Nest, plan: Leaf, box: Box, reduce_box: dict[Axis, Range], access: Access, names: BufferNames,
        step: Axis | None = None,
    ) -> None:  # fmt: skip
        self.nest = nest
        self.plan = plan
        self.options = plan.options(VectorForm)
        self.ranges = dict(zip(nest.axes, box, strict=True))
        self.ranges.update({a: reduce_box.get(a, whole(extent_of(a.extent))) for a in nest.reduce_axes})
        self.access = access
        self.names = names
        self.step = step
        self.alternating = step if plan.alternate else None
        self.backwards: Expr | None = None  # 1 in the blocks in which a sum is walked the other way round, too
        self.works: Expr | None = None  # at which steps there is something to sum up
        if step is not None and plan.idle is not None:
            self.works = lt(0, var(step)) if plan.idle == 0 else lt(var(step), plan.idle)
        self.vector = nest.named(plan.vector) if plan.vector else None
        self.register = {nest.named(a): n for a, n in plan.register}
        order = [nest.named(a) for a in plan.order]
        self.loop_axes = [a for a in order if a in nest.axes]
        self.transposed = _transposed_axis(nest, self.vector, self.register)
        whole_rows = self.transposed is None and self.vector is not None and self.loop_axes[-1:] == [self.vector]
        self.run = run_of_axes(nest, self.loop_axes, self.ranges, access) if whole_rows else ()
        self.panel: dict[Axis, Expr] = {}  # where a whole panel of weights begins
        self.row_block: Expr | None = None  # the number of the block of rows inside this panel
        self.part_of_rows: Axis | None = None  # whose blocks of rows stay near while panels pass
        self.group: AxisGroup | None = None  # that blocks along the vector axis are in
        self.held: dict[Expr, Expr] = {}  # parts of a map that are computed before its inner loops
        self.reduction = [a for a in order if a in nest.reduce_axes]
        self.unrolled_reduction = {nest.named(a) for a in self.options.unroll}
        self.passes: Axis | None = None
        for name, size in self.options.cut:
            axis = nest.named(name)
            extent = extent_of(axis.extent)
            if axis not in reduce_box and size < extent:  # a streamed axis comes in blocks already
                self.passes = Axis("pass", -(-extent // size))
                self.ranges[axis] = Range(simplify(var(self.passes) * size), size, extent)

    def _walk(self, name: str, count: Expr) -> tuple[list[Axis], Expr]:
        """Loops over a sum, and the place in it. In the blocks where a walk turns round, what was read last comes first
        here as well: backwards by quarters, each of them forwards as the hardware's prefetching likes it."""
        steps = static(count)
        if self.backwards is None or steps is None or steps % _QUARTERS or steps < 2 * _QUARTERS:
            loop = Axis(name, trip_count(count))
            return [loop], var(loop)
        quarter, loop = Axis(f"{name}_quarter", _QUARTERS), Axis(name, steps // _QUARTERS)
        place = var(quarter) + self.backwards * (_QUARTERS - 1 - 2 * var(quarter))
        return [quarter, loop], place * (steps // _QUARTERS) + var(loop)

    def results_of(self, monoid: Monoid, sums: Buffer, at: tuple[Expr, ...]) -> dict[Expr, Expr]:
        """What the sums at a place of scratch are the results for."""
        return self._results(monoid, [sums], at)

    def stores_of(self, block: RegisterBlock, results: dict[Expr, Expr]) -> tuple[Stmt, ...]:
        return self._stores(block, results)

    def _stores(self, block: RegisterBlock, results: dict[Expr, Expr], rows: Axis | None = None) -> tuple[Stmt, ...]:
        body: list[Stmt] = []
        unswitched = bool(self.nest.unswitched)
        for tensor, value in zip(self.nest.stores, self.nest.values, strict=True):
            final = self.access.lower(substitute(replace_nodes(value, {**self.held, **results}), block.env))
            logical = tuple(block.env[a] for a in self.nest.axes)
            value = simplify(final)
            body.extend(self.access.stores(tensor, logical, value) if unswitched
                        else self._to_all_places(tensor, logical, value, block))  # fmt: skip
        plain = [s for s in body if isinstance(s, Store)]
        if unswitched:
            return self._written_out(block, plain)
        if rows is not None and len(plain) == len(body):
            return transposed_stores(plain, block, rows, self.plan.lanes, self.names.fresh)
        if self.nest.monoid is not None and len(plain) == len(body):
            return transposed_results(plain, block, self.plan.lanes, self.names.fresh) or block.around(*body)
        return block.around(*body)

    def _to_all_places(
        self, tensor: Tensor, logical: tuple[Expr, ...], value: Expr, block: RegisterBlock
    ) -> tuple[Stmt, ...]:
        """Stores of one element; what goes to several places is computed once, into a register."""
        is_number = tensor.dtype.is_float and tensor.dtype.bytes >= 4
        if len(self.access.write[tensor]) == 1 or isinstance(value, Load) or not is_number:
            return self.access.stores(tensor, logical, value)
        shape = (extent_of(block.lane.extent),) if block.lane is not None else ()
        index = (var(block.lane),) if block.lane is not None else ()
        held = Buffer(self.names.fresh("value"), shape, tensor.dtype, Memory.REGISTER)
        return (Alloc(held, (Store(held, index, value), *self.access.stores(tensor, logical, load(held, index)))),)

    def _written_out(self, block: RegisterBlock, body: Sequence[Store]) -> tuple[Stmt, ...]:
        """Every position of a block of several axes, with what they have in common computed once."""
        stores = list(body)
        for axis in block.unrolled:
            parts = [part for s in stores for part in (*s.indices, s.value)]
            at_place = [iter(decide(parts, axis, place)) for place in range(extent_of(axis.extent))]
            stores = [
                Store(s.buffer, tuple(next(part) for _ in s.indices), next(part)) for s in stores for part in at_place
            ]
        return shared_stores(stores, block.lane, self.names.fresh)

    def _results(self, monoid: Monoid, states: Sequence[Buffer], index: tuple[Expr, ...]) -> dict[Expr, Expr]:
        """What the epilogue reads in place of the accumulated tensors."""
        now: dict[Expr, Expr] = {s: load(b, index) for s, b in zip(monoid.left, states, strict=True)}
        here = [var(a) for a in self.nest.axes]
        return {load(t, here): replace_nodes(f, now) for t, f in zip(self.nest.accumulated, monoid.final, strict=True)}

    def _seed(self, monoid: Monoid) -> tuple[Expr, Expr] | None:
        """sum + x where the epilogue has no other use of the sum, and x: whole numbers may start from it."""
        if monoid.operator != "add" or not monoid.left[0].dtype.is_int or len(self.nest.accumulated) != 1:
            return None
        total = load(self.nest.accumulated[0], [var(a) for a in self.nest.axes])
        users = [n for n in walk(*self.nest.values) if total in n.args]
        if len(users) != 1 or not is_op(users[0], "add") or users[0].args[0] is not total or self.nest.initial:
            return None
        more = users[0].args[1]
        return None if total in walk(more) else (users[0], more)

    def _initial(self, monoid: Monoid, env: dict[Axis, Expr]) -> tuple[Expr, ...]:
        if not self.nest.initial:
            return monoid.identity
        return tuple(simplify(self.access.lower(substitute(v, env))) for v in self.nest.initial)

    def _states(self, monoid: Monoid, shape: tuple[int, ...], stem: str) -> list[Buffer]:
        return [Buffer(self.names.fresh(stem), shape, s.dtype, Memory.REGISTER) for s in monoid.left]

    def _update(
        self, monoid: Monoid, states: Sequence[Buffer], index: tuple[Expr, ...], right: Sequence[Expr]
    ) -> tuple[Stmt, ...]:
        """states[index] = combine(states[index], right), all components at once."""
        now: dict[Expr, Expr] = {s: load(b, index) for s, b in zip(monoid.left, states, strict=True)}
        now.update(dict(zip(monoid.right, right, strict=True)))
        merged = [replace_nodes(c, now) for c in monoid.combine]
        if len(states) == 1:
            return (Store(states[0], index, merged[0]),)
        lane = index[-1:] if states[0].shape and index and not isinstance(index[-1], Const) else ()
        width = states[0].shape[-1:] if lane else ()
        fresh = [Buffer(self.names.fresh("next"), width, s.dtype, Memory.REGISTER) for s in states]
        body: tuple[Stmt, ...] = (
            *(Store(b, lane, m) for b, m in zip(fresh, merged, strict=True)),
            *(Store(s, index, load(b, lane)) for s, b in zip(states, fresh, strict=True)),
        )
        for buffer in fresh:
            body = (Alloc(buffer, body),)
        return body


def _transposed_axis(nest: Nest, vector: Axis | None, register: dict[Axis, int]) -> Axis | None:
    """The axis of a map's blocks that is read along where the vector axis is stored along."""
    others = [a for a in register if a is not vector]
    return others[0] if nest.monoid is None and not nest.unswitched and others else None
