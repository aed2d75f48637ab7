"""A second tile inside a kernel's: nests that follow each other walked in parts of it, so that what passes between them
stays at a nearer level (Welder's recursion, one level up from the tile that is chosen).

Parts are rows of the tile as the root's axes lie: whole along the inner axes, one element along the outer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilewright.backend.cpu.plan.parts import parts_of, passed_between
from tilewright.backend.cpu.plan.tile import predict
from tilewright.backend.protocol import Choice, Inner
from tilewright.ir.expr import Axis
from tilewright.ir.tensor import Tensor
from tilewright.target import MemoryLevel
from tilewright.tile_graph.context import NestContext, is_contraction
from tilewright.tile_graph.nest import Nest
from tilewright.tile_graph.plan import Leaf, Sizes
from tilewright.tile_graph.propagate import extent_of

_MOST_RUNS = 6  # of nests that are tried, those that pass and read again most first
_WORTH_TRYING = 0.01  # of the kernel's time that moving this at the tile level must take


def tile_again(
    nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor], choice: Choice,
    inner: Inner | None = None,
) -> Choice | None:  # fmt: skip
    """The kernel with the best of such tiles inside, or with the one given; None where there is none."""
    near = _nearer_level(choice, context)
    if near is None or choice.block or choice.step or context.cached is not None or any(n.unswitched for n in nests):
        return None
    root, cut = nests[-1], dict(choice.tile)
    whole = {a: cut.get(f"o{i}", max(1, extent_of(a.extent))) for i, a in enumerate(root.axes)}
    candidates = _candidates(root, whole)
    if inner is not None:
        part = dict(inner.tile)
        sizes = [tuple(part.get(f"o{i}", whole[a]) for i, a in enumerate(root.axes))] if part else candidates
        return _walked(nests, leaves, context, stored, choice, inner.first, inner.last, near, sizes) if sizes else None
    if not candidates or choice.footprint <= context.target.levels[1].capacity // 2:
        return None  # all of it is near already
    best: Choice | None = None
    for first, last in _runs(nests, stored, context, choice, whole):
        found = _walked(nests, leaves, context, stored, choice, first, last, near, candidates)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def _nearer_level(choice: Choice, context: NestContext) -> MemoryLevel | None:
    """The level inside that of a kernel's tile."""
    target = context.target
    if choice.level:
        return target.tile_level
    return target.levels[1] if target.levels[1] is not target.tile_level else None


def _walked(
    nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor], choice: Choice,
    first: int, last: int, near: MemoryLevel, candidates: Sequence[Sequence[int]],
) -> Choice | None:  # fmt: skip
    """The kernel with these nests in the best of such parts; None where none will do."""
    root, cut = nests[-1], dict(choice.tile)
    known = context.memo.tiles.boxes
    whole = {a: cut.get(f"o{i}", max(1, extent_of(a.extent))) for i, a in enumerate(root.axes)}
    columns = np.array(candidates, dtype=np.int64)
    sizes = {a: known.size(np.ascontiguousarray(columns[:, i])) for i, a in enumerate(root.axes)}
    parts = parts_of(nests, first, last, near, stored, context, whole, sizes)
    if parts is None:
        return None
    tile = {a: known.size(np.full(len(columns), n, dtype=np.int64)) for a, n in whole.items()}
    times = predict(nests, leaves, context, stored, tile, parts=parts)
    seconds = np.where(parts.held <= near.capacity // 2, times.seconds, np.inf)
    best = int(np.argmin(seconds))
    if not np.isfinite(seconds[best]):
        return None
    inside: Sizes = tuple(
        (f"o{i}", int(n)) for i, (n, a) in enumerate(zip(columns[best], root.axes, strict=True)) if n < whole[a]
    )
    held = int(np.broadcast_to(parts.held, seconds.shape)[best])
    return replace(choice, seconds=float(seconds[best]), footprint=int(times.held[best]),
                   inner=Inner(first, last, inside, near.name, held, choice.seconds))  # fmt: skip


def _candidates(root: Nest, whole: dict[Axis, int]) -> list[tuple[int, ...]]:
    """Parts of a tile, as sizes of the root's axes: they fill it, unless the tile is all there is along an axis."""
    found: list[tuple[int, ...]] = []
    outer: list[int] = []
    for place, axis in enumerate(root.axes):
        rest = [whole[a] for a in root.axes[place + 1 :]]
        size = 1
        while size < whole[axis]:
            if whole[axis] == extent_of(axis.extent) or whole[axis] % size == 0:
                found.append((*outer, size, *rest))
            size *= 2
        outer.append(1)
    return found


def _runs(
    nests: Sequence[Nest], stored: frozenset[Tensor], context: NestContext, choice: Choice, whole: dict[Axis, int]
) -> list[tuple[int, int]]:
    """Nests that follow each other, first and last, by what they pass to each other or read several times."""
    parts = parts_of(nests, 0, len(nests), context.target.levels[1], stored, context, whole, whole)
    if parts is None:
        return []
    elements = {n: context.memo.tiles.boxes.elements(box) for n, box in parts.boxes.items()}
    level = context.target.tile_level
    turns = -(-choice.tiles // context.target.units)
    ranked = []
    made = {t for n in nests for t in n.stores}
    for first in range(len(nests) - 1):
        if is_contraction(nests[first]) and not choice.level:
            continue
        for last in range(first + 2, len(nests) + 1):
            near = passed_between(nests, first, last, stored)
            inside = nests[first:last]
            if is_contraction(inside[-1]) and not choice.level:
                break  # next to the first cache: its register tiles want all the rows there are
            moved = sum(int(elements[n]) * t.dtype.bytes * 2 for n in inside for t in n.stores if t in near)
            again = sum(int(elements[n]) * t.dtype.bytes for number, n in enumerate(inside) for t in n.reads()
                        if t not in made and any(t in m.reads() for m in inside[:number]))  # fmt: skip
            if near and turns * (moved + again) / level.bandwidth > _WORTH_TRYING * choice.seconds:
                ranked.append((-(moved + again), last - first, first, last))
    return [(first, last) for _, _, first, last in sorted(ranked)[:_MOST_RUNS]]
