"""Instructions that threads of a GPU issue for what is no single one, as compilers for CUDA write them."""

from __future__ import annotations

from tilewright.ir.forms.expr import Expr
from tilewright.tile_graph.algebra.nest import data_ops

LOAD = 4.0  # slots of a load: a warp's addresses pass through a quarter of the lanes
SLOTS = {"exp": 8, "exp2": 4, "log": 12, "tanh": 20, "erf": 25, "sigmoid": 16, "sin": 20, "cos": 20, "pow": 60,
         "div": 9, "sqrt": 8, "rsqrt": 4, "fmod": 30}  # fmt: skip


def slots_of(*roots: Expr) -> float:
    """Of all operations on data; choices are made by one that waits for nothing."""
    return sum(SLOTS.get(n.op.name, 1.0) if n.op.name != "select" else 0.5 for n in data_ops(*roots))
