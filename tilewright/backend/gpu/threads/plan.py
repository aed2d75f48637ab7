"""Plans nests for a GPU: which threads compute which outputs, how reductions are shared, what shared memory holds.

The threads of a block take up each nest's box anew: positions (outputs, or register tiles of them) are numbered with
the axis that neighbouring threads walk fastest, and thread t takes positions t, t + threads, ...
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from tilewright.backend.gpu.constants import SCATTERED_STORE
from tilewright.backend.gpu.maps.plan import busy_threads, with_packets
from tilewright.backend.gpu.threads.window_plan import is_window, with_window
from tilewright.ir.analysis.products import Factor, factors
from tilewright.ir.forms.expr import Axis, Load, axes_of, loads, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.target.instruction_sets import LEAST_COPY_BYTES
from tilewright.tile_graph.algebra.context import NestContext, is_contraction, offset_of, stride
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import ThreadForm

MOST_THREADS = 256  # a block: enough to hide latency, few enough for 255 registers a thread
_FILLED_THREADS = 128  # of a block, below which its register tile shrinks
_STAGED_BYTES = 48 << 10  # shared memory for the operands of the steps that are under way
_MOST_STEP = 32
_RINGS = ((3, 16), (2, 8))  # steps that are under way, and elements of each at least
_LONG_SHARE = 32  # elements of a reduction that a thread has at least, where more than a warp share it
MOST_OUTPUTS = 8  # of a sum that a warp shares: a packet of each is under way at once
_SHORT_RUN = 16  # elements of an innermost reduction axis that a thread takes in a packet or two


def nest_factors(nest: Nest) -> tuple[Factor, ...]:
    return factors(nest.elements[0], nest.axes, nest.reduce_axes)


def reused(nest: Nest, sizes: Mapping[Axis, int]) -> bool:
    """Whether the outputs of a box share every operand of the product: then staging in shared memory pays."""
    if not is_contraction(nest) or not nest.reduce_axes:
        return False
    parts = [f for f in nest_factors(nest) if loads(f.value)]
    if len(parts) < 2:
        return False
    return all(any(sizes[a] > 1 and a not in f.outputs for a in nest.axes) for f in parts)


def plan_threads(nest: Nest, free: frozenset[Tensor], context: NestContext) -> Leaf:
    """A nest that threads run by themselves, constants in `free` lying as it likes: order of threads, register tile,
    shared reductions."""
    names = nest.axis_names()
    register = _register_tile(nest, busy_threads(context.target))
    order = thread_order(nest, context)
    reduction = reduction_order(nest, context)
    if _staged(nest):
        split = _contraction_split(nest, register, busy_threads(context.target))
        along: Axis | None = order[-1]
    else:
        split, along = _split(nest, order, reduction, context)
    leaf = Leaf(
        tensor=nest.tensor.name, core=nest.core, epilogue=nest.epilogue,
        vector=None if along is None else names[along], register=tuple((names[a], n) for a, n in register.items()),
        order=tuple(names[a] for a in (*order, *reduction)), form=ThreadForm(split=split),
    )  # fmt: skip
    packed = with_packets(leaf, nest, context)
    return packed if _staged(nest) else with_window(packed, nest, free, context)


def _staged(nest: Nest) -> bool:
    return reused(nest, {a: extent_of(a.extent) for a in nest.axes})


def _register_tile(nest: Nest, busy: int) -> dict[Axis, int]:
    """Outputs of one thread along an axis of each operand's own, so that loaded operands are used several times."""
    if not _staged(nest):
        return {}
    parts = [f for f in nest_factors(nest) if loads(f.value)]
    points = prod(extent_of(a.extent) for a in nest.axes)
    room = points * _most_shares(nest) // busy  # with fewer threads there are smaller tiles
    chosen: dict[Axis, int] = {}
    for part in parts[:2]:
        own = [a for a in part.outputs if any(a not in other.outputs for other in parts)]
        axis = max(own, key=lambda a: (extent_of(a.extent), nest.axes.index(a)), default=None)
        if axis is not None and axis not in chosen:
            chosen[axis] = 1
    while chosen:
        product = prod(chosen.values())
        grown = [
            a for a in chosen if chosen[a] < 8 and chosen[a] * 4 <= extent_of(a.extent) and product * 2 <= max(4, room)
        ]
        if not grown:
            break
        smallest = min(grown, key=lambda a: chosen[a])
        chosen[smallest] *= 2
    return {a: n for a, n in chosen.items() if n > 1}


