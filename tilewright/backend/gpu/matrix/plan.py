"""How a block's warps share the products of a kernel on tensor cores: the way of each that is predicted to be fastest
(matrix_cost.py), and the tiles that say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2, prod, sqrt

import numpy as np

from tilewright.backend.gpu.boxes import Block, cuts_packets, filled
from tilewright.backend.gpu.constants import ANEW_OF_BYTES, ANEW_OF_ROOT, LEAST_ANEW
from tilewright.backend.gpu.maps.plan import in_packets_along
from tilewright.backend.gpu.maps.unpack import Packed, packed_side
from tilewright.backend.gpu.matrix.cost import (
    BY_ELEMENT,
    COMPUTED,
    COPIED_AS_IT_LIES,
    MOST_BLOCK,
    UNPACKED,
    BlockedProduct,
    Both,
    Fragments,
    MatrixCost,
    Ways,
    columns_at_a_time,
    fragments_for,
    layout_for,
    seconds,
    ways_by_warps,
)
from tilewright.backend.gpu.matrix.lower import guarded_read
from tilewright.backend.gpu.matrix.sides import Side, Sides, has_whole_packets, sides_of
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS, ROW_BYTES
from tilewright.ir.analysis.terms import TERMS, terms_of
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Load, axes_of, loads, var, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.instruct import WARP
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext, offset_of, stride
from tilewright.tile_graph.algebra.nest import Nest, data_cost
from tilewright.tile_graph.algebra.propagate import Box, Range, Size, extent_of
from tilewright.tile_graph.plan.form import ASYNC, COPIED, Bind, Hold, Leaf, Tile, TileAxis, UnitBarrier

LEAST_ROWS = 8  # rows and columns, and _LEAST_SUMMED steps of the sum, below which fragments are mostly empty
_LEAST_SUMMED = 16
_LEAST_FAR = 2  # rows, where the other operand does not stay in the L2: what is empty of fragments costs nothing
_MOST_STORED = 8  # columns of a packet on its way out
_COMPUTED_BESIDE = 4  # elements whose computation takes as many registers as a copy
_FEW_SUMS = 32  # registers of a thread, beside which a machine's number of copies is said
_ROOM = 32 << 10  # bytes that what a block holds is counted in: ways beside tiles that hold about as much are the same
_EVEN = 8  # sides of images that are multiples of it are cut by powers of two
_PARTS, _LEAST_PART = (2, 3, 4), 4  # of others: into so many, each at least so long
NEVER = 1e15  # cycles of what cannot be done


def instruction_of(nest: Nest, target: Target) -> str | None:
    """The instruction that runs the nest's product; None where there is none, or too little to do for it."""
    sides = sides_of(nest)
    if sides is None or not target.rate(sides.instruction):
        return None
    rows, columns = (prod(extent_of(a.extent) for a in side.axes) for side in (sides.rows, sides.columns))
    length = prod(extent_of(a.extent) for a in nest.reduce_axes)
    packed = any(packed_side(side.value, nest.reduce_axes) is not None for side in (sides.rows, sides.columns))
    outer = target.beyond_local
    far = max(rows, columns) * length * FORMS[sides.instruction].operand.bytes > outer.capacity * outer.shared_by // 2
    # what is unpacked takes its time, and what comes from device memory, however few the rows are
    least = 1 if packed else _LEAST_FAR if far else LEAST_ROWS
    enough = min(rows, columns) >= least and max(rows, columns) >= LEAST_ROWS
    return sides.instruction if enough and length >= _LEAST_SUMMED else None


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


def ways_of(
    nest: Nest, leaf: Leaf, nests: Sequence[Nest], context: NestContext, cut: tuple[bool, bool] = (False, False)
) -> Ways:
    """How the rows' operand and the columns' come to shared memory: copied as they lie in memory, computed packet by
    packet, or element by element, as where boxes `cut` packets."""
    sides = sides_of_leaf(nest, leaf)
    inside = made_by(nests)
    rows, columns = (
        BY_ELEMENT if is_cut else way_of(side, nest, leaf, inside, context)
        for side, is_cut in zip((sides.rows, sides.columns), cut, strict=True)
    )
    packed = packed_columns(nest, leaf)
    return rows, columns if packed is None else UNPACKED[packed.bits]


