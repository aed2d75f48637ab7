"""Steps of a Scan in which a sum has nothing to sum up: planning looks for them, lowering makes sure of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.ir.compute import Scan
from tilewright.ir.expr import Load, is_op
from tilewright.ir.tensor import Tensor
from tilewright.tile_graph.nest import Nest
from tilewright.tile_graph.propagate import extent_of


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
