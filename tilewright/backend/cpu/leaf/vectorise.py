"""Plans one nest: the axis that fills a vector, the register tile, the order of loops (Roller's top level)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from tilewright.backend.cpu.constants import (
    DOT_WORTH,
    EVERY_OTHER,
    FAR_LANE_STORE,
    FAR_ROWS,
    FAR_STEP,
    FEWER_WORTH,
    LANE_STORE,
    MOST_GATHERED,
    PARTLY,
    REDUCTION_COUNTS,
    ROWS_OF_A_PASS,
    SHARED_WINDOW,
    SHORT_SUM,
    TRANSPOSED_STORE,
    VECTOR_CHOICES,
    VECTOR_NEAR,
    VECTORS_WIDE,
)
from tilewright.backend.cpu.leaf.arithmetic import leaf_arithmetic
from tilewright.backend.cpu.maps.transposes import transposed_block
from tilewright.backend.cpu.vector.construct import BuiltLeaf, build_tiles, dot_tiles
from tilewright.backend.cpu.vector.contraction_facts import ContractionFacts, factors_of, operands_of
from tilewright.backend.cpu.vector.loop_order import is_merged, output_order, reads_rows, reduction_order, unrolled
from tilewright.backend.cpu.vector.vector_cost import (
    fit_lanes,
    span,
    transposed_from,
    vector_cost,
    widest_bytes,
)
from tilewright.errors import InternalError
from tilewright.ir.forms.expr import Axis, Load, Op, axes_of, is_op, loads, var, walk
from tilewright.ir.forms.scalar import CHAINS
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import (
    NestContext,
    is_contraction,
    layouts_around,
    packed_axis,
    stride,
    walked_on,
)
from tilewright.tile_graph.algebra.cuts import cut, is_cut
from tilewright.tile_graph.algebra.nest import Nest, data_cost, moves, shares_a_read
from tilewright.tile_graph.algebra.propagate import Size, extent_of, whole
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.algebra.unswitch import writes_streams
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm

_LINE = 16  # elements that fill a cache line


# seconds, what plans with this vector axis have in common, register tile, loops: most are never looked at again
_Candidate = tuple[float, Leaf, Mapping[Axis, int], Sequence[Axis]]


def plan_nest(nest: Nest, context: NestContext) -> Leaf:
    """The plan of a nest on its whole domain; the tile's own size only shortens the loops."""
    return candidate_plans(nest, context, 1)[0]


def streamed_leaves(
    nests: Sequence[Nest], leaves: Sequence[Leaf], stream: Stream | None, context: NestContext
) -> tuple[Leaf, ...]:
    """The leaves of a kernel: sums that a stream takes in blocks, which need not be whole groups of an instruction and
    begin from what is carried, run on vectors."""
    blocked = stream.reducers if stream is not None else {}
    return tuple(
        replace(_vector_plans(nest, context, 1)[0], composed=leaf.composed)
        if nest in blocked and leaf.instruction is not None else leaf
        for nest, leaf in zip(nests, leaves, strict=True)
    )  # fmt: skip


def candidate_plans(nest: Nest, context: NestContext, most: int | None = None, forms: bool = False) -> list[Leaf]:
    """The plans the construction considers for a nest on a CPU, the predicted best first; all, or so many of them, of
    `forms` alone the best register tile for each order of the loops and each pass."""
    from tilewright.backend.cpu.leaf.instructions import plan_instruction

    by_instruction = plan_instruction(nest, context)
    return [by_instruction] if by_instruction is not None else _vector_plans(nest, context, most, forms)


