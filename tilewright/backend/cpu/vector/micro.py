"""What a contraction costs on one core: cycles of its register tile, and the bytes its loops bring from cache to cache.

Roller's micro-performance model. Whoever keeps a level full decides: data of a loop that fits a level is fetched into
it once, and again in every turn of the loops outside that use other data. All sizes may be arrays with an entry a
candidate, so that thousands of plans are compared in one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np

from tilewright.backend.cpu.constants import (
    AGAIN_EXPOSED,
    ASKED_CYCLES,
    BLOCK_CYCLES,
    CHECK_CYCLES,
    CROWDED,
    DOT_STREAMS,
    FAR_EXPOSED,
    FULL,
    OVERFULL,
    RESUMED,
    ROWS_EXPOSED,
    RUN_EXPOSED,
    RUN_HIDDEN,
    RUN_STALL,
    SCATTERED,
    SPILLED,
    STEP_CYCLES,
)
from tilewright.backend.cpu.vector.contraction_facts import ContractionFacts, LoopForm, ReadFacts, overlap
from tilewright.backend.cpu.vector.fold_lanes import narrowest, parts_of
from tilewright.ir.forms.expr import Axis
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import period
from tilewright.tile_graph.algebra.propagate import Size, extent_of, index_size
from tilewright.tile_graph.algebra.runs import stretch
from tilewright.tile_graph.traffic.touch import chosen, least, most


def step_cycles(facts: ContractionFacts, rows: Size, vectors: Size) -> Size:
    """One step of the reduction on a register tile: multiply-adds, reads, or the chain through an accumulator."""
    arithmetic = rows * vectors / facts.target.pipes + _factor_cycles(facts, rows, vectors)
    reads: Size = 0.0
    for operand in facts.operands:
        count: Size = vectors if operand.by_vector else 1.0
        if operand.by_row:
            count = count * rows
            if facts.window is not None and overlap(operand, facts.row, facts.window):
                length = extent_of(facts.window.extent)
                distinct = (rows - 1) * operand.row_step + length if operand.row_step < length else rows * length
                count = count * distinct / (rows * length)
        if not operand.by_vector and facts.by_lane and not facts.factors:
            count = count / facts.lanes
        if operand.gathered:
            count = count * operand.gathered
        reads = reads + count * operand.lines
    if all(operand.by_vector for operand in facts.operands):
        # every multiply-add holds vectors of both operands: more accumulators than this and some live in memory
        arithmetic = arithmetic * chosen(rows * vectors > facts.target.vector_registers * 3 // 8, SPILLED, 1.0)
    # a read and a multiply-add share the front end: reads that fit beside the arithmetic still cost a little
    reads = reads / facts.target.pipes
    return most(most(arithmetic + 0.08 * reads, reads), facts.target.fma_latency) + STEP_CYCLES


def _factor_cycles(facts: ContractionFacts, rows: Size, vectors: Size) -> Size:
    """A step's operations on the factors before they are multiplied; a value that all lanes share is then broadcast."""
    cycles: Size = 0.0
    for count, by_row, by_vector in facts.factors:
        each = count + (0 if by_vector else 1)
        cycles = cycles + each * (rows if by_row else 1) * (vectors if by_vector else 1) / facts.target.pipes
    return cycles


