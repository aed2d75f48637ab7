"""What a contraction costs on one core: cycles of its register tile, and the bytes its loops bring from cache to cache.

Roller's micro-performance model. Whoever keeps a level full decides: data of a loop that fits a level is fetched into
it once, and again in every turn of the loops outside that use other data. All sizes may be arrays with an entry a
candidate, so that thousands of plans are compared in one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from tilewright.ir.expr import Axis, Expr, Load, axes_of, is_op, loads, var, walk
from tilewright.ir.simplify import linear, simplify
from tilewright.target import Target
from tilewright.tile_graph.nest import Nest, data_cost, moves, period
from tilewright.tile_graph.plan import Leaf
from tilewright.tile_graph.propagate import Size, extent_of, index_size
from tilewright.tile_graph.runs import stretch

_PIPES = 2  # vector FMA pipes, and vector loads a cycle
_BLOCK_CYCLES = 14.0  # to start and end a register tile's loop: addresses, the first loads, the last adds
_STEP_CYCLES = 0.2  # of a step of the reduction: loop counter, what the scheduler loses
_CHECK_CYCLES = 8.0  # of one question whether a window lies inside, for a whole register tile
_ASKED_CYCLES = 0.15  # of one such question for a single element of a dot product, most of them foreseen
_SPILLED = 1.8
_PASS_CYCLES = 180.0  # to resume a register tile in another pass: its rows and its panel are cold again
_FULL = 0.75  # of the tile level holds what is used again; the rest is passing through
_OVERFULL = 1.8  # times its capacity: of so much nothing is found again
_SCATTERED = 1.5  # times its bytes: what of a cache an operand takes whose steps are lines apart
_CROWDED = 2.0  # times a line comes again that is thrown out before it is used up
_RUN_HIDDEN = 0.3  # of the arithmetic's time a run from the next cache may take and not be seen
_RUN_STALL = 1.0  # of what takes longer than that is seen
_RUN_EXPOSED = 0.06  # of the time a contiguous run takes from the next cache that arithmetic does not hide
_ROWS_EXPOSED = 0.1  # the same for as many streams as the register tile has rows: the prefetcher follows few
_DOT_STREAMS = 1.3  # of the time the rows of dot products take from the next cache: a stream for each, side by side
_FAR_EXPOSED = 0.15  # the same for what comes from beyond the tile level once more


@dataclass(frozen=True)
class Form:
    """How the loops of a contraction stand: its register tile, which block loop is inside, what a pass covers."""

    rows: Size
    vectors: Size
    row_inside: Size  # row blocks inside vector blocks: a panel of the vector operand stays, rows pass by
    cut: Size  # elements of the cut reduction axis a pass; its whole extent where nothing is cut


@dataclass(frozen=True)
class Operand:
    node: Load
    by_vector: bool
    by_row: bool
    is_run: bool  # contiguous as the loops walk it: one stream for the prefetcher
    is_scattered: bool = False  # every step of the reduction reads another line: the sets of a cache fill unevenly
    row_step: int = 1  # positions of the window from a row to the next
    gathered: float = 0.0  # reads that a vector costs whose lanes are no neighbours in memory; 0 where they are
    row_bytes: int = 0  # from a row of the register tile to the next; 0 where it is not one number
    order: tuple[int, ...] = ()  # its axes as they lie in memory, the innermost first; empty where it is packed
    lines: float = 1.0  # that a vector of it lies on: more than one where windows have vectors begin anywhere

    @cached_property
    def dims(self) -> tuple[tuple[Expr, int], ...]:
        """Its indices with the extents of their axes."""
        source = self.node.source
        return tuple((simplify(i), extent_of(e)) for i, e in zip(self.node.indices, source.shape, strict=True))

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """All axes that it moves along."""
        return tuple(axes_of(*self.node.indices))


@dataclass(frozen=True)
class Contraction:
    """The facts of a contraction nest that do not depend on sizes."""

    nest: Nest
    target: Target
    vector: Axis | None
    row: Axis | None
    lanes: int
    by_lane: bool  # the broadcast operand is read as vectors and multiplied lane by lane
    window: Axis | None  # a reduction axis written out: neighbouring rows share its reads
    cut_axis: Axis | None
    operands: tuple[Operand, ...]
    # what the factors of a product still compute at every step: operations, and whether rows and vectors each do
    factors: tuple[tuple[int, bool, bool], ...] = ()
    runs: Mapping[Axis, tuple[Axis, ...]] = field(default_factory=dict)  # what register tiles walk on to from an axis
    parts: tuple[int, ...] = ()  # what the vector axis is cut into where windows hang over its ends

    @cached_property
    def reduction(self) -> int:
        return prod(max(1, extent_of(a.extent)) for a in self.nest.reduce_axes)

    @cached_property
    def checks(self) -> int:
        """How often a register tile asks whether its window lies inside."""
        if not any(is_op(n, "select") for n in walk(*self.nest.elements)):
            return 0
        innermost = max((extent_of(a.extent) for a in self.nest.reduce_axes), default=1)
        return self.reduction // max(1, innermost if self.window is None else extent_of(self.window.extent))

    @cached_property
    def plain(self) -> list[Axis]:
        along = {b for around in self.runs.values() for b in around}
        return [a for a in self.nest.axes if a is not self.vector and a is not self.row and a not in along]

    @cached_property
    def latency(self) -> float:
        """Cycles from one multiply-add to the next on the same accumulator."""
        return self.target.fma_chains / _PIPES

    @cached_property
    def guarded(self) -> tuple[set[Load], bool]:
        """Reads under conditions, and whether those differ along the vector: every lane then asks for itself."""
        selects = [n for n in walk(*self.nest.elements) if is_op(n, "select")]
        conditions = axes_of(*(n.args[0] for n in selects))
        return {read for n in selects for read in loads(*n.args[1:])}, self.vector in conditions

    @cached_property
    def cycles_a_second(self) -> float:
        return self.target.fma_rate / (_PIPES * self.target.lanes(4))


def form_of(plan: Leaf, facts: Contraction) -> Form:
    """The form a plan gives its nest."""
    nest = facts.nest
    register = {nest.named(a): n for a, n in plan.register}
    rows = register.get(facts.row, 1) if facts.row is not None else 1
    vectors = max(1, register.get(facts.vector, plan.lanes) // plan.lanes) if facts.vector is not None else 1
    order = [nest.named(a) for a in plan.order]
    inside = True
    if facts.row is not None and facts.vector in order:
        inside = order.index(facts.row) > order.index(facts.vector)
    cut = dict(plan.cut).get(nest.axis_names()[facts.cut_axis]) if facts.cut_axis is not None else None
    whole = extent_of(facts.cut_axis.extent) if facts.cut_axis is not None else 1
    return Form(rows, vectors, inside, cut or whole)


def step_cycles(facts: Contraction, rows: Size, vectors: Size) -> Size:
    """One step of the reduction on a register tile: multiply-adds, reads, or the chain through an accumulator."""
    arithmetic = rows * vectors / _PIPES + _factor_cycles(facts, rows, vectors)
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
        arithmetic = arithmetic * np.where(rows * vectors > facts.target.vector_registers * 3 // 8, _SPILLED, 1.0)
    # a read and a multiply-add share the front end: reads that fit beside the arithmetic still cost a little
    reads = reads / _PIPES
    return np.maximum(np.maximum(arithmetic + 0.08 * reads, reads), facts.latency) + _STEP_CYCLES


def _factor_cycles(facts: Contraction, rows: Size, vectors: Size) -> Size:
    """A step's operations on the factors before they are multiplied; a value that all lanes share is then broadcast."""
    cycles: Size = 0.0
    for count, by_row, by_vector in facts.factors:
        each = count + (0 if by_vector else 1)
        cycles = cycles + each * (rows if by_row else 1) * (vectors if by_vector else 1) / _PIPES
    return cycles


