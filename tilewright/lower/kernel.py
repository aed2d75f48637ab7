"""Lowers one kernel of a Plan: the grid of tiles, a place for every tensor, then its nests in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from tilewright.ir.compute import Compute, Map
from tilewright.ir.expr import Axis, Expr, const, var
from tilewright.ir.loops import Buffer, Kernel, Memory
from tilewright.ir.simplify import simplify
from tilewright.ir.tensor import Layout, Tensor
from tilewright.lower.access import Access, Place, global_place
from tilewright.tile_graph.nest import Nest, build_nest
from tilewright.tile_graph.plan import KernelPlan
from tilewright.tile_graph.propagate import Box, Range, extent_of
from tilewright.tile_graph.streams import Phases


@dataclass(frozen=True)
class Binding:
    """A kernel and the tensors its parameters stand for; a write of `prefix` goes below a leading step index."""

    kernel: Kernel
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class ScanView:
    """How a kernel inside a Scan sees it: the step, and outputs that keep every step."""

    step: Axis
    stacked: Mapping[Tensor, Tensor]  # body tensor -> output with the step as first axis


def plan_nests(plan: KernelPlan, computes: Mapping[str, Compute]) -> list[Nest]:
    """The nests a kernel plan names."""
    maps = {}
    for edge in plan.edges:
        if edge.mode == "recompute":
            compute = computes[edge.tensor]
            assert isinstance(compute, Map)
            maps[compute.output] = compute
    nests = []
    for part in plan.nests:
        epilogue = [computes[name] for name in part.epilogue]
        nests.append(build_nest(computes[part.core], epilogue, maps))  # type: ignore[arg-type]
    return nests


def grid(root: Nest, plan: KernelPlan, tile: Axis) -> Box:
    """The box of the root that the flat tile index stands for; the last axis moves fastest."""
    position: Expr = var(tile)
    ranges: list[Range] = []
    for axis, (size, count) in reversed(list(zip(root.axes, _cuts(root, plan), strict=True))):
        extent = extent_of(axis.extent)
        if count == 1:
            ranges.append(Range(const(0), extent, extent))
            continue
        ranges.append(Range(simplify((position % count) * size), size, extent))
        position = simplify(position // count)
    return tuple(reversed(ranges))


def tile_count(root: Nest, plan: KernelPlan) -> int:
    return prod(count for _, count in _cuts(root, plan))


def _cuts(root: Nest, plan: KernelPlan) -> list[tuple[int, int]]:
    """Tile size and number of tiles along each axis of the root; an empty axis is one tile of nothing."""
    sizes = dict(plan.tile)
    cuts = []
    for number, axis in enumerate(root.axes):
        extent = max(1, extent_of(axis.extent))
        size = min(sizes.get(f"o{number}", extent), extent)
        cuts.append((size, -(-extent // size)))
    return cuts


def bind_reads(
    phases: Phases, access: Access, params: list[Buffer], arguments: list[str], layout: Callable[[Tensor], Layout]
) -> None:
    inside = {t for n in phases.nests for t in n.stores}
    for nest in phases.nests:
        for tensor in nest.reads():
            if tensor in inside or tensor in access.read:
                continue
            place = global_place(tensor, layout(tensor), f"p{len(params)}")
            access.read[tensor] = place
            params.append(place.buffer)
            arguments.append(tensor.name)


def bind_writes(
    phases: Phases, access: Access, params: list[Buffer], arguments: list[str],
    scratch: list[Buffer], layout: Callable[[Tensor], Layout], scan: ScanView | None,
    memory: Memory = Memory.SCRATCH,
) -> None:  # fmt: skip
    for nest in phases.nests:
        for tensor in nest.stores:
            if tensor in access.read:
                continue
            if phases.plans[nest].level != "DRAM":
                box = phases.boxes[nest]
                order = layout(tensor)
                shape = order.storage_shape(tuple(min(int(r.size), r.extent) for r in box))
                buffer = Buffer(f"s{len(scratch)}", shape, tensor.dtype, memory)
                scratch.append(buffer)
                access.put(tensor, Place(buffer, order, tuple(r.low for r in box)))
                continue
            place = global_place(tensor, layout(tensor), f"p{len(params)}")
            stacked = scan.stacked.get(tensor) if scan else None
            access.put(tensor, place)
            params.append(place.buffer)
            arguments.append(tensor.name)
            if stacked is not None and scan is not None:
                out = global_place(stacked, layout(stacked), f"p{len(params)}")
                access.write[tensor].append(Place(out.buffer, Layout.natural(tensor.rank), (), (var(scan.step),)))
                params.append(out.buffer)
                arguments.append(stacked.name)
