"""Sub-graph tiling: output tiles of a connected group compared by predicted time, all candidates in one NumPy batch.

Time of a tile is its arithmetic or its traffic, whichever is slower; tiles run in waves over the units. A tile whose
intermediates do not fit the tile level is not a candidate (Welder's footprint, with liveness).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from tilewright.backend.cpu.constants import (
    CARRIED,
    CUT_PANELS,
    ENOUGH_TILES,
    EVENED,
    FEW_TILES,
    FOREIGN,
    MOST_CANDIDATES,
    MOST_REFUSED,
    NEAR_EXPOSED,
    NEARLY_WHOLE,
    OFTEN,
    PREFETCHED_EXPOSED,
    SHARED_COST,
    SHARED_STEP,
    STEP_ALONE,
    STEP_ROWS,
    STREAM_STEP,
    TILE_FAR_EXPOSED,
    TILE_SECONDS,
)
from tilewright.backend.cpu.kernel.parts import TileParts
from tilewright.backend.cpu.kernel.residency import byte_seconds, farthest_hold, lone_unit_share
from tilewright.backend.cpu.kernel.tile_traffic import Numbers, outer_scratch_seconds, scratch_seconds, traffic_seconds
from tilewright.backend.cpu.leaf.instructions import crowding
from tilewright.backend.cpu.leaf.leaf_seconds import (
    arithmetic_seconds,
    epilogue_cost,
    known_seconds,
    register_fill,
)
from tilewright.backend.cpu.leaf.near_rows import may_keep_rows, near_rows
from tilewright.backend.cpu.leaf.vectorise import layouts_around, scatter_cycles
from tilewright.backend.cpu.prefetch.panels import (
    panel_read,
    prefetch_distance,
    prefetched_seconds,
    rows_ahead,
    walks_rows,
)
from tilewright.backend.cpu.prefetch.soon import prefetch_before, weights_in_panels
from tilewright.backend.protocol import Choice
from tilewright.ir.forms.expr import Axis, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, kind_of, packed_axis
from tilewright.tile_graph.algebra.cuts import is_cut, is_of_many
from tilewright.tile_graph.algebra.nest import Nest, period
from tilewright.tile_graph.algebra.propagate import (
    Box,
    Range,
    Size,
    extent_of,
    propagate,
    size_key,
    whole_blocks,
)
from tilewright.tile_graph.algebra.rolling import Overlap, moves, reads_of, step_boxes
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.tile_graph.traffic.moving import footprint, looked_up


def choose_tile(
    nests: Sequence[Nest],
    plans: Sequence[Leaf],
    context: NestContext,
    stored: frozenset[Tensor],
    fixed: Mapping[str, int] | None = None,
    stream: Stream | None = None,
    blocks: Sequence[int] = (),
) -> Choice | None:
    """The best output tile, with `stream` walked in one of these blocks; None when no tile's intermediates fit."""
    if len(nests) > 1 or fixed or stream is not None or context.cached is not None:
        return _best_tile(nests, plans, context, stored, fixed or {}, stream, blocks)
    # a nest alone: while its plan is chosen, and again as the first of groups
    known, key = context.memo.alone, (nests[0], plans[0], layouts_around(nests[0], context), stored)
    if key not in known:
        known[key] = _best_tile(nests, plans, context, stored, {}, None, ())
    return known[key]


def _best_tile(
    nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
    fixed: Mapping[str, int], stream: Stream | None, blocks: Sequence[int],
) -> Choice | None:  # fmt: skip
    root = nests[-1]
    tiles = context.memo.tiles
    known = tiles.sizes
    key = (tiles.boxes.number(root), plans[-1].unnamed, tuple(fixed.items()), tuple(blocks))
    if key not in known:
        along = _axis_sizes(root, plans[-1], fixed, context.target.units)
        grid = np.meshgrid(*along, np.array(blocks if stream else (0,)), indexing="ij")
        known[key] = [tiles.boxes.size(each.ravel()) for each in grid]
    *candidates, block = known[key]
    sizes = dict(zip(root.axes, candidates, strict=True))
    times = predict(nests, plans, context, stored, sizes, stream, block)
    best = _fastest(times.seconds, times.tiles, block)
    if not np.isfinite(times.seconds[best]):
        return None
    tile = tuple(
        (f"o{i}", int(sizes[a][best])) for i, a in enumerate(root.axes) if sizes[a][best] < extent_of(a.extent)
    )
    level = hold_level(times.held[best], context)
    return Choice(tile, float(times.seconds[best]), int(times.tiles[best]), int(times.held[best]),
                  int(block[best]), level=level, unhindered=times.unhindered)  # fmt: skip