def _vector_plans(nest: Nest, context: NestContext, most: int | None = None, forms: bool = False) -> list[Leaf]:
    panel = _stored_panel(nest, context)
    if panel is not None:
        base = _base_plan(nest, panel[0], context)
        # a panel is whole vectors of its reader, which may be wider elements, fewer a vector, than those copied
        base = replace(base, lanes=min(base.lanes, panel[1] & -panel[1]))
        return [with_loops(nest, base, dict([panel]), output_order(nest, panel[0], (), context))]
    if not is_contraction(nest):  # nothing is packed for it
        context = replace(context, constants=frozenset(), staged=frozenset())
    found: list[_Candidate] = []
    for vector in _vector_axes(nest, context):
        base = _base_plan(nest, vector, context)
        if vector is not None and is_contraction(nest):
            for walked in (base, *_along_windows(nest, vector, base, context)):
                found.extend(_contraction_plans(nest, vector, walked, context))
            continue
        register, row_axes = _register_tile(nest, vector, base.lanes, context)
        order = output_order(nest, vector, row_axes, context)
        if vector is not None and nest.monoid is not None and set(register) == {vector}:
            register = _side_by_side(nest, vector, with_loops(nest, base, register, order), context)
        base = base.with_options(VectorForm, cut=_row_passes(nest, vector, register, context))
        found.append((0.0, base, register, order))
    best = sorted(found, key=lambda candidate: candidate[0])[:most]
    if forms:
        first: dict[tuple[object, ...], _Candidate] = {}
        for candidate in best:
            _, shared, _, loops = candidate
            cut = shared.options(VectorForm).cut
            first.setdefault((shared.vector, shared.lanes, shared.order, cut, *loops), candidate)
        best = list(first.values())
    return [with_loops(nest, shared, sizes, loops) for _, shared, sizes, loops in best]


def _base_plan(nest: Nest, vector: Axis | None, context: NestContext) -> Leaf:
    """What a plan owes to the choice of the vector axis alone."""
    lanes = 1
    if vector is not None:
        lanes = fit_lanes(context.target.lanes(widest_bytes(nest)), span(nest, vector, context))
    names = nest.axis_names()
    reduction = reduction_order(nest, context)
    row_lanes = lanes if reads_rows(nest, vector, reduction, context) else 1
    unroll = unrolled(nest, reduction, vector) if row_lanes == 1 else []
    if row_lanes > 1 and is_merged(nest, reduction[-1]) and extent_of(reduction[-1].extent) <= SHORT_SUM * row_lanes:
        unroll = [reduction[-1]]
    return Leaf(
        tensor=nest.tensor.name, core=nest.core, epilogue=nest.epilogue,
        vector=None if vector is None else names[vector], lanes=lanes, order=tuple(names[a] for a in reduction),
        form=VectorForm(unroll=tuple(names[a] for a in unroll), row_lanes=row_lanes),
    )  # fmt: skip


def _along_windows(nest: Nest, vector: Axis, base: Leaf, context: NestContext) -> list[Leaf]:
    """The same with the axis innermost, and written out, along which the windows of neighbouring rows overlap: they
    then share vectors that they read, where those of neighbours along the vector are different ones."""
    row = _row_axis(nest, vector, context)
    if row is None or base.options(VectorForm).row_lanes > 1 or vector in nest.reduce_axes:
        return []
    names = nest.axis_names()
    overlapping = [
        axis for axis in reduction_order(nest, context)
        if 1 < extent_of(axis.extent) <= SHARED_WINDOW and base.options(VectorForm).unroll != (names[axis],)
        and any(row in axes_of(i) and axis in axes_of(i) for n in loads(*nest.elements) if moves(n, vector)
                for i in n.indices)
    ]  # fmt: skip
    return [
        replace(base, order=(*(r for r in base.order if r != names[axis]), names[axis])).with_options(
            VectorForm, unroll=(names[axis],)
        )
        for axis in overlapping
    ]


def _stored_panel(nest: Nest, context: NestContext) -> tuple[Axis, int] | None:
    """The axis that a copy into panels is split along, and how wide they are: one block then fills one row of one."""
    last = context.layout(nest.tensor).order[-1:]
    return (nest.axes[last[0].axis], last[0].size) if last and last[0].size and last[0].size > 1 else None


def with_loops(nest: Nest, base: Leaf, register: Mapping[Axis, int], order: Sequence[Axis]) -> Leaf:
    names = nest.axis_names()
    sizes = tuple((names[a], n) for a, n in register.items())
    return replace(base, register=sizes, order=(*(names[a] for a in order), *base.order))


