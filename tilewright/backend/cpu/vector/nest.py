"""Lowers one nest to CPU loops: blocks of a register tile, reduction loops around it, vector lanes inside.

A block keeps its accumulators in registers from the first element to the epilogue. Conditions that only say
"outside the padding" become branches around whole blocks instead of selects in the innermost loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.backend.cpu.maps.guards import is_covered, strip, worst
from tilewright.backend.cpu.maps.rows import places, range_of, run_of_blocks
from tilewright.backend.cpu.vector.lanes import LaneSums
from tilewright.backend.cpu.vector.lower_ahead import hints
from tilewright.backend.cpu.vector.lower_in_turn import in_turn
from tilewright.backend.cpu.vector.lower_near_rows import blocks_of_part, part_loop, with_last
from tilewright.backend.cpu.vector.remainders import (
    AxisGroup,
    are_whole_groups,
    is_everywhere,
    kept_parts,
    reads_own_result,
    remainder_form,
    whole_lanes,
)
from tilewright.backend.cpu.vector.rows_ahead import with_rows_ahead
from tilewright.backend.cpu.vector.window_rows import rows_asked
from tilewright.ir.analysis.simplify import join_divisions, linear, simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Monoid
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    all_of,
    axes_of,
    const,
    eq,
    is_op,
    load,
    loads,
    replace_nodes,
    select,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.loops import PREFETCH, PREFETCH_TILE, Buffer, For, ForKind, If, Memory, Stmt, Store
from tilewright.lower.blocks import BlockRun, Remainder, overlapping, pieces
from tilewright.lower.nesting import alloc, serial, trip_count, unrolled
from tilewright.lower.register_block import RegisterBlock
from tilewright.tile_graph.algebra.cuts import cut
from tilewright.tile_graph.algebra.nest import heavy, is_window, period, shares_a_read
from tilewright.tile_graph.algebra.propagate import Range, extent_of


class CpuNest(LaneSums):
    """The lowering of one nest under one plan."""

    def statements(self) -> tuple[Stmt, ...]:
        if self.nest.monoid is not None and self.vector is not None and self.vector in self.nest.axes:
            self.run = run_of_blocks(self.nest, self.vector, self.register, self.ranges, self.access)
            self.loop_axes = [a for a in self.loop_axes if a not in self.run[:-1]]
        loops = self._output_loops(0, {}, [])
        if not self.options.ahead or (len(self.plan.register) == 2 and self.nest.monoid is not None):
            return loops  # of a sum in panels each step asks for weights
        return with_rows_ahead(loops, self.options.ahead, own=self.nest.monoid is not None)

    def _passes_start(self, depth: int) -> bool:
        """Passes go around the loops over register tiles, inside those over single positions."""
        first = next((i for i, a in enumerate(self.loop_axes) if a in self.register), len(self.loop_axes))
        return self.passes is not None and depth == first

    def _output_loops(
        self, depth: int, env: dict[Axis, Expr], blocked: list[tuple[Axis, BlockRun, Expr]]
    ) -> tuple[Stmt, ...]:
        if self.passes is not None and self._passes_start(depth):
            return (For(self.passes, ForKind.SERIAL, self._axis_loops(depth, env, blocked)),)
        return self._axis_loops(depth, env, blocked)

    def _axis_loops(
        self, depth: int, env: dict[Axis, Expr], blocked: list[tuple[Axis, BlockRun, Expr]]
    ) -> tuple[Stmt, ...]:
        if depth == len(self.loop_axes):
            return self._block(env, blocked)
        if self.options.near_rows and self.part_of_rows is None and self.loop_axes[depth:-1] == [self.vector]:
            return self._parts_of_rows(depth, env, blocked)
        fresh = self._invariant(env) if self.nest.monoid is None else []
        if fresh:
            return self._held_before(fresh, env, lambda: self._axis_loops(depth, env, blocked))
        axis = self.loop_axes[depth]
        extent = range_of(self.run, self.ranges) if axis in self.run[-1:] else self.ranges[axis]
        if self.run and axis is self.run[0]:
            return self._blocks(self.run[-1], range_of(self.run, self.ranges), len(self.loop_axes) - 1, env, blocked)
        if axis in self.nest.unswitched and axis not in self.register and static(extent.count) == axis.extent:
            steps = [{**env, axis: const(place)} for place in range(extent_of(axis.extent))]
            return tuple(s for step in steps for s in self._output_loops(depth + 1, step, blocked))
        if axis not in self.register:
            count = extent.count
            if static(count) == 1:
                return self._output_loops(depth + 1, {**env, axis: extent.low}, blocked)
            loop = Axis(axis.name, trip_count(count))
            inner = self._output_loops(depth + 1, {**env, axis: simplify(extent.low + var(loop))}, blocked)
            return (For(loop, ForKind.SERIAL, inner),)
        group = period(self.nest, axis)
        if group is not None and are_whole_groups(extent, group):
            # blocks never reach over the end of a group: all that a block reads of axis // group is one element
            loop = Axis(f"{axis.name}_group", trip_count(simplify(extent.count // group)))
            part = Range(simplify(extent.low + var(loop) * group), group, group)
            self.group = AxisGroup.of(axis, group, part.low) if axis is self.vector else self.group
            inner = self._blocks(axis, part, depth, env, blocked)
            self.group = None if axis is self.vector else self.group
            return (For(loop, ForKind.SERIAL, inner),)
        if axis is self.vector or self.nest.monoid is None:
            whole = axis is not self.vector and bool(self.nest.unswitched)
            parts = [extent] if whole else cut(extent, axis, self.nest, self.plan.lanes)
            return tuple(s for part in parts for s in self._blocks(axis, part, depth, env, blocked))
        return self._blocks(axis, extent, depth, env, blocked)

    def _invariant(self, env: dict[Axis, Expr]) -> list[Expr]:
        """Costly parts of a map's values that the loops still to come do not change, the largest of them."""
        known = [n for n in heavy(*self.nest.values) if n not in self.held and all(a in env for a in axes_of(n))]
        return [n for n in known if not any(n is not o and n in walk(o) for o in known)]

    def _held_before(
        self, parts: Sequence[Expr], env: dict[Axis, Expr], inner: Callable[[], tuple[Stmt, ...]]
    ) -> tuple[Stmt, ...]:
        """Computed once, before the loops inside."""
        buffers = [Buffer(self.names.fresh("held"), (), n.dtype, Memory.REGISTER) for n in parts]
        values = [simplify(self.access.lower(substitute(replace_nodes(n, self.held), env))) for n in parts]
        before, self.held = self.held, {**self.held, **{n: load(b, ()) for n, b in zip(parts, buffers, strict=True)}}
        body = inner()
        self.held = before
        return alloc(buffers, [*(Store(b, (), v) for b, v in zip(buffers, values, strict=True)), *body])

    def _blocks(
        self, axis: Axis, extent: Range, depth: int, env: dict[Axis, Expr], blocked: list[tuple[Axis, BlockRun, Expr]]
    ) -> tuple[Stmt, ...]:
        lanes = self.plan.lanes if axis is self.vector else 1
        cuts = self._pieces(axis, extent, lanes)
        if axis is self.transposed:
            cuts = [replace(piece, lanes=1) for piece in pieces(extent, self.register[axis], self.plan.lanes)]
        if self.part_of_rows is not None and self.part_of_rows.extent != 1 and axis is self.loop_axes[-1]:
            return self._near_blocks(self.part_of_rows, cuts, extent, depth, env, blocked)
        return tuple(s for piece in cuts for s in self._piece(axis, piece, extent, depth, env, blocked))

    def _piece(
        self, axis: Axis, piece: BlockRun, extent: Range, depth: int, env: dict[Axis, Expr],
        blocked: list[tuple[Axis, BlockRun, Expr]],
    ) -> tuple[Stmt, ...]:  # fmt: skip
        """All blocks of one size."""
        trips = static(piece.trips)
        if trips == 0:
            return ()
        if trips == 1:
            start = simplify(extent.low + piece.base)
            return self._output_loops(depth + 1, env, [*blocked, (axis, piece, start)])
        loop = Axis(f"{axis.name}_block", trip_count(piece.trips))
        walked: Expr = var(loop)
        backwards: Expr | None = None
        # the outermost loop over blocks goes the other way round in odd steps
        if self.alternating is not None and trips is not None and all(static(p.trips) == 1 for _, p, _ in blocked):
            odd = var(self.alternating) % 2
            walked = walked + odd * (trips - 1 - 2 * var(loop))
            backwards = odd * select(eq(var(loop) % (trips - 1), 0), 1, 0)
        start = simplify(extent.low + piece.base + walked * piece.size)
        before = self.backwards
        self.backwards = backwards or before
        asks = self.options.ahead and axis is self.loop_axes[-1] and backwards is None
        is_shared = asks and shares_a_read(self.nest, axis) and not is_window(self.nest, self.vector)
        self.row_block = var(loop) if is_shared else None
        inner = self._output_loops(depth + 1, env, [*blocked, (axis, piece, start)])
        self.backwards, self.row_block = before, None
        return (For(loop, ForKind.SERIAL, inner),)

    def _parts_of_rows(
        self, depth: int, env: dict[Axis, Expr], blocked: list[tuple[Axis, BlockRun, Expr]]
    ) -> tuple[Stmt, ...]:
        row = self.loop_axes[-1]
        extent = range_of(self.run, self.ranges) if row in self.run else self.ranges[row]
        blocks = self.options.near_rows // self.register[row]
        self.part_of_rows = part_loop(row, self._pieces(row, extent, 1)[0], blocks)
        inner = self._axis_loops(depth, env, blocked)
        part, self.part_of_rows = self.part_of_rows, None
        return inner if part.extent == 1 else (For(part, ForKind.SERIAL, inner),)

    def _near_blocks(
        self, part: Axis, cuts: Sequence[BlockRun], extent: Range, depth: int, env: dict[Axis, Expr],
        blocked: list[tuple[Axis, BlockRun, Expr]],
    ) -> tuple[Stmt, ...]:  # fmt: skip
        """The blocks of one part of the rows; those that are not full come with the last."""
        row = self.loop_axes[-1]
        loop, start = blocks_of_part(part, row, cuts[0], self.options.near_rows // self.register[row], extent)
        blocks = self._output_loops(depth + 1, env, [*blocked, (row, cuts[0], start)])
        rest = [s for piece in cuts[1:] for s in self._piece(row, piece, extent, depth, env, blocked)]
        return (For(loop, ForKind.SERIAL, blocks), *with_last(part, rest))

    def _pieces(self, axis: Axis, extent: Range, lanes: int) -> list[BlockRun]:
        """Blocks along an axis; what is left over of a sum's vector axis is taken in whole vectors where it can be."""
        plain = pieces(extent, self.register[axis], lanes)
        is_map = self.nest.monoid is None and self.transposed is None and self.group is None and self.step is None
        if is_map and not reads_own_result(self.nest, self.access):
            # elements alone would be a copy of the text for the few of them, and as slow as whole vectors
            uneven = plain[-1:] and static(plain[-1].trips) is None and plain[-1].lanes == 1
            return (uneven and overlapping(extent, self.register[axis], lanes)) or plain
        is_sum = self.nest.monoid is not None and not self.nest.initial and not self.nest.unswitched
        if lanes == 1 or axis not in self.nest.axes or not is_sum:
            return plain
        whole = pieces(extent, self.register[axis], lanes, Remainder.PADDED)
        if whole[-1:] == plain[-1:]:
            return plain
        inside = Axis("inside", whole[-1].size)
        at = {axis: simplify(extent.low + whole[-1].base + var(inside))}
        elements: Sequence[Expr] = self.nest.elements
        if self.group is not None:
            elements, at = self.group.elements(elements), self.group.places(at)
        # what moves along several axes walked as one lies side by side, or they would not be
        way = remainder_form(elements, at, inside, self.access) if not self.run else Remainder.EARLIER
        # what waits in the result's place between passes, or is carried from step to step, is added to once
        if way is Remainder.EARLIER and (self.passes is not None or self.step is not None):
            return plain
        if way is Remainder.EARLIER and not self.run and is_everywhere(self.nest, self.access):
            way = Remainder.BEFORE
        return pieces(extent, self.register[axis], lanes, way)

    def _block(self, env: dict[Axis, Expr], blocked: Sequence[tuple[Axis, BlockRun, Expr]]) -> tuple[Stmt, ...]:
        values = dict(env)
        unrolled: list[Axis] = []
        sources: dict[Axis, Axis] = {}
        lane: Axis | None = None
        for axis, piece, start in blocked:
            offset: Expr = const(0)
            steps = piece.size // piece.lanes
            if steps > 1:
                unrolled.append(Axis(f"{axis.name}_u", steps))
                sources[unrolled[-1]] = axis
                offset = var(unrolled[-1]) * piece.lanes
            if piece.lanes > 1:
                lane = Axis(f"{axis.name}_lane", piece.lanes)
                offset = offset + var(lane)
            values[axis] = simplify(start + offset)
        if self.run:
            values.update(places(self.run, values[self.run[-1]]))
        if self.group is not None:
            values = self.group.places(values)
        block = RegisterBlock(values, tuple(unrolled), lane)
        if self.nest.monoid is None:
            rows = next((u for u, a in sources.items() if a is self.transposed), None)
            return self._stores(block, {}, rows)
        if self.vector in self.nest.reduce_axes:
            return self._reduce_lanes(block, self.nest.monoid)
        across = next((u for u, a in sources.items() if a is self.vector), None)
        self.panel = {axis: start for axis, piece, start in blocked
                      if axis is self.vector and piece.size == self.register[axis]}  # fmt: skip
        kept = next((piece.kept for axis, piece, _ in blocked if axis is self.vector), None)
        return self._reduce(block, self.nest.monoid, across, kept)

    # --- reduction with the vector along an output axis

    def _reduce(self, block: RegisterBlock, monoid: Monoid, across: Axis | None, kept: int | None) -> tuple[Stmt, ...]:
        states = self._states(monoid, block.shape, "acc")
        conditions, elements = self._guards(monoid, block)
        starts = self._initial(monoid, block.env)
        begin = block.around(*(Store(s, block.index, v) for s, v in zip(states, starts, strict=True)))
        stored = [block] if kept is None else kept_parts(block, across, kept)
        end = tuple(s for part in stored for s in self._ended(part, monoid, states))
        if self.passes is not None:
            begin, end = self._in_passes(self.passes, stored, states[0], monoid.identity[0], begin, end)
        ordered = block if across is None else self._register_order(block, across)
        loops = self._reduce_loops(0, ordered, states, monoid, elements, conditions)
        if self.works is not None:
            loops = (If(self.works, loops),)
        return alloc(states, [*rows_asked(self, block, across), *begin, *loops, *end])

    def _ended(self, block: RegisterBlock, monoid: Monoid, states: Sequence[Buffer]) -> tuple[Stmt, ...]:
        stores = self._stores(block, self._results(monoid, states, block.index))
        if not self.options.in_turn or block.cut_lane:
            return stores
        return in_turn(block, stores, states, self.options.in_turn, self.names.fresh)

    def _register_order(self, block: RegisterBlock, across: Axis) -> RegisterBlock:
        """Multiply-adds row after row: one broadcast at a time waits in a register, and accumulators find room.

        Where rows are read as vectors these wait anyway, and it goes vector after vector. Long epilogues lose some
        percent by another order than that of their stores."""
        rows = tuple(a for a in block.unrolled if a is not across)
        by_lane = self.options.row_lanes > 1
        if not rows or self.unrolled_reduction or len(loads(*self.nest.elements)) < 2:
            return block
        if by_lane and heavy(*self.nest.values):
            return block
        return replace(block, walk=(across, *rows) if by_lane else (*rows, across))

    def _in_passes(
        self, passes: Axis, stored: Sequence[RegisterBlock], state: Buffer, identity: Expr, begin: tuple[Stmt, ...],
        end: tuple[Stmt, ...],
    ) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:  # fmt: skip
        """Between passes the partial sum waits where the result will be."""
        tensor = self.nest.stores[0]
        resume: list[Stmt] = []
        leave: list[Stmt] = []
        for block in stored:
            place = tuple(block.env[a] for a in self.nest.axes)
            leave.extend(block.around(*self.access.stores(tensor, place, load(state, block.index))))
            # lanes that are not stored start afresh, in one store with the others: registers are stored whole
            whole, inside = whole_lanes(block, extent_of(state.shape[-1]) if state.shape else 1)
            waiting = self.access.lower(load(tensor, tuple(whole.env[a] for a in self.nest.axes)))
            value = waiting if inside is None else select(inside, waiting, identity)
            resume.extend(whole.around(Store(state, whole.index, value)))
        last = extent_of(passes.extent) - 1
        return (If(eq(var(passes), 0), begin, tuple(resume)),), (If(eq(var(passes), last), end, tuple(leave)),)

    def _guards(self, monoid: Monoid, block: RegisterBlock) -> tuple[list[Expr], list[Expr]]:
        """Conditions under which an element counts, taken out of the element where skipping it changes nothing."""
        elements = self.nest.elements if self.group is None else self.group.elements(self.nest.elements)
        if monoid.operator is None:
            return [], list(elements)
        conditions, element = strip(elements[0], monoid.identity[0], monoid.operator == "add")
        kept: list[Expr] = []
        lane_axis = self.vector if block.lane is not None else None
        inside: list[Expr] = []
        for condition in conditions:
            # a condition read from memory is checked once, before the reduction; one that changes inside stays there
            moving = bool(loads(condition)) and any(a in self.nest.reduce_axes for a in axes_of(condition))
            (inside if lane_axis in axes_of(condition) or moving else kept).append(condition)
        if inside:
            element = select(all_of(inside), element, monoid.identity[0])
        return kept, [element]

    def _reduce_loops(
        self,
        depth: int,
        block: RegisterBlock,
        states: Sequence[Buffer],
        monoid: Monoid,
        elements: Sequence[Expr],
        conditions: Sequence[Expr],
    ) -> tuple[Stmt, ...]:
        """Loops from `depth` inwards. `conditions` are those not yet checked."""
        bound = set(block.env)
        ready = [c for c in conditions if all(a in bound for a in axes_of(c) if a in self.ranges)]
        rest = [c for c in conditions if c not in ready]
        plain = [c for c in ready if not self._varies(c, block)]
        varied = [c for c in ready if self._varies(c, block)]
        if varied and not rest:
            return self._two_ways(depth, block, states, monoid, elements, plain, varied)
        later = [*rest, *varied]
        if depth == len(self.reduction):
            right = [self.access.lower(substitute(e, block.env)) for e in elements]
            inner = block.around(*self._update(monoid, states, block.index, right))
        else:
            axis = self.reduction[depth]
            inner = self._loop(axis, depth, block, states, monoid, elements, later, axis in self.unrolled_reduction)
        return self._guarded(plain, block.env, inner)

    def _loop(
        self, axis: Axis, depth: int, block: RegisterBlock, states: Sequence[Buffer], monoid: Monoid,
        elements: Sequence[Expr], conditions: Sequence[Expr], unroll: bool,
    ) -> tuple[Stmt, ...]:  # fmt: skip
        extent = self.ranges[axis]
        if self.options.row_lanes > 1 and depth == len(self.reduction) - 1 and not conditions:
            by_lanes = self._lane_loop(axis, block, states, monoid, elements)
            if by_lanes is not None:
                return by_lanes
        if static(extent.count) == 1:
            here = replace(block, env={**block.env, axis: extent.low})
            return self._reduce_loops(depth + 1, here, states, monoid, elements, conditions)
        is_innermost = depth == len(self.reduction) - 1 and not unroll
        together = self._together(extent) if is_innermost else 1
        count = simplify(extent.count // together)
        if depth == 0 and not unroll:
            loops, place = self._walk(axis.name, count)
        else:
            loops = [Axis(axis.name, trip_count(count))]
            place = var(loops[0])
        first = simplify(extent.low + place * together)
        turn = Axis(f"{axis.name}_u", together)
        here = replace(block, env={**block.env, axis: simplify(first + var(turn)) if together > 1 else first})
        inner = self._reduce_loops(depth + 1, here, states, monoid, elements, conditions)
        if is_innermost:
            asked = self._asked({**block.env, axis: first}, together)
            inner = (*asked, *(unrolled([turn], inner) if together > 1 else inner))
        # the last block of a streamed axis is shorter: a loop then
        is_short = unroll and static(extent.count) is not None
        return unrolled(loops, inner) if is_short else serial(loops, inner)

    def _lane_loop(
        self, axis: Axis, block: RegisterBlock, states: Sequence[Buffer], monoid: Monoid, elements: Sequence[Expr]
    ) -> tuple[Stmt, ...] | None:
        """The innermost reduction in steps of a vector: what is broadcast over lanes is read once for several steps."""
        width = self.options.row_lanes
        extent = self.ranges[axis]
        full = simplify(extent.count // width)
        loops, place = self._walk(axis.name, full)
        inner = Axis(f"{axis.name}_k", width)
        env = {**block.env, axis: simplify(extent.low + place * width + var(inner))}
        right = [self.access.lower(substitute(e, env)) for e in elements]
        # a read that a select guards must stay behind its condition
        guarded = {n for s in walk(*right) if is_op(s, "select") for n in loads(*s.args[1:])}
        rows = [n for n in loads(*right) if n not in guarded and self._is_row(n, inner, block)]
        if not rows or static(full) == 0:
            return None
        body: list[Stmt] = list(self._asked({**block.env, axis: simplify(extent.low + place * width)}, width))
        held: dict[Expr, Expr] = {}
        buffers: list[Buffer] = []
        widened = {n.args[0]: n for n in walk(*right) if is_op(n, "cast") and n.args[0] in rows}
        for node in (widened.get(n, n) for n in rows):  # kept in the type it is multiplied in
            moving = [a for a in block.unrolled if a in axes_of(node)]
            lane = Axis(f"{axis.name}_lane", width)
            shape = (*(extent_of(a.extent) for a in moving), width)
            buffer = Buffer(self.names.fresh("row"), shape, node.dtype, Memory.REGISTER)
            position = tuple(var(a) for a in moving)
            value = substitute(node, {inner: var(lane)})
            filled: tuple[Stmt, ...] = (For(lane, ForKind.VECTOR, (Store(buffer, (*position, var(lane)), value),)),)
            body.extend(unrolled(moving, filled))
            buffers.append(buffer)
            held[node] = load(buffer, (*position, var(inner)))
        update = self._update(monoid, states, block.index, [replace_nodes(e, held) for e in right])
        body.append(For(inner, ForKind.UNROLL, block.around(*update)))
        # a few steps and what is left over, written out: no branch mispredicted at the end of every row of a window
        rest = simplify(extent.count - full * width)
        short = axis in self.unrolled_reduction and static(full) is not None and static(rest) is not None
        repeated = alloc(buffers, body)
        result: list[Stmt] = [*(unrolled(loops, repeated) if short else serial(loops, repeated))]
        if static(rest) != 0:
            tail = Axis(f"{axis.name}_tail", trip_count(rest))
            env = {**block.env, axis: simplify(extent.low + full * width + var(tail))}
            last = [self.access.lower(substitute(e, env)) for e in elements]
            kind = ForKind.UNROLL if short else ForKind.SERIAL
            result.append(For(tail, kind, block.around(*self._update(monoid, states, block.index, last))))
        return tuple(result)

    def _asked(self, env: dict[Axis, Expr], steps: int) -> tuple[Stmt, ...]:
        """What steps of the sum ask for, from the place of the first of them on: parts of the next panel of weights, so
        that all blocks of rows ask for all of it, and what later steps read of their own."""
        if not self.panel or (self.row_block is None and not self.options.soon):
            return ()
        rows = {a for a in self.register if a is not self.vector}
        along = [n for n in loads(*self.nest.elements) if self.vector in axes_of(n)]
        weights = next(n for n in along if rows.isdisjoint(axes_of(n)))
        begin = {**env, **self.panel, **{a: self.ranges[a].low for a in self.reduction}}
        step: Expr = const(0)
        all_steps: int | Expr = 1
        for axis in self.reduction:
            extent = self.ranges[axis]
            step = step * trip_count(extent.count) + (env[axis] - extent.low)
            all_steps = all_steps * trip_count(extent.count)
        found: tuple[Stmt, ...] = ()
        (width,) = (self.register[a] for a in self.panel)
        if self.row_block is not None:
            following = {**begin, **{a: simplify(start + width) for a, start in self.panel.items()}}
            counted = self.row_block * all_steps + step
            found = hints(PREFETCH_TILE, weights, following, counted, self.options.ahead, steps, self.access)
        if not self.options.soon:
            return found
        return (*found, *hints(PREFETCH, weights, begin, step + self.options.soon, width, steps, self.access))

    def _together(self, extent: Range) -> int:
        """Steps in a turn of the innermost loop: the last block of a streamed axis may not be whole turns."""
        count = static(extent.count)
        return self.options.together if count is not None and count % self.options.together == 0 else 1

    def _is_row(self, node: Load, inner: Axis, block: RegisterBlock) -> bool:
        """A read that is the same on all lanes and contiguous along the reduction."""
        if block.lane is None or block.lane in axes_of(node) or node.source.memory is Memory.REGISTER:
            return False
        offset: Expr = const(0)
        for index, size in zip(node.indices, node.source.shape, strict=True):
            offset = offset * size + index
        total = join_divisions(linear(simplify(offset)))
        others = any(inner in axes_of(t) for t in total.terms if t is not var(inner))
        return total.terms.get(var(inner)) == 1 and not others

    def _varies(self, condition: Expr, block: RegisterBlock) -> bool:
        """Whether a condition differs inside the unrolled block."""
        return any(a in block.unrolled for a in axes_of(substitute(condition, block.env)))

    def _two_ways(
        self, depth: int, block: RegisterBlock, states: Sequence[Buffer], monoid: Monoid, elements: Sequence[Expr],
        plain: Sequence[Expr], varied: Sequence[Expr],
    ) -> tuple[Stmt, ...]:  # fmt: skip
        """Where the whole block is inside, no check remains; else each unrolled position checks for itself."""
        lowered = [simplify(self.access.lower(substitute(c, block.env))) for c in varied]
        everywhere = all_of(simplify(worst(c, block.unrolled)) for c in lowered)
        fast = self._reduce_loops(depth, block, states, monoid, elements, [])
        guards = [a for a in block.unrolled if any(a in axes_of(c) for c in lowered)]
        parts: list[tuple[Expr, RegisterBlock]] = []
        if depth < len(self.reduction) and len(guards) == 1 and extent_of(guards[0].extent) > 2:
            # a window hangs over one end at a time: the rest of the block still runs as one
            for first in (False, True):
                part = block.without(guards[0], first)
                inside = [simplify(self.access.lower(substitute(c, part.env))) for c in varied]
                check = all_of(simplify(worst(c, part.unrolled)) for c in inside)
                if check is not everywhere:  # else what is outside is at the other end
                    parts.append((check, part))
        slow: tuple[Stmt, ...] = ()
        if not is_covered(all_of(lowered), [everywhere, *(check for check, _ in parts)]):
            single = RegisterBlock(block.env, tuple(a for a in block.unrolled if a not in guards), block.lane)
            alone = _SingleUnroll(self, single, block.index).loops(depth, states, monoid, elements)
            slow = unrolled(guards, (If(all_of(lowered), alone),))
        for check, part in parts:
            slow = (If(check, self._reduce_loops(depth, part, states, monoid, elements, []), slow),)
        return self._guarded(plain, block.env, (If(everywhere, fast, slow),))

    def _guarded(self, conditions: Sequence[Expr], env: dict[Axis, Expr], body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        check = simplify(self.access.lower(all_of(substitute(c, env) for c in conditions)))
        if isinstance(check, Const) and check.value:
            return body
        return (If(check, body),)


class _SingleUnroll:
    """The checked way through a block: loops inside one unrolled position, accumulators indexed as in the block."""

    def __init__(self, nest: CpuNest, block: RegisterBlock, index: tuple[Expr, ...]) -> None:
        self.nest = nest
        self.block = block
        self.index = index

    def loops(self, depth: int, states: Sequence[Buffer], monoid: Monoid, elements: Sequence[Expr]) -> tuple[Stmt, ...]:
        env = dict(self.block.env)
        around: list[Axis] = []
        for axis in self.nest.reduction[depth:]:
            extent = self.nest.ranges[axis]
            loop = Axis(axis.name, trip_count(extent.count))
            env[axis] = simplify(extent.low + var(loop))
            around.append(loop)
        right = [self.nest.access.lower(substitute(e, env)) for e in elements]
        body = self.block.around(*self.nest._update(monoid, states, self.index, right))
        return serial(around, body)
