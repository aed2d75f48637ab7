"""Cycles that a leaf keeps a core busy on its tile while all it touches is in the nearest cache.

A block of registers takes as long as the busiest of what it needs: pipes that compute, ports that load, the port that
stores, and the chain from one step of a sum to the next on the same accumulator. Blocks of every size that a tile is
cut into are counted by themselves: what is left over waits for its chain where a whole block would not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2, prod

from tilewright.backend.cpu.vector.contraction_facts import PIPES
from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, Var, axes_of, is_op, loads, var, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.access import Access, Place
from tilewright.lower.blocks import Piece
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest, data_ops, op_cost
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.algebra.unswitch import positions as written_out
from tilewright.tile_graph.traffic.touch import chosen, least, most

_ISSUED = 4.0  # instructions a cycle that the processors we know take up
_AHEAD = 200.0  # instructions that they look ahead: short blocks run into each other, and hide each other's chains
_BESIDE = 0.1  # of what the less busy ports do that is not wholly beside the busiest
_CALL_ALONE = 1.25  # times as long for a function of vector mathematics by itself as for as many as run side by side
_TURN = 2.0  # instructions of a turn of a loop besides its work: the counter and the branch
_START = 6.0  # instructions to start a loop: addresses, bounds
_CHECK = 4.0  # instructions of a question whether a window lies inside, for a whole block
_LOADED = 6.0  # cycles from a read of the nearest cache to its use
_FORESEEN = 32.0  # turns of a loop whose end the processor foresees
_MISSED = 16.0  # cycles where it does not


@dataclass(frozen=True)
class Ports:
    """What a core does in a cycle."""

    compute: float
    load: float
    store: float
    latency: float  # cycles from one multiply-add to the next on its result

    @staticmethod
    def of(target: Target) -> Ports:
        near, cycle = target.levels[1], clock_of(target) * target.vector_bytes
        return Ports(PIPES, near.bandwidth / cycle, near.writing / cycle, target.fma_chains / PIPES)


def clock_of(target: Target) -> float:
    """Cycles a second while vectors are multiplied."""
    return target.fma_rate / (PIPES * target.lanes(4))


@dataclass(frozen=True)
class Shape:
    """A leaf on its tile, as its lowering cuts it: what the cycles depend on."""

    nest: Nest
    access: Access
    vector: Axis | None
    lanes: int
    chains: int  # vectors side by side along a sum's own axis
    run: Sequence[Axis]  # axes that are walked as one with the vector's
    blocks: Sequence[tuple[Size, Mapping[Axis, Piece]]]  # on a tile: how many, and how large along each axis
    inner: Mapping[Axis, Size]  # elements of the sum
    unrolled: frozenset[Axis]
    together: int  # steps in a turn of the innermost loop
    row_lanes: int  # steps whose broadcast operand is read as one vector
    passes: int
    share: Size  # of the elements of the sum, that are not padding
    distinct: Callable[[Load], float]  # of the reads of a block, that are made
    starts: Size  # of the innermost loop of a map
    transposed: Axis | None


def busy_cycles(shape: Shape, target: Target) -> Size:
    return _Busy(shape, target).cycles()


@dataclass(frozen=True)
class Use:
    """What some instructions need of a core; cycles of the longest chain among them, and cycles that nothing hides."""

    operations: Size = 0.0
    reads: Size = 0.0
    stores: Size = 0.0
    others: Size = 0.0  # instructions
    chain: Size = 0.0
    lost: Size = 0.0

    def plus(self, more: Use) -> Use:
        return Use(self.operations + more.operations, self.reads + more.reads, self.stores + more.stores,
                   self.others + more.others, self.chain + more.chain, self.lost + more.lost)  # fmt: skip

    def times(self, count: Size) -> Use:
        return Use(self.operations * count, self.reads * count, self.stores * count, self.others * count,
                   self.chain * count, self.lost * count)  # fmt: skip

    def cycles(self, ports: Ports) -> Size:
        """Of a block that others like it follow."""
        # a read is mostly part of the instruction that uses it
        instructions = self.operations + 0.5 * self.reads + self.stores + self.others
        needs = (self.operations / ports.compute, self.reads / ports.load, self.stores / ports.store,
                 instructions / _ISSUED)  # fmt: skip
        flowing: Size = 0.0
        for need in needs:
            flowing = most(flowing, need)
        flowing = flowing + _BESIDE * (sum(needs, 0.0) - flowing)
        return most(flowing, self.chain * least(1.0, instructions / _AHEAD)) + self.lost


class _Busy:
    def __init__(self, shape: Shape, target: Target) -> None:
        self.shape, self.nest, self.target, self.ports = shape, shape.nest, target, Ports.of(target)
        self.along = shape.vector is not None and shape.vector in self.nest.reduce_axes
        self.strides: dict[Load, int | None] = {}

    def cycles(self) -> Size:
        total: Size = 0.0
        for count, block in self.shape.blocks:
            ended = self._ended(block).times(self.shape.passes)
            if self.nest.monoid is None:
                use = ended.plus(Use(others=_TURN))
            else:
                use = ended.plus(self._lane_sum(block) if self.along else self._sum(block))
            total = total + count * use.cycles(self.ports)
        return total + self.shape.starts * _START / _ISSUED

    # --- positions of a block

    def _positions(self, node: Expr, block: Mapping[Axis, Piece]) -> int:
        """Registers that a node has a value of its own in."""
        used = set(axes_of(node))
        if not used.isdisjoint(self.shape.run):
            used.add(self.shape.run[-1])
        return prod(-(-piece.size // piece.lanes) for axis, piece in block.items() if axis in used)

    def _wide(self, block: Mapping[Axis, Piece]) -> bool:
        """Whether a block's registers are vectors."""
        return any(piece.lanes > 1 for piece in block.values())

    def _read(self, node: Load, block: Mapping[Axis, Piece], vector: bool) -> float:
        """Reads of the nearest cache for one register of a node."""
        if not vector or self.shape.vector is None:
            return 1.0
        stride = self._stride(node)
        if stride in (0, 1):
            return 1.0
        if self.shape.transposed is not None:
            return 1.0
        return self._lanes(block) * self.target.gathered_reads

    def _stride(self, node: Load) -> int | None:
        if node not in self.strides:
            self.strides[node] = self._found_stride(node)
        return self.strides[node]

    def _found_stride(self, node: Load) -> int | None:
        """Elements between neighbours along the vector; None where it is not one number."""
        assert isinstance(node.source, Tensor) and self.shape.vector is not None
        if node.source in self.nest.accumulated:
            return 1
        if any(i.reads and self.shape.vector in axes_of(i) for i in node.indices):
            return None
        return self._along(self.shape.access.read[node.source], node.indices)

    def _along(self, place: Place, indices: tuple[Expr, ...]) -> int | None:
        """Elements of storage between neighbours along the vector."""
        total = Linear({}, 0)
        sizes = place.buffer.shape[len(place.prefix) :]
        for index, size in zip(place.layout.storage_indices(indices), sizes, strict=True):
            total = total.scaled(extent_of(size)).plus(linear(simplify(index)))
        step = 0
        vector = self.shape.vector
        for term, by in join_divisions(total).terms.items():
            if isinstance(term, Var) and term.axis is vector:
                step += by
            elif vector in axes_of(term):
                inner = self._inside(term)
                if inner is None:
                    return None
                step += by * inner
        return step

    def _inside(self, term: Expr) -> int | None:
        """Of an index that is no sum, how it moves along a vector that never crosses a multiple."""
        vector = self.shape.vector
        assert vector is not None
        if is_op(term, "mod") or is_op(term, "floordiv"):
            place, size = term.args
            if not isinstance(size, Const) or int(size.value) < self.shape.lanes:
                return None
            return linear(place).terms.get(var(vector), 0) if is_op(term, "mod") else 0
        if is_op(term, "min") or is_op(term, "max"):
            moving = [a for a in term.args if vector in axes_of(a)]
            return linear(moving[0]).terms.get(var(vector), 0) if len(moving) == 1 else None
        return None

    # --- sums

    def _step(self, block: Mapping[Axis, Piece], wide: bool, chains: int) -> Use:
        """One step of a sum."""
        monoid = self.nest.monoid
        assert monoid is not None
        whole = prod(-(-p.size // p.lanes) for p in block.values()) * chains
        combined = float(sum(op_cost(n.op.name) for n in data_ops(*monoid.combine)))
        operations = combined * whole
        fused = monoid.operator == "add" and is_op(self.nest.elements[0], "mul")
        for node in data_ops(*self.nest.elements):
            if node.op.name != "select" and not (fused and node is self.nest.elements[0]):
                operations += op_cost(node.op.name) * self._positions(node, block) * self._chained(node, chains)
        reads = 0.0
        for load in loads(*self.nest.elements):
            each = self._read(load, block, wide) * self.shape.distinct(load)
            if wide and not self.along and self._stride(load) == 0:
                each = each / self.shape.row_lanes
            reads += self._positions(load, block) * self._chained(load, chains) * each
        spilled = self._spilled(whole, block)
        depth = 1.0 if len(monoid.combine) == 1 else 2.0
        return Use(operations, reads + spilled, spilled, 0.0, depth * self.ports.latency)

    def _spilled(self, accumulators: int, block: Mapping[Axis, Piece]) -> float:
        """Accumulators that find no register beside the operands of a step: read and written in each."""
        beside = min(self._positions(n, block) for n in loads(*self.nest.elements)) if loads(*self.nest.elements) else 0
        states = len(self.nest.monoid.combine) if self.nest.monoid is not None else 1
        return float(max(0, accumulators * states + beside + 1 - self.target.vector_registers))

    def _chained(self, node: Expr, chains: int) -> int:
        return chains if self.along and self.shape.vector in axes_of(node) else 1

    def _sum(self, block: Mapping[Axis, Piece]) -> Use:
        """All steps of a block whose lanes are results."""
        shape = self.shape
        steps: Size = 1.0
        for size in shape.inner.values():
            steps = steps * size
        written = float(prod(extent_of(a.extent) for a in shape.unrolled) * shape.together)
        innermost: Size = 1.0
        for axis in list(shape.inner)[::-1]:
            if axis not in shape.unrolled:
                innermost = shape.inner[axis]
                break
        inner = self._step(block, self._wide(block), 1).plus(Use(others=_TURN / written))
        around = steps / most(innermost * written / shape.together, 1.0)
        checks = any(is_op(n, "select") for n in walk(*self.nest.elements))
        turning = Use(others=_START + (_CHECK if checks else 0.0), lost=self._missed(innermost))
        return inner.times(steps * shape.share).plus(turning.times(around * shape.passes))

    def _missed(self, turns: Size) -> Size:
        return chosen(turns > _FORESEEN, _MISSED, 0.0)

    def _lane_sum(self, block: Mapping[Axis, Piece]) -> Use:
        """All steps of a block whose lanes are parts of the sum: what fills no vectors goes element by element."""
        shape = self.shape
        assert shape.vector is not None
        width = shape.lanes * shape.chains
        length = shape.inner[shape.vector]
        others: Size = 1.0
        for axis, size in shape.inner.items():
            others = others * (size if axis is not shape.vector else 1.0)
        outputs = prod(p.size for p in block.values())
        turn = Use(others=_TURN)
        wide = self._step(block, True, shape.chains).plus(turn).times(others * (length // width) * shape.share)
        single = self._step(block, False, 1).plus(turn).times(others * (length % width) * shape.share)
        starts = Use(others=2 * _START, lost=self._missed(length // width) + self._missed(length % width)).times(others)
        states = len(self.nest.monoid.combine) if self.nest.monoid is not None else 1
        halvings = log2(max(2, shape.lanes)) + shape.chains - 1
        # a halving moves one half beside the other, then adds them
        folded = Use(outputs * states * (3 * halvings), chain=halvings * (self.ports.latency + 3.0))
        return wide.plus(single).plus(starts).plus(folded)

    # --- what is stored

    def _ended(self, block: Mapping[Axis, Piece]) -> Use:
        """What is done with the results of a block, or all that a map does."""
        nest, wide = self.nest, self._wide(block)
        values: Sequence[Expr] = nest.values
        whole = prod(-(-p.size // p.lanes) for p in block.values())
        if nest.unswitched:
            values = written_out(nest.unswitched, *nest.values)
        operations = 0.0
        for node in data_ops(*values):
            count = self._vectors(block) if nest.unswitched else self._positions(node, block)
            operations += self._slots(node) * count * self._alone(node, count)
        reads = 0.0
        for load in loads(*values):
            if load.source not in nest.accumulated:
                count = self._vectors(block) if nest.unswitched else self._positions(load, block)
                reads += self._read(load, block, wide) * count
        stored = 0.0
        for tensor in nest.stores:
            for place in self.shape.access.write[tensor]:
                stride = self._along(place, nest.place) if wide else 1
                each = 1.0 if stride == 1 or self.shape.transposed is not None else self._lanes(block)
                stored += each * (len(values) * self._vectors(block) if nest.unswitched else whole)
        if self.shape.transposed is not None:
            operations += log2(max(2, self.shape.lanes)) * whole
        return Use(operations, reads, stored, 0.0, _LOADED + self.ports.latency)

    @staticmethod
    def _slots(node: Op) -> float:
        return op_cost(node.op.name) if node.op.name != "select" else 0.5

    def _alone(self, node: Op, count: int) -> float:
        """What calls of a function cost more where fewer of them are written side by side than the machine runs."""
        if op_cost(node.op.name) == 1:
            return 1.0
        most_together = self.target.calls_together
        missing = 1 - (min(count, most_together) - 1) / (most_together - 1)
        return 1 + (_CALL_ALONE - 1) * missing

    def _lanes(self, block: Mapping[Axis, Piece]) -> int:
        return max((p.lanes for p in block.values()), default=1)

    def _vectors(self, block: Mapping[Axis, Piece]) -> int:
        piece = block.get(self.shape.vector) if self.shape.vector is not None else None
        return 1 if piece is None else -(-piece.size // piece.lanes)


def blocks_of(
    cuts: Mapping[Axis, Sequence[tuple[Piece, Size]]], times: Size
) -> list[tuple[Size, dict[Axis, Piece]]]:
    """Blocks of every size on a tile, where each axis is cut into these pieces and all of it runs so many times."""
    found: list[tuple[Size, dict[Axis, Piece]]] = []
    for pieces in product(*cuts.values()):
        count: Size = times
        for _, trips in pieces:
            count = count * trips
        found.append((count, {axis: piece for axis, (piece, _) in zip(cuts, pieces, strict=True)}))
    return found

