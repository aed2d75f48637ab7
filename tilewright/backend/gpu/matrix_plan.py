"""How a block's warps share a product on tensor cores, priced by the rates of the Target; nothing is measured.

A part of the sum (a slab) takes as long as the slowest of tensor cores, shared memory and the L2 cache; so many stages
are under way that the latency of memory is covered by the slabs before. A block begins, waits for its first slab, walks
the sum and stores. Blocks that share a multiprocessor add up where they use the same unit and overlap where they wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

import numpy as np

from tilewright.backend.gpu.matrix import PADDED, SWIZZLED
from tilewright.backend.gpu.matrix_epilogue import SUMS_PAD
from tilewright.backend.gpu.matrix_sides import Side, Sides, sides_of
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS, ROW_BYTES
from tilewright.ir.expr import Axis, Load, axes_of, loads, var, walk
from tilewright.target import Target
from tilewright.tile_graph.context import NestContext, offset_of, stride
from tilewright.tile_graph.nest import Nest, data_cost
from tilewright.tile_graph.plan import COPIED, Barrier, Bind, Hold, Leaf, Tile, TileAxis
from tilewright.tile_graph.propagate import Box, Range, Size, extent_of

Both = tuple[bool, bool]  # of the rows' operand, and of the columns'
Ways = tuple[int, int]

_LEAST = 8  # rows and columns, and _LEAST_SUMMED steps of the sum, below which fragments are mostly empty
_LEAST_SUMMED = 16
_MOST_BLOCK = 256  # rows or columns of a block
_WARPS = (1, 2, 3, 4, 6, 8)
_GROUPS = {8: (1, 2, 4)}  # of so many warps that share the steps of a part: two warps a scheduler, small tiles or not
_STEP_BYTES = (256, 128, 64)  # of a line of shared memory along the sum
_LEAST_STEPS = 2  # of a part, of each group: the next fragments come while these are multiplied
_LEAST_STAGES, _WISHED_STAGES, _MOST_STAGES = 3, 4, 6  # parts arrive unevenly, whatever the mean says
REGISTERS = 255  # of a thread
REGISTERS_BESIDE = 44  # addresses, conditions and counters
REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor
THREADS = 2048  # of a multiprocessor
# The rest is fitted on 700 plans of 13 products, measured on an H200; four products were left out of the fit, and are
# predicted as well as the others (7% off in the median).
_FIRST = 1.6  # times the latency of memory until the first part is there
_LOADED = 2.5  # times the latency of memory that is idle, under load
_SYNC = 304  # cycles of a part at the least: the wait, the barrier and the first fragments
_DEPTH_STEP = 10  # and of each step in it
_NEVER = 1e15  # cycles of what cannot be done
_LINE = 128  # bytes that the L2 brings at a time
_CUT_LINES, _SHORT_LINES = 2.0, 2.0  # times the bytes of runs that end inside lines, or are a part of one each
_MET_LINES = 1.9  # times the rate of the L2: lines that several multiprocessors want at about the same time
_PADDED_SLOWER = 1.4  # times the time of fragments and copies in lines that are padded
_OVERLAP = 2.5  # units at work together take the mean of this power: 1 in turn, infinity all at once
_THROUGH_SHARED = 5.4  # times the time to write the sums into shared memory, for their way out
_COPIED, _COMPUTED, _BY_ELEMENT = range(3)  # how operands come to shared memory
_WAY_SLOTS = (0, 20, 40)  # issue slots of an element, one thread
_WAY_CYCLES = (0, 40, 80)  # and cycles until the thread has it there
_STORED = 4  # issue slots of an element of the result, one thread
_REGISTERS_TAKEN = 60  # beside fragments, where the assembler has room


@dataclass(frozen=True)
class Fragments:
    """How a block's warps share a product, and how its operands come."""

    rows: int  # of a block
    columns: int
    warp_rows: int
    warp_columns: int
    step: int
    stages: int
    stored: int = 1  # columns of a result that are stored at a time, by way of shared memory
    groups: int = 1  # of warps, that each take some of the steps of every part of the sum

    @property
    def warps(self) -> int:
        return self.rows // self.warp_rows * (self.columns // self.warp_columns) * self.groups


