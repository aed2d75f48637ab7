"""Plans changed by hand: other parts, other leaves, other steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from tilewright.ir.forms.compute import Map, Program, Reduce, all_computes
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile, cut_axes


def resized(kernel: Tile, program: Program, sizes: Mapping[str, int]) -> Tile:
    """A kernel handed out in parts of these sizes, by the axes of its last result."""
    last = kernel.leaves[-1]
    core = all_computes(program)[last.core]
    assert isinstance(core, Map | Reduce)
    extents = {f"o{i}": max(1, extent_of(a.extent)) for i, a in enumerate(core.axes)}
    axes, parts = cut_axes(last.tensor, extents, sizes)
    return replace(kernel, axes=axes, sizes=parts)


def with_kernels(plan: Plan, kernels: Iterable[Tile]) -> Plan:
    """The plan with these in the place of its kernels of the same names."""
    return plan.with_kernels({kernel.name: kernel for kernel in kernels})


def map_leaves(plan: Plan, change: Callable[[Leaf], Leaf]) -> Plan:
    return replace(plan, body=plan.body.map_leaves(change))


def map_tiles(plan: Plan, change: Callable[[Tile], Tile]) -> Plan:
    """The plan with every Tile changed, those inside before those around them."""

    def changed(tile: Tile) -> Tile:
        return change(replace(tile, body=tuple(changed(n) if isinstance(n, Tile) else n for n in tile.body)))

    return replace(plan, body=changed(plan.body))


def step_kernels(plan: Plan) -> list[Tile]:
    """Kernels that run once in every step of a Scan."""
    return [kernel for kernel, steps in plan.launches() if steps is not None]
