"""Instructions that threads of a GPU issue for what is no single one, as compilers for CUDA write them."""

from __future__ import annotations

from tilewright.backend.gpu.constants import CHOICE_SLOTS, FUNCTION_SLOTS
from tilewright.ir.forms.expr import Expr
from tilewright.tile_graph.algebra.nest import data_ops


def slots_of(*roots: Expr) -> float:
    """Of all operations on data; choices are made by one that waits for nothing."""
    return sum(FUNCTION_SLOTS.get(n.op.name, 1.0) if n.op.name != "select" else CHOICE_SLOTS for n in data_ops(*roots))
