"""Sums along the vector: every lane adds up a part of its own, and in the end the lanes are added to each other."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.backend.cpu.vector.fold_lanes import halved
from tilewright.backend.cpu.vector.parts import NestParts
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Monoid
from tilewright.ir.forms.expr import Axis, Expr, const, load, replace_nodes, substitute, var
from tilewright.ir.forms.loops import Buffer, For, ForKind, Stmt, Store
from tilewright.lower.nesting import alloc, trip_count
from tilewright.lower.register_block import RegisterBlock


class LaneSums(NestParts):
    """The lowering of a reduction whose own axis is the vector's."""

    def _reduce_lanes(self, block: RegisterBlock, monoid: Monoid) -> tuple[Stmt, ...]:
        axis = self.vector
        assert axis is not None
        extent = self.ranges[axis]
        lanes = self.plan.lanes
        chains = max(1, self.register.get(axis, lanes) // lanes)
        count = extent.count
        lane = Axis(f"{axis.name}_lane", lanes)
        chain = Axis(f"{axis.name}_u", chains)
        unrolled = (*block.unrolled, chain) if chains > 1 else block.unrolled
        wide = RegisterBlock(block.env, unrolled, lane)
        states = self._states(monoid, wide.shape, "acc")
        totals = self._states(monoid, block.shape, "total")
        body: list[Stmt] = list(
            wide.around(*(Store(s, wide.index, v) for s, v in zip(states, monoid.identity, strict=True)))
        )
        step = lanes * chains
        others = [a for a in self.reduction if a is not axis]
        full = simplify(count // step)
        loop = Axis(axis.name, trip_count(full))
        offset = var(loop) * step + (var(chain) * lanes if chains > 1 else const(0)) + var(lane)
        body.extend(self._lane_loops(others, RegisterBlock({**block.env, axis: simplify(extent.low + offset)},
                                     unrolled, lane), [loop], states, monoid))  # fmt: skip
        rest = simplify(count - full * step)
        left = static(rest) or 0
        if left // lanes:  # whole vectors that fill a part of the chains
            few = Axis(chain.name, left // lanes)
            at = simplify(extent.low + full * step + var(few) * lanes + var(lane))
            wide = RegisterBlock({**block.env, axis: at}, (*block.unrolled, few), lane)
            body.extend(self._lane_loops(others, wide, [], states, monoid))
        # chains fold into the first, its lanes into one total, which starts from the initial value, where there is one
        if self.nest.initial or len(states) > 1:
            starts = self._initial(monoid, block.env)
            body.extend(block.around(*(Store(t, block.index, v) for t, v in zip(totals, starts, strict=True))))

        def more_of(parts: Sequence[Buffer], width: int) -> tuple[Stmt, ...]:
            if not left & width:
                return ()
            part = Axis(f"{axis.name}_part", width)
            at = simplify(extent.low + full * step + (left // (2 * width) * (2 * width) + var(part)))
            return self._lane_loops(others, RegisterBlock({**block.env, axis: at}, block.unrolled, part), [], parts,
                                    monoid)  # fmt: skip

        halves = halved(block, states, chains, lanes, lambda shape, stem: self._states(monoid, shape, stem),
                        lambda parts, index, right: self._update(monoid, parts, index, right), more_of)  # fmt: skip
        body.extend(halves.body)
        first = (*block.index, *halves.chain)
        body.extend(block.around(*self._fold_lanes(monoid, totals, halves.states, block.index, first, halves.lanes)))
        done = left // halves.lanes * halves.lanes
        last = simplify(rest - done)
        if static(last) != 0:
            tail = Axis(f"{axis.name}_tail", trip_count(last))
            env = {**block.env, axis: simplify(extent.low + full * step + done + var(tail))}
            body.extend(
                self._lane_loops(others, RegisterBlock(env, block.unrolled, block.lane), [tail], totals, monoid)
            )
        body.extend(self._stores(block, self._results(monoid, totals, block.index)))
        return alloc([*states, *totals, *halves.buffers], body)

    def _fold_lanes(
        self, monoid: Monoid, totals: Sequence[Buffer], states: Sequence[Buffer], index: tuple[Expr, ...],
        first: tuple[Expr, ...], lanes: int,
    ) -> tuple[Stmt, ...]:  # fmt: skip
        """A total takes all lanes of a vector: of a plain monoid by pairs, so that few wait for each other."""
        if len(states) > 1:
            lane = Axis("fold", lanes)
            update = self._update(monoid, totals, index, [load(s, (*first, var(lane))) for s in states])
            return (For(lane, ForKind.UNROLL, update),)
        parts: list[Expr] = [load(states[0], (*first, const(i))) for i in range(lanes)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [
                replace_nodes(monoid.combine[0], {monoid.left[0]: a, monoid.right[0]: b})
                for a, b in zip(parts[:half], parts[half:], strict=True)
            ]
        if not self.nest.initial:  # lanes have begun with the identity
            return (Store(totals[0], index, parts[0]),)
        return self._update(monoid, totals, index, parts)

    def _lane_loops(
        self,
        others: Sequence[Axis],
        block: RegisterBlock,
        inner_loops: Sequence[Axis],
        states: Sequence[Buffer],
        monoid: Monoid,
    ) -> tuple[Stmt, ...]:
        env = dict(block.env)
        loops: list[Axis] = []
        for axis in others:
            loop = Axis(axis.name, trip_count(self.ranges[axis].count))
            env[axis] = simplify(self.ranges[axis].low + var(loop))
            loops.append(loop)
        right = [self.access.lower(substitute(e, env)) for e in self.nest.elements]
        body = block.around(*self._update(monoid, states, block.index, right))
        for loop in reversed([*loops, *inner_loops]):
            if static(loop.extent) == 0:
                return ()
            body = (For(loop, ForKind.SERIAL, body),)
        return body
