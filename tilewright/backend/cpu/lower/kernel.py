"""Lowers one kernel of a Plan for a CPU: a parallel loop over tiles around the nests of a tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.backend.cpu.lower.instruction import CpuInstruction
from tilewright.backend.cpu.lower.nest import CpuNest
from tilewright.backend.cpu.lower.padding import filled_up
from tilewright.backend.cpu.lower.prefetch import with_prefetches
from tilewright.backend.cpu.lower.window import CpuWindow
from tilewright.intrinsics.cpu import WINDOW_DOTS
from tilewright.ir.expr import Axis
from tilewright.ir.loops import Alloc, Buffer, For, ForKind, Kernel, Stmt
from tilewright.ir.tensor import Layout, Tensor
from tilewright.lower.access import Access
from tilewright.lower.kernel import Binding, ScanView, bind_reads, bind_writes, grid, tile_count
from tilewright.lower.register_block import Names
from tilewright.target import Target
from tilewright.tile_graph.nest import Nest
from tilewright.tile_graph.plan import KernelPlan
from tilewright.tile_graph.streams import Phases, stream_phases


def lower_cpu_kernel(
    plan: KernelPlan, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None, target: Target
) -> Binding:
    """One CPU kernel: a parallel loop over tiles around the nests of a tile."""
    tile = Axis("tile", tile_count(nests[-1], plan))
    box = grid(nests[-1], plan, tile)
    phases = stream_phases(plan, nests, box)
    access = Access()
    params: list[Buffer] = []
    arguments: list[str] = []
    scratch: list[Buffer] = []
    bind_reads(phases, access, params, arguments, layout)
    bind_writes(phases, access, params, arguments, scratch, layout, scan)
    names = Names()
    step = scan.step if scan else None
    body: list[Stmt] = []
    for part in phases.before:
        body.extend(_nest(part, phases, access, names, step))
    if phases.loop is not None:
        inner = [s for part in phases.inside for s in _nest(part, phases, access, names, step)]
        body.append(For(phases.loop, ForKind.SERIAL, tuple(inner)))
    for part in phases.after:
        body.extend(_nest(part, phases, access, names, step))
    wrapped = with_prefetches(body, plan.prefetch, phases, access)
    for buffer in reversed(scratch):
        wrapped = (Alloc(buffer, wrapped),)
    wrapped = (For(tile, ForKind.PARALLEL, wrapped),)
    return Binding(Kernel(plan.name, tuple(params), wrapped, (), step), tuple(arguments))


def _nest(nest: Nest, phases: Phases, access: Access, names: Names, step: Axis | None) -> tuple[Stmt, ...]:
    instruction = phases.plans[nest].instruction
    kind = CpuWindow if instruction in WINDOW_DOTS else CpuInstruction if instruction else CpuNest
    plan, box = phases.plans[nest], phases.boxes[nest]
    made = kind(nest, plan, box, phases.reduce_boxes.get(nest, {}), access, names, step).statements()
    return (*made, *filled_up(nest, box, access, plan.lanes))