@dataclass(frozen=True)
class MatrixCost:
    """Cycles of a multiprocessor that a block keeps busy, cycles it takes alone, bytes of shared memory, and how many
    blocks share a multiprocessor."""

    busy: float
    alone: float
    ring: int
    resident: int


def instruction_of(nest: Nest, target: Target) -> str | None:
    """The instruction that runs the nest's product; None where there is none, or too little to do for it."""
    sides = sides_of(nest)
    if sides is None or not target.rate(sides.instruction):
        return None
    rows, columns = (prod(extent_of(a.extent) for a in side.axes) for side in (sides.rows, sides.columns))
    length = prod(extent_of(a.extent) for a in nest.reduce_axes)
    return sides.instruction if min(rows, columns) >= _LEAST and length >= _LEAST_SUMMED else None


def sides_of_leaf(nest: Nest, leaf: Leaf) -> Sides:
    """The columns along the output axis that neighbouring threads walk."""
    outputs = [nest.named(a) for a in leaf.order if a[0] == "o"]
    sides = sides_of(nest, outputs[-1])
    assert sides is not None
    return sides


def box_sizes(nest: Nest, leaf: Leaf, box: Box) -> tuple[int, int, int]:
    """Rows, columns and products of a box."""
    sides = sides_of_leaf(nest, leaf)
    sizes = {a: int(r.size) for a, r in zip(nest.axes, box, strict=True)}
    rows, columns, others = (
        prod(sizes[a] for a in axes) for axes in (sides.rows.axes, sides.columns.axes, sides.others)
    )
    return rows, columns, others


def ways_of(nest: Nest, leaf: Leaf, nests: Sequence[Nest], context: NestContext) -> Ways:
    """How the rows' operand and the columns' come to shared memory: copied as they lie in memory, computed packet by
    packet, or element by element."""
    sides = sides_of_leaf(nest, leaf)
    inside = {t for n in nests for t in n.stores}
    innermost = nest.named(leaf.order[-1])

    def way(side: Side, along_sum: bool) -> int:
        line = extent_of((innermost if along_sum else side.axes[-1]).extent)
        if line % FORMS[leaf.instruction or ""].packet:
            return _BY_ELEMENT
        return _COPIED if isinstance(side.value, Load) and side.value.source not in inside else _COMPUTED

    rows, columns = runs_of(nest, leaf, context)
    return way(sides.rows, rows), way(sides.columns, columns)


def runs_of(nest: Nest, leaf: Leaf, context: NestContext) -> Both:
    """Whether lines of memory run along the sum, of the rows' operand and of the columns'."""
    sides = sides_of_leaf(nest, leaf)
    bare = replace(context, constants=frozenset(), staged=frozenset())

    def along(side: Side) -> bool:
        found = [x for x in walk(side.value) if isinstance(x, Load)]
        return not any(stride(x, side.axes[-1], bare) == 1 for x in found)

    return along(sides.rows), along(sides.columns)


def stored_at_once(nest: Nest, leaf: Leaf, context: NestContext) -> int:
    """Columns of a result that make a packet of 16 bytes, where they lie beside each other in memory and the result is
    of 16 bits or its epilogue reads something else: lanes of a fragment would store or read pieces of lines."""
    last = sides_of_leaf(nest, leaf).columns.axes[-1]
    widest = max(t.dtype.bytes for t in nest.stores)
    size = ROW_BYTES // widest
    own = set(nest.accumulated)
    beside = [x for x in loads(*nest.values) if x.source not in own]
    if widest > 4 or (widest == 4 and not beside) or extent_of(last.extent) % size:
        return 1
    for tensor in nest.stores:
        at = offset_of(tensor, context.layout(tensor), tuple(var(a) for a in nest.axes))
        if (
            at.terms.get(var(last)) != 1
            or at.constant % size
            or any(c % size or last in axes_of(t) for t, c in at.terms.items() if t is not var(last))
        ):
            return 1
    return size


