"""What a Scan's repeated kernels ask of the caches: reads that are new at every step, weights walked to and fro, and
the time of a step when the step before left them where they fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilewright.backend.cpu.constants import FULL, NEAR_FULL, OVERFULL, SHARE_OF_L1
from tilewright.backend.cpu.kernel.tile import predict
from tilewright.backend.protocol import StepKernel, StepPlan
from tilewright.ir.forms.compute import Scan
from tilewright.ir.forms.expr import Axis, axes_of, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.cached import Cached
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.idle import idle_step
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, box_elements, extent_of, propagate, reads_box
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.plan.form import Sizes


def plan_steps(
    kernels: Sequence[StepKernel], scan: Scan, context: NestContext
) -> tuple[list[StepPlan], tuple[str, ...]]:
    """The kernels of a step that knows that the step before left the caches warm, and what stays in them."""
    values = context.constants if isinstance(context.constants, Mapping) else {}
    changed = []
    for kernel in kernels:
        pairs = zip(kernel.leaves, kernel.nests, strict=True)
        leaves = tuple(
            replace(leaf, alternate=is_walked_to_and_fro(nest, context), idle=idle_step(nest, scan, values))
            for leaf, nest in pairs
        )
        changed.append(replace(kernel, leaves=leaves))
    times = step_seconds(changed, scan, context)
    early = [asked_early(k.nests, k.choice.tile, scan, context) for k in changed]
    plans = [StepPlan(k.leaves, t, e) for k, t, e in zip(changed, times, early, strict=True)]
    return plans, kept_near(changed, context)


def step_seconds(kernels: Sequence[StepKernel], scan: Scan, context: NestContext) -> tuple[float, ...]:
    """The time of each kernel in a step that follows another; equal Scans share the work."""
    stored = {t for k in kernels for t in k.stored}
    nests = [n for k in kernels for n in k.nests]
    shapes = tuple(
        (len(k.nests), k.choice, tuple(replace(p, tensor="", core="", epilogue=()) for p in k.leaves)) for k in kernels
    )
    computed = signature(
        nests,
        lambda t: (t in stored, t in context.constants, t in context.staged, context.layout(t), context.stepped.get(t)),
    )
    key = (computed, shapes, scan.axis.extent, context.weights_fit)
    known = context.memo.steps
    if key not in known:
        known[key] = tuple(_seconds(k, repeated(kernels, scan, context)) for k in kernels)
    return known[key]


def repeated(kernels: Sequence[StepKernel], scan: Scan, context: NestContext) -> NestContext:
    """What is known around the kernels of a step that follows another: where what they read is."""
    return replace(context, cached={**_new(kernels, scan, context), **_cached(kernels, context)})


def _seconds(kernel: StepKernel, context: NestContext) -> float:
    if kernel.choice.block:
        return kernel.choice.seconds
    sizes = {a: np.array([n]) for a, n in _sizes(kernel).items()}
    return float(predict(kernel.nests, kernel.leaves, context, kernel.stored, sizes).seconds[0])


def _sizes(kernel: StepKernel) -> dict[Axis, int]:
    """The output tile of a kernel, by the root's axes."""
    tile = dict(kernel.choice.tile)
    return {a: tile.get(f"o{n}", max(1, extent_of(a.extent))) for n, a in enumerate(kernel.nests[-1].axes)}


