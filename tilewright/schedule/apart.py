"""Views that stay nests of their own: composed into a contraction, a transpose would have its vectors gathered.

In a product with a transpose both operands run along the sum. Vectors along the columns are then gathered lane by lane
for every few rows, and lanes along the sum must be folded for every output: the wider the vector, the dearer both. A
transposed tile beside the sum, near the core like any intermediate, is gathered once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from tilewright.ir.compute import Compute, Map, Reduce
from tilewright.ir.expr import Load, axes_of, loads, substitute, var
from tilewright.ir.simplify import linear, simplify
from tilewright.ir.tensor import Tensor
from tilewright.schedule.context import NestContext
from tilewright.schedule.micro import fold_cycles
from tilewright.schedule.propagate import extent_of
from tilewright.target import Target

_PIPES = 2  # vector multiply-adds a cycle
_ROWS = 12  # of a register tile that share a gathered vector
_STORE_CYCLES = 0.25  # a transposed element stored, and the loop around it
_LEAST_GAIN = 0.9


def transposed_views(computes: Sequence[Compute], context: NestContext) -> frozenset[Tensor]:
    """Results of maps that only move elements and are not to be composed into the contractions that read them."""
    if context.target.kind != "cpu":
        return frozenset()
    views = {c.output: c for c in computes if isinstance(c, Map) and isinstance(c.value, Load)}
    found: dict[Tensor, None] = {}
    for compute in computes:
        if not isinstance(compute, Reduce) or compute.monoid.operator != "add" or len(compute.elements) != 1:
            continue
        operands = loads(*compute.elements)
        if len(operands) != 2 or any(n.source in context.constants for n in operands):
            continue
        for read in operands:
            if read.source in views and _is_transposed(compute, read, views) and _pays(compute, read, context.target):
                found[read.source] = None
    return frozenset(found)


def _is_transposed(compute: Reduce, read: Load, views: Mapping[Tensor, Map]) -> bool:
    """Whether the operand that holds the columns runs along the sum where it lies, and along the columns as it is."""
    if len(compute.reduce_axes) != 1 or not compute.axes or read.indices[-1] is not var(compute.axes[-1]):
        return False
    if any(compute.axes[-1] in axes_of(*n.indices) for n in loads(*compute.elements) if n is not read):
        return False
    innermost = linear(simplify(_where_it_lies(read, views).indices[-1])).terms
    return innermost.get(var(compute.reduce_axes[0])) == 1 and var(compute.axes[-1]) not in innermost


def _where_it_lies(read: Load, views: Mapping[Tensor, Map]) -> Load:
    while (made := views.get(read.source)) is not None:
        moved = substitute(made.value, dict(zip(made.axes, read.indices, strict=True)))
        assert isinstance(moved, Load)
        read = moved
    return read


def _pays(compute: Reduce, read: Load, target: Target) -> bool:
    """Cycles with a transposed tile against vectors gathered for every few rows, or lanes folded for every output."""
    lanes = target.lanes(read.dtype.bytes)
    lane_cycles = target.gathered_reads / _PIPES
    steps = prod(extent_of(a.extent) for a in (*compute.axes, *compute.reduce_axes))
    ideal = steps / (lanes * _PIPES)
    rows = prod(extent_of(a.extent) for a in compute.axes if a not in axes_of(*read.indices))
    gathering = 1.0 + _PIPES * lanes * lane_cycles / min(_ROWS, max(1, rows))
    folding = 1.0 + _PIPES * lanes * fold_cycles(lanes) / max(1, extent_of(compute.reduce_axes[0].extent))
    copied = prod(extent_of(e) for e in read.source.shape)
    return ideal + copied * (lane_cycles + _STORE_CYCLES) < _LEAST_GAIN * ideal * min(gathering, folding)
