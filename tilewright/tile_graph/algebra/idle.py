"""Steps of a Scan in which a sum has nothing to sum up: planning looks for them, lowering makes sure of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.ir.forms.compute import Map, Program, Reduce, Scan, expressions
from tilewright.ir.forms.expr import Load, axes_of, is_op, loads
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of


def idle_step(nest: Nest, scan: Scan, values: Mapping[Tensor, object]) -> int | None:
    """The first step, where a sum of products of the state and weights is known to be zero: it begins with zeros.
    `values` are those of the constants."""
    if nest.monoid is None or nest.monoid.operator != "add" or not is_op(nest.elements[0], "mul"):
        return None
    begins = zip(scan.carry, scan.initial, strict=True)
    zero = {carry for carry, initial in begins if initial in values and not np.asarray(values[initial]).any()}
    for state, weight in (nest.elements[0].args, nest.elements[0].args[::-1]):
        if not isinstance(state, Load) or not isinstance(weight, Load):
            continue
        if state.source in zero and weight.source in values:
            # zero times infinity is not zero
            finite = np.isfinite(np.asarray(values[weight.source])).all()
            return (extent_of(scan.axis.extent) - 1 if scan.reverse else 0) if finite else None
    return None


def read_by_steps(program: Program) -> dict[Tensor, frozenset[int]]:
    """Tensors of which a Scan reads one place at each step, with the dimensions along which a tile of the step reads
    what lies outside it: that of the steps, and those it reads at fixed places."""
    found: dict[Tensor, frozenset[int]] = {}
    for scan in (c for c in program.computes if isinstance(c, Scan)):
        for compute in scan.body:
            own = compute.axes if isinstance(compute, Map | Reduce) else ()
            for node in (n for n in loads(*expressions(compute)) if scan.axis in axes_of(*n.indices)):
                outside = frozenset(d for d, i in enumerate(node.indices) if not any(a in own for a in axes_of(i)))
                found[node.source] = found.get(node.source, frozenset()) | outside
    return found