def _cached(kernels: Sequence[StepKernel], context: NestContext) -> dict[Tensor, Cached]:
    """Where weights come from at each step: the nearest level that holds what a core reads from use to use."""
    target = context.target
    weights = {t for k in kernels for n in k.nests for t in n.reads() if t in context.constants}
    own: dict[Tensor, float] = {}  # bytes of each that one core reads in a step
    for kernel in kernels:
        turns = -(-kernel.choice.tiles // target.units)
        boxes = propagate(kernel.nests, _any_tile(kernel.nests[-1], kernel.choice.tile))
        for nest in kernel.nests:
            for tensor, box in reads_box(nest, boxes[nest], {}, weights).items():
                read = min(_bytes(tensor), turns * int(box_elements(box)) * tensor.dtype.bytes)
                own[tensor] = max(own.get(tensor, 0), read)
    held = sum(own.values())
    alternating = any(n.alternate for k in kernels for n in k.leaves)
    nearest, outer = target.nearest, target.shared_cache
    near = _found(held, nearest.capacity * NEAR_FULL, alternating)
    level = max(0.0, _found(held, target.local.capacity * FULL, alternating) - near)
    everything = sum(_bytes(t) for t in weights)
    far = outer if outer is not None and everything <= outer.capacity * outer.shared_by // 2 else target.main
    return dict.fromkeys(weights, Cached(near, level, 1 / far.bandwidth))


def _new(kernels: Sequence[StepKernel], scan: Scan, context: NestContext) -> dict[Tensor, Cached]:
    """What is read at the step: a part that no step read before, asked for early from wherever it is."""
    read = [n for k in kernels for nest in k.nests for n in nest.loads() if scan.axis in axes_of(*n.indices)]
    level = context.target.local
    part = 1 / max(1, extent_of(scan.axis.extent))
    return {n.source: Cached(0.0, 1.0, 1 / level.bandwidth, part) for n in read}


def _found(held: float, room: float, alternating: bool) -> float:
    """The part of what is read again and again that a cache still has."""
    if held <= room:
        return 1.0
    if alternating:  # at the end of a step it begins with what it used last
        return room / held
    return max(0.0, OVERFULL - held / room) / (OVERFULL - 1)


def kept_near(kernels: Sequence[StepKernel], context: NestContext) -> tuple[str, ...]:
    """Weights that a Scan's steps leave in the tile level, each tile its even part in one piece."""
    if len(kernels) != 1 or kernels[0].choice.block:
        return ()
    (kernel,) = kernels
    tiles = kernel.choice.tiles
    boxes = propagate(kernel.nests, _any_tile(kernel.nests[-1], kernel.choice.tile))
    weights = {t for n in kernel.nests for t in n.reads() if t in context.constants}
    found: dict[Tensor, int] = {}
    for nest in kernel.nests:
        for tensor, box in reads_box(nest, boxes[nest], {}, weights).items():
            outermost = context.layout(tensor).order[0].axis
            cut = [d for d, part in enumerate(box) if int(part.size) < part.extent]
            if _bytes(tensor) <= context.target.nearest.capacity:
                continue
            if cut != [outermost] or int(box[outermost].size) * tiles != box[outermost].extent or tensor in found:
                return ()
            found[tensor] = _bytes(tensor) // tiles
    if not found or not 1 < tiles <= context.target.units:
        return ()
    fits = sum(found.values()) <= context.target.local.capacity * FULL
    return tuple(sorted(t.name for t in found)) if fits else ()


def asked_early(nests: Sequence[Nest], tile: Sizes, scan: Scan, context: NestContext) -> tuple[str, ...]:
    """Tensors to ask for early, in no near cache yet. Carried over, and needed at once: other tiles wrote most of it,
    and all lines travel together instead of one after the other. Indexed by the step, and needed only by a later nest:
    the first leaves the time to bring it. Carried over, needed only by a later nest, and pushed out by the first."""
    at_once = set(nests[0].reads())
    wanted = {n.source for nest in nests for n in nest.loads() if scan.axis in axes_of(*n.indices)} - at_once
    if is_walked_to_and_fro(nests[0], context):
        wanted |= {t for nest in nests[1:] for t in nest.reads() if t in scan.carry} - at_once
    carried = at_once & set(scan.carry) if tile else set()
    if not wanted | carried:
        return ()
    boxes = propagate(nests, _any_tile(nests[-1], tile))
    sizes: dict[Tensor, int] = {}
    for nest in nests:
        for tensor, box in reads_box(nest, boxes[nest], {}, wanted | carried).items():
            sizes[tensor] = max(sizes.get(tensor, 0), int(box_elements(box)) * tensor.dtype.bytes)
    room = context.target.nearest.capacity // SHARE_OF_L1
    kept = [t for t, size in sizes.items() if size <= room]
    return tuple(t.name for t in sorted(kept, key=lambda t: (t not in carried, t.name)))


def is_walked_to_and_fro(nest: Nest, context: NestContext) -> bool:
    """A contraction whose weights are more than the nearest cache holds meets, when it turns round at the end of a
    step, the weights it used last."""
    if not is_contraction(nest):
        return False
    weights = sum(_bytes(t) for t in nest.reads() if t in context.constants)
    return weights > context.target.nearest.capacity


def _bytes(tensor: Tensor) -> int:
    return tensor.most_bytes


def _any_tile(root: Nest, tile: Sizes) -> Box:
    sizes: Mapping[str, int] = dict(tile)
    ranges = []
    for number, axis in enumerate(root.axes):
        extent = extent_of(axis.extent)
        size = min(sizes.get(f"o{number}", extent), extent)
        ranges.append(Range(var(Axis(f"origin_{number}", max(1, extent - size + 1))), size, extent))
    return tuple(ranges)
