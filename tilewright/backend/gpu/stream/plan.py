"""How a stream that lies in registers is cut: rows of a block and of a warp, and blocks of the streamed axis; priced
by the rates of the Target as products on tensor cores are (matrix_cost.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod

from tilewright.backend.gpu import constants as prices
from tilewright.backend.gpu.matrix.cost import (
    instructions,
    layout_for,
    ring_bytes,
    seconds,
)
from tilewright.backend.gpu.matrix.plan import fill_by, way_of
from tilewright.backend.gpu.stream.form import COLUMN, SINGLE, RegisterForm, register_form
from tilewright.backend.gpu.stream.visible import ROW
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.compute import Map
from tilewright.ir.forms.expr import Load, walk
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest, inline
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Bind, Hold, Leaf, Sizes, Tile, TileAxis
from tilewright.tile_graph.plan.leaf_form import FragmentForm

_UNIT = 16  # rows of a fragment, and columns of the two that lie beside each other in a rows' operand
_BLOCKS = (32, 64, 128)
_GROUPED_BLOCKS = (80, 96, 192)  # for groups of warps alone
_GROUPED_ROWS = 192  # for groups of warps alone
_ROWS = (16, 32, 64, 128, _GROUPED_ROWS, 256)
_WARP_ROWS = (16, 32)
_PIECE = 64  # elements of a line of shared memory that groups of warps read, and rows of a group
_LEAST_PART = 32  # of a block that several warps share
_LEAST_GROUP_BLOCK, _LONGEST = 64, 128  # of the streamed axis: groups take no shorter blocks, warps no longer ones
_MOST_WARPS = 8
_MOST_GROUPED_WARPS = 16
_STAGES = 2
_BYTES = 2  # of an operand's element
_SPLITS = (1, 2, 4)  # warps that may have the same rows
_STATE_BYTES, _ROW_STATES = 4, 32  # of what is carried: beside a row's columns, as lanes keep it


@dataclass(frozen=True)
class StreamFragments:
    """Rows of a block and of a warp, a block of the streamed axis, and columns, all in whole fragments."""

    rows: int
    warp_rows: int
    block: int
    columns: int
    summed: int
    stages: int
    instruction: str
    split: int = 1  # warps that have the same rows, each of them a part of every block

    @property
    def warps(self) -> int:
        return self.rows // self.warp_rows * self.split

    @property
    def own(self) -> int:
        """Of a block of the streamed axis, what a warp has."""
        return self.block // self.split

    @property
    def met(self) -> int:
        """Bytes that warps with the same rows tell each other."""
        return _STATE_BYTES * (self.split - 1) * self.rows * (self.columns + _ROW_STATES)

    @property
    def in_groups(self) -> bool:
        return FORMS[self.instruction].warps > 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        form = FORMS[self.instruction]
        if self.in_groups:
            lines = self.rows + self.stages * self.block
            return _BYTES * (lines * _pieces(self.summed) + self.stages * self.block * _pieces(self.columns))
        sizes = ((self.rows, self.summed, 1), (self.block, self.summed, self.stages),
                 (self.columns, self.block, self.stages))  # fmt: skip
        return sum(ring_bytes(*size, form) for size in sizes) + self.met

    @property
    def registers(self) -> int:
        """32-bit registers of a thread."""
        if self.in_groups:  # scores and what threads make of them, what is multiplied from registers, and sums
            return self.block + self.block // 4 + self.columns // 2 + prices.BESIDE_GROUPED
        own = self.warp_rows // _UNIT
        kept = self.columns // 2 + self.own // 2 + self.summed // 4 + 6
        return own * kept + self.own // 2 + prices.REGISTERS_BESIDE  # and the columns' fragments that are under way


@dataclass(frozen=True)
class StreamChoice:
    tile: Sizes
    block: int
    seconds: float
    tiles: int
    made: StreamFragments


def choose_stream(
    nests: Sequence[Nest], leaves: Sequence[Leaf], stream: Stream, fixed: Mapping[str, int], target: Target
) -> StreamChoice | None:
    """The best way of a stream in registers; None where it has none."""
    return min(stream_choices(nests, leaves, stream, fixed, target), key=lambda c: c.seconds, default=None)


def stream_choices(
    nests: Sequence[Nest], leaves: Sequence[Leaf], stream: Stream, fixed: Mapping[str, int], target: Target
) -> Iterator[StreamChoice]:
    """The ways to cut a stream in registers."""
    form = register_form(nests, leaves, stream)
    if form is None or fixed or not target.rate(next(iter(form.products.values())).instruction):
        return
    root = nests[-1]
    names = root.axis_names()
    (row,) = form.axes(root, ROW)
    length = extent_of(row.extent)
    sizes = sorted({min(n, length) for n in _ROWS if n < 2 * length})
    blocks = sorted({min(b, stream.extent) for b in (*_BLOCKS, *_GROUPED_BLOCKS)})
    for size in sizes:
        cut = {a: 1 for a in root.axes if form.roles[a] == SINGLE} | ({row: size} if size < length else {})
        tiles = prod(-(-extent_of(a.extent) // n) for a, n in cut.items())
        for block in blocks:
            found = fragments_of(form, stream.extent, size, block, tiles, target)
            if found is None:
                continue
            time, made = found
            tile = tuple((names[a], cut[a]) for a in root.axes if a in cut and cut[a] < extent_of(a.extent))
            yield StreamChoice(tile, block, time, tiles, made)


def planned(
    nests: Sequence[Nest], leaves: Sequence[Leaf], stream: Stream | None, tile: Sizes, block: int, tiles: int,
    target: Target,
) -> tuple[RegisterForm, StreamFragments] | None:  # fmt: skip
    """How a choice is carried out in registers; None where it is not."""
    form = None if stream is None else register_form(nests, leaves, stream)
    if form is None or stream is None or not target.rate(next(iter(form.products.values())).instruction):
        return None
    root = nests[-1]
    (row,) = form.axes(root, ROW)
    given = dict(tile)
    whole = {a: given.get(n, extent_of(a.extent)) for a, n in root.axis_names().items() if a in root.axes}
    if any(n > 1 for a, n in whole.items() if form.roles[a] == SINGLE):
        return None
    found = fragments_of(form, stream.extent, whole[row], block, tiles, target)
    return None if found is None else (form, found[1])


def fragments_of(
    form: RegisterForm, extent: int, rows: int, block: int, tiles: int, target: Target
) -> tuple[float, StreamFragments] | None:
    """The best way to share so many rows out to warps, and the time of all tiles."""
    best: tuple[float, StreamFragments] | None = None
    trips = ceil(extent / block)
    for made in _shared_out(form, rows, block, trips, target):
        threads = target.warp * made.warps
        ends = made.in_groups and extent % block
        beside = prices.BESIDE_ENDS * (block - _LEAST_GROUP_BLOCK) if ends else 0
        if made.registers + beside > min(target.vector_registers, target.register_file // threads):
            continue
        if made.shared > target.local.capacity:
            continue
        busy, alone, longest = (_group_cycles if made.in_groups else _cycles)(form, made, trips, target)
        resident = max(1, min(target.local.capacity // made.shared, target.resident_threads // threads,
                              target.register_file // (made.registers * threads)))  # fmt: skip
        time = max(float(seconds(busy, alone, resident, tiles, target)), longest / target.clock + target.kernel_cost)
        if best is None or time < best[0]:
            best = (time, made)
    return best


def _shared_out(
    form: RegisterForm, rows: int, block: int, trips: int, target: Target
) -> Iterator[StreamFragments]:
    """The ways to share rows out, by every instruction that multiplies the same."""
    for instruction in instructions(target, next(iter(form.products.values())).instruction):
        in_groups = FORMS[instruction].warps > 1
        padded = -(-rows // _PIECE) * _PIECE if in_groups else _whole(rows)
        if in_groups and not form.is_apart:
            continue
        if in_groups and (block < _LEAST_GROUP_BLOCK or rows < prices.LEAST_FILLED * padded):
            continue
        if not in_groups and ((trips > 1 and block in _GROUPED_BLOCKS) or block > _LONGEST or rows == _GROUPED_ROWS):
            continue
        # of several blocks, warps that share rows took longer than groups, or warps alone, in all that was measured
        splits = _SPLITS if not in_groups and trips == 1 else (1,)
        # every second group is half a block behind, and reads what it sums up with for so much longer
        stages = min(_STAGES + 1 if in_groups and padded > _PIECE else _STAGES, trips)
        most = _MOST_GROUPED_WARPS if in_groups else _MOST_WARPS
        for each, split in product((_UNIT,) if in_groups else _WARP_ROWS, splits):
            walked = _whole(-(-block // split)) * split
            if padded % each == 0 and padded // each * split <= most and (split == 1 or walked // split >= _LEAST_PART):
                yield StreamFragments(padded, each, walked, _whole(form.columns), _whole(form.summed), stages,
                                      instruction, split)  # fmt: skip


def _mean_trips(form: RegisterForm, made: StreamFragments, trips: int) -> float:
    """Blocks of the streamed axis that a tile's rows see, of all tiles."""
    if form.until is None:
        return trips
    ends = range(made.rows, form.rows + made.rows, made.rows)  # behind the last row of each tile
    seen = [min(trips, ceil((min(end, form.rows) + form.until) / made.block)) for end in ends]
    return sum(seen) / len(seen)