def _most_shares(nest: Nest) -> int:
    """Threads that may share a contraction without having too little to do each."""
    length = prod(extent_of(a.extent) for a in nest.reduce_axes)
    shares = 1
    while shares < 4 and length >= shares * 2 * 32:
        shares *= 2
    return shares


def _contraction_split(nest: Nest, register: Mapping[Axis, int], busy: int) -> int:
    places = prod(extent_of(a.extent) for a in nest.axes) // prod(register.values())
    split = 1
    while split < _most_shares(nest) and places * split < busy:
        split *= 2
    return split


def thread_order(nest: Nest, context: NestContext) -> list[Axis]:
    """Output axes, the one neighbouring threads walk last: along it most accesses are contiguous. Of a map that stores
    across what it reads, the axis of what is read comes before it, so that the rest of a line is asked for soon."""
    layout = context.layout(nest.tensor)
    place = {part.axis: i for i, part in enumerate(layout.order)}
    order = sorted(nest.axes, key=lambda a: place.get(nest.axes.index(a), 0))
    if not order:
        return []
    store = offset_of(nest.tensor, layout, tuple(var(a) for a in nest.axes))
    reads = () if _staged(nest) else loads(*(nest.elements or nest.values))
    steps = prod(extent_of(r.extent) for r in nest.reduce_axes)
    made = _elements(nest.tensor)

    def merit(axis: Axis, stored: float) -> float:
        """Of accesses beside each other along the axis; of a map each as often as its elements are reached for."""
        if extent_of(axis.extent) == 1:
            return -1.0
        near = [n for n in reads if stride(n, axis, context) == 1]
        total = stored if store.terms.get(var(axis)) == 1 else 0.0
        if nest.reduce_axes:
            return total + len(near)
        return total + sum(min(1.0, _elements(source) / made) for source in {x.source for x in near})

    def best(axes: Sequence[Axis], stored: float) -> Axis:
        return max(axes, key=lambda a: (merit(a, stored), order.index(a)))

    fastest = best(order, SCATTERED_STORE if not nest.reduce_axes else 1.5 / steps)
    rest = [a for a in order if a is not fastest]
    if not nest.reduce_axes and rest and not any(stride(n, fastest, context) == 1 for n in reads):
        beside = best(rest, 0.0)
        if merit(beside, 0.0) > 0:
            rest = [*(a for a in rest if a is not beside), beside]
    return [*rest, fastest]


def _elements(tensor: Tensor) -> int:
    return max(1, prod(extent_of(n) for n in tensor.shape))


def reduction_order(nest: Nest, context: NestContext, free: frozenset[Tensor] = frozenset()) -> list[Axis]:
    """The axis whose neighbours lie closest in storage innermost; what is `free` to lie otherwise follows the rest, and
    what some axes do not move, as scales of blocks, follows what all of them move."""
    bound = [n for n in loads(*nest.elements) if n.source not in free] or loads(*nest.elements)
    moved = [sum(a in axes_of(*n.indices) for a in nest.reduce_axes) for n in bound]
    bound = [n for n, count in zip(bound, moved, strict=True) if count == max(moved)]

    def distance(axis: Axis) -> float:
        steps = [stride(n, axis, context) for n in bound]
        moving = [abs(s) for s in steps if s]
        return min(moving, default=1 << 30) if None not in steps else 1 << 20

    return sorted(nest.reduce_axes, key=lambda a: -distance(a))


