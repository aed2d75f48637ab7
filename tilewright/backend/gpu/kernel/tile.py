"""Compares output tiles of a kernel for a GPU by predicted time: all candidates in one NumPy batch.

A multiprocessor runs several blocks at once, so latency overlaps between blocks while issue slots and bytes add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np

from tilewright.backend.gpu import constants as prices
from tilewright.backend.gpu.kernel.room import block_bytes, own_bytes
from tilewright.backend.gpu.kernel.shared_arena import whole_lines
from tilewright.backend.gpu.maps.plan import accesses, fit_lanes, flat_sizes, placed_values
from tilewright.backend.gpu.matrix.plan import NEVER, matrix_costs, matrix_sizes
from tilewright.backend.gpu.stream.plan import choose_stream
from tilewright.backend.gpu.threads.in_step import shares_in_step
from tilewright.backend.gpu.threads.plan import (
    MOST_THREADS,
    finished,
    fit_register,
    nest_factors,
    of_part,
    outputs_at_once,
    reused,
    shares_sum,
)
from tilewright.backend.gpu.threads.rows import padded_nests, padding_bytes
from tilewright.backend.gpu.threads.window_plan import is_window, reads_of_turn
from tilewright.backend.protocol import Choice
from tilewright.intrinsics.gpu_matrix import ROW_BYTES
from tilewright.ir.forms.expr import Axis, Expr, Load, is_op, loads, var, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target
from tilewright.target.instruction_sets import BANK_ROW_BYTES, PACKET_BYTES
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest, data_cost, op_cost
from tilewright.tile_graph.algebra.propagate import (
    Box,
    Range,
    Size,
    box_elements,
    boxes_of_reads,
    extent_of,
    propagate,
    reads_box,
)
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.tile_graph.traffic.moving import accessed, compulsory, footprint, looked_up, transactions

_MOST_CANDIDATES = 2000
_STATES = 4  # buffers of a streamed reduction
_BLOCKS = 4  # that share a multiprocessor, as registers allow
BESIDE_BYTES = 8 << 10  # of shared memory that leaves take besides what is held
_FEW_SLICES = 8  # reads of one tensor by a nest that are looked at one by one: neighbours of a window are many


def choose_gpu_tile(
    nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
    fixed: Mapping[str, int], stream: Stream | None = None, block: int = 0, most_threads: int = MOST_THREADS,
) -> Choice | None:  # fmt: skip
    """The best output tile, with `stream` walked in blocks; None when no tile's intermediates fit in shared memory."""
    root = nests[-1]
    target = context.target
    candidates = _candidates(root, plans[-1], fixed)
    sizes = {axis: np.array([c[i] for c in candidates], dtype=np.int64) for i, axis in enumerate(root.axes)}
    box: Box = tuple(
        Range(var(Axis(f"origin_{i}", extent_of(a.extent))), sizes[a], extent_of(a.extent))
        for i, a in enumerate(root.axes)
    )
    limits = stream.reduce_boxes(var(Axis("block", stream.extent)), block) if stream else {}
    boxes = propagate(nests, box, limits)
    plans = [of_part(p, n, limits[n], target.warp) if n in limits and p.instruction is None else p
             for n, p in zip(nests, plans, strict=True)]  # fmt: skip
    trips = dict.fromkeys((*stream.wide, *stream.reducers), -(-stream.extent // block)) if stream else {}
    tiles = np.ones(len(candidates), dtype=np.int64)
    for axis in root.axes:
        tiles = tiles * -(-max(1, extent_of(axis.extent)) // sizes[axis])
    padding = padding_bytes(boxes, padded_nests(nests, plans, stored, stream, context), stream, context)
    held = footprint(nests, boxes, stored, stream) + sum(padding.values())
    steps: dict[str, Size] = {"block": block, **{f"origin_{i}": sizes[a] for i, a in enumerate(root.axes)}}
    products = matrix_costs(nests, plans, boxes, limits, steps, tiles, held, context)
    tiles_of = {n: fit_register(p, n, _sizes(n, boxes[n])) for n, p in zip(nests, plans, strict=True)}
    lanes_of = {n: fit_lanes(p, n, _sizes(n, boxes[n])) for n, p in zip(nests, plans, strict=True)}
    shared: dict[Nest, Size] = {}
    if stream is None and not products:
        shared = shares_in_step(nests, plans, boxes, lanes_of[root], target.warp)
    work = [products[n].threads if n in products else _work(n, p, boxes[n], tiles_of[n], lanes_of[n], shared.get(n, 0))
            for n, p in zip(nests, plans, strict=True)]  # fmt: skip
    threads = np.clip(
        -(-np.maximum.reduce([np.broadcast_to(w, tiles.shape) for w in work]) // target.warp) * target.warp,
        target.warp, most_threads,
    )
    if products:  # a block has as many threads as its products take, whatever runs beside them
        threads = next(iter(products.values())).threads
    lanes = target.fma_rate / target.clock  # multiply-adds a multiprocessor issues in a cycle
    near = target.beyond_local.bandwidth / target.clock
    issue: Size = np.zeros(len(candidates))
    latency: Size = np.zeros(len(candidates)) + prices.BLOCK_START
    ring: Size = 0
    inside = {t for n in nests for t in n.stores}
    for nest, plan, positions in zip(nests, plans, work, strict=True):
        if nest in products:
            again = trips.get(nest, 1)
            issue = issue + products[nest].busy * again
            latency = latency + products[nest].alone * again
            ring = np.maximum(ring, products[nest].ring)
            continue
        register = tiles_of[nest]
        if stream is None and shares_sum(plan, nest, target.warp):
            register = outputs_at_once(nest, boxes[nest], -(-positions // threads))
            positions = -(-positions // next(iter(register.values()), 1))
        rounds = -(-positions // threads)
        lanes_here = np.where(shared.get(nest, 0) > 0, lanes_of[root], lanes_of[nest])
        slots, wait = _step_cost(nest, plan, register, lanes_here, boxes[nest], target, shared.get(nest, 0))
        busy = np.minimum(rounds * threads, -(-positions // target.warp) * target.warp)
        repeats = trips[nest] if stream and nest in stream.wide else 1
        issue = issue + (busy * slots + rounds * _staging(nest, boxes[nest])) / lanes * repeats
        touches: Size = 1
        if nest.monoid is None and not inside.issuperset(nest.reads()):
            # the next packets are asked for when these are stored
            touches = -(-rounds // plan.options(ThreadForm).at_once)
        touched = touches * prices.FIRST_TOUCH * target.main.latency * target.clock / 2
        latency = latency + rounds * wait * repeats + touched
        # a streamed reduction carries its state on by a few small maps
        carried = 4 * (prices.BARRIER_CYCLES + _global_step(target)) if nest in trips else 0
        latency = latency + (prices.BARRIER_CYCLES + carried) * trips.get(nest, 1)
    traffic, again, wide = _traffic(nests, boxes, context, stored, limits, trips)
    alive = -(-tiles // target.units)
    beside = np.maximum(ring, BESIDE_BYTES)
    at_once = np.minimum(_BLOCKS, np.maximum(1, target.local.capacity // np.maximum(held + beside, 1)))
    for cost in products.values():
        at_once = np.minimum(at_once, cost.resident)
    # what nests read one after the other stays in the first cache, which is the same memory, or in the next
    between = np.minimum(alive, at_once) * wide
    traffic = traffic + np.where(between <= target.local.capacity // 2, 0, again)
    outer = target.beyond_local
    lost = np.where(between <= outer.capacity // 2, 0, again) * tiles
    # a few warps cannot keep the multiprocessor busy
    issue = issue * np.maximum(1.0, target.schedulers * target.warp / (np.minimum(alive, at_once) * threads))
    moving = alive * traffic / near
    # loads overlap with arithmetic, but never wholly
    cycles = np.maximum(alive * issue, moving) + prices.EXPOSED * np.minimum(alive * issue, moving)
    waiting = -(-alive // at_once) * latency
    busy = cycles / target.clock
    cycles = np.maximum(cycles, waiting) + prices.WAIT_EXPOSED * np.minimum(cycles, waiting)
    seconds = cycles / target.clock * (1 + prices.REPEAT_PENALTY * (_repeated(nests, boxes, tiles, stream, trips) - 1))
    # what one multiprocessor can draw from memory is not much more than its share
    drawing = np.minimum(target.units, np.maximum(tiles, 1))
    rate = np.minimum(target.main.bandwidth * target.units, drawing * (target.main.alone or target.main.bandwidth))
    far = (compulsory(nests, stored, context) + lost) / rate
    if root not in products:
        far = far * (1 + prices.BROKEN_RUNS * _broken(root, sizes, context))
        if root.monoid is None and compulsory(nests, stored, context) > outer.capacity:
            far = far * np.where(work[-1] > threads, prices.LONG_BLOCKS, 1.0)
    seconds = np.maximum(seconds, far) + prices.FAR_EXPOSED * np.minimum(seconds, far)
    seconds = seconds + start(target)
    if len(nests) == 1 and nests[0] in products:
        seconds = np.maximum(products[nests[0]].seconds(tiles, target), far + target.kernel_cost)
    seconds = np.where(held <= target.local.capacity // 2, seconds, np.inf)
    seconds = np.where(held + ring <= target.local.capacity, seconds, np.inf)
    for cost in products.values():
        seconds = np.where(cost.alone < NEVER, seconds, np.inf)
    # among equals no multiprocessor idle, then fewer starts
    order = np.lexsort((tiles, tiles < target.units, np.round(seconds * 1e9)))
    rings = {n: np.broadcast_to(c.ring, tiles.shape) for n, c in products.items()}

    def fits(number: int) -> bool:
        """Whether all that the arena of this candidate holds has room, which the sizes above are only near to."""
        here = {n: tuple(_at(r, number) for r in boxes[n]) for n in nests}
        own = {n: int(ring[number]) for n, ring in rings.items()}
        shares = set()
        for nest, plan in zip(nests, plans, strict=True):
            if nest not in products:
                plain = finished(plan, nest, here[nest], limits.get(nest, {}))
                own[nest] = own_bytes(nest, plain, here[nest], target.max_threads, target.warp)
                if not plain.options(ThreadForm).step:
                    shares.add(nest)
        kept = {t: box_elements(here[n]) * t.dtype.bytes + int(np.broadcast_to(padding.get(t, 0), tiles.shape)[number])
                for n in nests for t in n.stores if t not in stored}  # fmt: skip
        room = target.local.capacity
        if stream is None:
            return block_bytes(nests, kept, own, unshared=shares) <= room
        states = int(np.broadcast_to(held, tiles.shape)[number]) + BANK_ROW_BYTES * _STATES * len(nests)
        return states + whole_lines(max(own.values(), default=0)) <= room

    best = next((int(n) for n in order if not np.isfinite(seconds[n]) or fits(int(n))), None)
    if best is None or not np.isfinite(seconds[best]):
        return None
    tile = tuple(
        (f"o{i}", int(sizes[a][best])) for i, a in enumerate(root.axes) if sizes[a][best] < extent_of(a.extent)
    )
    at_work = 0.0 if products else float(np.maximum(busy, far)[best])
    return Choice(tile, float(seconds[best]), int(tiles[best]), int(np.broadcast_to(held, tiles.shape)[best]),
                  block if stream else 0, busy=at_work)  # fmt: skip


def _at(part: Range, number: int) -> Range:
    """A part of one of the candidates."""
    return part if np.ndim(part.size) == 0 else replace(part, size=int(part.size[number]))


def start(target: Target) -> float:
    """From a kernel's end to where the next computes, by which blocks that may start early are mostly there."""
    return dict(target.barriers).get("dependent_launch", target.kernel_cost + prices.RAMP_SECONDS)


def choose_register_stream(
    nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
    fixed: Mapping[str, int], stream: Stream,
) -> Choice | None:  # fmt: skip
    """The best tile and block of a stream that warps keep in registers; None where it does not lie there."""
    target = context.target
    best = choose_stream(nests, plans, stream, fixed, target)
    if best is None:
        return None
    drawing = min(target.units, best.tiles) * (target.main.alone or target.main.bandwidth)
    far = compulsory(nests, stored, context) / min(target.main.bandwidth * target.units, drawing)
    seconds = max(best.seconds, far + target.kernel_cost)
    return Choice(best.tile, seconds, best.tiles, best.made.shared, best.block)


def _repeated(
    nests: Sequence[Nest], boxes: Mapping[Nest, Box], tiles: Size, stream: Stream | None, trips: Mapping[Nest, int]
) -> Size:
    """Arithmetic of all tiles over the arithmetic that is needed: tiles that overlap compute the same again."""
    done: Size = 0.0
    needed = 0.0
    for nest in nests:
        steps = 1 + prod(extent_of(a.extent) for a in nest.reduce_axes)
        again = trips[nest] if stream and nest in stream.wide else 1
        done = done + tiles * box_elements(boxes[nest]) * float(steps * again)
        needed += prod(extent_of(a.extent) for a in nest.axes) * steps
    return np.maximum(1.0, done / max(needed, 1.0))  # of an empty result nothing is needed


def _candidates(root: Nest, plan: Leaf, fixed: Mapping[str, int]) -> list[tuple[int, ...]]:
    register = dict(plan.register)
    names = root.axis_names()
    if plan.options(ThreadForm).flat and not fixed:
        return list(product(*flat_sizes(plan, root)))
    choices: list[list[int]] = []
    for axis in root.axes:
        extent = max(1, extent_of(axis.extent))  # an empty axis is one tile of nothing
        if names[axis] in fixed:
            choices.append([min(extent, fixed[names[axis]])])
            continue
        if plan.instruction is not None:
            choices.append(matrix_sizes(root, plan, axis))
            continue
        packed = root.monoid is None or is_window(plan, root)
        whole = plan.lanes if names[axis] == plan.vector and packed else register.get(names[axis], 1)
        unit = min(whole, extent)
        found = {extent}
        size = unit
        while size < extent:
            found.add(size)
            size *= 2
        choices.append(sorted(found))
    while prod(len(c) for c in choices) > _MOST_CANDIDATES:
        longest = max(range(len(choices)), key=lambda i: len(choices[i]))
        choices[longest] = sorted({*choices[longest][::2], choices[longest][-1]})
    return list(product(*choices))


def _sizes(nest: Nest, box: Box) -> dict[Axis, Size]:
    return {a: r.size for a, r in zip(nest.axes, box, strict=True)}


def _work(nest: Nest, plan: Leaf, box: Box, register: Mapping[Axis, Size], lanes: Size, shared: Size) -> Size:
    """Threads that a box could use; `shared`: how many share a sum that is in step with others, or 0."""
    total: Size = np.where(shared > 0, shared, plan.options(ThreadForm).split)
    packed = nest.monoid is None or is_window(plan, nest)
    vector = nest.named(plan.vector) if packed and plan.vector is not None else None
    for axis, extent in zip(nest.axes, box, strict=True):
        total = total * -(-extent.size // (lanes if axis is vector else register.get(axis, 1)))
    return total


def _staging(nest: Nest, box: Box) -> Size:
    """Issue slots that bring the operands of a contraction into shared memory, all threads together."""
    if not reused(nest, {a: extent_of(a.extent) for a in nest.axes}):
        return 0
    ranges = dict(zip(nest.axes, box, strict=True))
    length = prod(extent_of(a.extent) for a in nest.reduce_axes)
    total: Size = 0
    for factor in nest_factors(nest):
        if factor.reductions:
            each = prices.STAGE_SLOTS if isinstance(factor.value, Load) else prices.COMPUTED_SLOTS
            total = total + box_elements(tuple(ranges[a] for a in factor.outputs)) * length * each
    return total


def _global_step(target: Target) -> float:
    """Cycles of a step that reads global memory."""
    return prices.OWN_CACHE * target.local.latency * target.clock


def _step_cost(
    nest: Nest, plan: Leaf, register: Mapping[Axis, Size], lanes: Size, box: Box, target: Target, shared: Size = 0
) -> tuple[Size, Size]:
    """(issue slots, cycles of latency) of one thread for one position; `shared` as above."""
    far, near = _global_step(target), prices.SHARED_STEP * target.local.latency * target.clock
    outputs: Size = 1
    for n in register.values():
        outputs = outputs * n
    values, elements = (_operations(target, *x) for x in (nest.values, nest.elements))
    if nest.monoid is None:
        read, stored = accesses(nest, plan, lanes)
        slots = outputs * (lanes * values + prices.LOAD_SLOTS * stored) + prices.LOAD_SLOTS * read
        return slots, far / 4 + outputs * lanes * values  # rounds do not wait for each other
    epilogue = outputs * (values + prices.LOAD_SLOTS * (len(nest.stores) + len(nest.value_loads)))
    split = plan.options(ThreadForm).split
    steps = prod(extent_of(a.extent) for a in nest.reduce_axes) / split
    if reused(nest, {a: extent_of(a.extent) for a in nest.axes}):
        fragments: Size = 0
        for factor in nest_factors(nest):
            part: Size = 1
            for axis in factor.outputs:
                part = part * register.get(axis, 1)
            fragments = fragments + part
        slots = outputs + prices.LOAD_SLOTS * fragments + elements
        epilogue += 2 * prices.LOAD_SLOTS * outputs * (split.bit_length() - 1)
        # one warp alone issues a load as fast as anything; the slots count when all four schedulers load at once
        return steps * slots + epilogue, steps * np.maximum(near, outputs + fragments) + epilogue
    if is_window(plan, nest):
        return _window_cost(nest, plan, register, lanes, box, target)
    wide: Size = np.where(shared > 0, lanes, plan.lanes)
    threads: Size = np.where(shared > 0, shared, split)
    fetching: Size = 0
    for node in nest.element_loads:
        fetching = fetching + prices.LOAD_SLOTS * np.maximum(1, wide * node.dtype.bytes // ROW_BYTES)
    slots = outputs * (fetching + wide * (elements + data_cost(*nest.monoid.combine)))
    steps = prod(extent_of(a.extent) for a in nest.reduce_axes) / (threads * wide)
    alone = slots / 2
    # behind a branch no load of a later step is under way: 293 cycles a step were measured on an H200
    wait = target.beyond_local.latency * target.clock if _branches(nest) else far / 2
    return steps * slots + epilogue, steps * np.maximum(wait, alone) + prices.SHUFFLE_CYCLES * (threads > 1) + epilogue


def _window_cost(
    nest: Nest, plan: Leaf, register: Mapping[Axis, Size], lanes: Size, box: Box, target: Target
) -> tuple[Size, Size]:
    """The same where a thread keeps packets of neighbouring outputs: it reads once what several of them share."""
    assert nest.monoid is not None and plan.vector is not None
    vector = nest.named(plan.vector)
    across = box[nest.axes.index(vector)].size
    outputs: Size = 1
    for n in register.values():
        outputs = outputs * n
    taps = extent_of(nest.named(plan.order[-1]).extent)
    turns = prod(extent_of(a.extent) for a in nest.reduce_axes) // taps
    fetching: Size = 0
    for node in nest.element_loads:
        packets = np.maximum(1, lanes * node.dtype.bytes // ROW_BYTES)
        # threads of a warp touch as many lines as a box has too little of each: they pass one by one
        moves = any(a in node.axes for a in nest.axes if a is not vector)
        lines = BANK_ROW_BYTES / np.minimum(BANK_ROW_BYTES, across * node.dtype.bytes) if moves else 1
        fetching = fetching + packets * lines * reads_of_turn(node, nest, plan, register)
    each = _operations(target, *nest.elements) + data_cost(*nest.monoid.combine)
    slots = prices.LOAD_SLOTS * fetching + taps * outputs * lanes * each
    moved = prices.LOAD_SLOTS * (len(nest.stores) + len(nest.value_loads))
    epilogue = outputs * (lanes * _operations(target, *nest.values) + moved)
    return turns * slots + epilogue, turns * np.maximum(_global_step(target), slots / 2) + epilogue


def _branches(nest: Nest) -> bool:
    """Whether conditions choose between loads."""
    chosen = [n for n in walk(*placed_values(nest.elements)) if is_op(n, "select")]
    return any(all(map(loads, node.args[1:])) for node in chosen)


def _operations(target: Target, *values: Expr) -> float:
    """Operations on data; exp of numbers of 16 bits is one of the units that compute powers of two."""
    quick = [n for n in walk(*values) if is_op(n, "exp") and all(x.dtype.bits <= 16 for x in loads(n))]
    return data_cost(*values) + len(quick) * (target.fma_rate / target.clock / prices.SPECIAL_A_CYCLE - op_cost("exp"))


def _broken(root: Nest, sizes: Mapping[Axis, Size], context: NestContext) -> Size:
    """How much is missing to what a warp stores at once in what a tile stores beside each other."""
    order = context.layout(root.tensor).order
    if not order:
        return 0.0
    axis, width = root.axes[order[-1].axis], root.tensor.dtype.bytes
    line = min(context.target.warp * PACKET_BYTES, extent_of(axis.extent) * width)
    return 1 - np.minimum(sizes[axis] * width, line) / max(line, 1)


def _traffic(
    nests: Sequence[Nest], boxes: Mapping[Nest, Box], context: NestContext, stored: frozenset[Tensor],
    limits: Mapping[Nest, Mapping[Axis, Range]], trips: Mapping[Nest, int],
) -> tuple[Size, Size, Size]:  # fmt: skip
    """Bytes one block moves from and to device memory, in whole transactions; of what it reads, the bytes that a later
    nest reads again; and how much lies between the two times."""
    total: Size = 0.0
    again: Size = 0.0
    inside = {t for n in nests for t in n.stores}
    seen: dict[Tensor, Size] = {}
    repeated: dict[Tensor, Size] = {}
    for nest in nests:
        outside = {t for t in nest.reads() if t not in inside}
        for tensor, box in reads_box(nest, boxes[nest], limits.get(nest, {}), outside).items():
            moved = transactions(tensor, box, context)
            slices = boxes_of_reads(nest, boxes[nest], limits.get(nest, {}), tensor)
            if 1 < len(slices) <= _FEW_SLICES:
                moved = np.minimum(moved, sum(transactions(tensor, part, context) for part in slices))
            if nest.monoid is None:  # of rows that are numbered otherwise, boxes span far more than is read
                moved = np.minimum(moved, accessed(nest, tensor, boxes[nest], context))
            moved = moved * trips.get(nest, 1)
            if tensor in nest.tables:
                moved = np.minimum(moved, looked_up(nest, tensor, box_elements(boxes[nest]), context))
            if tensor in seen:
                # a box of rows that are rolled or looked up spans far more than is read of it
                own = np.minimum(moved, accessed(nest, tensor, boxes[nest], context))
                again = again + np.minimum(seen[tensor], own)
                repeated[tensor] = own
            seen[tensor] = np.maximum(seen[tensor], moved) if tensor in seen else moved
        for tensor in nest.stores:
            if tensor in stored:
                total = total + transactions(tensor, boxes[nest], context)
    return sum(seen.values(), total), again, sum(repeated.values(), 0.0)
