"""What a leaf takes of a multiprocessor: issue slots of all its threads, and how long one block takes by itself.

A thread asks for what it reads, waits for the latency of where that lies, and computes; loads that do not stand behind
a branch are under way together, some at a time. What other blocks of the multiprocessor can hide is the fold's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2, prod

from tilewright.backend.gpu import constants as prices
from tilewright.backend.gpu.maps.packets import flat_offset
from tilewright.backend.gpu.matrix.cost import BlockedProduct, Fragments, cost_of
from tilewright.backend.gpu.matrix.plan import (
    cuts_of,
    made_by,
    product_of,
    runs_of,
    steps_of,
    stored_at_once,
    ways_of,
)
from tilewright.backend.gpu.threads.contract import GpuContract
from tilewright.backend.gpu.threads.nest import GpuNest
from tilewright.backend.gpu.threads.slots import slots_of as _slots
from tilewright.backend.gpu.threads.window_plan import is_window, reads_of_turn
from tilewright.ir.analysis.products import Factor
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, Op, axes_of, is_op, load, loads, var, walk
from tilewright.ir.forms.loops import Memory
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.placed import Placed
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest, data_cost
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Hold, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm


@dataclass(frozen=True)
class LeafAround:
    """Around the leaves of a kernel: its nests, and the Tiles over warps with how their operands come."""

    nests: Sequence[Nest]
    target: Target
    blocks: int
    warps: dict[str, tuple[Tile, Sequence[Hold]]]


@dataclass(frozen=True)
class Taken:
    """Seconds of a multiprocessor that a block keeps busy, and that it takes alone; blocks that share it (0: any)."""

    busy: float
    alone: float
    resident: int = 0


def warps_of(kernel: Tile) -> dict[str, tuple[Tile, Sequence[Hold]]]:
    """The Tile over warps around each leaf on tensor cores, and the holds of its operands."""
    found: dict[str, tuple[Tile, Sequence[Hold]]] = {}
    for tile in (t for t in kernel.walk() if isinstance(t, Tile)):
        for inner in (n for n in tile.body if isinstance(n, Tile) and n.over == "warps"):
            for leaf in inner.leaves:
                if leaf.instruction is not None:
                    found[leaf.tensor] = inner, tile.holds
    return found


def taken(placed: Placed, low: GpuNest, contract: GpuContract | None, shared: float, around: LeafAround) -> Taken:
    """What a leaf takes whose threads move so many bytes from and to shared memory."""
    name = (placed.work.owner or placed.nest).tensor.name
    if placed.work.leaf.instruction is not None and name in around.warps:
        return _on_tensor_cores(placed, around, *around.warps[name])
    cycles = _Threads(placed, low, around.target)
    slots, alone = cycles.contraction(contract) if contract is not None else cycles.plain()
    target = around.target
    busy = max(slots / target.fma_rate, shared / target.local.bandwidth)
    return Taken(busy, max(busy, alone / target.clock))


def _on_tensor_cores(placed: Placed, around: LeafAround, warps: Tile, holds: Sequence[Hold]) -> Taken:
    nest, leaf, target = placed.nest, placed.work.leaf, around.target

    def layout(tensor: Tensor) -> Layout:
        access = placed.access
        return (access.read[tensor] if tensor in access.read else access.write[tensor][0]).layout

    context = NestContext(target, layout, frozenset())
    sizes = product_of(nest, leaf, placed.work.box, dict(placed.work.limits))
    is_root = nest.tensor is around.nests[-1].tensor
    stored = stored_at_once(nest, leaf, context) if is_root else 1
    ranges = {**dict(zip(nest.axes, placed.work.box, strict=True)), **dict(placed.work.limits)}
    cut = cuts_of(nest, leaf, ranges, {}, made_by(around.nests), context)
    ways, runs = ways_of(nest, leaf, around.nests, context, cut), runs_of(nest, leaf, context)
    work, steps = data_cost(*nest.values), steps_of(nest, leaf)
    product = BlockedProduct(*sizes, around.blocks, ways, False, runs, stored, work, steps=steps)
    (_, height), (_, width) = warps.sizes
    rows, columns = (a.extent for a in warps.axes)
    stages = max((h.stages for h in holds), default=1)
    form = leaf.options(FragmentForm)
    made = Fragments(rows, columns, height, width, form.step, stages, stored, form.split, form.instruction)
    cost = cost_of(target, made, product)
    return Taken(cost.busy / target.clock, cost.alone / target.clock, cost.resident)


class _Threads:
    """A leaf whose threads compute by themselves; all in cycles and slots of a thread's instruction."""

    def __init__(self, placed: Placed, low: GpuNest, target: Target) -> None:
        self.placed, self.low, self.target, self.nest, self.leaf = placed, low, target, placed.nest, placed.work.leaf
        self.far = target.beyond_local.latency * target.clock
        self.near = target.local.latency * target.clock
        self.outputs = prod(low.register.get(a, 1) for a in self.nest.axes)
        self.length = prod(float(placed.mean(a)) for a in self.nest.reduce_axes)

    def _latency(self, nodes: Sequence[Load]) -> float:
        """Cycles until what is read is there; what is read at places that are read first comes after those."""
        found = [0.0]
        for node in self._reads(nodes):
            if isinstance(node.source, Tensor) and node.source in self.placed.access.read:
                shared = self.placed.access.read[node.source].buffer.memory is Memory.SHARED
                chained = 1 + any(i.reads for i in node.indices)
                found.append(chained * (self.near if shared else self._from_afar(node)))
        return max(found)

    def _from_afar(self, node: Load) -> float:
        """Of a read of device memory: from the cache that all share the first time, then from the block's own, which is
        the same memory as what it shares."""
        moving = set(axes_of(*node.indices))
        sizes = {a: float(self.placed.mean(a)) for a in (*self.nest.axes, *self.nest.reduce_axes)}
        made = prod(n / (1 if a in moving else self.low.register.get(a, 1)) for a, n in sizes.items())
        (touch,) = self.placed.touches([node])
        line = self.target.beyond_local.transaction
        distinct = float(touch.bytes(sizes, line)[0]) / node.source.dtype.bytes
        first = min(1.0, distinct / max(1.0, made))
        return first * self.far + (1 - first) * prices.OWN_CACHE * self.near

    def _wavefronts(self, node: Load) -> float:
        """Slots of a warp's read or store: one for as many lanes as lie in a line, a few at least."""
        stride = self._stride(node)
        last = self.low.order[-1] if self.low.order else None
        places = self.low.places.get(last, 1) if last is not None else 1
        warp, line = self.target.warp, self.target.local.transaction
        runs = max(1.0, warp / max(1, places))
        if stride == 0:
            each = 1.0
        elif stride == 1:
            each = max(1.0, min(warp, places) * node.source.dtype.bytes / line)
        else:
            each = min(warp, places)
        return max(prices.LOAD_SLOTS, runs * each)

    def _stride(self, node: Load) -> int | None:
        """Elements between what neighbouring threads read."""
        if not self.low.order or any(i.reads for i in node.indices):
            return None
        lowered = self.placed.access.lower(node)
        if not isinstance(lowered, Load):
            return None
        terms = linear(simplify(flat_offset(lowered))).terms
        last = self.low.order[-1]
        if any(last in axes_of(t) and t is not var(last) for t in terms):
            return None
        return int(terms.get(var(last), 0))

    def _reads(self, nodes: Sequence[Load]) -> list[Load]:
        own = {*self.nest.accumulated, *(t for t in self.nest.reads() if self._is_own(t))}
        return [n for n in nodes if n.source not in own]

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether threads have it in their registers."""
        place = self.placed.access.read.get(tensor)
        return place is not None and place.buffer.memory is Memory.REGISTER

    # --- a position a thread, or a few threads a position

    def plain(self) -> tuple[float, float]:
        """Slots of all threads of a block, and cycles of a block alone."""
        low, leaf, nest = self.low, self.leaf, self.nest
        packet = leaf.lanes if nest.monoid is None and leaf.vector is not None else 1
        positions = low.count / packet
        rounds = max(1.0, ceil(positions * low.options.split / low.threads))
        at_once = max(1, low.options.at_once)
        values, epilogue = self._epilogue(packet)
        if nest.monoid is None:
            wait = self._latency(self._reads(loads(*nest.values)))
            alone = ceil(rounds / at_once) * wait + rounds * values + prices.CHAIN_CYCLES * values / max(1, packet)
            return self._all(positions * low.options.split) * (values + epilogue), alone
        steps, each, wait = self._steps()
        folded = log2(low.options.split) * prices.SHUFFLE_CYCLES if low.options.split > 1 else 0.0
        if low.options.split > self.target.warp:
            folded += 2 * prices.BARRIER_CYCLES
        waits = self._latency(self._reads(loads(*nest.values)))
        alone = rounds * (steps * wait + folded + waits + prices.CHAIN_CYCLES * values)
        slots = steps * each + values + epilogue + folded / prices.CHAIN_CYCLES
        return self._all(positions * low.options.split) * slots, alone

    def _all(self, threads: float) -> float:
        """Threads at work, in whole warps."""
        warp = self.target.warp
        return ceil(threads / warp) * warp

    def _epilogue(self, packet: int) -> tuple[float, float]:
        """Slots of a thread's results: what is computed, and what is read and stored."""
        nest = self.nest
        outputs = self.outputs * packet
        computed = outputs * _slots(*nest.values) + prices.DIVIDED_SLOTS * _divided(*self._reads(loads(*nest.values)))
        packets = max(1.0, outputs * nest.tensor.dtype.bytes / self.target.vector_bytes) if packet > 1 else self.outputs
        touched = [load(t, nest.place) for t in nest.stores if t in self.placed.access.read and not self._is_own(t)]
        touched += self._reads(loads(*nest.values))
        each = sum(map(self._wavefronts, touched)) if packet == 1 else prices.LOAD_SLOTS * len(touched)
        return computed, packets * each

    def _steps(self) -> tuple[float, float, float]:
        """Of a sum: a thread's steps, slots of one, and cycles until the next may begin."""
        nest, leaf = self.nest, self.leaf
        assert nest.monoid is not None
        wide = leaf.lanes if leaf.vector is not None and leaf.vector[0] == "r" else 1
        nodes = loads(*nest.elements)
        combined = _slots(*nest.monoid.combine) + _slots(*nest.elements)
        if is_window(leaf, nest):
            taps = extent_of(nest.named(leaf.order[-1]).extent)
            lanes = leaf.lanes
            reads = sum(float(reads_of_turn(n, nest, leaf, self.low.register)) for n in nodes)
            each = prices.LOAD_SLOTS * reads * max(1, lanes * 4 // 16) + taps * self.outputs * lanes * combined
            turns = self.length / taps
            return turns, each, max(self._latency(nodes), each / 2)
        steps = self.length / self.low.options.split / wide
        packets = sum(max(1.0, wide * n.dtype.bytes / self.target.vector_bytes) for n in nodes)
        moved = prices.LOAD_SLOTS * packets if wide > 1 else sum(self._wavefronts(n) for n in nodes)
        each = self.outputs * (moved + wide * combined) + prices.DIVIDED_SLOTS * _divided(*nodes)
        together = 1 if _chooses(*nest.elements) else max(prices.UNROLLED_LOADS, self.low.options.at_once)
        chain = prices.CHAIN_CYCLES * wide
        return steps, each, max(self._latency(nodes) / together, each / 2, chain)

    # --- operands through shared memory

    def contraction(self, contract: GpuContract) -> tuple[float, float]:
        low = self.low
        slots, fill = 0.0, 0.0
        together = 0.0  # latency of what is asked for at once
        for factor in contract.buffers:
            trips, each, chain = self._fill(contract, factor)
            latency = self._latency(loads(factor.value)) + chain
            slots += trips * each * low.threads
            fill += trips * each
            if _branches(factor.value):
                fill += trips * latency  # what is read behind a condition is stored before the next is asked for
            else:
                together = max(together, ceil(trips / prices.UNROLLED_LOADS) * latency)
        fill += together
        used = contract.step / low.options.split
        fragments = sum(prod(low.register.get(a, 1) for a in f.outputs) for f in contract.factors)
        direct = [f for f in contract.factors if f not in contract.buffers]
        step = self.outputs + prices.LOAD_SLOTS * fragments
        wait = max(self.near / 2, self.outputs + 2.0 * fragments)
        if direct:
            wait = max(wait, self._latency([n for f in direct for n in loads(f.value)]) / prices.UNROLLED_LOADS)
        using = used * wait
        takers = self._all(min(low.threads, low.count * low.options.split))
        slots += takers * used * step
        in_ring = max(using, fill / max(1, contract.stages - 1))
        part = in_ring if contract.stages > 1 else fill + using + prices.BARRIER_CYCLES
        values, moved = self._epilogue(1)
        folded = log2(low.options.split) * prices.SHUFFLE_CYCLES * self.outputs / 2 if low.options.split > 1 else 0.0
        ends = folded + prices.CHAIN_CYCLES * values + moved + self._latency(self._reads(loads(*self.nest.values)))
        first = fill if contract.stages > 1 else 0.0
        alone = low.rounds * (contract.steps * (part + prices.BARRIER_CYCLES) + ends + first)
        return low.rounds * (contract.steps * slots + takers * (values + moved + folded)), alone

    def _fill(self, contract: GpuContract, factor: Factor) -> tuple[int, float, float]:
        """Of a step's part of an operand: how many a thread brings, slots of each, and cycles until its place is
        known."""
        low = self.low
        axes = contract._ordered(factor)
        sizes: dict[Axis, int] = {a: low.places[a] * low.register.get(a, 1) for a in axes}
        wide = contract._packet(factor, axes, sizes)
        trips = -(-contract.step * prod(sizes.values()) // wide // low.threads)
        divisions = 2 * (len(axes) + len(self.nest.reduce_axes) - 1)  # of the number of a place into those of its axes
        index = divisions + _divided(*loads(factor.value))
        each = 2 * prices.LOAD_SLOTS + _slots(factor.value) + prices.DIVIDED_SLOTS * index
        return trips, each, prices.DIVIDED_CHAIN * index if _branches(factor.value) else 0.0


def _divided(*nodes: Load) -> int:
    """Divisions in the places of reads."""
    found = [n for node in nodes for n in walk(*node.indices) if isinstance(n, Op)]
    return sum(n.op.name in ("floordiv", "mod") for n in found)


def _branches(*roots: Expr) -> bool:
    """Whether reads stand behind conditions: none of a later turn is under way then."""
    return any(loads(*n.args[1:]) for n in walk(*roots) if is_op(n, "select"))


def _chooses(*roots: Expr) -> bool:
    """Whether conditions choose between reads."""
    return any(all(loads(a) for a in n.args[1:]) for n in walk(*roots) if is_op(n, "select"))