def _contraction_plans(nest: Nest, vector: Axis, base: Leaf, context: NestContext) -> list[_Candidate]:
    """Plans of a contraction along one vector axis, each with its predicted seconds."""
    row = _row_axis(nest, vector, context)
    facts = _facts_of(nest, vector, row, base, context)
    result: list[_Candidate] = []
    if vector in nest.reduce_axes:
        scatter = _scatter_seconds(nest, vector, {}, context)
        return [(seconds * DOT_WORTH + scatter, base, sizes, dot_order(nest, sizes))
                for seconds, sizes in dot_tiles(facts, dot_rows(nest))]  # fmt: skip
    scattered: dict[int, float] = {}
    passes: dict[int | None, Leaf] = {}
    for built in build_tiles(facts):
        sizes, order = block_loops(facts, built)
        if built.cut not in passes:
            passes[built.cut] = base.with_options(VectorForm, cut=passes_of(facts, built))
        if built.rows not in scattered:
            scattered[built.rows] = _scatter_seconds(nest, vector, sizes, context)
        result.append((built.seconds + scattered[built.rows], passes[built.cut], sizes, order))
    return result


def dot_rows(nest: Nest) -> list[Axis]:
    """Output axes along which dot products share a read."""
    return [a for a in nest.axes if extent_of(a.extent) > 1 and shares_a_read(nest, a)]


def dot_order(nest: Nest, sizes: Mapping[Axis, int]) -> list[Axis]:
    """The output loops around a register tile of dot products."""
    outer = sorted((a for a in sizes if a in nest.axes), key=lambda a: -extent_of(a.extent))
    return [*(a for a in nest.axes if a not in outer), *outer]


def block_loops(facts: ContractionFacts, built: BuiltLeaf) -> tuple[dict[Axis, int], list[Axis]]:
    """The register tile of a form, and the output loops around it."""
    assert facts.vector is not None
    rows = [facts.row] if facts.row is not None and built.rows > 1 else []
    sizes = {**dict.fromkeys(rows, built.rows), facts.vector: built.vectors * facts.lanes}
    plain = [a for a in facts.nest.axes if a is not facts.vector and a not in rows]
    return sizes, [*plain, *([facts.vector, *rows] if built.row_inside else [*rows, facts.vector])]


def passes_of(facts: ContractionFacts, built: BuiltLeaf) -> tuple[tuple[str, int], ...]:
    """The reduction axis that a form walks in passes, and how much of it in each."""
    if built.cut is None or facts.cut_axis is None:
        return ()
    return ((facts.nest.axis_names()[facts.cut_axis], built.cut),)


def scatter_cycles(
    nest: Nest, vector: Axis | None, register: Mapping[Axis, int], context: NestContext, points: Size
) -> Size:
    """Of storing elements lane by lane, where the vector does not run along the result's storage. Rows that do are
    transposed with the lanes, as many as fill squares."""
    if vector is None or vector not in nest.axes:
        return 0.0
    store = context.offset(nest.tensor, nest.place)
    if store.terms.get(var(vector), 0) == 1:
        return 0.0
    lanes = context.target.lanes(widest_bytes(nest))
    rows = max((n for a, n in register.items() if a is not vector and store.terms.get(var(a), 0) == 1), default=1)
    transposed = rows // lanes * lanes / rows if rows >= lanes else 0.0
    near = points * nest.tensor.dtype.bytes <= context.target.nearest.capacity
    apart = np.where(near, LANE_STORE, FAR_LANE_STORE)
    return points * ((1 - transposed) * apart + transposed * (apart / lanes + TRANSPOSED_STORE))


def _scatter_seconds(nest: Nest, vector: Axis, register: Mapping[Axis, int], context: NestContext) -> float:
    points = prod(extent_of(a.extent) for a in nest.axes) / context.target.units
    cycles = float(scatter_cycles(nest, vector, register, context, points)) if vector in nest.axes else points
    return cycles / (context.target.fma_rate / (2 * context.target.lanes(4)))


