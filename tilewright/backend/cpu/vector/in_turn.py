"""Sums whose results are computed a few vectors at a time: where what follows them is long, one copy of it serves all
accumulators, which then take a store and a read each."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest, data_cost
from tilewright.tile_graph.plan.form import Leaf

_LONG = 8  # slots of what follows a sum, beside which a store and a read are little


def in_turn(nest: Nest, leaf: Leaf, target: Target) -> Leaf:
    """The leaf with as many vectors at a time as run side by side best, where there are several such."""
    if nest.monoid is None or nest.unswitched or leaf.instruction is not None or leaf.vector is None:
        return leaf
    vectors = prod(size for _, size in leaf.register) // leaf.lanes
    if leaf.vector[0] == "r" or vectors < 2 * target.calls_together or data_cost(*nest.values) < _LONG:
        return leaf
    return replace(leaf, in_turn=target.calls_together)
