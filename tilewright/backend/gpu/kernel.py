"""Lowers one kernel of a Plan for a GPU: a block a tile, intermediates in shared memory, barriers where nests meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewright.backend.gpu.nest import GpuNest
from tilewright.ir.expr import Axis
from tilewright.ir.loops import Barrier, Buffer, For, ForKind, Kernel, Memory, Scope, Stmt
from tilewright.ir.tensor import Layout, Tensor
from tilewright.lower.access import Access
from tilewright.lower.kernel import Binding, ScanView, bind_reads, bind_writes, grid, tile_count
from tilewright.lower.nesting import alloc
from tilewright.lower.register_block import Names
from tilewright.target import Target
from tilewright.tile_graph.nest import Nest
from tilewright.tile_graph.plan import KernelPlan
from tilewright.tile_graph.streams import Phases, stream_phases


@dataclass
class _Hazards:
    """Buffers touched since the last barrier; tells when the next nest must wait."""

    read: set[Buffer] = field(default_factory=set)
    written: set[Buffer] = field(default_factory=set)

    def meets(self, reads: set[Buffer], writes: set[Buffer]) -> bool:
        return bool(self.written & (reads | writes) or self.read & writes)

    def add(self, reads: set[Buffer], writes: set[Buffer]) -> None:
        self.read |= reads
        self.written |= writes

    def clear(self) -> None:
        self.read.clear()
        self.written.clear()


class _Block:
    """What one block does, nest after nest."""

    def __init__(self, phases: Phases, access: Access, thread: Axis) -> None:
        self.phases = phases
        self.access = access
        self.thread = thread
        self.names = Names()
        self.shared: list[Buffer] = []
        self.hazards = _Hazards()

    def statements(self) -> tuple[Stmt, ...]:
        phases = self.phases
        body = self._nests(phases.before)
        if phases.loop is not None:
            if self._loop_meets():
                body.append(Barrier(Scope.BLOCK))
                self.hazards.clear()
            inner = self._nests(phases.inside)
            # the next block of the stream writes what this one still reads
            inner.append(Barrier(Scope.BLOCK))
            self.hazards.clear()
            body.append(For(phases.loop, ForKind.SERIAL, tuple(inner)))
        body.extend(self._nests(phases.after))
        return tuple(body)

    def _nests(self, nests: Sequence[Nest]) -> list[Stmt]:
        body: list[Stmt] = []
        for nest in nests:
            reads, writes = self._touched(nest)
            if self.hazards.meets(reads, writes):
                body.append(Barrier(Scope.BLOCK))
                self.hazards.clear()
            phases = self.phases
            lowered = GpuNest(nest, phases.plans[nest], phases.boxes[nest], dict(phases.reduce_boxes.get(nest, {})),
                              self.access, self.names, self.thread, self.shared)  # fmt: skip
            body.extend(lowered.statements())
            self.hazards.add(reads, writes)
        return body

    def _loop_meets(self) -> bool:
        touched = [self._touched(n) for n in self.phases.inside]
        return any(self.hazards.meets(reads, writes) for reads, writes in touched)

    def _touched(self, nest: Nest) -> tuple[set[Buffer], set[Buffer]]:
        reads = {self.access.read[t].buffer for t in nest.reads()}
        writes = {p.buffer for t in nest.stores for p in self.access.write[t]}
        return reads, writes


def lower_gpu_kernel(
    plan: KernelPlan, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None, target: Target
) -> Binding:
    """One GPU kernel: blocks over tiles, shared buffers, then the threads of a block."""
    tile = Axis("tile", tile_count(nests[-1], plan))
    phases = stream_phases(plan, nests, grid(nests[-1], plan, tile))
    access = Access()
    params: list[Buffer] = []
    arguments: list[str] = []
    kept: list[Buffer] = []
    bind_reads(phases, access, params, arguments, layout)
    bind_writes(phases, access, params, arguments, kept, layout, scan, Memory.SHARED)
    thread = Axis("thread", plan.block_threads)
    block = _Block(phases, access, thread)
    inside = (For(thread, ForKind.THREAD, block.statements()),)
    whole = For(tile, ForKind.BLOCK, alloc([*kept, *block.shared], inside))
    return Binding(Kernel(plan.name, tuple(params), (whole,), (), scan.step if scan else None), tuple(arguments))
