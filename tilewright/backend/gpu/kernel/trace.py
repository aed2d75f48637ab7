"""What the leaf of a GPU's block loads and stores, thread by thread, and what a block touches of device memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod

from tilewright.backend.gpu.kernel.busy import LeafAround, Taken, taken
from tilewright.backend.gpu.threads.contract import GpuContract
from tilewright.backend.gpu.threads.nest import GpuNest
from tilewright.ir.analysis.products import Factor
from tilewright.ir.forms.expr import Axis, Load, loads
from tilewright.ir.forms.loops import Buffer, Memory
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.placed import Placed
from tilewright.lower.register_block import BufferNames
from tilewright.tile_graph.algebra.nest import moves
from tilewright.tile_graph.algebra.propagate import Size
from tilewright.tile_graph.plan.form import Tile
from tilewright.tile_graph.traffic.traffic import Bytes, LeafTrace


def gpu_walk(
    lanes: Tile, staged: Callable[[Buffer], None], around: LeafAround | None = None
) -> Callable[[Placed], LeafTrace]:
    """The walk of a leaf that these threads take up; `staged` is told of the buffers that it passes operands in. What
    is `around` the leaves tells what they take."""
    return lambda placed: _Leaf(placed, lanes, staged, around).walk()


class _Leaf:
    def __init__(
        self, placed: Placed, lanes: Tile, staged: Callable[[Buffer], None], around: LeafAround | None
    ) -> None:
        work = placed.work
        self.around = around
        self.placed = placed
        self.nest = work.nest
        self.low = GpuNest(work.nest, work.leaf, work.box, dict(work.limits), placed.access, BufferNames(),
                           Axis("thread", lanes.count), warp=lanes.warp)  # fmt: skip
        self.contract = GpuContract(self.low) if self.low.options.step else None
        for buffer in self.low.shared:
            staged(buffer)
        self.loaded: Bytes = {}
        self.stored: Bytes = {}

    def walk(self) -> LeafTrace:
        nest, placed = self.nest, self.placed
        own = set(nest.accumulated)
        outside = [n for n in nest.loads() if n.source not in own]
        if self.contract is not None:
            self._steps(self.contract)
        else:
            for node in loads(*nest.elements):
                self._add(self.loaded, node, self._points() * self._length())
        for node in (*loads(*nest.values), *loads(*nest.initial)):
            if node.source not in own:
                self._add(self.loaded, node, self._once(node))
        for tensor in nest.stores:
            for place in placed.access.write[tensor]:
                if place.buffer.memory is Memory.REGISTER:
                    continue
                key = placed.key(place.buffer)
                self.stored[key] = self.stored.get(key, 0.0) + self._points() * tensor.dtype.bytes
        sizes = {a: placed.mean(a) for a in (*nest.axes, *nest.reduce_axes)}
        touches = [(t, 0) for t in (*placed.touches(outside), *placed.stores())]
        # shared memory is no part of a cache
        far = [(t, first) for t, first in touches if not isinstance(t.buffer, Buffer)]
        time = Taken(0.0, 0.0) if self.around is None else self._taken(self.around)
        return LeafTrace([sizes], [], far, placed.grows, {}, placed.origins, {}, self.loaded, self.stored, time.busy,
                         time.alone, time.resident)  # fmt: skip

    def _taken(self, around: LeafAround) -> Taken:
        moved = [float(n) for found in (self.loaded, self.stored) for b, n in found.items()
                 if isinstance(b, Buffer) and b.memory is Memory.SHARED]  # fmt: skip
        return taken(self.placed, self.low, self.contract, sum(moved), around)

    def _add(self, to: Bytes, node: Load, count: Size) -> None:
        assert isinstance(node.source, Tensor)
        buffer = self.placed.access.read[node.source].buffer
        if buffer.memory is Memory.REGISTER:
            return
        key = self.placed.key(buffer)
        to[key] = to.get(key, 0.0) + count * node.source.dtype.bytes

    def _points(self) -> Size:
        total: Size = 1.0
        for axis in self.nest.axes:
            total = total * self.placed.mean(axis)
        return total

    def _length(self) -> Size:
        total: Size = 1.0
        for axis in self.nest.reduce_axes:
            total = total * self.placed.mean(axis)
        return total

    def _once(self, node: Load) -> Size:
        """How often the results of a tile read something: once a register tile where it does not move inside."""
        total: Size = 1.0
        for axis in self.nest.axes:
            share = 1 if moves(node, axis) else self.low.register.get(axis, 1)
            total = total * self.placed.mean(axis) / share
        return total

    # --- operands in steps

    def _steps(self, contract: GpuContract) -> None:
        length, low = self._length(), self.low
        # threads whose register tile begins inside
        positions: Size = 1.0
        for axis in self.nest.axes:
            positions = positions * (low.places[axis] if axis in low.register else self.placed.mean(axis))
        for factor in contract.factors:
            axes = contract._ordered(factor)
            each = prod(low.register.get(a, 1) for a in axes)
            buffer = contract.buffers.get(factor)
            if buffer is None:
                for node in loads(factor.value):
                    self._add(self.loaded, node, positions * length * each)
                continue
            size = {a: low.places[a] * low.register.get(a, 1) for a in axes}
            for node in loads(factor.value):
                self._add(self.loaded, node, low.rounds * length * self._filled(contract, factor, axes, size))
            element = buffer.dtype.bytes
            key: Hashable = buffer
            filled = low.rounds * length * prod(size.values()) * element
            self.stored[key] = self.stored.get(key, 0.0) + filled
            self.loaded[key] = self.loaded.get(key, 0.0) + positions * length * each * element

    def _filled(self, contract: GpuContract, factor: Factor, axes: list[Axis], size: dict[Axis, int]) -> Size:
        """Elements of an operand that a step reads for each place of the sum."""
        if contract._packet(factor, axes, size) == 1:
            return float(prod(size.values()))
        total: Size = 1.0
        for axis in axes:  # packets outside of the tile are not read
            total = total * (self.placed.mean(axis) if self.low.may_leave(axis) else size[axis])
        return total


MEMORIES = (frozenset({Memory.SHARED}), frozenset({Memory.GLOBAL}))  # of the levels next to registers