@lru_cache(maxsize=1 << 16)
def fragments_for(
    target: Target, instruction: str, rows: int, columns: int, others: int, length: int, blocks: int, ways: Ways,
    far: bool, runs: Both, stored: int = 1, work: int = 0, warps: int = 0, room: int = 0,
) -> tuple[Fragments, MatrixCost] | None:  # fmt: skip
    """The best way for a box of a product, `blocks` of which are to be computed; with so many warps where that is
    given, in so much shared memory. `ways` and `runs`: see `ways_of` and `runs_of`; `far`: operands come from device
    memory rather than from the L2; `work`: instructions of the epilogue."""
    best: tuple[float, Fragments, MatrixCost] | None = None
    room = room or target.tile_level.capacity
    width = FORMS[instruction].operand.bytes
    for count, groups in ((n, g) for n in ((warps,) if warps else _WARPS) for g in _GROUPS.get(n, (1,))):
        if groups > 1 and stored == 1:
            continue  # their sums meet in shared memory
        together = count // groups
        for down in (n for n in range(1, together + 1) if together % n == 0):
            shape = _block(rows, columns, down, together // down)
            if shape is None:
                continue
            for step in (size // width for size in _STEP_BYTES):
                if step // (FORMS[instruction].depth * groups) < _LEAST_STEPS:
                    continue
                made = _staged(Fragments(*shape, step, 1, stored, groups), target, instruction, length, far, room)
                if made is None:
                    continue
                cost = _cost(made, target, instruction, rows, columns, others, length, blocks, ways, far, runs, work)
                time = float(seconds(cost.busy, cost.alone, cost.resident, blocks, target))
                if best is None or time < best[0]:
                    best = (time, made, cost)
    return None if best is None else best[1:]


def _block(rows: int, columns: int, down: int, across: int) -> tuple[int, int, int, int] | None:
    """Rows and columns of a block with so many warps below and beside each other, and of a warp."""
    height = ceil(min(rows, _MOST_BLOCK) / (16 * down)) * 16
    width = ceil(min(columns, _MOST_BLOCK) / (16 * across)) * 16
    kept = height * width // 32 + (height + width) // 2  # sums, and fragments of both operands, twice
    if kept + REGISTERS_BESIDE > REGISTERS:
        return None
    return height * down, width * across, height, width


def _staged(made: Fragments, target: Target, instruction: str, length: int, far: bool, room: int) -> Fragments | None:
    """With as many stages as cover the latency, where there is room for them."""
    parts = ceil(length / made.step)
    latency = _LOADED * (target.main if far else target.outer or target.main).latency * target.clock
    slab = _slab(made, target, instruction, (True, True), target.units)
    if ring_bytes(replace(made, stages=1), instruction) > room:
        return None
    covering = 1 + ceil(latency / max(_SYNC, slab.together(1)))
    wanted = min(max(_WISHED_STAGES, covering), _MOST_STAGES, parts + 1)
    for stages in range(wanted, min(wanted, _LEAST_STAGES) - 1, -1):
        tried = replace(made, stages=stages)
        if ring_bytes(tried, instruction) <= room:
            return tried
    return None


def ring_bytes(made: Fragments, instruction: str) -> int:
    """Shared memory of the operands, and of the sums on their way out."""
    width = FORMS[instruction].operand.bytes
    padding = sum(_padding(n, made.step, FORMS[instruction].packet) for n in (made.rows, made.columns))
    ring = made.stages * (made.step * width * (made.rows + made.columns) + padding * 16)
    sums = made.groups * made.rows * (made.columns + SUMS_PAD) * 4 if made.stored > 1 else 0
    return max(ring, sums)  # one after the other


def _padding(size: int, step: int, packet: int) -> int:
    """Packets that padded lines take more, whichever way they run."""
    return 0 if layout_for(size, step, packet) == SWIZZLED else max(size, 2 * step)


def layout_for(size: int, step: int, packet: int) -> str:
    """Packets of a line are exchanged where that leaves none out, whichever way lines run; 32-bit elements that lie
    along a line of their own are read one by one."""
    lines = (size // packet, step // packet)
    return SWIZZLED if packet == 8 and all(n in (1, 2, 4) or n % 8 == 0 for n in lines) else PADDED


def _line_waste(run: int) -> float:
    """Bytes that are fetched for each byte of runs of a length, the next run far away."""
    if run % _LINE == 0:
        return 1.0
    return _SHORT_LINES if _LINE % run == 0 else _CUT_LINES


@dataclass(frozen=True)
class _Slab:
    """Cycles of a multiprocessor's units for a part of the sum of one block."""

    tensor: float
    shared: float
    beyond: float  # the L2 cache

    def together(self, idle: float) -> float:
        """Of all units, the tensor cores so many times slower."""
        units = (self.tensor * idle, self.shared, self.beyond)
        return float(sum(unit**_OVERLAP for unit in units) ** (1 / _OVERLAP))


def _slab(made: Fragments, target: Target, instruction: str, runs: Both, active: int) -> _Slab:
    """With so many multiprocessors at work."""
    width = FORMS[instruction].operand.bytes
    rate = target.rate(instruction)
    assert rate is not None
    tensor = made.rows * made.columns * made.step / (rate / target.clock)
    packet = FORMS[instruction].packet
    slower = [
        1.0 if layout_for(n, made.step, packet) == SWIZZLED else _PADDED_SLOWER for n in (made.rows, made.columns)
    ]
    through = (
        made.rows * (made.columns // made.warp_columns + 1) * slower[0]
        + made.columns * (made.rows // made.warp_rows + 1) * slower[1]
    )
    # lines that a run begins or ends inside are fetched by both neighbours
    lines = [
        1.0 if run else _line_waste(size * width) for size, run in zip((made.rows, made.columns), runs, strict=True)
    ]
    moved = made.rows * lines[0] + made.columns * lines[1]
    near = target.tile_level.bandwidth / target.clock
    beyond = _MET_LINES * (target.outer or target.main).bandwidth / target.clock * target.units / active
    return _Slab(tensor, width * made.step * through / near, width * made.step * moved / beyond)


def _cost(
    made: Fragments, target: Target, instruction: str, rows: int, columns: int, others: int, length: int, blocks: int,
    ways: Ways, far: bool, runs: Both, work: int,
) -> MatrixCost:  # fmt: skip
    form = FORMS[instruction]
    turns = others * ceil(rows / made.rows) * ceil(columns / made.columns)
    parts = ceil(length / made.step)
    slab = _slab(made, target, instruction, runs, min(blocks, target.units))
    lanes = target.fma_rate / target.clock
    warps = made.warps
    depth = made.step // form.depth // made.groups
    # elements that are not just copied: threads compute where they lie and what they are, and wait for them
    sizes = (made.rows, made.columns)
    part = slab.together(1)
    part += made.step * sum(n * _WAY_SLOTS[way] for n, way in zip(sizes, ways, strict=True)) / lanes
    each = made.step * sum(n * _WAY_CYCLES[way] for n, way in zip(sizes, ways, strict=True))
    reach = _LOADED * (target.main if far else target.outer or target.main).latency * target.clock
    # a multiprocessor's four schedulers each feed a quarter of its tensor cores, and the busiest is the last
    own = max(slab.together(ceil(warps / 4) * 4 / warps), _SYNC + _DEPTH_STEP * depth)
    waiting = reach / max(1, made.stages - 1) + each / (32 * warps)
    step = max(own, waiting if parts > made.stages - 1 else 0.0)
    out = made.rows * made.columns
    stored = out / (32 * warps) * (_STORED + work) * max(1.0, warps / 4)
    if made.stored > 1:
        stored += _THROUGH_SHARED * out * made.groups * 4 / (target.tile_level.bandwidth / target.clock)
    ring = ring_bytes(made, instruction)
    kept = made.warp_rows * made.warp_columns // 32 + (made.warp_rows + made.warp_columns) // 2
    registers = min(REGISTERS, kept + _REGISTERS_TAKEN)
    resident = max(1, min(target.tile_level.capacity // max(ring, 1), REGISTER_FILE // (registers * 32 * warps),
                          THREADS // (32 * warps)))  # fmt: skip
    busy = turns * (parts * part + stored)
    alone = _FIRST * target.main.latency * target.clock + turns * (parts * step + stored)
    return MatrixCost(busy, alone, ring, resident)


def seconds(busy: Size, alone: Size, resident: Size, blocks: Size, target: Target) -> Size:
    """Of a kernel of so many blocks, the launch included; numbers, or arrays with an entry a candidate."""
    alive = -(-blocks // target.units)
    turns = -(-alive // resident)
    cycles = np.maximum((alive - 1) * busy + alone, turns * alone)
    return cycles / target.clock + target.kernel_cost


def product_of(nest: Nest, leaf: Leaf, box: Box, reduce_box: Mapping[Axis, Range]) -> tuple[int, int, int, int]:
    """Rows, columns, products and steps of the sum of a box."""
    length = prod(int(reduce_box[a].size) if a in reduce_box else extent_of(a.extent) for a in nest.reduce_axes)
    return (*box_sizes(nest, leaf, box), length)


def choose_fragments(
    nests: Sequence[Nest], leaves: Sequence[Leaf], boxes: Mapping[Nest, Box],
    limits: Mapping[Nest, Mapping[Axis, Range]], blocks: int, held: int, context: NestContext,
) -> dict[str, Fragments]:  # fmt: skip
    """The best way for every leaf of a kernel that runs on matrices, by name; the longest of them says how many warps
    the block has."""
    target, far = context.target, comes_from_far(context)
    work = [(product_of(n, leaf, boxes[n], limits.get(n, {})), n, leaf)
            for n, leaf in zip(nests, leaves, strict=True) if leaf.instruction in FORMS]  # fmt: skip
    found: dict[str, Fragments] = {}
    warps = 0
    for sizes, nest, leaf in sorted(work, key=lambda item: -prod(item[0])):
        stored = stored_at_once(nest, leaf, context) if nest is nests[-1] else 1
        runs, room = runs_of(nest, leaf, context), target.tile_level.capacity - held
        ways = ways_of(nest, leaf, nests, context)
        made = fragments_for(target, leaf.instruction or "", *sizes, blocks, ways, far, runs, stored,
                             data_cost(*nest.values), warps, room)  # fmt: skip
        if made is None:
            raise InternalError(f"no fragments of '{nest.tensor.name}' fit {warps} warps and {held} bytes beside them")
        found[leaf.tensor] = made[0]
        warps = made[0].warps
    return found


@dataclass(frozen=True)
class MatrixCosts:
    """The same with an entry a candidate."""

    threads: np.ndarray
    busy: np.ndarray
    alone: np.ndarray
    ring: np.ndarray
    resident: np.ndarray

    def seconds(self, blocks: np.ndarray, target: Target) -> np.ndarray:
        found: np.ndarray = seconds(self.busy, self.alone, self.resident, blocks, target)
        return found


def matrix_costs(
    nests: Sequence[Nest], leaves: Sequence[Leaf], boxes: Mapping[Nest, Box],
    limits: Mapping[Nest, Mapping[Axis, Range]], tiles: np.ndarray, context: NestContext,
) -> dict[Nest, MatrixCosts]:  # fmt: skip
    """What each product of a kernel costs a block, by candidate; one that has no way costs infinitely much."""
    far = comes_from_far(context)
    found: dict[Nest, MatrixCosts] = {}
    for nest, leaf in zip(nests, leaves, strict=True):
        if leaf.instruction not in FORMS:
            continue
        ways = ways_of(nest, leaf, nests, context)
        runs, work = runs_of(nest, leaf, context), data_cost(*nest.values)
        stored = stored_at_once(nest, leaf, context) if nest is nests[-1] else 1
        sides = sides_of_leaf(nest, leaf)
        sizes = {a: np.broadcast_to(r.size, tiles.shape) for a, r in zip(nest.axes, boxes[nest], strict=True)}
        columns = [np.prod([sizes[a] for a in axes], axis=0) if axes else np.ones_like(tiles)
                   for axes in (sides.rows.axes, sides.columns.axes, sides.others)]  # fmt: skip
        reduce_box = limits.get(nest, {})
        length = prod(int(reduce_box[a].size) if a in reduce_box else extent_of(a.extent) for a in nest.reduce_axes)
        rows = []
        for r, c, o, t in zip(*(x.tolist() for x in (*columns, tiles)), strict=True):
            made = fragments_for(
                context.target, leaf.instruction or "", r, c, o, length, t, ways, far, runs, stored, work
            )
            way, cost = made if made is not None else (None, MatrixCost(_NEVER, _NEVER, 0, 1))
            rows.append((32 * (way.warps if way else 1), cost.busy, cost.alone, cost.ring, cost.resident))
        found[nest] = MatrixCosts(*(np.array(x) for x in zip(*rows, strict=True)))
    return found


def matrix_sizes(nest: Nest, leaf: Leaf, axis: Axis) -> list[int]:
    """Sizes of a block along an output axis that are worth a look."""
    sides = sides_of_leaf(nest, leaf)
    extent = extent_of(axis.extent)
    if axis in sides.others:
        return [1]
    side = sides.rows if axis in sides.rows.axes else sides.columns
    own = [a for a in side.axes if extent_of(a.extent) > 1]
    if axis is (own or side.axes)[-1]:
        sizes = {n for n in (16, 32, 48, 64, 96, 128, 192, 256) if n < extent}
        return sorted(sizes | {extent}) if extent <= _MOST_BLOCK else sorted(sizes)
    inner = prod(extent_of(a.extent) for a in side.axes[side.axes.index(axis) + 1 :])
    sizes = {1}
    while 2 * max(sizes) * inner <= 2 * _MOST_BLOCK and 2 * max(sizes) < extent:
        sizes.add(2 * max(sizes))
    return sorted(sizes | ({extent} if extent * inner <= _MOST_BLOCK else set()))


def with_warps(kernel: Tile, nests: Sequence[Nest], chosen: Mapping[str, Fragments], registers: str) -> Tile:
    """The kernel with every leaf that runs on matrices inside the Tile over warps that shares it out, and that inside
    a Tile that brings its operands."""
    by_name = {n.tensor.name: n for n in nests}
    if not chosen:
        return kernel

    def changed(node: Tile | Leaf, level: str) -> Tile | Leaf:
        if isinstance(node, Tile):
            return replace(node, body=tuple(n if isinstance(n, Barrier) else changed(n, node.level) for n in node.body))
        made = chosen.get(node.tensor)
        if made is None or node.part not in ("whole", "step"):
            return node
        nest = by_name[node.tensor]
        names = nest.axis_names()
        sides = sides_of_leaf(nest, node)
        sizes = (("m", made.warp_rows), ("n", made.warp_columns))
        axes = tuple(
            TileAxis(name, extent, tuple(Bind(node.tensor, names[a]) for a in side.axes))
            for name, extent, side in zip("mn", (made.rows, made.columns), (sides.rows, sides.columns), strict=True)
        )
        packet = FORMS[node.instruction or ""].packet
        holds = tuple(
            Hold(next(x.source.name for x in walk(side.value) if isinstance(x, Load)), fill=COPIED, stages=made.stages,
                 layout=layout_for(extent, made.step, packet))
            for side, extent in zip((sides.rows, sides.columns), (made.rows, made.columns), strict=True)
        )  # fmt: skip
        warps = Tile(registers, sizes, "warps", (node,), axes=axes)
        return Tile(level, over="order", body=(warps,), holds=holds)

    made = changed(kernel, kernel.level)
    assert isinstance(made, Tile)
    return made


def comes_from_far(context: NestContext) -> bool:
    """Whether operands are read from device memory: a model's weights may stay in the L2 from run to run, where they
    are few; a product without weights is part of something larger."""
    outer = context.target.outer
    return outer is None or not context.constants or context.weights > outer.capacity * outer.shared_by // 2