def hold_level(held: int, context: NestContext) -> str:
    """Where so many bytes of intermediates live, where that is not the tile level."""
    outer = context.target.shared_cache
    return outer.name if outer is not None and held > context.target.local.capacity // 2 else ""


def _fastest(seconds: Numbers, *others: Numbers) -> int:
    """The candidate that takes least time, to a nanosecond; among equals the larger tile: fewer starts."""
    rounded = np.round(seconds * 1e9)
    equal = np.flatnonzero(rounded == rounded.min())
    for numbers in others:
        if len(equal) > 1:
            numbers = numbers[equal]
            equal = equal[numbers == numbers.min()]
    return int(equal[0])


@dataclass(frozen=True)
class Windows:
    """Parts of the root's axes for units, walked in steps along one of them under windows; an entry a candidate."""

    nests: Sequence[Nest]
    overlaps: Sequence[Overlap]
    parts: Sequence[Numbers]  # along each axis of the root
    steps: Numbers
    seconds: Numbers
    tiles: Numbers
    held: Numbers

    def moving(self, number: int) -> bool:
        """Whether windows move in a candidate: asked of few of them, which takes long."""
        return moves(self.nests, [int(p[number]) for p in self.parts], int(self.steps[number]), self.overlaps)

    def choice(self, number: int, context: NestContext) -> Choice:
        extents = [extent_of(a.extent) for a in self.nests[-1].axes]
        cut = [int(part[number]) for part in self.parts]
        tile = tuple((f"o{i}", n) for i, n in enumerate(cut) if n < extents[i])
        return Choice(tile, float(self.seconds[number]), int(self.tiles[number]), int(self.held[number]),
                      step=int(self.steps[number]), level=hold_level(self.held[number], context))  # fmt: skip


def choose_window(
    nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
    overlaps: Sequence[Overlap], fixed: Mapping[str, int] | None = None, step: int = 0,
) -> Choice | None:  # fmt: skip
    """Parts of the root's rows for the units, and steps in which windows move over each; None where none fits. Of parts
    that are `fixed` and a given step, what they take."""
    found = windows(nests, plans, context, stored, overlaps, fixed, step)
    seconds = found.seconds.copy()
    for _ in range(min(MOST_REFUSED, len(seconds))):
        best = _fastest(seconds, found.tiles)
        if not np.isfinite(seconds[best]):
            return None
        if found.moving(best):
            return found.choice(best, context)
        seconds[best] = np.inf
    return None


