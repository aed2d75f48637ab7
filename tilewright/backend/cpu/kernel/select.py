"""Which of a nest's plans to take: forms that the construction finds near each other, compared again by the full model.

The construction compares register tiles and orders over a few cuts of the output, with what all forms share left out.
First reads from main memory are not the same for all: passes and the order of the loops decide how well they hide.
"""

from __future__ import annotations

from tilewright.backend.cpu.constants import FORM_WORTH, MOST_FORMS, RANKED_PLANS
from tilewright.backend.cpu.kernel.panels import constant_layouts
from tilewright.backend.cpu.kernel.tile import choose_tile
from tilewright.backend.cpu.leaf.vectorise import candidate_plans, plan_nest
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.plan.form import Leaf


def select_plan(nest: Nest, context: NestContext) -> Leaf:
    """The plan of a nest as a kernel of its own is predicted to be fastest with it."""
    if not is_contraction(nest) or context.hurried:
        return plan_nest(nest, context)
    first, *others = candidate_plans(nest, context, RANKED_PLANS, forms=True)[:MOST_FORMS]
    if not others or first.instruction is not None:
        return first
    best, limit = first, FORM_WORTH * _seconds(nest, first, context)
    for plan in others:
        seconds = _seconds(nest, plan, context)
        if seconds < limit:
            best, limit = plan, seconds
    return best


def _seconds(nest: Nest, plan: Leaf, context: NestContext) -> float:
    read = constant_layouts(nest, plan, context)  # as the plan will read them
    packed = {t: context.memo.layout(layout) for t, layout in read.items()}
    lying = context.with_layouts(lambda t: packed.get(t) or context.layout(t))
    choice = choose_tile([nest], [plan], lying, frozenset(nest.stores))
    return float("inf") if choice is None else choice.seconds
