"""What tiles move, in whole transactions."""

from __future__ import annotations

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, var
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.target import machine
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.propagate import Range
from tilewright.tile_graph.traffic.moving import transactions


def test_gigabytes_that_lie_in_one_run_are_counted() -> None:
    """Bytes of the box by bytes of the run are more than 64 bits count."""
    target, tensor = machine("h200"), Tensor("x", (1 << 20, 768), dtypes.float32)
    context = NestContext(target, lambda t: Layout.natural(t.rank), frozenset())
    rows = np.array([1, 1 << 19, 1 << 20])
    box = tuple(Range(var(Axis(f"at{i}", n)), size, n) for i, (n, size) in enumerate(((1 << 20, rows), (768, 768))))
    assert transactions(tensor, box, context).tolist() == [n * 768 * 4 for n in rows]
