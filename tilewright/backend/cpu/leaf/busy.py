"""Cycles that a leaf keeps a core busy on its tile while all it touches is in the nearest cache.

A block of registers takes as long as the busiest of what it needs: pipes that compute, ports that load, the port that
stores, and the chain from one step of a sum to the next on the same accumulator. Blocks of every size that a tile is
cut into are counted by themselves: what is left over waits for its chain where a whole block would not. What a block
does is found once for a nest; sizes of blocks may be arrays with an entry a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2, prod
from typing import Any

from tilewright.backend.cpu.constants import (
    BESIDE,
    BLOCK_CYCLES,
    CALL_ALONE,
    EVERY_OTHER,
    FORESEEN,
    ISSUED,
    ISSUED_IN_ORDER,
    LOADED,
    LOOKED_AHEAD,
    LOOP_START,
    MISSED,
    RESUMED,
    TURN,
    WINDOW_CHECK,
)
from tilewright.backend.cpu.vector.fold_lanes import narrowest, parts_of
from tilewright.ir.forms.expr import Axis, Expr, Load, axes_of, is_op, loads, walk
from tilewright.target import Target
from tilewright.target.instruction_sets import MASKED_BYTES
from tilewright.tile_graph.algebra.context import is_contraction
from tilewright.tile_graph.algebra.nest import Nest, data_ops, op_cost
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.traffic.touch import chosen, least, most

_WIDE = min(MASKED_BYTES) // 4  # lanes: a part of a vector is then transposed as well as the whole


@dataclass(frozen=True)
class Ports:
    """What a core does in a cycle."""

    compute: float
    load: float
    store: float
    latency: float  # cycles from one multiply-add to the next on its result
    issued: float  # instructions

    @staticmethod
    def of(target: Target, nest: Nest) -> Ports:
        near, cycle = target.nearest, target.fma_clock * target.vector_bytes
        issued = ISSUED_IN_ORDER if nest.unswitched else ISSUED
        return Ports(target.pipes, near.bandwidth / cycle, near.writing / cycle, target.fma_latency, issued)


@dataclass(frozen=True)
class AxisRegisters:
    """Registers of a block along an axis, and the lanes that each of them fills."""

    registers: Size
    lanes: Size = 1


Block = Mapping[Axis, AxisRegisters]


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
                 instructions / ports.issued)  # fmt: skip
        flowing: Size = 0.0
        for need in needs:
            flowing = most(flowing, need)
        flowing = flowing + BESIDE * (sum(needs, 0.0) - flowing)
        return most(flowing, self.chain * least(1.0, instructions / LOOKED_AHEAD)) + self.lost


@dataclass(frozen=True)
class LoweredLeaf:
    """A leaf as its lowering writes it, whatever its tile: what the work of a block depends on."""

    nest: Nest
    vector: Axis | None
    lanes: int
    run: Sequence[Axis]  # axes that are walked as one with the vector's
    blocked: Sequence[Axis]  # axes of the register tile
    unrolled: frozenset[Axis]
    together: int  # steps in a turn of the innermost loop
    row_lanes: int  # steps whose broadcast operand is read as one vector
    transposed: Axis | None
    stride: Callable[[Load], int | None]  # elements between neighbours along the vector; None: not one number
    lines: Callable[[Load], float]  # of the nearest cache that a vector of neighbours lies on
    stored: Sequence[int | None]  # elements between neighbours of every place that results are stored in
    squares: Axis | None = None  # along which a sum has its results stored side by side, where no vector does
    # seconds that a vector of a block written out loses to lines that so many reads throw out of the nearest cache
    crowded: Callable[[int], float] = lambda _: 0.0


@dataclass(frozen=True)
class Shape:
    """A leaf on its tile, as its lowering cuts it."""

    blocks: Sequence[tuple[Size, Block]]  # on a tile: how many, and how large along each axis
    inner: Mapping[Axis, Size]  # elements of the sum
    share: Size  # of the elements of the sum, that are not padding
    distinct: Callable[[Load], Size]  # of the reads of a block, that are made
    starts: Size  # of the innermost loop of a map
    chains: Size = 1  # vectors side by side along a sum's own axis
    passes: Size = 1


@dataclass(frozen=True)
class _Some:
    """So much of something for every register along some axes of a block, and along a sum's chains."""

    axes: frozenset[Axis]
    amount: float
    is_chained: bool = False


