"""A second tile inside a kernel's: nests that follow each other walked in parts of it, so that what passes between them
stays at a nearer level (Welder's recursion, one level up from the tile that is chosen).

Parts are rows or columns of the tile as the root's axes lie: cut along one of them, whole along those inside it, whole
or one element along each of those around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from tilewright.backend.cpu.constants import INNER_MOST_RUNS, INNER_PIECES, INNER_WORTH_TRYING, TWICE
from tilewright.backend.cpu.kernel.parts import boxes_of, parts_in, parts_of, passed_between
from tilewright.backend.cpu.kernel.tile import predict
from tilewright.backend.cpu.kernel.tile_traffic import Numbers
from tilewright.backend.protocol import Choice, Inner
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import MemoryLevel
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf, Sizes

_VECTOR = 16  # elements: 64 bytes are the widest


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
    if not candidates or choice.footprint <= near.capacity // 2:
        return None  # all of it is near already
    best: Choice | None = None
    for first, last in _runs(nests, stored, context, choice, whole, candidates, near.capacity // 2):
        found = _walked(nests, leaves, context, stored, choice, first, last, near, candidates)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def _nearer_level(choice: Choice, context: NestContext) -> MemoryLevel | None:
    """The level inside that of a kernel's tile."""
    target = context.target
    if choice.level:
        return target.local
    return target.nearest if target.nearest is not target.local else None


def _walked(
    nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor], choice: Choice,
    first: int, last: int, near: MemoryLevel, candidates: Sequence[Sequence[int]],
) -> Choice | None:  # fmt: skip
    """The kernel with these nests in the best of such parts; None where none will do."""
    root, cut = nests[-1], dict(choice.tile)
    known = context.memo.tiles.boxes
    whole = {a: cut.get(f"o{i}", max(1, extent_of(a.extent))) for i, a in enumerate(root.axes)}
    sizes = _columns(root, candidates, context)
    parts = parts_of(nests, first, last, near, stored, context, whole, sizes)
    tile = {a: known.size(np.full(len(candidates), n, dtype=np.int64)) for a, n in whole.items()}
    times = predict(nests, leaves, context, stored, tile, parts=parts)
    seconds = np.where(parts.filling & (parts.held <= near.capacity // 2), times.seconds, np.inf)
    best = int(np.argmin(seconds))
    if not np.isfinite(seconds[best]):
        return None
    inside: Sizes = tuple(
        (f"o{i}", int(n)) for i, (n, a) in enumerate(zip(candidates[best], root.axes, strict=True)) if n < whole[a]
    )
    held = int(np.broadcast_to(parts.held, seconds.shape)[best])
    return replace(choice, seconds=float(seconds[best]), footprint=int(times.held[best]),
                   inner=Inner(first, last, inside, near.name, held, choice.seconds))  # fmt: skip


def _columns(root: Nest, candidates: Sequence[Sequence[int]], context: NestContext) -> dict[Axis, Numbers]:
    """Sizes by axis, with an entry a candidate."""
    columns = np.array(candidates, dtype=np.int64)
    known = context.memo.tiles.boxes
    return {a: known.size(np.ascontiguousarray(columns[:, i])) for i, a in enumerate(root.axes)}


def _candidates(root: Nest, whole: dict[Axis, int]) -> list[tuple[int, ...]]:
    """Parts of a tile, as sizes of the root's axes: they fill it, unless the tile is all there is along an axis."""
    found: dict[tuple[int, ...], None] = {}
    for place, axis in enumerate(root.axes):
        rest = [whole[a] for a in root.axes[place + 1 :]]
        outer = list(product(*(dict.fromkeys((1, whole[a])) for a in root.axes[:place])))
        for size in _sizes_below(whole[axis]):
            if whole[axis] == extent_of(axis.extent) or whole[axis] % size == 0:
                found.update(dict.fromkeys((*around, size, *rest) for around in outer))
    return list(found)


def _sizes_below(whole: int) -> list[int]:
    """Powers of two, and even cuts, also as whole vectors of any machine."""
    powers = {1 << n for n in range(whole.bit_length())}
    even = {-(-whole // pieces) for pieces in INNER_PIECES}
    return sorted(n for n in powers | even | {-(-n // _VECTOR) * _VECTOR for n in even} if n < whole)


def _runs(
    nests: Sequence[Nest], stored: frozenset[Tensor], context: NestContext, choice: Choice, whole: dict[Axis, int],
    candidates: Sequence[Sequence[int]], room: int,
) -> list[tuple[int, int]]:  # fmt: skip
    """Nests that follow each other, first and last, by what they pass to each other or read several times; in parts
    of some size none of them computes everything twice, and nothing that they pass is more than `room`."""
    known = context.memo.tiles.boxes
    elements = {n: known.elements(box) for n, box in boxes_of(nests, context, whole).items()}
    columns = _columns(nests[-1], candidates, context)
    count = parts_in(whole, columns)
    each = {n: known.elements(box) for n, box in boxes_of(nests, context, columns).items()}
    level = context.target.level(choice.level) if choice.level else context.target.local
    turns = -(-choice.tiles // context.target.units)
    ranked = []
    made = {t for n in nests for t in n.stores}
    for first in range(len(nests) - 1):
        if is_contraction(nests[first]) and not choice.level:
            continue  # next to the first cache: its register tiles want all the rows there are
        for last in range(first + 2, len(nests) + 1):
            near = passed_between(nests, first, last, stored)
            inside = nests[first:last]
            possible = np.ones(len(candidates), dtype=bool)
            for nest in inside:
                passed = sum(t.dtype.bytes for t in nest.stores if t in near)
                possible = possible & (each[nest] * count < TWICE * elements[nest]) & (each[nest] * passed <= room)
            if not possible.any() or (is_contraction(inside[-1]) and not choice.level):
                break  # nor with more of them
            moved = sum(int(elements[n]) * t.dtype.bytes * 2 for n in inside for t in n.stores if t in near)
            again = sum(int(elements[n]) * t.dtype.bytes for number, n in enumerate(inside) for t in n.reads()
                        if t not in made and any(t in m.reads() for m in inside[:number]))  # fmt: skip
            if near and turns * (moved + again) / level.bandwidth > INNER_WORTH_TRYING * choice.seconds:
                ranked.append((-(moved + again), last - first, first, last))
    return [(first, last) for _, _, first, last in sorted(ranked)[:INNER_MOST_RUNS]]