def _split(
    nest: Nest, order: Sequence[Axis], reduction: Sequence[Axis], context: NestContext
) -> tuple[int, Axis | None]:
    """How many threads share a reduction, by shape alone, and the axis that neighbouring threads walk."""
    warp = context.target.warp
    fastest = order[-1] if order else None
    if nest.monoid is None or not reduction:
        return 1, fastest
    length = prod(extent_of(a.extent) for a in reduction)
    points = prod(extent_of(a.extent) for a in nest.axes)
    inner = reduction[-1]
    along_reduction = any(
        stride(n, inner, context) == 1 and (fastest is None or stride(n, fastest, context) not in (0, 1))
        for n in loads(*nest.elements)
    )
    split = 1
    if along_reduction or fastest is None or points == 1:
        # neighbours along a short run find nothing beside each other behind its end: one thread takes it at once
        run = extent_of(inner.extent)
        few = length > _SHORT_RUN and points < context.target.units * MOST_THREADS
        most = warp if run > _SHORT_RUN or few else 1
        while split < most and split * 2 <= length:
            split *= 2
        return _of_warps(split, length, warp), inner if split > 1 else fastest
    busy = context.target.units * MOST_THREADS
    while split < warp and split * 4 <= length and points * split * 2 <= busy:
        split *= 2
    return _of_warps(split, min(length, busy // max(1, points) * _LONG_SHARE), warp), fastest


def _of_warps(split: int, length: int, warp: int) -> int:
    """Of long reductions several warps take one, each thread still with a few packets."""
    while warp <= split < MOST_THREADS and length >= split * 2 * _LONG_SHARE:
        split *= 2
    return split


def of_part(plan: Leaf, nest: Nest, reduce_box: Mapping[Axis, Range], warp: int) -> Leaf:
    """The leaf where a part of its reduction is walked at a time: as many threads share it as that has work for."""
    split = plan.options(ThreadForm).split
    length = prod(int(reduce_box[a].size) if a in reduce_box else extent_of(a.extent) for a in nest.reduce_axes)
    while split > max(1, length) or (split > warp and length < split * _LONG_SHARE):
        split //= 2
    return plan if split == plan.options(ThreadForm).split else plan.with_options(ThreadForm, split=split)


def of_rows(plan: Leaf, nest: Nest, box: Box, held: Container[Tensor]) -> Leaf:
    """The leaf where a block reduces rows of its own tiles, more than its threads can share: each takes more of a row,
    which leaves fewer to exchange."""
    split = plan.options(ThreadForm).split
    if not all(n.source in held for n in nest.element_loads):
        return plan  # neighbours read along a row, for memory comes in lines
    rows = prod(positions(plan, nest, box).values())
    while split > 1 and rows * split > MOST_THREADS:
        split //= 2
    return plan if split == plan.options(ThreadForm).split else plan.with_options(ThreadForm, split=split)


def fit_register(plan: Leaf, nest: Nest, sizes: Mapping[Axis, Size]) -> dict[Axis, Size]:
    """The register tile on a box of these sizes (numbers or arrays): halved while too few threads would have work."""
    tile: dict[Axis, Size] = {nest.named(a): np.minimum(n, sizes[nest.named(a)]) for a, n in plan.register}
    if is_window(plan, nest):
        return tile
    for _ in range(6):
        work: Size = plan.options(ThreadForm).split
        for axis in nest.axes:
            work = work * -(-sizes[axis] // tile.get(axis, 1))
        largest: Size = 1
        for n in tile.values():
            largest = np.maximum(largest, n)
        shrink = (work < _FILLED_THREADS) & (largest > 1)
        for axis, n in tile.items():
            hit = shrink & (n == largest)
            tile[axis] = np.where(hit, n // 2, n)
            shrink = shrink & ~hit
    return tile


def positions(plan: Leaf, nest: Nest, box: Box) -> dict[Axis, int]:
    """Register tiles, or packets of a map, along each output axis of a box."""
    register = dict(plan.register)
    if (nest.monoid is None or is_window(plan, nest)) and plan.vector is not None:
        register[plan.vector] = plan.lanes
    names = nest.axis_names()
    return {a: -(-int(r.size) // register.get(names[a], 1)) for a, r in zip(nest.axes, box, strict=True)}


def finished(plan: Leaf, nest: Nest, box: Box, reduce_box: Mapping[Axis, Range]) -> Leaf:
    """A leaf that threads run by themselves, on its box: its register tile, and operands in steps where that pays."""
    names = nest.axis_names()
    sizes = {a: int(r.size) for a, r in zip(nest.axes, box, strict=True)}
    fitted = fit_register(plan, nest, sizes)
    plan = replace(plan, register=tuple((names[a], int(n)) for a, n in fitted.items() if n > 1))
    if is_window(plan, nest):
        return plan
    if (plan.vector is None or plan.vector[0] == "o") and reused(nest, sizes):
        step, stages = _step(plan, nest, box, reduce_box)
        if step:
            return plan.with_options(ThreadForm, step=step, at_once=stages)
    return plan if nest.monoid is None else replace(plan, register=())


def shares_sum(plan: Leaf, nest: Nest, warp: int) -> bool:
    """Whether a warp shares every sum of products, neighbours along it: then it may take several outputs."""
    options = plan.options(ThreadForm)
    by_warps = options.split == warp and plan.vector is not None and plan.vector[0] == "r"
    return by_warps and not options.step and not is_window(plan, nest) and is_contraction(nest)


def widened(plan: Leaf, nest: Nest, box: Box, warp: int) -> Leaf | None:
    """A sum that a warp shares with twice as many outputs a position, which share an operand: it is read once, and what
    the others read is asked for at a time. None where there are no more."""
    if not shares_sum(plan, nest, warp) or 2 * prod(n for _, n in plan.register) > MOST_OUTPUTS:
        return None
    names = nest.axis_names()
    parts = [f for f in nest_factors(nest) if f.reductions]
    for axis, part in zip(nest.axes, box, strict=True):
        twice = 2 * dict(plan.register).get(names[axis], 1)
        if part.size % twice == 0 and any(axis not in f.outputs for f in parts):
            return replace(plan, register=(*(r for r in plan.register if r[0] != names[axis]), (names[axis], twice)))
    return None


def outputs_at_once(nest: Nest, box: Box, rounds: Size) -> dict[Axis, Size]:
    """How many outputs a warp that shares a sum has on a box (numbers or arrays) which has so many times what its
    warps take at once: as a register tile along one of the axes that some operand does not have."""
    parts = [f for f in nest_factors(nest) if f.reductions]
    most: Size = 1
    found: Axis | None = None
    for axis, part in zip(nest.axes, box, strict=True):
        if any(axis not in f.outputs for f in parts):
            most, found = most * part.size, axis
    outputs: Size = 1
    for _ in range(MOST_OUTPUTS.bit_length() - 1):
        outputs = np.where((outputs < rounds) & (2 * outputs <= most), 2 * outputs, outputs)
    return {} if found is None else {found: outputs}


def threads_for(plan: Leaf, nest: Nest, box: Box) -> int:
    """Threads that have something to do in a leaf at once, if there are as many."""
    return prod(positions(plan, nest, box).values()) * plan.options(ThreadForm).split


def _step(plan: Leaf, nest: Nest, box: Box, reduce_box: Mapping[Axis, Range]) -> tuple[int, int]:
    """Elements of the reduction that are staged at a time, 0 when not even a few fit; and stages of them, where both
    operands can be copied while others are used."""
    register = dict(plan.register)
    names = nest.axis_names()
    places = positions(plan, nest, box)
    row = 0
    for factor in nest_factors(nest):
        if factor.reductions:
            row += prod(places[a] * register.get(names[a], 1) for a in factor.outputs) * factor.value.dtype.bytes
    length = prod(int(reduce_box[a].size) if a in reduce_box else extent_of(a.extent) for a in nest.reduce_axes)
    room = _STAGED_BYTES // max(row, 1)
    staged = [f.value for f in nest_factors(nest) if f.reductions]
    copied = all(isinstance(v, Load) and v.dtype.bytes >= LEAST_COPY_BYTES for v in staged)
    stages = next((n for n, least in _RINGS if copied and room // n >= least and length > n * least), 1)
    most = min(_MOST_STEP, length, room // stages)
    if most < min(4, length):
        return 0, 1
    whole = [n for n in range(most, max(most // 2, 1) - 1, -1) if length % n == 0]
    step = whole[0] if whole else most
    return step, min(stages, -(-length // step))
