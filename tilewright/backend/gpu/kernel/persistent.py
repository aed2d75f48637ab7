"""Steps of a recurrence inside one kernel: a block a multiprocessor, its part of the weights in shared memory.

A launch a step reads all weights from L2 again and starts the device anew. Blocks that stay meet at a barrier instead,
and read from each other no more than the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from tilewright.backend.gpu.boxes import block_of
from tilewright.backend.gpu.constants import STEPS_WORTH
from tilewright.backend.gpu.kernel.room import block_bytes, own_bytes
from tilewright.backend.gpu.kernel.shared_arena import whole_lines
from tilewright.backend.gpu.kernel.tile import choose_gpu_tile, start
from tilewright.backend.gpu.threads.plan import finished
from tilewright.backend.protocol import PersistentScan, StepKernel
from tilewright.ir.forms.compute import Scan
from tilewright.ir.forms.expr import axes_of
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target
from tilewright.target.instruction_sets import PACKET_BYTES
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.propagate import extent_of, reads_box
from tilewright.tile_graph.plan.form import Sizes
from tilewright.tile_graph.plan.leaf_form import ThreadForm

_MOST_TILES = 8  # cuts that are priced, those of most tiles first
_LEAST_STEPS = 4  # before them the copies are not paid back


def persistent_scan(kernels: Sequence[StepKernel], scan: Scan, context: NestContext) -> PersistentScan | None:
    """The steps walked by one kernel, where that is possible and predicted to be faster than a launch each."""
    target, steps = context.target, extent_of(scan.axis.extent)
    barrier = dict(target.barriers).get("grid")
    if barrier is None or len(kernels) != 1 or steps < _LEAST_STEPS:
        return None
    (step,) = kernels
    stores = {t for nest in step.nests for t in nest.stores}
    if not stores.issuperset(scan.following) or len(set(scan.following)) < len(scan.following):
        return None
    if step.choice.block or any(leaf.instruction is not None for leaf in step.leaves):
        return None
    best: PersistentScan | None = None
    for tile in _resident_tiles(step, target):
        found = _priced(step, tile, scan, context, barrier)
        if found is not None and (best is None or found.choice.seconds < best.choice.seconds):
            best = found
    return best if best is not None and best.choice.seconds < STEPS_WORTH * steps * step.choice.seconds else None


def _resident_tiles(step: StepKernel, target: Target) -> Iterator[Sizes]:
    """Cuts along the axes that the step's own tile cuts, with no more tiles than multiprocessors."""
    root = step.nests[-1]
    extents = {f"o{i}": max(1, extent_of(a.extent)) for i, a in enumerate(root.axes)}
    names = [name for name, _ in step.choice.tile]
    sizes = [[min(extents[n], size << k) for k in range((extents[n] - 1) // size + 1) if size << k < 2 * extents[n]]
             for n, size in step.choice.tile]  # fmt: skip
    found = {}
    for cut in product(*sizes):
        tiles = prod(-(-extents[n] // size) for n, size in zip(names, cut, strict=True))
        if tiles <= target.units:
            found[tuple(zip(names, cut, strict=True))] = tiles
    yield from sorted(found, key=lambda cut: -found[cut])[:_MOST_TILES]


def _priced(step: StepKernel, tile: Sizes, scan: Scan, context: NestContext, barrier: float) -> PersistentScan | None:
    target, steps = context.target, extent_of(scan.axis.extent)
    root = step.nests[-1]
    whole = {f"o{i}": max(1, extent_of(a.extent)) for i, a in enumerate(root.axes)}
    alone = choose_gpu_tile(step.nests, step.leaves, context, step.stored, {**whole, **dict(tile)},
                            most_threads=target.max_threads)  # fmt: skip
    if alone is None:
        return None
    kept = _kept(step, tile, scan, context)
    size = sum(bytes_ for bytes_, _ in kept.values())
    outer = target.beyond_local
    # weights that stay are read from shared memory instead
    working = max(alone.seconds - start(target) - size / outer.bandwidth, outer.latency)
    each = working + size / target.local.bandwidth + barrier
    before = start(target) + size / target.main.bandwidth
    chosen = replace(alone, seconds=before + steps * each, footprint=alone.footprint + size, resident=True)
    return PersistentScan(chosen, tuple((tensor, lanes) for tensor, (_, lanes) in kept.items()))


def _kept(step: StepKernel, tile: Sizes, scan: Scan, context: NestContext) -> dict[Tensor, tuple[int, int]]:
    """Constants that a block reads at every step, as many as there is room for, with the bytes of its part and how many
    neighbours are copied at a time."""
    boxes, target = block_of(step.nests, dict(tile), None, 0).boxes, context.target
    leaves = {n: finished(leaf, n, boxes[n], {}) for n, leaf in zip(step.nests, step.leaves, strict=True)}
    own = {n: own_bytes(n, leaf, boxes[n], target.max_threads, target.warp) for n, leaf in leaves.items()}
    shares = {n for n, leaf in leaves.items() if not leaf.options(ThreadForm).step}
    held = {t: prod(int(part.size) for part in boxes[n]) * t.dtype.bytes
            for n in step.nests for t in n.stores if t not in step.stored}  # fmt: skip
    sizes: dict[Tensor, int] = {}
    packets: dict[Tensor, int] = {}
    for nest in step.nests:
        moving = {n.source for n in (*nest.element_loads, *nest.value_loads) if scan.axis in axes_of(*n.indices)}
        wanted = {t for t in nest.reads() if t in context.constants and t.rank and t not in moving}
        for tensor, box in reads_box(nest, boxes[nest], {}, wanted).items():
            size = whole_lines(prod(int(part.size) for part in box) * tensor.dtype.bytes)
            sizes[tensor] = max(size, sizes.get(tensor, 0))
            row, wide = int(box[-1].size), PACKET_BYTES // tensor.dtype.bytes
            packets[tensor] = wide if row == tensor.shape[-1] and row % wide == 0 else 1
    room = target.local.capacity - block_bytes(step.nests, held, own, at_once=True, unshared=shares)
    kept: dict[Tensor, tuple[int, int]] = {}
    for tensor, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= room:
            kept[tensor] = size, packets[tensor]
            room -= size
    return kept
