"""Plans one nest: the axis that fills a vector, the register tile, the order of loops (Roller's top level).

The register tile is chosen by counting: multiply-adds, loads and the latency of a dependent chain, per step of the
reduction, over all blocks the extents make, left-over ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.ir.expr import Axis, Expr, Load, Op, Var, axes_of, const, loads, var
from tilewright.ir.simplify import join_divisions, linear, simplify
from tilewright.ir.tensor import Layout, StorageAxis, Tensor
from tilewright.schedule.nest import Nest, data_cost
from tilewright.schedule.plan import NestPlan
from tilewright.schedule.propagate import extent_of
from tilewright.target import Target

_FMA_LATENCY = 4  # cycles, on every core we know within one
_PIPES = 2  # vector FMA pipes, and loads a cycle


@dataclass(frozen=True)
class NestContext:
    """What planning a nest needs to know around it."""

    target: Target
    layout: Callable[[Tensor], Layout]
    constants: frozenset[Tensor] | Mapping[Tensor, object]


def offset_of(tensor: Tensor, layout: Layout, indices: tuple[Expr, ...]) -> Expr:
    """The flat position of a read in storage."""
    offset: Expr = const(0)
    for index, size in zip(layout.storage_indices(indices), layout.storage_shape(tensor.shape), strict=True):
        offset = offset * size + index
    return simplify(offset)


def stride(node: Load, axis: Axis, context: NestContext) -> int | None:
    """Elements of storage between neighbours along `axis`; None when it is not one number."""
    layout = context.layout(node.source)
    if node.source in context.constants and layout.is_natural and packed_axis(node, axis) is not None:
        return 1
    total = join_divisions(linear(offset_of(node.source, layout, node.indices)))
    step = 0
    for term, coefficient in total.terms.items():
        if isinstance(term, Var) and term.axis is axis:
            step = coefficient
        elif axis in axes_of(term):
            return _split_stride(term, axis)
    return step


def _split_stride(term: Expr, axis: Axis) -> int | None:
    """x % n and x // n look contiguous or constant to a vector that never crosses a multiple of n."""
    if isinstance(term, Op) and term.op.name == "mod":
        inner = linear(term.args[0]).terms.get(var(axis))
        return inner
    return None


def packed_axis(node: Load, axis: Axis) -> int | None:
    """The axis of a constant that is indexed by `axis` and by nothing else, and no other axis is."""
    plain = [d for d, i in enumerate(node.indices) if isinstance(i, Var) and i.axis is axis]
    used = [d for d, i in enumerate(node.indices) if axis in axes_of(i)]
    return plain[0] if len(plain) == 1 and plain == used else None


def is_contraction(nest: Nest) -> bool:
    """A sum of products of at least two reads."""
    return nest.monoid is not None and nest.monoid.operator == "add" and len(loads(nest.elements[0])) >= 2


def plan_nest(nest: Nest, context: NestContext, phase: str = "tile", level: str = "DRAM") -> NestPlan:
    """The plan of a nest on its whole domain; the tile's own size only shortens the loops."""
    if context.target.kind == "gpu":
        from tilewright.schedule.gpu import plan_gpu_nest

        return plan_gpu_nest(nest, context, phase, level)
    vector = _choose_vector(nest, context)
    lanes = context.target.lanes(max(t.dtype.bytes for t in nest.stores)) if vector is not None else 1
    if vector is not None:
        lanes = _fit_lanes(lanes, extent_of(vector.extent))
    if lanes == 1:
        vector = None
    names = nest.axis_names()
    register, row_axes = _register_tile(nest, vector, lanes, context)
    order = _output_order(nest, vector, row_axes, context)
    reduction = _reduction_order(nest, context)
    unroll = _unrolled(nest, reduction, vector)
    row_lanes = lanes if _reads_rows(nest, vector, reduction, context) and not unroll else 1
    return NestPlan(
        tensor=nest.tensor.name, core=nest.core, epilogue=nest.epilogue, level=level, phase=phase,
        vector=None if vector is None else names[vector], lanes=lanes,
        register=tuple((names[a], n) for a, n in register.items()),
        order=tuple(names[a] for a in (*order, *reduction)), unroll=tuple(names[a] for a in unroll),
        row_lanes=row_lanes,
    )  # fmt: skip


def _reads_rows(nest: Nest, vector: Axis | None, reduction: Sequence[Axis], context: NestContext) -> bool:
    """Whether the operand broadcast over the vector is contiguous along the innermost reduction, where that helps."""
    if not context.target.lane_multiply or vector is None or vector not in nest.axes or not reduction:
        return False
    if not is_contraction(nest) or extent_of(reduction[-1].extent) < 8 or nest.tensor.dtype.name != "float32":
        return False
    return any(
        vector not in axes_of(*n.indices) and stride(n, reduction[-1], context) == 1 for n in loads(*nest.elements)
    )