def _vector_axes(nest: Nest, context: NestContext) -> list[Axis | None]:
    """Axes worth a vector, the cheapest first: one, or for a contraction all that come near it."""
    costs = []
    lanes = context.target.lanes(widest_bytes(nest))
    for axis in (*(a for a in reversed(nest.axes) if a not in nest.unswitched), *reversed(nest.reduce_axes)):
        is_told = _choices_along(nest, axis) <= VECTOR_CHOICES or is_cut(axis, nest, lanes)
        cost = vector_cost(nest, axis, context) if is_told else None
        if cost is not None:
            costs.append((cost, axis))
    costs.sort(key=lambda pair: pair[0])
    if not costs:
        return [None]
    if not is_contraction(nest):
        return [costs[0][1]]
    best = costs[0][1]
    if best in nest.axes and span(nest, best, context) >= VECTORS_WIDE * lanes:
        costs = [(cost, axis) for cost, axis in costs if axis in nest.axes]  # vectors are full: nothing to fold for
    return [axis for cost, axis in costs[:3] if cost <= costs[0][0] * VECTOR_NEAR]


def _choices_along(nest: Nest, axis: Axis) -> int:
    """Places that decide between values along an axis: each lane would have all of them written out, if the axis is
    not cut there."""
    return sum(is_op(n, "select") and axis in n.args[0].axes for n in walk(*nest.elements, *nest.values))


def facts_of(nest: Nest, plan: Leaf, context: NestContext) -> ContractionFacts:
    """The facts of a contraction as a plan lays it out."""
    vector, row = _tile_axes(nest, plan, context)
    return _facts_of(nest, vector, row, plan, context)


def _facts_of(nest: Nest, vector: Axis | None, row: Axis | None, plan: Leaf, context: NestContext) -> ContractionFacts:
    options = plan.options(VectorForm)
    unroll = [nest.named(a) for a in options.unroll]
    return contraction_facts(nest, vector, row, plan.lanes, options.row_lanes > 1, unroll, context)


def runs_of(nest: Nest, plan: Leaf, context: NestContext) -> Mapping[Axis, tuple[Axis, ...]]:
    """Axes that the register tiles of a contraction walk on to, by the axis they begin along."""
    return walked_on(nest, *_tile_axes(nest, plan, context), context)


def _tile_axes(nest: Nest, plan: Leaf, context: NestContext) -> tuple[Axis | None, Axis | None]:
    vector = nest.named(plan.vector) if plan.vector else None
    rows = [nest.named(a) for a, _ in plan.register if a != plan.vector]
    return vector, rows[0] if rows else _row_axis(nest, vector, context) if vector is not None else None


def contraction_facts(
    nest: Nest, vector: Axis | None, row: Axis | None, lanes: int, by_lane: bool, unroll: Sequence[Axis],
    context: NestContext,
) -> ContractionFacts:  # fmt: skip
    known = context.memo.facts
    key = (nest, vector, row, lanes, by_lane, tuple(unroll), layouts_around(nest, context))
    if key not in known:
        known[key] = _facts(nest, vector, row, lanes, by_lane, unroll, context)
    return known[key]