def ways_in(part: Block, nest: Nest, leaf: Leaf, nests: Sequence[Nest], context: NestContext) -> Ways:
    """The same in the box that a block computes."""
    rows, columns = cuts_of(nest, leaf, part.ranges(nest), part.steps, made_by(nests), context)
    return ways_of(nest, leaf, nests, context, (bool(rows), bool(columns)))


def made_by(nests: Sequence[Nest]) -> frozenset[Tensor]:
    """What a block makes itself."""
    return frozenset(t for n in nests for t in n.stores)


def cuts_of(
    nest: Nest, leaf: Leaf, ranges: Mapping[Axis, Range], steps: Mapping[str, Size], inside: frozenset[Tensor],
    context: NestContext,
) -> tuple[Size, Size]:  # fmt: skip
    """Whether a box cuts packets of the rows' operand, and of the columns'; axes that are not among the ranges are
    walked from end to end."""
    sides, packet = sides_of_leaf(nest, leaf), FORMS[leaf.instruction or ""].packet

    def is_cut(side: Side) -> Size:
        lane = lane_of(side, nest, leaf, context)
        if lane not in ranges:
            return False
        part = filled(ranges[lane], packet) if has_whole_packets(side, lane, packet, inside) else ranges[lane]
        return cuts_packets(part, packet, steps)

    return is_cut(sides.rows), is_cut(sides.columns)


def lane_of(side: Side, nest: Nest, leaf: Leaf, context: NestContext) -> Axis:
    """What lines of an operand run along."""
    return nest.named(leaf.order[-1]) if runs_along(side, leaf, context) else side.axes[-1]


def way_of(side: Side, nest: Nest, leaf: Leaf, inside: frozenset[Tensor], context: NestContext) -> int:
    """The same of one operand; what is `inside` is not read from memory."""
    lane = lane_of(side, nest, leaf, context)
    packet = FORMS[leaf.instruction or ""].packet
    if not has_whole_packets(side, lane, packet, inside):
        return BY_ELEMENT
    read, conditions = guarded_read(side.value)
    if not isinstance(read, Load) or read.source in inside or lane in axes_of(*conditions):
        return COMPUTED
    is_packed = read.source in context.constants and context.packable(read.source)
    return COPIED_AS_IT_LIES if is_packed or in_packets_along(read, lane, packet, context) else COMPUTED


def fill_by(way: int) -> str:
    """What a Hold says of an operand that comes in a way."""
    return ASYNC if way in (COPIED_AS_IT_LIES, *UNPACKED.values()) else COPIED


def packed_columns(nest: Nest, leaf: Leaf) -> Packed | None:
    """The columns' operand of a leaf, where it is unpacked as fragments of 16-bit elements are fetched."""
    reduction = [nest.named(a) for a in leaf.order if a[0] == "r"]
    return packed_side(sides_of_leaf(nest, leaf).columns.value, reduction)


def steps_of(nest: Nest, leaf: Leaf) -> tuple[int, ...]:
    """Lengths that parts of the sum may have, where not any."""
    packed = packed_columns(nest, leaf)
    return () if packed is None else packed.parts()


def runs_of(nest: Nest, leaf: Leaf, context: NestContext) -> Both:
    """Whether lines of memory run along the sum, of the rows' operand and of the columns'."""
    sides = sides_of_leaf(nest, leaf)
    return runs_along(sides.rows, leaf, context), runs_along(sides.columns, leaf, context)


def runs_along(side: Side, leaf: Leaf, context: NestContext) -> bool:
    bare = replace(context, constants=frozenset(), staged=frozenset())
    found = [x for x in walk(side.value) if isinstance(x, Load)]
    if lie_along_sum(leaf):  # weights are packed so
        found = [x for x in found if not (x.source in context.constants and context.packable(x.source)
                                          and may_turn(x))]  # fmt: skip
    return not any(stride(x, side.axes[-1], bare) == 1 for x in found)


def lie_along_sum(leaf: Leaf) -> bool:
    """Whether operands are best found in lines along the sum: only elements of 16 bits are turned over as they are
    fetched, others are read one by one."""
    return FORMS[leaf.instruction or ""].operand.bits != 16


def may_turn(read: Load) -> bool:
    """Whether every dimension of a constant is walked by one axis, so that another order of them is known to suit."""
    return all(len(axes_of(i)) < 2 for i in read.indices)