def _fit_lanes(lanes: int, extent: int) -> int:
    """The narrowest vector that holds the extent, or the widest there is."""
    while lanes > 1 and lanes // 2 >= extent:
        lanes //= 2
    return lanes


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _choose_vector(nest: Nest, context: NestContext) -> Axis | None:
    best: tuple[float, Axis] | None = None
    for axis in (*reversed(nest.axes), *reversed(nest.reduce_axes)):
        cost = _vector_cost(nest, axis, context)
        if cost is not None and (best is None or cost < best[0]):
            best = (cost, axis)
    return None if best is None else best[1]


def _vector_cost(nest: Nest, axis: Axis, context: NestContext) -> float | None:
    """Instructions for one vector's worth of elements, relative to a perfect vector."""
    extent = extent_of(axis.extent)
    lanes = _fit_lanes(context.target.lanes(nest.tensor.dtype.bytes), extent)
    if lanes == 1:
        return None
    reducing = axis in nest.reduce_axes
    if reducing and (nest.monoid is None or len(nest.monoid.left) > 4):
        return None
    steps = 1
    for r in nest.reduce_axes:
        steps *= max(1, extent_of(r.extent))
    wide = context.target.lanes(nest.tensor.dtype.bytes)
    cost = 0.5
    for node in loads(*(nest.elements or nest.values)):
        step = stride(node, axis, context)
        cost += 0.25 if step == 0 else 1.0 if step == 1 else 2.0 * lanes
    store = offset_of(nest.tensor, context.layout(nest.tensor), tuple(var(a) for a in nest.axes))
    if reducing:
        cost += 2.5 * lanes * lanes / steps  # folding the lanes at the end, once an output
    else:
        step = linear(store).terms.get(var(axis), 0)
        cost += (0.5 if step == 1 else 1.0 * lanes) / steps
        for node in loads(*nest.values) if nest.elements else ():
            if node.source not in nest.accumulated:
                found = stride(node, axis, context)
                cost += (0.2 if found in (0, 1) else 1.0 * lanes) / steps
    return cost * -(-extent // lanes) / (extent / lanes) * (wide / lanes)


def _register_tile(
    nest: Nest, vector: Axis | None, lanes: int, context: NestContext
) -> tuple[dict[Axis, int], tuple[Axis, ...]]:
    """Sizes along output axes (and the vector axis), and the row axes of the tile."""
    if vector is None:
        return {}, ()
    if not is_contraction(nest):
        extent = extent_of(vector.extent)
        chains = 4 if nest.monoid is not None else 2 if data_cost(*nest.values) < 12 else 1
        while chains > 1 and chains * lanes > extent:
            chains //= 2
        return {vector: lanes * chains}, ()
    rows = [a for a in nest.axes if a is not vector and extent_of(a.extent) > 1 and _shares_a_read(nest, a)]
    budget = context.target.vector_registers * 3 // 4
    if vector in nest.reduce_axes:
        return _dot_tile(nest, vector, lanes, rows, budget)
    row = max(reversed(rows), key=lambda a: _row_merit(nest, a, vector, context), default=None)
    by_lane = _reads_rows(nest, vector, _reduction_order(nest, context), context)
    best: tuple[float, int, int] = (float("inf"), 1, 1)
    width = extent_of(vector.extent)
    height = extent_of(row.extent) if row is not None else 1
    for columns in range(1, 9):
        if columns > 1 and columns * lanes > width:
            break
        for mr in range(1, min(height, 12) + 1):
            if mr * columns > budget or (by_lane and mr * columns + mr + columns > context.target.vector_registers - 4):
                break
            cost = _tile_cost(height, mr, width, columns, lanes, by_lane)
            if cost < best[0] * 0.999:
                best = (cost, mr, columns)
    _, mr, columns = best
    register = {vector: columns * lanes}
    if row is not None and mr > 1:
        return {row: mr, **register}, (row,)
    return register, ()


def _tile_cost(height: int, mr: int, width: int, columns: int, lanes: int, by_lane: bool) -> float:
    """Cycles of one step of the reduction over the whole output."""

    def step(rows: int, vectors: int) -> float:
        arithmetic = rows * vectors / _PIPES
        # vector operands come from farther away than a row's scalars, which stay in L1: they weigh more
        broadcasts = 0.0 if by_lane else rows / _PIPES
        movement = vectors / _PIPES + (rows / lanes / _PIPES if by_lane else broadcasts)
        return max(arithmetic + 0.15 * vectors + 0.1 * broadcasts + 0.5, movement, float(_FMA_LATENCY))

    full_rows, rest_rows = divmod(height, mr)
    full_columns, rest = divmod(width, columns * lanes)
    rest_vectors, singles = divmod(rest, lanes)
    total = 0.0
    for count, rows in ((full_rows, mr), (1, rest_rows)):
        if not rows or not count:
            continue
        total += count * full_columns * step(rows, columns)
        if rest_vectors:
            total += count * step(rows, rest_vectors)
        if singles:
            total += count * step(rows, 1)
    return total


def _dot_tile(
    nest: Nest, vector: Axis, lanes: int, rows: Sequence[Axis], budget: int
) -> tuple[dict[Axis, int], tuple[Axis, ...]]:
    """A tile for dot products along a contiguous reduction: outputs along up to two axes, lanes folded at the end."""
    ranked = sorted(rows, key=lambda a: -extent_of(a.extent))[:2]
    sizes = dict.fromkeys(ranked, 1)
    limit = max(4, min(16, budget - 4))
    while ranked:
        grown = [a for a in ranked if sizes[a] * 2 <= min(4, extent_of(a.extent))]
        product = 1
        for n in sizes.values():
            product *= n
        if not grown or product * 2 > limit:
            break
        smallest = min(grown, key=lambda a: sizes[a])
        sizes[smallest] *= 2
    register = {a: n for a, n in sizes.items() if n > 1}
    product = 1
    for n in register.values():
        product *= n
    chains = 1
    while chains * product < 4 and chains * 2 * lanes <= extent_of(vector.extent):
        chains *= 2
    register[vector] = chains * lanes
    return register, tuple(a for a in ranked if a in register)


def _shares_a_read(nest: Nest, axis: Axis) -> bool:
    """Whether some operand does not depend on the axis, so that a row of the tile reuses it."""
    return any(axis not in axes_of(*n.indices) for n in loads(*nest.elements))


def _row_merit(nest: Nest, axis: Axis, vector: Axis, context: NestContext) -> float:
    """How much a row axis saves: vector reads that do not depend on it count most; long axes before short ones."""
    merit = 0.0
    for node in loads(*nest.elements):
        if axis not in axes_of(*node.indices):
            merit += 4.0 if vector in axes_of(*node.indices) else 1.0
    extent = extent_of(axis.extent)
    return merit * min(extent, 8) + (0.5 if extent > 8 else 0.0)


def _output_order(nest: Nest, vector: Axis | None, rows: Sequence[Axis], context: NestContext) -> list[Axis]:
    """Plain axes outermost; then vector blocks, then row blocks: a panel of the vector operand stays near."""
    plain = [a for a in nest.axes if a is not vector and a not in rows]
    inner = [*([vector] if vector in nest.axes else []), *rows]
    if not is_contraction(nest):
        layout = context.layout(nest.tensor)
        position = {part.axis: i for i, part in enumerate(layout.order)}
        return sorted(nest.axes, key=lambda a: position.get(nest.axes.index(a), 0))
    return [*plain, *inner]


def _reduction_order(nest: Nest, context: NestContext) -> list[Axis]:
    """The axis whose neighbours lie closest in storage innermost; constants are packed to follow any order."""
    operands = [n for n in loads(*nest.elements) if n.source not in context.constants] or loads(*nest.elements)

    def distance(axis: Axis) -> float:
        steps = [stride(n, axis, context) for n in operands]
        moving = [abs(s) for s in steps if s]
        return min(moving, default=1 << 30) if None not in steps else 1 << 20

    return sorted(nest.reduce_axes, key=lambda a: -distance(a))


def _unrolled(nest: Nest, reduction: Sequence[Axis], vector: Axis | None) -> list[Axis]:
    """A short innermost window is written out: neighbouring outputs then share its reads in registers."""
    if not is_contraction(nest) or not reduction or vector in nest.reduce_axes:
        return []
    last = reduction[-1]
    if extent_of(last.extent) > 5 or extent_of(last.extent) == 1:
        return []
    return [last]


def constant_layouts(nest: Nest, plan: NestPlan, context: NestContext) -> dict[Tensor, Layout]:
    """Panels for constants read along the vector axis: (outer, other axes in loop order, one register tile wide)."""
    if plan.vector is None or not is_contraction(nest) or context.target.kind == "gpu":
        return {}
    vector = nest.named(plan.vector)
    if vector not in nest.axes:
        return {}
    register = dict(plan.register)
    names = nest.axis_names()
    width = register.get(plan.vector, plan.lanes)
    order = [nest.named(a) for a in plan.order]
    found: dict[Tensor, Layout] = {}
    for node in loads(*nest.elements):
        tensor = node.source
        if tensor not in context.constants or not context.layout(tensor).is_natural or tensor.rank < 2:
            continue
        axis = packed_axis(node, vector)
        if axis is None:
            continue

        def depth(dim: int, node: Load = node) -> int:
            axes = [a for a in axes_of(node.indices[dim]) if a in order]
            if any(register.get(names[a], 0) >= extent_of(a.extent) > 1 for a in axes):
                return len(order)  # written out inside every loop: next to the vector, so that one run is read
            return max((order.index(a) for a in axes), default=-1)

        others = sorted((d for d in range(tensor.rank) if d != axis), key=depth)
        # padded to whole vectors: the last one is read whole
        run = min(width, _round_up(extent_of(tensor.shape[axis]), plan.lanes))
        parts = [StorageAxis(axis, run), *(StorageAxis(d) for d in others), StorageAxis(axis, 1, run)]
        if run == extent_of(tensor.shape[axis]):
            parts = [*(StorageAxis(d) for d in others), StorageAxis(axis)]
        found[tensor] = Layout(tuple(parts))
    return found


def with_phase(plan: NestPlan, phase: str, level: str) -> NestPlan:
    return replace(plan, phase=phase, level=level)