def _facts(
    nest: Nest, vector: Axis | None, row: Axis | None, lanes: int, by_lane: bool, unroll: Sequence[Axis],
    context: NestContext,
) -> ContractionFacts:  # fmt: skip
    reduction = reduction_order(nest, context)
    # a product of activations may read tiles that a neighbour leaves near, whose rows lie otherwise
    over_weights = any(n.source in context.constants for n in nest.element_loads)
    runs: dict[Load, bool] = {}
    scattered: dict[Load, bool] = {}
    gathered: dict[Load, float] = {}
    pitches: dict[Load, int] = {}
    orders: dict[Load, tuple[int, ...]] = {}
    panel = 0
    for node in nest.element_loads:
        free = node.source in context.constants or node.source in context.staged
        along = packed_axis(node, vector) if vector is not None and free else None
        inner = context.layout(node.source).order[-1:]
        is_given = not context.layout(node.source).is_natural
        packed = along is not None and (not is_given or inner[0].axis == along)
        if packed and is_given and inner[0].size is not None:
            panel = max(panel, inner[0].size // lanes)
        by_row = row is not None and moves(node, row)
        scattered[node] = not packed and not by_row and _is_scattered(node, vector, reduction, context)
        runs[node] = packed or row is None or not (by_row or scattered[node])
        step = 1 if packed or vector is None else stride(node, vector, context)
        one_by_one = context.target.gathered_reads * lanes
        gathered[node] = 0.0 if step in (0, 1) else EVERY_OTHER if step == 2 and lanes >= PARTLY else one_by_one
        parts = context.layout(node.source).order
        if not packed and all(p.size is None and p.step == 1 for p in parts):
            orders[node] = tuple(p.axis for p in reversed(parts))
        if not runs[node] and row is not None and over_weights:
            pitches[node] = abs(stride(node, row, context) or 0) * node.source.dtype.bytes
    return ContractionFacts(
        nest, context.target, vector, row, lanes, by_lane, unroll[0] if unroll and not by_lane else None,
        _cut_axis(nest, reduction, unroll) if over_weights else None,
        operands_of(nest, vector, row, runs, scattered, gathered, pitches, orders, context.target),
        factors_of(nest, vector, row),
        walked_on(nest, vector, row, context), _parts(nest, vector, lanes), panel,
    )  # fmt: skip


def _parts(nest: Nest, vector: Axis | None, lanes: int) -> tuple[int, ...]:
    """The lengths that an axis is cut into where the conditions of windows change along it: of short vectors the ends
    are a small part."""
    if lanes < PARTLY or vector is None or vector not in nest.axes:
        return ()
    if not any(is_op(n, "select") for n in walk(*nest.elements)):
        return ()
    found = cut(whole(extent_of(vector.extent)), vector, nest, lanes)
    return tuple(int(part.size) for part in found) if len(found) > 1 else ()


def _is_scattered(node: Load, vector: Axis | None, reduction: Sequence[Axis], context: NestContext) -> bool:
    """Whether every step of the reduction reads vectors of another line: as many streams as there are steps."""
    if vector is None or not reduction or not moves(node, vector) or not moves(node, reduction[-1]):
        return False
    step = stride(node, reduction[-1], context)
    return step is None or abs(step) * node.source.dtype.bytes > FAR_STEP


def _cut_axis(nest: Nest, reduction: Sequence[Axis], unroll: Sequence[Axis]) -> Axis | None:
    """The reduction axis that passes may cut: the outermost, where partial sums can wait in the result's place."""
    long = [a for a in reduction if extent_of(a.extent) > 1 and a not in unroll]
    plain_sum = nest.monoid is not None and len(nest.monoid.left) == 1 and not nest.initial and len(nest.stores) == 1
    if not long or not plain_sum or nest.monoid is None or nest.stores[0].dtype is not nest.monoid.left[0].dtype:
        return None
    return long[0]


def _row_axis(nest: Nest, vector: Axis, context: NestContext) -> Axis | None:
    rows = [a for a in nest.axes if a is not vector and extent_of(a.extent) > 1 and shares_a_read(nest, a)]
    return max(reversed(rows), key=lambda a: _row_merit(nest, a, vector, context), default=None)


def _register_tile(
    nest: Nest, vector: Axis | None, lanes: int, context: NestContext
) -> tuple[dict[Axis, int], tuple[Axis, ...]]:
    """Sizes along output axes (and the vector axis), and the row axes of the tile."""
    if vector is None:
        return {}, ()
    if not is_contraction(nest):
        extent = extent_of(vector.extent)
        if nest.unswitched:
            if writes_streams(nest.unswitched, *nest.values):
                return {vector: lanes * max(1, min(_LINE // lanes, extent // lanes))}, ()
            return {**nest.unswitched, vector: lanes}, ()
        transposed = transposed_from(nest, vector, context)
        if transposed is not None:
            return transposed_block(transposed, vector, lanes), (transposed,)
        chains = _chains(nest, vector, context.target)
        if nest.monoid is not None:
            if vector in nest.axes and len(nest.monoid.left) == 1 and not nest.unswitched:
                chains = max(chains, context.target.vector_registers // 2)
            most = MOST_GATHERED if _is_gathered(nest, vector, context) else chains
            chains = max(1, min(chains, most, extent // lanes))
        while chains > 1 and chains * lanes > extent:
            chains //= 2
        return {vector: lanes * chains}, ()
    raise InternalError(f"{nest.tensor.name}: a contraction has tiles of its own")


def _is_gathered(nest: Nest, vector: Axis, context: NestContext) -> bool:
    """Whether a vector's lanes are no neighbours, nor every other element, of what it reads."""
    return any(stride(node, vector, context) not in (0, 1, 2) for node in nest.sample)


def _side_by_side(nest: Nest, vector: Axis, plan: Leaf, context: NestContext) -> dict[Axis, int]:
    """The register tile of a reduction, of as many vectors as the plan has or fewer: what they leave over at the end of
    a sum is added element by element, and at the end of a row fills fewer registers."""
    most = dict(plan.register)[nest.axis_names()[vector]] // plan.lanes
    counts = np.array(sorted({n for n in (*REDUCTION_COUNTS, most) if n <= most}))
    arithmetic = leaf_arithmetic(nest, plan, context)
    whole_tile = {a: max(1, extent_of(a.extent)) for a in nest.axes}
    chains = counts if vector in nest.reduce_axes else 1
    seconds = np.broadcast_to(arithmetic.seconds({vector: counts * plan.lanes}, whole_tile, chains), counts.shape)
    best = int(np.argmin(seconds))
    return {vector: plan.lanes * int(counts[best] if seconds[best] < FEWER_WORTH * seconds[-1] else most)}


def _row_passes(
    nest: Nest, vector: Axis | None, register: Mapping[Axis, int], context: NestContext
) -> tuple[tuple[str, int], ...]:
    """Few rows at a time where a column of blocks would take a piece of far too many: rows then stream by."""
    if nest.monoid is None or vector not in nest.axes or vector is None or len(nest.reduce_axes) != 1:
        return ()
    axis = _cut_axis(nest, nest.reduce_axes, ())
    reads = [n for n in nest.element_loads if axis is not None and moves(n, axis)]
    if axis is None or len(reads) != 1 or extent_of(vector.extent) <= register[vector]:
        return ()
    pitch = (stride(reads[0], axis, context) or 0) * reads[0].dtype.bytes
    total = pitch * extent_of(axis.extent)
    if pitch <= FAR_ROWS or total <= context.target.nearest.capacity or extent_of(axis.extent) < 4 * ROWS_OF_A_PASS:
        return ()
    return ((nest.axis_names()[axis], ROWS_OF_A_PASS),)


def _chains(nest: Nest, vector: Axis, target: Target) -> int:
    """Vectors side by side: reductions need some to hide the latency of adding, light maps to walk whole lines, and
    functions that are chains of operations others to fill the pipes."""
    if nest.monoid is not None:
        return 8 if vector in nest.axes and len(nest.monoid.left) == 1 else 4
    fills = 4 * nest.tensor.dtype.bytes <= widest_bytes(nest)  # four vectors of numbers make one of bytes
    if fills or data_cost(*nest.values, along=vector) < 12:
        return 4
    chained = [n for n in walk(*nest.values) if isinstance(n, Op) and n.op.name in CHAINS and vector in n.axes]
    return target.calls_together if chained else 1


def _row_merit(nest: Nest, axis: Axis, vector: Axis, context: NestContext) -> float:
    """How much a row axis saves: vector reads that do not depend on it count most; long axes before short ones."""
    merit = 0.0
    for node in nest.element_loads:
        if not moves(node, axis):
            merit += 6.0 if moves(node, vector) else 1.0
    extent = span(nest, axis, context)
    return merit * min(extent, 8) + (0.5 if extent > 8 else 0.0)