def core_seconds(facts: Contraction, form: Form, tile: Mapping[Axis, Size]) -> Size:
    """Arithmetic of one tile, blocks that the register tile does not fill included."""
    height, stacks = blocks_along(facts, facts.row, tile)
    width, groups = blocks_along(facts, facts.vector, tile)
    full_rows, rest_rows = height // form.rows, height % form.rows
    steps: Size = 0.0
    blocks: Size = 0.0
    across: list[tuple[Size, Size]] = []
    inside = max(facts.parts, default=0)
    for part in (inside,) if facts.parts else (width,):
        rest_vectors = -(-(part % (form.vectors * facts.lanes)) // facts.lanes)  # the last one as whole as the others
        across.append((part // (form.vectors * facts.lanes), form.vectors))
        across.append((np.minimum(rest_vectors, 1), rest_vectors))
    if facts.parts:  # a window over an end asks for itself whether it may read: as many elements as vectors
        across.append((sum(facts.parts) - inside, 1))
    for count, rows in ((full_rows, form.rows), (np.minimum(rest_rows, 1), rest_rows)):
        for columns, vectors in across:
            number = count * columns
            steps = steps + number * step_cycles(facts, np.maximum(rows, 1), np.maximum(vectors, 1))
            blocks = blocks + number
    passes = -(-_cut_extent(facts) // form.cut)
    plain: Size = stacks * groups
    for axis in facts.plain:
        plain = plain * tile[axis]
    starting = _BLOCK_CYCLES * passes + _PASS_CYCLES * (passes - 1) + _CHECK_CYCLES * facts.checks
    return (steps * facts.reduction + blocks * starting) * plain / facts.cycles_a_second


def blocks_along(facts: Contraction, axis: Axis | None, tile: Mapping[Axis, Size]) -> tuple[Size, Size]:
    """How far blocks along an axis reach on a tile, and how often: they end with a group."""
    if axis is None:
        return 1, 1
    group = period(facts.nest, axis)
    if group is None:
        return stretch(axis, facts.runs.get(axis, ()), tile)
    return np.minimum(tile[axis], group), np.maximum(1, -(-tile[axis] // group))


def dot_seconds(facts: Contraction, register: Mapping[str, int], tile: Mapping[Axis, Size]) -> Size:
    """Dot products along a contiguous reduction, or no vector at all: outputs in a register tile, lanes folded last."""
    names = facts.nest.axis_names()
    sizes = {a: register.get(names[a], 1) for a in facts.nest.axes}
    outputs = prod(sizes.values())
    chains = max(1, register.get(names[facts.vector], facts.lanes) // facts.lanes) if facts.vector is not None else 1
    folding = outputs * fold_cycles(facts.lanes, chains) if facts.vector is not None else 0.0
    blocks: Size = 1.0
    for axis, size in sizes.items():
        blocks = blocks * -(-tile[axis] // size)
    core = blocks * (_dot_cycles(facts, sizes, chains) + folding + _BLOCK_CYCLES) / facts.cycles_a_second
    near, far = _dot_traffic(facts, sizes, tile, blocks)
    busy = core + _DOT_STREAMS * near / facts.target.tile_level.bandwidth
    return np.maximum(busy, far) + _FAR_EXPOSED * np.minimum(busy, far)


def _dot_cycles(facts: Contraction, sizes: Mapping[Axis, int], chains: int) -> float:
    """All steps of one register tile of dot products: what does not fill the chains goes element by element."""
    outputs, width = prod(sizes.values()), facts.lanes * chains
    along = extent_of(facts.vector.extent) if facts.vector is not None else facts.reduction
    guarded, by_lane = facts.guarded
    reads, asked = 0.0, 0.0
    for operand in facts.operands:
        count: float = prod(n for a, n in sizes.items() if a in operand.axes)
        if operand.node in guarded:
            asked += (facts.target.lane_check if by_lane else _ASKED_CYCLES) * count
            count = count / len(guarded)  # of the alternatives one is read
        lane_by_lane = operand.gathered or (by_lane and operand.node in guarded)
        reads += count * (facts.lanes * facts.target.gathered_reads if lane_by_lane else 1)
    together = max(outputs * chains / _PIPES, reads * chains / _PIPES, facts.latency) + _STEP_CYCLES
    together += asked * chains * (facts.lanes if by_lane else 1)
    one = max(outputs / _PIPES, reads / _PIPES, facts.latency) + _STEP_CYCLES + asked
    return facts.reduction / max(1, along) * (along // width * together + along % width * one)


def fold_cycles(lanes: int, chains: int = 1) -> float:
    """To add up the lanes of one sum: chains first, then halves of the vector, the last four lanes one by one."""
    halvings = max(0, lanes.bit_length() - 3)
    return 0.5 * (chains - 1) + 1.5 * halvings + 0.75 * min(lanes, 4) + 4.0


def _dot_traffic(
    facts: Contraction, sizes: Mapping[Axis, int], tile: Mapping[Axis, Size], blocks: Size
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
        moved = moved + np.where(all_of_it <= facts.target.levels[1].capacity // 2, all_of_it, each)
    return moved, far


def _by_streams(operand: Operand, target: Target) -> bool:
    """Whether it matters how many rows of an operand are read side by side: it comes from main memory, being more than
    half of any cache, and the prefetcher follows few."""
    outer, source = target.outer or target.tile_level, operand.node.source
    size = prod(extent_of(e) for e in source.shape) * source.dtype.bytes
    return target.stream_cost > 0.0 and size > outer.capacity * outer.shared_by // 2


def _cut_extent(facts: Contraction) -> int:
    return extent_of(facts.cut_axis.extent) if facts.cut_axis is not None else 1


def moving_seconds(facts: Contraction, form: Form, tile: Mapping[Axis, Size], core: Size) -> Size:
    """Time of a tile with what moves into the first cache, and what is fetched again beyond the tile level."""
    depths = _depths(facts, form, tile)
    line = facts.target.levels[1].transaction
    held = [[_lines(o, sizes, line) for o in facts.operands] for sizes in depths]
    trips, uses = _loops(facts, form, tile)
    near = facts.target.levels[1]
    level = facts.target.tile_level
    into_near = _traffic(facts, held, trips, uses, near.capacity)
    into_level = _traffic(facts, held, trips, uses, level.capacity * _FULL)
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
        fetched = pick(_crowded(facts, operand, form.rows), _CROWDED * block * turns, first)
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
    far = again / (facts.target.outer or facts.target.main).bandwidth
    stalls = np.minimum(_RUN_STALL * np.maximum(runs - _RUN_HIDDEN * core, 0.0), runs)
    total = np.maximum(core + stalls, np.maximum(np.maximum(rows, streams), far))
    total = total + _RUN_EXPOSED * np.minimum(core, runs) + _ROWS_EXPOSED * np.minimum(core, rows)
    return total + _FAR_EXPOSED * np.minimum(core, far)


def pick(condition: Size, then: Size, otherwise: Size) -> Size:
    """`np.where`, without its overhead where one answer holds for all candidates."""
    if isinstance(condition, bool | np.bool_):
        return then if condition else otherwise
    return np.where(condition, then, otherwise)


def _crowded(facts: Contraction, operand: Operand, rows: Size) -> Size:
    """Whether the rows of a register tile fall on too few sets of the first cache."""
    if operand.is_run or not operand.by_row or not operand.row_bytes:
        return False
    return rows > facts.target.lines_held(operand.row_bytes)


def _depths(facts: Contraction, form: Form, tile: Mapping[Axis, Size]) -> list[dict[Axis, Size]]:
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


def _loops(facts: Contraction, form: Form, tile: Mapping[Axis, Size]) -> tuple[list[Size], list[list[Size]]]:
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


def _trips(facts: Contraction, axis: Axis, block: Size, tile: Mapping[Axis, Size]) -> Size:
    length, times = stretch(axis, facts.runs.get(axis, ()), tile)
    return -(-length // block) * times


def _traffic(
    facts: Contraction, held: Sequence[Sequence[Size]], trips: Sequence[Size], uses: Sequence[Sequence[Size]],
    capacity: float,
) -> list[Size]:  # fmt: skip
    """Bytes of each operand that come into a cache of that capacity during one tile."""
    # replacement is near random in the caches we know: of a little too much a good part is still found again
    wide = [_SCATTERED if o.is_scattered else 1.0 for o in facts.operands]
    taken = [sum((n * w for n, w in zip(parts, wide, strict=True)), 0.0) / capacity for parts in held]
    staying = [np.clip(_OVERFULL - share, 0.0, _OVERFULL - 1) / (_OVERFULL - 1) for share in taken]
    result: list[Size] = []
    for number in range(len(facts.operands)):
        # nothing stays: every register tile fetches its own
        moved: Size = held[0][number]
        for count in trips:
            moved = moved * count
        for depth in range(len(held)):
            here: Size = held[depth][number]
            stays: Size = True
            for loop in range(depth, len(trips)):
                used = uses[number][loop]
                stays = pick(used, False, stays)
                here = pick(stays, here, here * trips[loop])
            moved = staying[depth] * here + (1 - staying[depth]) * moved
        result.append(moved)
    return result


def _bytes(operand: Operand, sizes: Mapping[Axis, Size]) -> Size:
    """Distinct bytes an operand touches while the axes run over these sizes."""
    total: Size = operand.node.source.dtype.bytes
    for index, extent in operand.dims:
        total = total * index_size(index, sizes, extent)
    # rows that are rolled or shuffled span more than is read of them
    points: Size = operand.node.source.dtype.bytes
    for axis in operand.axes:
        points = points * sizes.get(axis, 1)
    return np.minimum(total, points)


def _lines(operand: Operand, sizes: Mapping[Axis, Size], line: int) -> Size:
    """The same in whole lines of a cache: of a short run most of a line is carried for nothing."""
    total = _bytes(operand, sizes)
    run: Size = operand.node.source.dtype.bytes
    goes_on: Size = True
    for dimension in operand.order:
        index, extent = operand.dims[dimension]
        size = index_size(index, sizes, extent)
        run = np.where(goes_on, run * size, run)
        goes_on = np.logical_and(goes_on, size >= extent)
    run = np.maximum(run, 1)  # of nothing, where an axis is empty
    return total * (-(-run // line) * line) / run if operand.order else total


def overlap(operand: Operand, row: Axis | None, window: Axis) -> bool:
    """Whether steps along a window read what other rows read."""
    return any(row in axes and window in axes for axes in map(axes_of, operand.node.indices))


def factors_of(nest: Nest, vector: Axis | None, row: Axis | None) -> tuple[tuple[int, bool, bool], ...]:
    """Operations on the factors of a product that change with the reduction, by whether they change along the row and
    along the vector: such as a normalisation composed into the sum that reads it."""
    if len(nest.elements) != 1 or not is_op(nest.elements[0], "mul"):
        return ()
    found = []
    for factor in nest.elements[0].args:
        moving = [r for r in nest.reduce_axes if r in axes_of(factor)]
        ways = 1 + sum(is_op(n, "select") for n in walk(factor))  # of which a step takes one
        count = -(-data_cost(factor, along=moving[-1]) // ways) if moving else 0
        if count:
            axes = axes_of(factor)
            found.append((count, row in axes, vector in axes))
    return tuple(found)


def operands_of(
    nest: Nest, vector: Axis | None, row: Axis | None, is_run: Mapping[Load, bool], is_scattered: Mapping[Load, bool],
    gathered: Mapping[Load, float], row_bytes: Mapping[Load, int], order: Mapping[Load, tuple[int, ...]],
    target: Target,
) -> tuple[Operand, ...]:  # fmt: skip
    found = []
    for node in nest.element_loads:
        by_row = row is not None and moves(node, row)
        step = max((abs(linear(i).terms.get(var(row), 0)) for i in node.indices), default=1) if row is not None else 1
        by_vector = vector is not None and moves(node, vector)
        anywhere = any(vector in met and any(r in met for r in nest.reduce_axes) for met in map(axes_of, node.indices))
        lines = 1 + (target.vector_bytes - node.source.dtype.bytes) / target.levels[1].transaction if anywhere else 1.0
        found.append(Operand(node, by_vector, by_row, is_run[node], is_scattered[node], max(1, step), gathered[node],
                             row_bytes.get(node, 0), order.get(node, ()), lines))  # fmt: skip
    return tuple(found)