def core_seconds(facts: ContractionFacts, form: LoopForm, tile: Mapping[Axis, Size]) -> Size:
    """Arithmetic of one tile, blocks that the register tile does not fill included."""
    height, stacks = blocks_along(facts, facts.row, tile)
    width, groups = blocks_along(facts, facts.vector, tile)
    full_rows, remainder_rows = height // form.rows, height % form.rows
    steps: Size = 0.0
    blocks: Size = 0.0
    across: list[tuple[Size, Size]] = []
    inside = max(facts.parts, default=0)
    for part in (inside,) if facts.parts else (width,):
        # the last vector is as whole as the others
        remainder_vectors = -(-(part % (form.vectors * facts.lanes)) // facts.lanes)
        across.append((part // (form.vectors * facts.lanes), form.vectors))
        across.append((least(remainder_vectors, 1), remainder_vectors))
    if facts.parts:  # a window over an end asks for itself whether it may read: as many elements as vectors
        across.append((sum(facts.parts) - inside, 1))
    for count, rows in ((full_rows, form.rows), (least(remainder_rows, 1), remainder_rows)):
        for columns, vectors in across:
            number = count * columns
            steps = steps + number * step_cycles(facts, most(rows, 1), most(vectors, 1))
            blocks = blocks + number
    passes = -(-_cut_extent(facts) // form.cut)
    plain: Size = stacks * groups
    for axis in facts.plain:
        plain = plain * tile[axis]
    starting = BLOCK_CYCLES * passes + RESUMED * (passes - 1) + CHECK_CYCLES * facts.checks
    return (steps * facts.reduction + blocks * starting) * plain / facts.target.fma_clock


def blocks_along(facts: ContractionFacts, axis: Axis | None, tile: Mapping[Axis, Size]) -> tuple[Size, Size]:
    """How far blocks along an axis reach on a tile, and how often: they end with a group."""
    if axis is None:
        return 1, 1
    group = period(facts.nest, axis)
    if group is None:
        return stretch(axis, facts.runs.get(axis, ()), tile)
    return np.minimum(tile[axis], group), np.maximum(1, -(-tile[axis] // group))


def dot_seconds(facts: ContractionFacts, register: Mapping[str, int], tile: Mapping[Axis, Size]) -> Size:
    """Dot products along a contiguous reduction, or no vector at all: outputs in a register tile, lanes folded last."""
    names = facts.nest.axis_names()
    sizes = {a: register.get(names[a], 1) for a in facts.nest.axes}
    outputs = prod(sizes.values())
    chains = max(1, register.get(names[facts.vector], facts.lanes) // facts.lanes) if facts.vector is not None else 1
    folding = outputs * fold_cycles(facts.lanes, chains) if facts.vector is not None else 0.0
    blocks: Size = 1.0
    for axis, size in sizes.items():
        blocks = blocks * -(-tile[axis] // size)
    core = blocks * (_dot_cycles(facts, sizes, chains) + folding + BLOCK_CYCLES) / facts.target.fma_clock
    near, far = _dot_traffic(facts, sizes, tile, blocks)
    busy = core + DOT_STREAMS * near / facts.target.local.bandwidth
    return np.maximum(busy, far) + FAR_EXPOSED * np.minimum(busy, far)


def _dot_cycles(facts: ContractionFacts, sizes: Mapping[Axis, int], chains: int) -> float:
    """All steps of one register tile of dot products: what does not fill the chains goes vector by vector, then into
    halves of one, and what fills none of them element by element."""
    outputs, width = prod(sizes.values()), facts.lanes * chains
    along = extent_of(facts.vector.extent) if facts.vector is not None else facts.reduction
    guarded, by_lane = facts.guarded
    reads, asked = 0.0, 0.0
    for operand in facts.operands:
        count: float = prod(n for a, n in sizes.items() if a in operand.axes)
        if operand.node in guarded:
            asked += (facts.target.lane_check if by_lane else ASKED_CYCLES) * count
            count = count / len(guarded)  # of the alternatives one is read
        lane_by_lane = operand.gathered or (by_lane and operand.node in guarded)
        reads += count * (facts.lanes * facts.target.gathered_reads if lane_by_lane else 1)
    pipes, latency = facts.target.pipes, facts.target.fma_latency

    def step(vectors: int) -> float:
        cycles = max(outputs * vectors / pipes, reads * vectors / pipes, latency) + STEP_CYCLES
        return cycles + asked * vectors * (facts.lanes if by_lane else 1)

    one = max(outputs / pipes, reads / pipes, latency) + STEP_CYCLES + asked
    monoid = facts.nest.monoid
    narrow = min(facts.lanes, narrowest(c.dtype for c in monoid.combine)) if monoid is not None else 1
    left, pieces = along % width // facts.lanes, parts_of(along, facts.lanes, narrow)
    whole = along // width * step(chains) + (step(left) if left else 0.0)
    return facts.reduction / max(1, along) * (whole + pieces * step(1) + along % narrow * one)


def fold_cycles(lanes: int, chains: int = 1) -> float:
    """To add up the lanes of one sum: chains first, then halves of the vector, the last four lanes one by one."""
    halvings = max(0, lanes.bit_length() - 3)
    return 0.5 * (chains - 1) + 1.5 * halvings + 0.75 * min(lanes, 4) + 4.0


def _dot_traffic(
    facts: ContractionFacts, sizes: Mapping[Axis, int], tile: Mapping[Axis, Size], blocks: Size
) -> tuple[Size, Size]:
    """Bytes into the first cache, where an operand that does not fit it comes again with every register tile; and the
    seconds of what comes from main memory, once."""
    whole = {a: extent_of(a.extent) for a in facts.nest.reduce_axes}
    guarded, _ = facts.guarded
    moved: Size = 0.0
    far: Size = 0.0
    for operand in facts.operands:
        share = 1 / len(guarded) if operand.node in guarded else 1.0  # of the alternatives one is read
        all_of_it = _bytes(operand, {**whole, **tile}) * share
        if _by_streams(operand, facts.target):
            streams = prod(n for a, n in sizes.items() if a in operand.axes)
            far = far + all_of_it * (1 + facts.target.stream_cost * (streams - 1)) / facts.target.main.bandwidth
            continue
        each = _bytes(operand, {**whole, **sizes}) * share * blocks
        moved = moved + np.where(all_of_it <= facts.target.nearest.capacity // 2, all_of_it, each)
    return moved, far


def _by_streams(operand: ReadFacts, target: Target) -> bool:
    """Whether it matters how many rows of an operand are read side by side: it comes from main memory, being more than
    half of any cache, and the prefetcher follows few."""
    outer, source = target.shared_cache or target.local, operand.node.source
    size = source.most_bytes
    return target.stream_cost > 0.0 and size > outer.capacity * outer.shared_by // 2


def _cut_extent(facts: ContractionFacts) -> int:
    return extent_of(facts.cut_axis.extent) if facts.cut_axis is not None else 1


def moving_seconds(facts: ContractionFacts, form: LoopForm, tile: Mapping[Axis, Size], core: Size) -> Size:
    """Time of a tile with what moves into the first cache, and what is fetched again beyond the tile level."""
    depths = _depths(facts, form, tile)
    line = facts.target.nearest.transaction
    held = [list(column) for column in zip(*(_held(o, depths, line) for o in facts.operands), strict=True)]
    trips, uses = _loops(facts, form, tile)
    near = facts.target.nearest
    level = facts.target.local
    into_near, into_level = _traffic(facts, held, trips, uses, (near.capacity, level.capacity * FULL))
    runs: Size = 0.0
    rows: Size = 0.0
    again: Size = 0.0
    streams: Size = 0.0
    turns: Size = 1
    for count in trips:
        turns = turns * count
    parts = zip(facts.operands, into_near, into_level, held[0], held[-1], strict=True)
    for operand, first, second, block, whole in parts:
        # rows that meet on the same sets throw each other out: every register tile fetches them, and again
        fetched = pick(_crowded(facts, operand, form.rows), CROWDED * block * turns, first)
        seconds = fetched / level.bandwidth
        runs, rows = (runs + seconds, rows) if operand.is_run else (runs, rows + seconds)
        again = again + np.maximum(second - whole, 0)
        if operand.by_row and not operand.is_run and _by_streams(operand, facts.target):
            streams = streams + whole * (1 + facts.target.stream_cost * (form.rows - 1)) / facts.target.main.bandwidth
    passes = -(-_cut_extent(facts) // form.cut)
    outputs: Size = 4.0
    for axis in facts.nest.axes:
        outputs = outputs * tile[axis]
    runs = runs + 2 * outputs * (passes - 1) / level.bandwidth
    far = again / facts.target.beyond_local.bandwidth
    stalls = np.minimum(RUN_STALL * np.maximum(runs - RUN_HIDDEN * core, 0.0), runs)
    total = np.maximum(core + stalls, np.maximum(np.maximum(rows, streams), far))
    total = total + RUN_EXPOSED * np.minimum(core, runs) + ROWS_EXPOSED * np.minimum(core, rows)
    exposed = AGAIN_EXPOSED if any(o.is_run and o.by_vector for o in facts.operands) else FAR_EXPOSED
    return total + exposed * np.minimum(core, far)


def pick(condition: Size, then: Size, otherwise: Size) -> Size:
    """`np.where`, without its overhead where one answer holds for all candidates."""
    if isinstance(condition, bool | np.bool_):
        return then if condition else otherwise
    return np.where(condition, then, otherwise)


def _crowded(facts: ContractionFacts, operand: ReadFacts, rows: Size) -> Size:
    """Whether the rows of a register tile fall on too few sets of the first cache."""
    if operand.is_run or not operand.by_row or not operand.row_bytes:
        return False
    return rows > facts.target.lines_held(operand.row_bytes)


def _depths(facts: ContractionFacts, form: LoopForm, tile: Mapping[Axis, Size]) -> list[dict[Axis, Size]]:
    """Sizes of all axes inside each loop: a register tile, the inner block loop, the outer one, passes, the tile."""
    block: dict[Axis, Size] = {a: extent_of(a.extent) for a in facts.nest.reduce_axes}
    block.update(dict.fromkeys(facts.plain, 1))
    if facts.vector is not None and facts.vector in facts.nest.axes:
        block[facts.vector] = np.minimum(form.vectors * facts.lanes, tile[facts.vector])
    if facts.row is not None:
        block[facts.row] = np.minimum(form.rows, tile[facts.row])
    for axis, around in facts.runs.items():
        left = form.rows if axis is facts.row else form.vectors * facts.lanes
        for within, outer in pairwise((axis, *around)):
            left = -(-left // extent_of(within.extent))
            block[outer] = np.minimum(left, tile[outer])
    if facts.cut_axis is not None:
        block[facts.cut_axis] = np.minimum(form.cut, _cut_extent(facts))
    inner = dict(block)
    inside = form.row_inside
    both = dict(block)
    if facts.row is not None:
        for axis in (facts.row, *facts.runs.get(facts.row, ())):
            inner[axis] = pick(inside, tile[axis], block[axis])
            both[axis] = tile[axis]
    if facts.vector is not None and facts.vector in facts.nest.axes:
        outer_first = np.logical_not(inside) if facts.row is not None else True
        for axis in (facts.vector, *facts.runs.get(facts.vector, ())):
            inner[axis] = pick(outer_first, tile[axis], block[axis])
            both[axis] = tile[axis]
    passes = dict(both)
    if facts.cut_axis is not None:
        passes[facts.cut_axis] = _cut_extent(facts)
    whole = {**passes, **{a: tile[a] for a in facts.plain}}
    return [block, inner, both, passes, whole]


def _loops(facts: ContractionFacts, form: LoopForm, tile: Mapping[Axis, Size]) -> tuple[list[Size], list[list[Size]]]:
    """Trips of the loops between the depths, and for each whether an operand uses other data in every turn."""
    rows = _trips(facts, facts.row, form.rows, tile) if facts.row is not None else 1
    in_vector = facts.vector is not None and facts.vector in facts.nest.axes
    columns = _trips(facts, facts.vector, form.vectors * facts.lanes, tile) if in_vector else 1  # type: ignore[arg-type]
    inside = form.row_inside if facts.row is not None else False
    plain: Size = 1
    for axis in facts.plain:
        plain = plain * tile[axis]
    passes = -(-_cut_extent(facts) // form.cut)
    trips = [pick(inside, rows, columns), pick(inside, columns, rows), passes, plain]
    uses: list[list[Size]] = []
    for operand in facts.operands:
        axes = operand.axes
        vector, row = operand.by_vector and in_vector, operand.by_row
        uses.append([
            pick(inside, row, vector), pick(inside, vector, row),
            facts.cut_axis in axes, any(a in axes for a in facts.plain),
        ])  # fmt: skip
    return trips, uses


def _trips(facts: ContractionFacts, axis: Axis, block: Size, tile: Mapping[Axis, Size]) -> Size:
    length, times = stretch(axis, facts.runs.get(axis, ()), tile)
    return -(-length // block) * times


def _traffic(
    facts: ContractionFacts, held: Sequence[Sequence[Size]], trips: Sequence[Size], uses: Sequence[Sequence[Size]],
    capacities: Sequence[float],
) -> list[list[Size]]:  # fmt: skip
    """Bytes of each operand that come into caches of these capacities during one tile."""
    wide = [SCATTERED if o.is_scattered else 1.0 for o in facts.operands]
    taken: list[Size] = []
    for depth, parts in enumerate(held):
        if depth and all(a is b for a, b in zip(parts, held[depth - 1], strict=True)):
            taken.append(taken[-1])
        else:
            taken.append(sum((n if w == 1.0 else n * w for n, w in zip(parts, wide, strict=True)), 0.0))
    staying = _staying(taken, np.array(capacities)[:, None])
    into: list[Size] = []
    for number in range(len(facts.operands)):
        moved, *found = _fetched(number, held, trips, uses[number])
        for (stays, leaves), here in zip(staying, found, strict=True):
            moved = stays * here + leaves * moved
        into.append(moved)
    # an entry a candidate, or one for all
    return [[moved[place] if moved.shape[1] > 1 else moved[place, 0] for moved in into]
            for place in range(len(capacities))]  # fmt: skip


def _staying(taken: Sequence[Size], capacity: np.ndarray) -> list[tuple[Size, Size]]:
    """Of what loops take of a cache the part that is found again, and the part that is not: replacement is near random
    in the caches we know, and of a little too much a good part still stays."""
    found: list[tuple[Size, Size]] = []
    for depth, size in enumerate(taken):
        if depth and size is taken[depth - 1]:
            found.append(found[-1])
            continue
        stays = np.minimum(np.maximum(OVERFULL - size / capacity, 0.0), OVERFULL - 1) / (OVERFULL - 1)
        found.append((stays, 1 - stays))
    return found


def _fetched(number: int, held: Sequence[Sequence[Size]], trips: Sequence[Size], uses: Sequence[Size]) -> list[Size]:
    """Bytes of an operand that are fetched where nothing stays, every register tile its own; then where what each loop
    works on does."""
    moved: Size = held[0][number]
    for count in trips:
        moved = moved * count
    found = [moved]
    for depth in range(len(held)):
        here: Size = held[depth][number]
        stays: Size = True
        for loop in range(depth, len(trips)):
            stays = pick(uses[loop], False, stays)
            if not isinstance(trips[loop], int) or trips[loop] != 1:
                here = pick(stays, here, here * trips[loop])
        found.append(here)
    return found


def _bytes(operand: ReadFacts, sizes: Mapping[Axis, Size]) -> Size:
    """Distinct bytes an operand touches while the axes run over these sizes."""
    return _product(operand, [index_size(index, sizes, extent) for index, extent in operand.dims], sizes)


def _product(operand: ReadFacts, along: Sequence[Size], sizes: Mapping[Axis, Size]) -> Size:
    """Distinct bytes of an operand that reaches so far along each of its axes."""
    total: Size = operand.node.source.dtype.bytes
    for size in along:
        total = total * size
    if operand.is_plain:
        return total
    # rows that are rolled or shuffled span more than is read of them
    points: Size = operand.node.source.dtype.bytes
    for axis in operand.axes:
        points = points * sizes.get(axis, 1)
    return np.minimum(total, points)


def _held(operand: ReadFacts, depths: Sequence[Mapping[Axis, Size]], line: int) -> list[Size]:
    """Bytes of an operand inside each loop, in whole lines; loops that it does not move along change nothing."""
    found: list[Size] = []
    before: list[Size] | None = None
    for sizes in depths:
        along = [sizes.get(axis) for axis in operand.axes]
        if before is None or any(a is not b for a, b in zip(along, before, strict=True)):
            found.append(lines_of(operand, sizes, line))
        else:
            found.append(found[-1])
        before = along
    return found


def lines_of(operand: ReadFacts, sizes: Mapping[Axis, Size], line: int) -> Size:
    """The same in whole lines of a cache: of a short run most of a line is carried for nothing."""
    along = [index_size(index, sizes, extent) for index, extent in operand.dims]
    total = _product(operand, along, sizes)
    if not operand.order:
        return total
    run: Size = operand.node.source.dtype.bytes
    goes_on: Size = True
    for dimension in operand.order:
        if goes_on is False:
            break
        size = along[dimension]
        run = pick(goes_on, run * size, run)
        whole = size >= operand.dims[dimension][1]
        goes_on = whole if goes_on is True else goes_on & whole
    run = np.maximum(run, 1)  # of nothing, where an axis is empty
    return total * (-(-run // line) * line) / run
