"""Every feasible plan of a nest, and the predicted time of a kernel under given plans and tiles.

The planner takes the best of what it builds; the tuner measures some, and the benchmark of the model a random few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from tilewright.backend.cpu.constants import CANDIDATE_CHAINS, CANDIDATE_COLUMNS, CANDIDATE_ROWS, WORST_VECTOR
from tilewright.backend.cpu.kernel import tile as costs
from tilewright.backend.cpu.leaf.vectorise import candidate_plans
from tilewright.backend.cpu.vector.loop_order import output_order, reads_rows, reduction_order, unrolled
from tilewright.backend.cpu.vector.vector_cost import fit_lanes, vector_cost, widest_bytes
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.nest import Nest, shares_a_read
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import Sizes, VectorForm


def feasible_plans(nest: Nest, context: NestContext) -> list[Leaf]:
    """What the construction considers, the default first, and beyond it other vector axes, tiles and orders."""
    built = candidate_plans(nest, context)
    if built[0].instruction is not None:
        return built
    found: dict[Leaf, None] = dict.fromkeys(built)
    for vector in _vector_axes(nest, context):
        found.update(dict.fromkeys(_with_vector(nest, vector, context, built[0])))
    return list(found)


def _vector_axes(nest: Nest, context: NestContext) -> list[Axis]:
    priced = _vector_costs(nest, context)
    least = min(priced.values(), default=0.0)
    return [a for a, cost in priced.items() if cost <= WORST_VECTOR * least]


def _vector_costs(nest: Nest, context: NestContext) -> dict[Axis, float]:
    priced = {a: vector_cost(nest, a, context) for a in (*nest.axes, *nest.reduce_axes)}
    return {a: cost for a, cost in priced.items() if cost is not None}


def _with_vector(nest: Nest, vector: Axis, context: NestContext, default: Leaf) -> Iterable[Leaf]:
    lanes = fit_lanes(context.target.lanes(widest_bytes(nest)), extent_of(vector.extent))
    if lanes == 1:
        return
    names = nest.axis_names()
    reductions = _reduction_orders(nest, context)
    for register, rows in _register_tiles(nest, vector, lanes, context):
        for order in _output_orders(nest, vector, rows, context):
            for reduction in reductions:
                unrolls = {(), tuple(unrolled(nest, reduction, vector))}
                for unroll in sorted(unrolls, key=len):
                    by_lane = reads_rows(nest, vector, reduction, context) and not unroll
                    for row_lanes in sorted({1, lanes if by_lane else 1}):
                        yield replace(
                            default, vector=names[vector], lanes=lanes,
                            register=tuple((names[a], n) for a, n in register.items()),
                            order=tuple(names[a] for a in (*order, *reduction)),
                            form=VectorForm(unroll=tuple(names[a] for a in unroll), row_lanes=row_lanes),
                        )  # fmt: skip


def _register_tiles(
    nest: Nest, vector: Axis, lanes: int, context: NestContext
) -> Iterable[tuple[dict[Axis, int], tuple[Axis, ...]]]:
    width = extent_of(vector.extent)
    chains = [c for c in CANDIDATE_CHAINS if c == 1 or c * lanes <= width]
    if not is_contraction(nest):
        for count in chains:
            yield {vector: count * lanes}, ()
        return
    rows = [a for a in nest.axes if a is not vector and extent_of(a.extent) > 1 and shares_a_read(nest, a)]
    budget = context.target.vector_registers * 3 // 4
    if vector in nest.reduce_axes:
        ranked = sorted(rows, key=lambda a: -extent_of(a.extent))[:2]
        sizes = [[n for n in (1, 2, 4) if n <= extent_of(a.extent)] for a in ranked]
        for chosen in product(*sizes):
            tile = {a: n for a, n in zip(ranked, chosen, strict=True) if n > 1}
            for count in chains:
                if count * int(np.prod(chosen)) <= min(16, budget - 4):
                    yield {**tile, vector: count * lanes}, tuple(tile)
        return
    for columns in range(1, CANDIDATE_COLUMNS + 1):
        if columns > 1 and columns * lanes > width:
            break
        yield {vector: columns * lanes}, ()
        for row in rows:
            for height in range(2, min(extent_of(row.extent), CANDIDATE_ROWS) + 1):
                if height * columns <= budget:
                    yield {row: height, vector: columns * lanes}, (row,)


def _output_orders(nest: Nest, vector: Axis, rows: Sequence[Axis], context: NestContext) -> list[list[Axis]]:
    default = output_order(nest, vector, rows, context)
    if not is_contraction(nest) or not rows or vector not in nest.axes:
        return [default]
    plain = [a for a in default if a is not vector and a not in rows]
    return [default, [*plain, *rows, vector]]


def _reduction_orders(nest: Nest, context: NestContext) -> list[list[Axis]]:
    default = reduction_order(nest, context)
    return [default] if len(default) < 2 else [default, [default[-1], *default[:-1]]]


def candidate_tiles(nests: Sequence[Nest], plan: Leaf, units: int, uncut: frozenset[str] = frozenset()) -> list[Sizes]:
    """Output tiles worth a look for a root nest under this plan on so many units; axes of `uncut` stay whole."""
    root = nests[-1]
    fixed = {name: extent_of(axis.extent) for axis, name in root.axis_names().items() if name in uncut}
    whole = [max(1, extent_of(a.extent)) for a in root.axes]
    return [
        tuple((f"o{i}", n) for i, (n, extent) in enumerate(zip(sizes, whole, strict=True)) if n < extent)
        for sizes in costs.candidates(root, plan, fixed, units)
    ]


def _vector_penalty(nest: Nest, plan: Leaf, context: NestContext) -> float:
    """Instructions for a vector's worth of elements along the plan's vector axis, over those along the best one.

    One for what the construction builds; elements that are not neighbours in memory are gathered one by one, which the
    price of maps and reductions knows.
    """
    if not is_contraction(nest):
        return 1.0
    priced = _vector_costs(nest, context)
    own = priced.get(nest.named(plan.vector)) if plan.vector is not None else None
    return own / min(priced.values()) if own is not None else 1.0


def predict(
    nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
    tiles: Sequence[Sizes],
) -> np.ndarray[Any, np.dtype[np.float64]]:  # fmt: skip
    """Predicted seconds of the kernel for each tile; infinite where its intermediates do not fit."""
    return priced_tiles(nests, plans, context, stored, tiles)[0]


def priced_tiles(
    nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
    tiles: Sequence[Sizes],
) -> tuple[Any, Any]:  # fmt: skip
    """Predicted seconds of the kernel for each tile, and the bytes that one holds."""
    root = nests[-1]
    named = [dict(tile) for tile in tiles]
    sizes = {
        axis: np.array([tile.get(f"o{i}", max(1, extent_of(axis.extent))) for tile in named], dtype=np.int64)
        for i, axis in enumerate(root.axes)
    }
    times = costs.predict(nests, plans, context, stored, sizes)
    seconds = times.seconds * vector_penalty(nests, plans, context)
    return np.broadcast_to(seconds, (len(named),)), np.broadcast_to(times.held, (len(named),))


def vector_penalty(nests: Sequence[Nest], plans: Sequence[Leaf], context: NestContext) -> float:
    """How many times longer vectors along axes that suit a nest less make a kernel."""
    return max(_vector_penalty(n, p, context) for n, p in zip(nests, plans, strict=True))