def _group_cycles(
    form: RegisterForm, made: StreamFragments, trips: int, target: Target
) -> tuple[float, float, float]:
    """The same where groups of warps multiply, of blocks that see as much as they do in the mean; and of the block
    alone that sees most. A warp stands still while its own products are issued: groups work under each other's."""
    rate = target.rate(made.instruction)
    assert rate is not None
    lanes = target.fma_rate / target.clock
    depth = made.summed + made.columns
    groups = made.rows // _PIECE
    tensor = made.rows * made.block * depth / (rate / target.clock)
    near = target.local.bandwidth / target.clock
    shared = _BYTES * (made.block * depth * (groups + 1) + made.rows * made.summed) / near
    moved = _BYTES * made.block * depth + made.rows * made.block * form.read
    beyond = moved / (target.beyond_local.bandwidth / target.clock)
    powers = made.rows * made.block * form.work * prices.GROUP_SLOT / lanes
    long = made.rows * made.block * form.long / lanes
    vector = powers + long
    power = prices.STREAM_OVERLAP
    together = sum(part**power for part in (tensor, shared, beyond, vector)) ** (1 / power)
    busy = together * (1 + prices.IN_STEP if groups > 1 else 1) + groups * prices.GROUP_TRIP_BUSY
    # what a group does one after the other
    chain = (tensor + powers + prices.STREAM_ALONE * long) / groups + prices.GROUP_TRIP
    each = max(busy, chain)
    ends = made.rows * made.columns * (8 + form.end) / lanes
    rest = prices.STREAM_START + prices.STREAM_LOADED * target.main.latency * target.clock + chain + 2 * ends
    mean = _mean_trips(form, made, trips)
    return mean * busy + ends, rest + mean * each, rest + trips * each