def windows(
    nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
    overlaps: Sequence[Overlap], fixed: Mapping[str, int] | None = None, step: int = 0,
) -> Windows:  # fmt: skip
    """Parts and steps that are worth a look, with what they take."""
    root, units = nests[-1], context.target.units
    moving = overlaps[0].axis
    rows = extent_of(root.axes[moving].extent)
    along = _axis_sizes(root, plans[-1], fixed or {}, units)
    steps_tried = [n for n in STEP_ROWS if 2 * n <= rows and all(n * o.scale >= o.rows for o in overlaps)]
    along[moving] = np.array([step] if step else steps_tried, dtype=np.int64)
    if not len(along[moving]):
        none: Numbers = np.zeros(0)
        return Windows(nests, overlaps, [none] * len(along), none, none, none, none)
    candidates = np.meshgrid(*along, indexing="ij")
    sizes = {axis: each.ravel() for axis, each in zip(root.axes, candidates, strict=True)}
    times = predict(nests, plans, context, stored, sizes, overlaps=overlaps)
    steps = sizes[root.axes[moving]]
    others: Numbers = np.ones(len(steps), dtype=np.int64)
    for number, axis in enumerate(root.axes):
        if number != moving:
            others = others * -(-extent_of(axis.extent) // sizes[axis])
    # rows are cut into parts, whole steps each, only as far as units need it
    parts = np.clip(-(-units // others), 1, np.maximum(1, rows // (2 * steps)))
    part = -(-rows // (parts * steps)) * steps if fixed is None else np.full(len(steps), fixed[f"o{moving}"])
    tiles = others * -(-rows // part)
    idle = -(-tiles // units) * units * part / (others * rows)
    # what the first window of a part shares with none is computed for it alone
    seconds = times.seconds * (1 + times.again / part) * np.maximum(1.0, idle)
    cuts = [part if i == moving else sizes[a] for i, a in enumerate(root.axes)]
    return Windows(nests, overlaps, cuts, steps, seconds, tiles, times.held)


@dataclass(frozen=True)
class TileTimes:
    """Predictions with an entry a candidate tile: seconds of the kernel, its tiles, bytes a tile holds."""

    seconds: Numbers
    tiles: Numbers
    held: Numbers
    again: Size = 0.0  # rows of the root whose time windows take once more where they begin
    unhindered: float = 0.0  # the least of all if every tile fitted, and intermediates moved in no time


def predict(
    nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
    sizes: Mapping[Axis, Numbers], stream: Stream | None = None, block: Size = 0, overlaps: Sequence[Overlap] = (),
    parts: TileParts | None = None,
) -> TileTimes:  # fmt: skip
    """The time of a kernel with output tiles of these sizes, some of its nests in `parts` of them; infinite where a
    tile's intermediates do not fit."""
    root = nests[-1]
    known = context.memo.tiles.boxes
    origins = dict(zip(root.axes, context.memo.tiles.origins(root), strict=True))
    units = root.unswitched  # tiles begin at whole blocks of these: divisions by a block's size stay exact
    box = known.box(tuple(Range(var(origins[a]) * units.get(a, 1), sizes[a], extent_of(a.extent)) for a in root.axes))
    limits = stream.reduce_boxes(var(context.memo.tiles.block(stream.extent)), block) if stream else {}
    boxes, seen = step_boxes(nests, box, overlaps, known, limits)
    target = context.target
    grid = _grid(root, plans[-1], box, context)
    tiles, waves = grid.tiles, grid.waves
    nearer = parts.near if parts else frozenset()
    held = np.broadcast_to(
        footprint(nests, seen, stored | nearer, stream, steps=bool(overlaps), known=known), tiles.shape
    )
    farthest = farthest_hold(nests, context, stored)
    fits = (held <= farthest.capacity // 2) & whole_blocks(nests, boxes)
    both = {o: seen[o.nest][o.dim].size - boxes[o.nest][o.dim].size for o in overlaps}
    for overlap, rows in both.items():  # windows move on by what is new, and are less than all
        window = seen[overlap.nest][overlap.dim]
        fits = fits & (rows <= boxes[overlap.nest][overlap.dim].size) & (window.size < window.extent)
    if not fits.any():
        return TileTimes(np.full(tiles.shape, np.inf), tiles, held)
    turns = known.size(-(-stream.extent // block)) if stream else 1
    repeats = dict.fromkeys(stream.wide, turns) if stream else {}
    if parts is None:
        compute = _compute_seconds(nests, plans, boxes, context, repeats, stream, turns)
    else:
        walked = {**boxes, **parts.boxes}
        compute = _compute_seconds(nests, plans, walked, context, parts.times, None, 1) + parts.starting
    far, near = traffic_seconds(nests, boxes, context, stored, repeats, waves, parts.boxes if parts else None)
    beside: Size = 0  # the tile level has what parts keep together with the rest, if that is to be there
    if parts is not None:
        far, near, beside = far + parts.again[0], near + parts.again[1] + parts.seconds, parts.held
    far = far * grid.lone
    again = sum((rows / o.scale * _compute_seconds(*_leading(o.nest, nests, plans), boxes, context, {}, None, 1)
                 for o, rows in both.items()), 0.0) / compute  # fmt: skip
    outside = far  # of what is no intermediate
    scratch = scratch_seconds(nests, boxes, context, stored | nearer, repeats, stream, turns, held)
    if farthest is not target.local:
        beyond = held + beside > target.local.capacity // 2
        passed = outer_scratch_seconds(nests, boxes, context, stored | nearer, repeats)
        far = far + np.where(beyond, passed, 0.0) * grid.lone
        scratch = np.where(beyond, 0.0, scratch)
    near = near + scratch
    # movement overlaps with arithmetic, but never wholly, and the less the farther it goes
    far_exposed = TILE_FAR_EXPOSED if context.cached is None else NEAR_EXPOSED  # a step's weights are one long stream
    exposed = far_exposed * np.minimum(compute, far) + NEAR_EXPOSED * np.minimum(compute, near)
    if context.cached is None and stream is None:
        ahead = {root} if overlaps else {root, *filter(is_contraction, nests)}.difference(parts.boxes if parts else ())
        hidden = sum((_prefetched_seconds(n, p, boxes[n], context) for n, p in zip(nests, plans, strict=True)
                      if n in ahead), 0.0)  # fmt: skip
        exposed = exposed - (TILE_FAR_EXPOSED - PREFETCHED_EXPOSED) * np.minimum(compute, hidden)
    starting = TILE_SECONDS if context.cached is None else target.tile_cost
    per_tile = np.maximum(compute, far + near) + exposed + starting
    shared, alone = (SHARED_COST, 1.0) if context.cached is None else (SHARED_STEP, STEP_ALONE)
    evened = grid.evened if context.cached is None else 1.0
    starts = target.kernel_cost * np.where(tiles > 1, shared, alone)
    if context.cached is None and context.weights > target.local.capacity // 2:
        starts = starts + target.cold_start
    crowded = crowding(nests, plans, boxes, target)
    # every distinct byte is moved once, from where it is, by as many units as there are tiles for
    moved_once = _least_seconds(nests, stored, context) * grid.lone / grid.busy
    seconds = np.maximum((waves * per_tile * evened + starts) * crowded, moved_once)
    seconds = seconds + _fetched_by_steps(root, context, sizes)
    unhindered = 0.0
    if len(nests) > 1 and stream is None and not overlaps:
        free = np.maximum(compute, outside) + far_exposed * np.minimum(compute, outside) + starting
        unhindered = float(np.maximum((waves * free * evened + starts) * crowded, moved_once).min())
    return TileTimes(np.where(fits, seconds, np.inf), tiles, held, again, unhindered)


def weights_ahead(
    nests: Sequence[Nest], leaves: Sequence[Leaf], choice: Choice, context: NestContext
) -> tuple[Leaf, ...]:
    """The leaves of a kernel, each with what its steps ask for of the next panel of weights or of later rows, and of
    its own panel, and with the rows that stay near while panels pass."""
    if not any(
        may_keep_rows(nest, leaf, context)
        or walks_rows(nest, leaf, context)
        or panel_read(nest, leaf, context)
        or weights_in_panels(nest, leaf, context)
        for nest, leaf in zip(nests, leaves, strict=True)
    ):
        return tuple(leaves)
    known = context.memo.ahead
    key = (signature(nests, lambda t: (t in context.constants, t in context.staged, context.layout(t))),
           tuple([leaf.unnamed for leaf in leaves]), choice.tile, choice.step, context.weights_fit)  # fmt: skip
    if key not in known:
        known[key] = _asked_ahead(nests, leaves, choice, context)
    return tuple(leaf.with_options(VectorForm, **asked) if asked else leaf
                 for leaf, asked in zip(leaves, known[key], strict=True))  # fmt: skip


def _asked_ahead(
    nests: Sequence[Nest], leaves: Sequence[Leaf], choice: Choice, context: NestContext
) -> tuple[dict[str, int], ...]:
    """Of every leaf, by name, what it asks for and keeps."""
    root, tile = nests[-1], dict(choice.tile)
    sizes = {a: tile.get(f"o{i}", extent_of(a.extent)) for i, a in enumerate(root.axes)}
    walked = {root: sizes}
    known = context.memo.tiles.boxes
    if not choice.step:
        origins = dict(zip(root.axes, context.memo.tiles.origins(root), strict=True))
        starts = {a: var(origins[a]) * root.unswitched.get(a, 1) for a in root.axes}
        box = tuple(Range(starts[a], n, extent_of(a.extent)) for a, n in sizes.items())
        walked |= {n: _sizes(n, part) for n, part in propagate(nests, box, known=known).items() if n is not root}
    made = {t for nest in nests for t in nest.stores}

    def asked(nest: Nest, leaf: Leaf) -> dict[str, int]:
        if walks_rows(nest, leaf, context):
            return {"ahead": rows_ahead(nest, leaf, context, made)}
        if nest not in walked or leaf.instruction is not None:
            return {}
        ahead = int(prefetch_distance(nest, leaf, walked[nest], context))
        near = 0 if ahead else near_rows(nest, leaf, walked[nest], context)
        soon, together = prefetch_before(nest, leaf, walked[nest], context)
        return {"ahead": ahead, "near_rows": near, "soon": soon, "together": together}

    return tuple(asked(nest, leaf) for nest, leaf in zip(nests, leaves, strict=True))


def _prefetched_seconds(nest: Nest, plan: Leaf, box: Box, context: NestContext) -> Size:
    """`prefetched_seconds`, once for all groups that cut such a nest into the same tiles."""
    tiles = context.memo.tiles
    key = kind_of(nest, context), plan.unnamed, tiles.boxes.sizes[id(box)], context.weights_fit
    found = tiles.prefetched.get(key)
    if found is None:
        found = tiles.prefetched[key] = prefetched_seconds(nest, plan, _sizes(nest, box), context)
    return found


def _sizes(nest: Nest, box: Box) -> dict[Axis, Size]:
    return {axis: part.size for axis, part in zip(nest.axes, box, strict=True)}


def _leading(nest: Nest, nests: Sequence[Nest], plans: Sequence[Leaf]) -> tuple[Sequence[Nest], Sequence[Leaf]]:
    """A nest and those that lead to it, with their plans."""
    wanted = reads_of(nest, nests)
    return wanted, [p for n, p in zip(nests, plans, strict=True) if n in wanted]


@dataclass(frozen=True)
class _Grid:
    """What the sizes of tiles say by themselves, whatever is computed on them; an entry a candidate."""

    tiles: Numbers
    waves: Numbers
    busy: Numbers  # units that have a tile
    lone: Size
    evened: Size


def _grid(root: Nest, plan: Leaf, box: Box, context: NestContext) -> _Grid:
    known = context.memo.tiles.grids
    key = id(box), plan.register
    if key not in known:
        units = context.target.units
        sizes = [np.atleast_1d(part.size) for part in box]
        tiles: Numbers = np.ones(max((len(s) for s in sizes), default=1), dtype=np.int64)
        for axis, size in zip(root.axes, sizes, strict=True):
            tiles = tiles * -(-extent_of(axis.extent) // size)
        known[key] = _Grid(
            tiles, -(-tiles // units), np.clip(tiles, 1, units),  # an empty result has no tiles
            lone_unit_share(tiles, context), _evened(root, plan, sizes, tiles, units),
        )  # fmt: skip
    found: _Grid = known[key]
    return found


def _evened(root: Nest, plan: Leaf, sizes: Sequence[Numbers], tiles: Numbers, units: int) -> Size:
    """Of a unit's time with whole tiles alone what it takes with the last ones of an axis, which are less than whole:
    where they come often enough, every unit has as many of them as the others."""
    register, names = dict(plan.register), root.axis_names()
    share: Size = 1.0
    period: Size = 1  # tiles from one last tile along an axis to the next, outer axes counting slower
    for axis, size in zip(reversed(root.axes), reversed(sizes), strict=True):
        extent = max(1, extent_of(axis.extent))
        count = -(-extent // size)
        period = period * count
        block = register.get(names[axis], 1)
        last = np.minimum(size, -(-(extent - (count - 1) * size) // block) * block)
        spread = (tiles >= OFTEN * units * period) & (last >= NEARLY_WHOLE * size)
        missing = (size - last) / (count * size)
        share = share * np.where(spread, 1.0 - EVENED * missing, 1.0)
    return share


def _least_seconds(nests: Sequence[Nest], stored: frozenset[Tensor], context: NestContext) -> float:
    """One unit moving every distinct byte once, from where it is."""
    inside = {t for n in nests for t in n.stores}
    touched = {t for n in nests for t in n.reads() if t not in inside} | (inside & stored)
    alone = 0.0
    stepping = any(n.is_stepped for n in nests)
    for tensor in touched:
        size = tensor.most_bytes
        readers = [n.stepped[tensor] for n in nests if tensor in n.stepped] if stepping else []
        if readers:
            stepped = frozenset.intersection(*readers)
            size = prod(extent_of(e) for d, e in enumerate(tensor.shape) if d not in stepped) * tensor.dtype.bytes
        tables = [n for n in nests if tensor in n.tables]
        if tables and tables == [n for n in nests if tensor in n.reads()]:
            places = [looked_up(n, tensor, prod(extent_of(a.extent) for a in n.axes), context) for n in tables]
            size = min(size, sum(places))
        alone += size * byte_seconds(tensor, context)
    return alone


def _fetched_by_steps(root: Nest, context: NestContext, sizes: Mapping[Axis, Numbers]) -> Size:
    """A step's tile reads its own part of what was computed before the Scan: where tiles are cut otherwise, most of
    that was written by another unit, and is fetched from its cache. A map has its own reasons for a cut: what it reads
    was written by some unit too."""
    target = context.target
    if not is_contraction(root):
        return 0.0
    apart: Size = False
    for dimension in context.stepped.get(root.tensor, frozenset()):
        axis = root.axes[dimension]
        apart = np.logical_or(apart, sizes[axis] < extent_of(axis.extent))
    moved = root.tensor.most_bytes
    others = (target.units - 1) / target.units
    fetched = FOREIGN * moved * others / target.units / target.beyond_local.bandwidth
    return np.where(apart, fetched, 0.0)


def candidates(root: Nest, plan: Leaf, fixed: Mapping[str, int], units: int) -> list[tuple[int, ...]]:
    """Output tiles worth a look, as sizes of the root's axes."""
    return list(product(*(along.tolist() for along in _axis_sizes(root, plan, fixed, units))))


def _axis_sizes(root: Nest, plan: Leaf, fixed: Mapping[str, int], units: int) -> list[Numbers]:
    """Sizes worth a look along each axis of the root, whose tiles go to so many units."""
    register = dict(plan.register)
    names = root.axis_names()
    choices: list[list[int]] = []
    whole = _cut_axes(root, plan)
    for axis in root.axes:
        extent = max(1, extent_of(axis.extent))  # an empty axis is one tile of nothing
        if axis in whole and names[axis] not in fixed:
            choices.append([extent])
            continue
        if names[axis] in fixed:
            choices.append([min(extent, fixed[names[axis]])])
            continue
        unit = min(max(register.get(names[axis], 1), root.unswitched.get(axis, 1)), extent)
        sizes = {extent}
        size = unit
        while size < extent:
            sizes.add(size)
            size *= 2
        for pieces in (2, 3, 4, 6, 8, 12, 16):  # even cuts, rounded up to whole register tiles
            even = -(-extent // pieces)
            sizes.add(min(extent, -(-even // unit) * unit))
            # whole register tiles would leave units idle; but panels of weights are not cut
            if (pieces <= FEW_TILES or pieces == units) and not (is_contraction(root) and names[axis] == plan.vector):
                sizes.add(even)
        group = period(root, axis)
        if group is not None:  # a tile is whole groups, or an even part of one
            sizes = {extent} | {n for n in (*sizes, *(group * k for k in (1, 2, 4, 8, 16))) if n <= extent
                                and extent % n == 0 and (n % group == 0 or group % n == 0)}  # fmt: skip
        choices.append(sorted(sizes))
    while prod(len(c) for c in choices) > MOST_CANDIDATES:
        longest = max(range(len(choices)), key=lambda i: len(choices[i]))
        thinned = choices[longest][::2]
        if choices[longest][-1] not in thinned:
            thinned.append(choices[longest][-1])
        choices[longest] = thinned
    return [np.array(along, dtype=np.int64) for along in choices]


def _cut_axes(root: Nest, plan: Leaf) -> list[Axis]:
    """Axes that blocks are cut along at places of their own: tiles would cut elsewhere."""
    if root.unswitched:
        return []
    names = dict(plan.register) if root.monoid is None else [plan.vector] if plan.vector else []
    axes = [a for a in map(root.named, names) if a in root.axes]
    found = [a for a in axes if is_cut(a, root, plan.lanes)]
    others = prod(extent_of(a.extent) for a in root.axes if a not in found)
    return found if others >= ENOUGH_TILES else [a for a in found if is_of_many(a, root, plan.lanes)]


def _compute_seconds(
    nests: Sequence[Nest], plans: Sequence[Leaf], boxes: Mapping[Nest, Box], context: NestContext,
    repeats: Mapping[Nest, Size], stream: Stream | None, turns: Size,
) -> Size:  # fmt: skip
    """Arithmetic of one tile on one unit; a stream takes so many turns."""
    total: Size = 0.0
    known, sizes = context.memo.tiles.arithmetic, context.memo.tiles.boxes.sizes
    for nest, plan in zip(nests, plans, strict=True):
        box, times = boxes[nest], repeats.get(nest, 1)
        carried = turns if stream is not None and nest in stream.reducers else 0
        carrying = STREAM_STEP if stream is not None and nest in stream.factors else CARRIED
        if context.cached is not None:
            total = total + _nest_seconds(nest, plan, box, context, times, carried, carrying)
            continue
        key = kind_of(nest, context), plan.unnamed, sizes[id(box)], size_key(times), size_key(carried), carrying
        found = known.get(key)
        if found is None:
            found = known[key] = _nest_seconds(nest, plan, box, context, times, carried, carrying)
        total = total + found
    return total


def _cut_panels(nest: Nest, plan: Leaf, box: Box, context: NestContext) -> Size:
    """How many times as long a sum takes with vectors that begin anywhere in panels of its weights: lane by lane they
    are put together of two."""
    vector = nest.named(plan.vector) if plan.vector else None
    if vector is None or vector not in nest.axes:
        return 1.0
    if not any(n.source in context.constants and packed_axis(n, vector) is not None for n in nest.element_loads):
        return 1.0
    part = box[nest.axes.index(vector)]
    return np.where((part.size >= extent_of(vector.extent)) | (part.size % plan.lanes == 0), 1.0, CUT_PANELS)


def _nest_seconds(
    nest: Nest, plan: Leaf, box: Box, context: NestContext, times: Size, carried: Size, carrying: float
) -> Size:
    """Arithmetic of a nest on its part of a tile, so many times; its results are `carried` on so often, for so many
    operations each."""
    rate, wide = context.target.fma_rate, context.target.lanes(4)
    points = context.memo.tiles.boxes.elements(box) * times
    vectors = wide / max(plan.lanes, 1) if plan.vector else wide
    if not is_contraction(nest):
        return arithmetic_seconds(nest, plan, box, context) * times + points * carrying * carried * vectors / rate
    total = known_seconds(nest, plan, box, context) * times
    if plan.instruction is None:
        vector = nest.named(plan.vector) if plan.vector else None
        register = {nest.named(a): n for a, n in plan.register}
        total = total * _cut_panels(nest, plan, box, context)
        total = total + scatter_cycles(nest, vector, register, context, points) * 2 * wide / rate
    per_point = epilogue_cost(nest) + carrying * carried
    return total + points * per_point * vectors / register_fill(nest, plan, box, context) / rate