@dataclass(frozen=True)
class _Read:
    node: Load
    some: _Some
    step: int | None  # elements between neighbours along the vector
    lines: float  # that a vector lies on


class Busy:
    """What every block of a leaf does, and what all of them take."""

    def __init__(self, form: LoweredLeaf, target: Target) -> None:
        self.form, self.nest, self.target, self.ports = form, form.nest, target, Ports.of(target, form.nest)
        self.along = form.vector is not None and form.vector in self.nest.reduce_axes
        monoid = self.nest.monoid
        self.states = len(monoid.combine) if monoid is not None else 1
        if monoid is not None:
            self.narrow = narrowest(c.dtype for c in monoid.combine)
            self.combined = float(sum(op_cost(n.op.name) for n in data_ops(*monoid.combine)))
            self.operations = self._element_operations(monoid.operator == "add")
            self.reads = [self._read(n, self._axes(n)) for n in loads(*self.nest.elements)]
            self.is_checked = any(is_op(n, "select") for n in walk(*self.nest.elements))
        self._end()

    def _axes(self, node: Expr) -> frozenset[Axis]:
        """Axes of a block along which a node has a value of its own in every register."""
        used = set(axes_of(node))
        if not used.isdisjoint(self.form.run):
            used.add(self.form.run[-1])
        return frozenset(a for a in self.form.blocked if a in used)

    def _is_chained(self, node: Expr) -> bool:
        return self.along and self.form.vector in axes_of(node)

    def _element_operations(self, adds: bool) -> list[_Some]:
        """Operations of one element of a sum; the multiplication is one with the addition."""
        elements = self.nest.elements
        fused = elements[0] if adds and is_op(elements[0], "mul") else None
        found: dict[tuple[frozenset[Axis], bool], float] = {}
        for node in data_ops(*elements):
            if node.op.name != "select" and node is not fused:
                key = self._axes(node), self._is_chained(node)
                found[key] = found.get(key, 0.0) + op_cost(node.op.name)
        return [_Some(axes, amount, is_chained) for (axes, is_chained), amount in found.items()]

    def _read(self, node: Load, axes: frozenset[Axis]) -> _Read:
        step = self.form.stride(node) if self.form.vector is not None else 1
        lines = self.form.lines(node) if step == 1 and self.form.lanes > 1 else 1.0
        return _Read(node, _Some(axes, 1.0, self._is_chained(node)), step, lines)

    def _end(self) -> None:
        """What is done with the results of a block, or all that a map does."""
        nest, form = self.nest, self.form
        self.vectors = frozenset(a for a in form.blocked if a is form.vector)
        self.calls: list[_Some] = []  # of vector mathematics
        self.spilled, self.lost = 0.0, 0.0
        light: dict[frozenset[Axis], float] = {}
        read: dict[tuple[frozenset[Axis], int | None, float], float] = {}
        for node in data_ops(*nest.values):
            if op_cost(node.op.name) > 1:
                self.calls.append(_Some(self._axes(node), op_cost(node.op.name)))
            else:
                light[self._axes(node)] = light.get(self._axes(node), 0.0) + (0.5 if node.op.name == "select" else 1.0)
        for load in loads(*nest.values):
            if load.source not in nest.accumulated:
                found = self._read(load, self._axes(load))
                key = found.some.axes, found.step, found.lines
                read[key] = read.get(key, 0.0) + 1.0
        whole, places = frozenset(form.blocked), 1
        if nest.unswitched:
            operations, reads, checks = nest.block_counts
            whole, places = self.vectors, prod(nest.unswitched.values())
            light = {whole: operations + 0.5 * checks}
            read = {(whole, next((step for _, step, _ in read if step not in (0, 1)), 1), 1.0): float(reads)}
            self.calls = []
            # what waits for the second half of a transform and finds no register is written and read again
            self.spilled = max(0.0, reads - self.target.vector_registers // 2)
            self.lost = form.crowded(reads) * self.target.fma_clock
        self.light = [_Some(axes, amount) for axes, amount in light.items()]
        self.ended = [(_Some(axes, amount), step, lines) for (axes, step, lines), amount in read.items()]
        self.stored = [(_Some(whole, float(places)), step != 1) for step in form.stored]

    # --- blocks

    def cycles(self, shape: Shape) -> Size:
        total: Size = 0.0
        for count, block in shape.blocks:
            registers = _Registers(block)
            ended = self._ended(registers).times(shape.passes)
            if self.nest.monoid is None:
                use = ended.plus(Use(others=TURN))
            else:
                use = ended.plus(self._lane_sum(registers, shape) if self.along else self._sum(registers, shape))
            total = total + count * use.cycles(self.ports)
        return total + shape.starts * LOOP_START / ISSUED

    def _reads(self, step: int | None, lines: float, lanes: Size) -> Size:
        """Reads of the nearest cache for one register."""
        if step in (0, 1):
            return lines if lines == 1.0 else chosen(lanes > 1, lines, 1.0)
        if step == 2 and self.form.lanes >= _WIDE:
            return chosen(lanes == self.form.lanes, EVERY_OTHER, lanes * self.target.gathered_reads)
        return chosen(lanes > 1, lanes * self.target.gathered_reads, 1.0)

    def _is_turned(self, block: _Registers) -> Any:
        """Whether a block is transposed in registers: squares that lack too much go lane by lane."""
        if self.form.transposed is None:
            return False
        lanes = self.form.lanes
        enough = lanes if lanes < _WIDE else lanes // 2 + 1
        return least(block.lanes, block.count(frozenset({self.form.transposed}))) >= enough

    def _squares(self, block: _Registers) -> Size:
        """The part of a sum's results that is stored along rows, transposed in as many squares as those fill."""
        if self.form.squares is None:
            return 0.0
        rows, lanes = block.count(frozenset({self.form.squares})), self.form.lanes
        return rows // lanes * lanes / rows

    # --- sums

    def _step(self, block: _Registers, lanes: Size, chains: Size, shape: Shape) -> Use:
        """One step of a sum, of vectors with so many lanes."""
        assert self.nest.monoid is not None
        whole = block.all() * chains
        operations = self.combined * whole
        for some in self.operations:
            operations = operations + block.of(some, chains)
        reads: Size = 0.0
        beside: Size | None = None
        for read in self.reads:
            count = block.count(read.some.axes)
            beside = count if beside is None else least(beside, count)
            each = shape.distinct(read.node) * self._reads(read.step, read.lines, lanes)
            if read.step == 0 and not self.along and self.form.row_lanes > 1:
                each = each / chosen(lanes > 1, float(self.form.row_lanes), 1.0)
            reads = reads + block.of(read.some, chains) * each
        # accumulators that find no register beside the operands of a step: read and written in each
        held = whole * self.states + (0 if beside is None else beside) + 1
        spilled = most(0.0, held - self.target.vector_registers)
        depth = 1.0 if self.states == 1 else 2.0
        return Use(operations, reads + spilled, spilled, 0.0, depth * self.ports.latency)

    def _sum(self, block: _Registers, shape: Shape) -> Use:
        """All steps of a block whose lanes are results."""
        form = self.form
        steps: Size = 1.0
        for size in shape.inner.values():
            steps = steps * size
        written = float(prod(extent_of(a.extent) for a in form.unrolled) * form.together)
        innermost = next((n for a, n in reversed(list(shape.inner.items())) if a not in form.unrolled), 1.0)
        inner = self._step(block, block.lanes, 1, shape).plus(Use(others=TURN / written))
        around = steps / most(innermost * written / form.together, 1.0)
        turning = Use(others=LOOP_START + (WINDOW_CHECK if self.is_checked else 0.0), lost=_missed(innermost))
        resumed = RESUMED * (shape.passes - 1) if is_contraction(self.nest) else 0.0
        begun = Use(lost=BLOCK_CYCLES * shape.passes + resumed)
        return inner.times(steps * shape.share).plus(turning.times(around * shape.passes)).plus(begun)

    def _lane_sum(self, block: _Registers, shape: Shape) -> Use:
        """All steps of a block whose lanes are parts of the sum: what does not fill all chains goes vector by vector,
        then into the halves that the lanes are folded to, and what fills no narrowest vector element by element."""
        form = self.form
        assert form.vector is not None
        width, narrow = form.lanes * shape.chains, min(form.lanes, self.narrow)
        length = shape.inner[form.vector]
        others: Size = 1.0
        for axis, size in shape.inner.items():
            others = others * (size if axis is not form.vector else 1.0)
        turn = Use(others=TURN)
        wide = self._step(block, form.lanes, shape.chains, shape).plus(turn)
        left, single = length % width // form.lanes, length % narrow
        pieces = parts_of(length, form.lanes, narrow)
        # vectors in chains of their own, and a piece that joins the fold where it has as many lanes
        rest = self._step(block, form.lanes, most(left, 1), shape).times(least(left, 1))
        rest = rest.plus(self._step(block, narrow, 1, shape).times(pieces))
        rest = rest.plus(self._step(block, 1, 1, shape).plus(turn).times(single)).times(others * shape.share)
        starts = Use(others=2 * LOOP_START, lost=_missed(length // width) + _missed(single)).times(others)
        halvings = log2(max(2, form.lanes)) + shape.chains - 1
        # a halving moves one half beside the other, then adds them
        folded = Use(block.all() * self.states * (3 * halvings), chain=halvings * (self.ports.latency + 3.0))
        return wide.times(others * (length // width) * shape.share).plus(rest).plus(starts).plus(folded)

    # --- what is stored

    def _ended(self, block: _Registers) -> Use:
        operations: Size = 0.0
        for some in self.light:
            operations = operations + block.of(some)
        together = self.target.calls_together
        for some in self.calls:
            # fewer calls of a function side by side than the machine runs take longer each
            missing = 1 - (least(block.count(some.axes), together) - 1) / (together - 1)
            operations = operations + block.of(some) * (1 + (CALL_ALONE - 1) * missing)
        turned = self._is_turned(block)
        reads: Size = 0.0
        for some, step, lines in self.ended:
            each = self._reads(step, lines, block.lanes)
            reads = reads + block.of(some) * (each if step in (0, 1) else chosen(turned, 1.0, each))
        stored: Size = 0.0
        squares = self._squares(block)
        for some, is_apart in self.stored:
            each = chosen(turned, 1.0, block.lanes) if is_apart else 1.0
            stored = stored + block.of(some) * (each * (1 - squares) + squares if is_apart else each)
            operations = operations + block.of(some) * (squares * log2(max(2, self.form.lanes)) if is_apart else 0.0)
        if self.form.transposed is not None:
            operations = operations + log2(max(2, self.form.lanes)) * block.all()
        again, lost = self.spilled * block.count(self.vectors), self.lost * block.count(self.vectors)
        return Use(operations, reads + again, stored + again, 0.0, LOADED + self.ports.latency, lost)


class _Registers:
    """The registers of a block, all of them or those along some of its axes."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.lanes: Size = 1
        for part in block.values():
            self.lanes = most(self.lanes, part.lanes)
        self.counts: dict[frozenset[Axis], Size] = {}

    def count(self, axes: frozenset[Axis]) -> Size:
        if axes not in self.counts:
            self.counts[axes] = _product(p.registers for a, p in self.block.items() if a in axes)
        return self.counts[axes]

    def all(self) -> Size:
        return self.count(frozenset(self.block))

    def of(self, some: _Some, chains: Size = 1) -> Size:
        return self.count(some.axes) * (some.amount * (chains if some.is_chained else 1))


def _product(sizes: Iterable[Size]) -> Size:
    found: Size = 1
    for size in sizes:
        found = found * size
    return found


def _missed(turns: Size) -> Size:
    """Cycles lost where a loop of so many turns ends."""
    return chosen(turns > FORESEEN, MISSED, 0.0)


def blocks_of(
    cuts: Mapping[Axis, Sequence[tuple[Size, AxisRegisters]]], times: Size
) -> list[tuple[Size, dict[Axis, AxisRegisters]]]:
    """Blocks of every size on a tile, where each axis is cut into so many of these parts and all of it runs so many
    times."""
    found: list[tuple[Size, dict[Axis, AxisRegisters]]] = []
    for parts in product(*cuts.values()):
        count: Size = times
        for number, _ in parts:
            count = count * number
        found.append((count, {axis: part for axis, (_, part) in zip(cuts, parts, strict=True)}))
    return found