def _cycles(form: RegisterForm, made: StreamFragments, trips: int, target: Target) -> tuple[float, float, float]:
    """Of a multiprocessor that a block keeps busy, of a block alone, and of the longest one: they are alike."""
    rate = target.rate(next(iter(form.products.values())).instruction)
    assert rate is not None
    lanes = target.fma_rate / target.clock
    depth = made.summed + made.columns
    tensor = made.rows * made.block * depth / (rate / target.clock)
    near = target.local.bandwidth / target.clock
    shared = _BYTES * made.block * depth * (made.warps // made.split + 1) / near
    moved = _BYTES * made.block * depth + made.rows * made.block * form.read
    beyond = moved / (target.beyond_local.bandwidth / target.clock)
    inside = max(tensor, shared)
    slots = form.work * prices.STREAM_SLOT
    vector = made.rows * made.block * (slots + form.long) / lanes
    busy = max(max(inside, vector) + prices.STREAM_TRIP_BUSY, beyond)
    own = inside * max(1.0, 4 / made.warps) if made.warps < 4 else inside
    each = slots * prices.STREAM_APART + form.long * prices.STREAM_ALONE
    waiting = made.warp_rows * made.own / 32 * each * max(1.0, made.warps / 4)
    reach = prices.STREAM_LOADED * target.beyond_local.latency * target.clock
    alone = max(own + waiting + prices.STREAM_TRIP, reach, beyond)
    ends = made.rows * made.columns * (8 + form.end) / lanes
    first = prices.STREAM_LOADED * target.main.latency * target.clock
    told = 2 * made.met / near + (made.split - 1) * (prices.STREAM_TRIP + made.warp_rows * made.columns / 16)
    total = prices.STREAM_START + first + trips * alone + 2 * ends + told
    return trips * busy + ends + told / 2, total, total


def _pieces(n: int) -> int:
    """Elements of a line in whole pieces."""
    return -(-n // _PIECE) * _PIECE


def _whole(n: int) -> int:
    return -(-n // _UNIT) * _UNIT


def finished_stream(
    leaves: Sequence[Leaf], form: RegisterForm, made: StreamFragments, stream: Stream
) -> tuple[Leaf, ...]:
    """The leaves with the instruction and the steps of their products: all that is summed up at a time."""
    steps = {n.tensor.name: made.summed if n in stream.wide else made.block for n in form.products}
    splits = {n.tensor.name: made.split for n in form.products if n in stream.reducers}
    forms = {name: FragmentForm(made.instruction, split=splits.get(name, 1), step=step) for name, step in steps.items()}
    return tuple(replace(x, form=forms[x.tensor]) if x.tensor in forms else x for x in leaves)


def in_registers(
    kernel: Tile, nests: Sequence[Nest], form: RegisterForm, made: StreamFragments, registers: str,
    context: NestContext,
) -> Tile:  # fmt: skip
    """The kernel with its stream inside a Tile over warps, which keep what it holds; operands come by copies."""
    by_name = {n.tensor.name: n for n in nests}

    def axis(name: str, extent: int, role: str) -> TileAxis:
        binds = tuple(Bind(n.tensor.name, n.axis_names()[a]) for n in nests for a in form.axes(n, role))
        return TileAxis(name, extent, binds)

    def copied(nest: Nest, number: int, size: int, step: int, stages: int) -> Hold:
        side = (form.products[nest].rows, form.products[nest].columns)[number]
        source = next(x.source.name for x in walk(side.value) if isinstance(x, Load))
        way = way_of(replace(side, value=inline(side.value, first)), nest, leaves[nest.tensor.name], own, context)
        return Hold(source, fill=fill_by(way), stages=stages, layout=layout_for(size, step, FORMS[made.instruction]))

    (lanes,) = kernel.body
    assert isinstance(lanes, Tile)
    (walked,) = (t for t in lanes.body if isinstance(t, Tile))
    leaves = {x.tensor: x for x in walked.leaves}
    before = [x for x in lanes.body[: lanes.body.index(walked)] if isinstance(x, Leaf) and x.part == "whole"]
    # maps that are computed where an operand is brought
    first = {n.tensor: Map(n.tensor, n.axes, n.values[0]) for n in (by_name[x.tensor] for x in before)}
    own = frozenset(t for n in nests for t in n.stores)
    inside = [by_name[x.tensor] for x in walked.body if isinstance(x, Leaf) and by_name[x.tensor] in form.products]
    scores = {n for n in inside if any(x.part == "whole" and x.tensor == n.tensor.name for x in walked.leaves)}
    brought = tuple(
        copied(n, 1, made.block, made.summed, made.stages) if n in scores
        else copied(n, 1, made.columns, made.block, made.stages) for n in inside
    )  # fmt: skip
    rows = tuple(copied(n, 0, made.rows, made.summed, 1) for n in inside if n in scores)
    until = form.until if made.in_groups else None
    kept = replace(walked, level=registers, holds=(*walked.holds, *brought), until=until)
    body = tuple(kept if node is walked else node for node in lanes.body)
    sizes = (("m", made.warp_rows), ("n", made.columns))
    warps = Tile(registers, sizes, "warps", body, (*kernel.holds, *rows),
                 (axis("m", made.rows, ROW), axis("n", made.columns, COLUMN)))  # fmt: skip
    return replace(kernel, holds=(), body=(replace(lanes, body=(warps,)),))
