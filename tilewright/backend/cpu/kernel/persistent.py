"""Steps of a recurrence inside one kernel of a CPU: each core walks all of them on its own part of the state.

A call a step ends in a barrier, which costs more than a short step takes. Where no part of the state is read by
another core than the one that left it, nobody waits for anybody, and the state stays in the nearest cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.backend.cpu.kernel.steps import repeated, step_seconds
from tilewright.backend.cpu.kernel.tile import choose_tile
from tilewright.backend.protocol import PersistentScan, StepKernel
from tilewright.ir.forms.compute import Scan
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.own_state import own_axes
from tilewright.tile_graph.algebra.propagate import extent_of


def persistent_scan(kernels: Sequence[StepKernel], scan: Scan, context: NestContext) -> PersistentScan | None:
    """The steps walked by one kernel, where that is possible and predicted to be faster than a call each."""
    if len(kernels) != 1 or not scan.carry:  # steps without a state are no recurrence: nothing is handed on inside
        return None
    (step,) = kernels
    stores = {t for nest in step.nests for t in nest.stores}
    if not stores.issuperset(scan.following) or len(set(scan.following)) < len(scan.following):
        return None
    choice = step.choice
    if choice.block or choice.step or choice.inner or any(leaf.instruction is not None for leaf in step.leaves):
        return None
    # weights of products stay in the caches of the cores that share them out, step by step
    if any(is_contraction(nest) for nest in step.nests):
        return None
    own = own_axes(step.nests, scan)
    fixed = {f"o{i}": max(1, extent_of(a.extent)) for i, a in enumerate(step.nests[-1].axes) if f"o{i}" not in own}
    steps, target = max(1, extent_of(scan.axis.extent)), context.target
    # a kernel is started and its tiles are taken once for all steps
    shared = replace(target, kernel_cost=target.kernel_cost / steps, tile_cost=target.tile_cost / steps)
    around = replace(repeated(kernels, scan, context), target=shared)
    walked = choose_tile(step.nests, step.leaves, around, step.stored, fixed)
    (called,) = step_seconds(kernels, scan, context)
    if walked is None or walked.seconds >= called:
        return None
    return PersistentScan(replace(walked, seconds=steps * walked.seconds), (), meets=False)
