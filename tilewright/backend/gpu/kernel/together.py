"""Kernels of a GPU that share a launch: blocks of all of them at a time, one start instead of several.

A launch has one number of threads a block and one amount of shared memory and registers, the most that any of its
kernels needs. So kernels share one where every block finds a place at once all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.backend.gpu.kernel.tile import BESIDE_BYTES, start
from tilewright.backend.gpu.threads.in_step import with_stored_sums
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.runtime.gpu_model import MOST_SPREAD
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Tile, UnitBarrier
from tilewright.tile_graph.plan.leaf_form import ThreadForm


def share_launch(kernels: Sequence[Tile], target: Target) -> tuple[Tile, ...] | None:
    """The kernels with as many threads each; None where they are better started one by one."""
    threads = max(_lanes(k).count for k in kernels)
    made = []
    for kernel in kernels:
        lanes = _lanes(kernel)
        inside = [n for n in kernel.walk() if isinstance(n, Tile)]
        if any(isinstance(n, UnitBarrier) for tile in inside for n in tile.body):
            return None
        is_bound = any(t.over == "warps" for t in inside)
        if lanes.count != threads and (is_bound or any(threads % x.options(ThreadForm).split for x in kernel.leaves)):
            return None
        if lanes.count != threads:
            kernel = with_stored_sums(kernel)
        made.append(replace(kernel, body=tuple(replace(n, count=threads) if n is lanes else n for n in kernel.body)))
    return tuple(made) if sum(k.tiles for k in kernels) <= target.units * _places(kernels, threads, target) else None


def launch_seconds(kernels: Sequence[Tile], target: Target) -> float:
    """One start, then as long as the longest, or as all have to do: one waits while another is at work."""
    once = min(start(target), *(k.estimate.seconds for k in kernels))
    alone = [k.estimate.seconds - once for k in kernels]
    busy = sum(k.estimate.busy or s * min(1.0, k.tiles / target.units) for s, k in zip(alone, kernels, strict=True))
    return once + max(busy, *alone)


def _places(kernels: Sequence[Tile], threads: int, target: Target) -> int:
    """Blocks of a launch that a multiprocessor runs at a time, and that start early."""
    if any(leaf.instruction in FORMS for k in kernels for leaf in k.leaves):
        return 1  # fragments fill the registers, and operands in their stages shared memory
    held = max(k.estimate.footprint for k in kernels)
    return min(MOST_SPREAD, target.resident_threads // threads, target.local.capacity // (held + BESIDE_BYTES))


def _lanes(kernel: Tile) -> Tile:
    (lanes,) = (n for n in kernel.body if isinstance(n, Tile) and n.over == "lanes")
    return lanes