def stored_at_once(nest: Nest, leaf: Leaf, context: NestContext) -> int:
    """Columns of a result that make a packet of 16 bytes, where they lie beside each other in memory and the result is
    of 16 bits or fewer or its epilogue reads something else: lanes of a fragment would store or read pieces of lines.
    Of bytes half a packet: threads whose sums lie 64 bytes apart would meet in the banks."""
    last = sides_of_leaf(nest, leaf).columns.axes[-1]
    widest = max(t.dtype.bytes for t in nest.stores)
    size = min(ROW_BYTES // widest, _MOST_STORED)
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


def product_of(nest: Nest, leaf: Leaf, box: Box, reduce_box: Mapping[Axis, Range]) -> tuple[int, int, int, int]:
    """Rows, columns, products and steps of the sum of a box."""
    length = prod(int(reduce_box[a].size) if a in reduce_box else extent_of(a.extent) for a in nest.reduce_axes)
    return (*box_sizes(nest, leaf, box), length)


def choose_fragments(
    nests: Sequence[Nest], leaves: Sequence[Leaf], part: Block, held: int, context: NestContext
) -> dict[str, Fragments]:
    """The best way for every leaf of a kernel that runs on matrices, by name."""
    found = fitting_fragments(nests, leaves, part, held, context)
    if found is None:
        raise InternalError(f"no fragments of products of '{nests[-1].tensor.name}' fit {held} bytes beside them")
    return found


def fitting_fragments(
    nests: Sequence[Nest], leaves: Sequence[Leaf], part: Block, held: int, context: NestContext
) -> dict[str, Fragments] | None:
    """The same; None where no number of warps fits all."""
    target, far = context.target, comes_from_far(context)
    room = target.local.capacity - held
    names, products = [], []
    for nest, leaf in zip(nests, leaves, strict=True):
        if leaf.instruction in FORMS:
            sizes = product_of(nest, leaf, part.boxes[nest], part.limits.get(nest, {}))
            ways = ways_in(part, nest, leaf, nests, context)
            names.append(leaf.tensor)
            products.append(
                (leaf.instruction or "", _product(nest, leaf, nests, sizes, part.blocks, ways, far, context))
            )
    found = of_equal_warps(target, tuple(products), room)
    return None if found is None else {name: way for name, (way, _) in zip(names, found, strict=True)}


def _product(
    nest: Nest, leaf: Leaf, nests: Sequence[Nest], sizes: tuple[int, int, int, int], blocks: int, ways: Ways,
    far: bool, context: NestContext,
) -> BlockedProduct:  # fmt: skip
    stored = stored_at_once(nest, leaf, context) if nest is nests[-1] else 1
    runs = runs_of(nest, leaf, context)
    work, anew, steps = data_cost(*nest.values), anew_after(nest), steps_of(nest, leaf)
    return BlockedProduct(*sizes, blocks, ways, far, runs, stored, work, anew, steps)


def anew_after(nest: Nest) -> int:
    """Elements after which sums of tensor cores begin anew. They cut off what float32 would round at every step: on an
    H200 a sum of 4096 elements is 1e-5 off, by 256 at a time 6e-7, by 128 4e-7, where float32 itself is 1e-6 off. That
    matters where operands are exact, in parts of fewer digits. What float32 rounds grows with the root of the length,
    and so may this. Of 8-bit floats they keep fewer digits, 13 behind the point of the largest term on Hopper, so that
    their sums begin anew soon."""
    sides = sides_of(nest)
    if sides is not None and FORMS[sides.instruction].operand is dtypes.float8e4m3fn:
        return ANEW_OF_BYTES
    if not any(terms_of(axis, nest.element_loads) for axis in nest.reduce_axes):
        return 0
    length = prod(extent_of(a.extent) for a in nest.reduce_axes)
    anew = max(LEAST_ANEW, 1 << int(log2(ANEW_OF_ROOT * sqrt(length / TERMS))))
    return anew if length > anew else 0


@lru_cache(maxsize=1 << 14)
def of_equal_warps(
    target: Target, products: tuple[tuple[str, BlockedProduct], ...], room: int = 0
) -> tuple[tuple[Fragments, MatrixCost], ...] | None:
    """The best way of every product of a kernel, all by as many warps: a block has as many for one as for the next."""

    if len(products) == 1:
        found = fragments_for(target, *products[0], 0, room)
        return None if found is None else (found,)
    ways = [ways_by_warps(target, *product, room) for product in products]
    shared = set.intersection(*(set(by) for by in ways)) if ways else {0}
    tried = [tuple(by[warps][1:] for by in ways) for warps in sorted(shared)]
    return min(tried, key=lambda found: sum(cost.alone for _, cost in found), default=None)


def is_rolled(
    nest: Nest, leaf: Leaf, nests: Sequence[Nest], made: Fragments, part: Block, context: NestContext
) -> bool:
    """Whether the parts of a sum are walked in a loop: written out, a turn around the ring takes registers for the
    addresses of many copies, fewer of which there are beside more sums, and of what is computed on the way. Beside sums
    of many columns, which are added to others more than once in a turn, it finds none: 1.8 KB a thread were spilled,
    and a product took 2.2 times as long."""
    if columns_at_a_time(made.columns) < made.columns and 0 < 2 * anew_after(nest) <= made.stages * made.step:
        return True
    packet, threads = FORMS[leaf.instruction or ""].packet, WARP * made.warps
    parts = -(-product_of(nest, leaf, part.boxes[nest], part.limits.get(nest, {}))[-1] // made.step)
    written = parts if parts < 2 * made.stages else made.stages
    copies = 0.0
    for size, way in zip((made.rows, made.columns), ways_in(part, nest, leaf, nests, context), strict=True):
        elements = size * made.step / threads
        copies += elements / (packet if fill_by(way) == ASYNC else _COMPUTED_BESIDE)
    target, sums = context.target, made.warp_rows * made.warp_columns // WARP
    left = (target.vector_registers - sums) / (target.vector_registers - _FEW_SUMS)
    return written * copies > target.written_copies * left


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
    limits: Mapping[Nest, Mapping[Axis, Range]], steps: Mapping[str, Size], tiles: np.ndarray, held: Size,
    context: NestContext,
) -> dict[Nest, MatrixCosts]:  # fmt: skip
    """What each product of a kernel costs a block, by candidate, beside so many bytes that it holds; one that has no
    way costs infinitely much."""
    far = comes_from_far(context)
    named: dict[Nest, str] = {}
    candidates: list[list[BlockedProduct]] = []
    for nest, leaf in zip(nests, leaves, strict=True):
        if leaf.instruction not in FORMS:
            continue
        sides = sides_of_leaf(nest, leaf)
        sizes = {a: np.broadcast_to(r.size, tiles.shape) for a, r in zip(nest.axes, boxes[nest], strict=True)}
        columns = [np.prod([sizes[a] for a in axes], axis=0) if axes else np.ones_like(tiles)
                   for axes in (sides.rows.axes, sides.columns.axes, sides.others)]  # fmt: skip
        reduce_box = limits.get(nest, {})
        length = prod(int(reduce_box[a].size) if a in reduce_box else extent_of(a.extent) for a in nest.reduce_axes)
        ranges = {**dict(zip(nest.axes, boxes[nest], strict=True)), **reduce_box}
        found = cuts_of(nest, leaf, ranges, steps, made_by(nests), context)
        cuts = [np.broadcast_to(cut, tiles.shape) for cut in found]
        alike = {cut: _product(nest, leaf, nests, (1, 1, 1, length), 1, ways_of(nest, leaf, nests, context, cut), far,
                               context) for cut in set(zip(*(x.tolist() for x in cuts), strict=True))}  # fmt: skip
        named[nest] = leaf.instruction or ""
        candidates.append([replace(alike[r_cut, c_cut], rows=r, columns=c, others=o, blocks=t) for r, c, o, t, r_cut,
                           c_cut in zip(*(x.tolist() for x in (*columns, tiles, *cuts)), strict=True)])  # fmt: skip
    if not named:
        return {}
    never = Fragments(16, 16, 16, 16, 16, 1), MatrixCost(NEVER, NEVER, 0, 1)
    rows: dict[Nest, list[tuple[float, ...]]] = {nest: [] for nest in named}
    beside = -(-np.broadcast_to(held, tiles.shape) // _ROOM) * _ROOM
    rooms = np.maximum(context.target.local.capacity - beside, 1).tolist()
    for room, *each in zip(rooms, *candidates, strict=True):
        made = of_equal_warps(context.target, tuple(zip(named.values(), each, strict=True)), room)
        for nest, (way, cost) in zip(named, made or [never] * len(named), strict=True):
            rows[nest].append((WARP * way.warps, cost.busy, cost.alone, cost.ring, cost.resident))
    return {nest: MatrixCosts(*(np.array(x) for x in zip(*found, strict=True))) for nest, found in rows.items()}


def matrix_sizes(nest: Nest, leaf: Leaf, axis: Axis) -> list[int]:
    """Sizes of a block along an output axis that are worth a look."""
    sides = sides_of_leaf(nest, leaf)
    extent = extent_of(axis.extent)
    if axis in sides.others:
        return [1]
    side = sides.rows if axis in sides.rows.axes else sides.columns
    own = [a for a in side.axes if extent_of(a.extent) > 1]
    # results are stored in packets along the vector's axis, and begin with one
    even = _even_parts(extent) if len(own) > 1 and nest.axis_names()[axis] != leaf.vector else set[int]()
    if axis is (own or side.axes)[-1]:
        sizes = {n for n in (16, 32, 48, 64, 96, 128, 192, 256) if n < extent} | even
        return sorted(sizes | {extent}) if extent <= MOST_BLOCK else sorted(sizes)
    *between, last = side.axes[side.axes.index(axis) + 1 :]
    # of long rows parts: two of 96 leave less over of 260 than one of 192
    inner = prod(extent_of(a.extent) for a in between) * min(extent_of(last.extent), MOST_BLOCK // 2)
    sizes = {1}
    while 2 * max(sizes) * inner <= 2 * MOST_BLOCK and 2 * max(sizes) < extent:
        sizes.add(2 * max(sizes))
    return sorted(sizes | even | ({extent} if extent * inner <= MOST_BLOCK else set()))


def _even_parts(extent: int) -> set[int]:
    """Parts of an image's odd side that leave little over: 11 x 11 places of 33 x 33 fill 128 rows, 4 x 33 no 192."""
    if extent % _EVEN == 0:
        return set()
    return {-(-extent // count) for count in _PARTS if extent > count * _LEAST_PART}


def with_warps(
    kernel: Tile, nests: Sequence[Nest], chosen: Mapping[str, Fragments], registers: str, part: Block,
    context: NestContext,
) -> Tile:  # fmt: skip
    """The kernel with every leaf that runs on matrices inside the Tile over warps that shares it out, and that inside
    a Tile that brings its operands."""
    by_name = {n.tensor.name: n for n in nests}
    if not chosen:
        return kernel

    def changed(node: Tile | Leaf, level: str) -> Tile | Leaf:
        if isinstance(node, Tile):
            return replace(
                node, body=tuple(n if isinstance(n, UnitBarrier) else changed(n, node.level) for n in node.body)
            )
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
        form = FORMS[made.instruction]
        holds = tuple(
            Hold(name, fill=fill_by(way), stages=made.stages, layout=layout_for(extent, made.step, form))
            for name, way, extent in zip(_held(nest, node, sides), ways_in(part, nest, node, nests, context),
                                         (made.rows, made.columns), strict=True)
        )  # fmt: skip
        warps = Tile(registers, sizes, "warps", (node,), axes=axes)
        return Tile(level, over="order", body=(warps,), holds=holds)

    made = changed(kernel, kernel.level)
    assert isinstance(made, Tile)
    return made


def _held(nest: Nest, leaf: Leaf, sides: Sides) -> list[str]:
    """What of both operands lies in shared memory, by name: the first that is read of one, or its codes."""
    packed = packed_columns(nest, leaf)
    values = (sides.rows.value, sides.columns.value)
    first = [next(x.source.name for x in walk(value) if isinstance(x, Load)) for value in values]
    return first if packed is None else [first[0], packed.codes.source.name]


def comes_from_far(context: NestContext) -> bool:
    """Whether operands are read from device memory: a model's weights may stay in the L2 from run to run, where they
    are few; a product without weights is part of something larger."""
    outer = context.target.shared_cache
    return outer is None or not context.constants or context.weights > outer.capacity * outer.shared_by // 2
