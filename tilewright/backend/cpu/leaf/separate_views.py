"""Views that stay nests of their own: composed into a contraction, they would cost it more than a copy does.

In a product with a transpose both operands run along the sum. Vectors along the columns are then gathered lane by lane
for every few rows, and lanes along the sum must be folded for every output: the wider the vector, the dearer both. A
transposed tile beside the sum, near the core like any intermediate, is gathered once.

Columns cut out of wider rows, those of one head of an attention, lie in lines far apart. Where the distance is a
multiple of much, they fall on a few sets of the first cache, which throws them out before they are used again. Copied
side by side they stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from tilewright.backend.cpu.constants import COPY_GAIN, COPY_RUN, COPY_STORE, CROWDED_SUM, GATHER_ROWS
from tilewright.backend.cpu.vector.micro import fold_cycles
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.compute import Compute, Map, Reduce
from tilewright.ir.forms.expr import Load, axes_of, loads, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext, stride
from tilewright.tile_graph.algebra.propagate import extent_of


def separate_views(computes: Sequence[Compute], context: NestContext) -> frozenset[Tensor]:
    """Results of maps that only move elements and are not to be composed into the contractions that read them."""
    views = {c.output: c for c in computes if isinstance(c, Map) and isinstance(c.value, Load)}
    summed = {c.outputs[0] for c in computes if isinstance(c, Reduce)}
    # a result that is brought into another order: stored by the sum itself, it would be stored lane by lane
    found = {t: None for t, c in views.items() if _is_turned(c, summed, context)}
    for compute in computes:
        if not isinstance(compute, Reduce) or compute.monoid.operator != "add" or len(compute.elements) != 1:
            continue
        operands = loads(*compute.elements)
        if len(operands) != 2 or any(n.source in context.constants for n in operands):
            continue
        for read in operands:
            if read.source not in views or not _holds_columns(compute, read):
                continue
            lies = _where_it_lies(read, views)
            if _is_transposed(compute, lies):
                pays = _pays_transposed(compute, read, context.target)
            else:
                pays = _is_crowded(compute, lies, context) and _pays_copied(compute, read, context.target)
            if pays:
                found[read.source] = None
    return frozenset(found)


def _is_turned(view: Map, summed: set[Tensor], context: NestContext) -> bool:
    assert isinstance(view.value, Load)
    source = view.value.source
    if source not in summed or view.value.indices != tuple(var(a) for a in view.axes) or not view.axes:
        return False
    return context.layout(source).order[-1].axis != context.layout(view.output).order[-1].axis


def _holds_columns(compute: Reduce, read: Load) -> bool:
    """Whether neighbours along the last axis of the result are neighbours in this operand, and in no other."""
    if len(compute.reduce_axes) != 1 or not compute.axes or read.indices[-1] is not var(compute.axes[-1]):
        return False
    return all(compute.axes[-1] not in axes_of(*n.indices) for n in loads(*compute.elements) if n is not read)


def _is_transposed(compute: Reduce, lies: Load) -> bool:
    """Whether the operand runs along the sum where it lies."""
    innermost = linear(simplify(lies.indices[-1])).terms
    return innermost.get(var(compute.reduce_axes[0])) == 1 and var(compute.axes[-1]) not in innermost


def _is_crowded(compute: Reduce, lies: Load, context: NestContext) -> bool:
    """Whether a column of lines, one for every step of the sum, is more than the sets they fall on can hold beside
    what else is read."""
    along = compute.reduce_axes[0]
    if stride(lies, compute.axes[-1], context) != 1:
        return False
    step = abs(stride(lies, along, context) or 0) * lies.dtype.bytes
    far = step >= 2 * context.target.nearest.transaction
    return far and extent_of(along.extent) > context.target.lines_held(step)


def _where_it_lies(read: Load, views: Mapping[Tensor, Map]) -> Load:
    while (made := views.get(read.source)) is not None:
        moved = substitute(made.value, dict(zip(made.axes, read.indices, strict=True)))
        assert isinstance(moved, Load)
        read = moved
    return read


def _pays_copied(compute: Reduce, read: Load, target: Target) -> bool:
    """Cycles with the columns side by side against those of a sum that fetches them again and again."""
    ideal = _ideal_cycles(compute, read, target)
    return ideal + prod(extent_of(e) for e in read.source.shape) * COPY_RUN < COPY_GAIN * CROWDED_SUM * ideal


def _ideal_cycles(compute: Reduce, read: Load, target: Target) -> float:
    steps = prod(extent_of(a.extent) for a in (*compute.axes, *compute.reduce_axes))
    return steps / (target.lanes(read.dtype.bytes) * target.pipes)


def _pays_transposed(compute: Reduce, read: Load, target: Target) -> bool:
    """Cycles with a transposed tile against vectors gathered for every few rows, or lanes folded for every output."""
    lanes = target.lanes(read.dtype.bytes)
    lane_cycles = target.gathered_reads / target.pipes
    ideal = _ideal_cycles(compute, read, target)
    rows = prod(extent_of(a.extent) for a in compute.axes if a not in axes_of(*read.indices))
    gathering = 1.0 + target.pipes * lanes * lane_cycles / min(GATHER_ROWS, max(1, rows))
    folding = 1.0 + target.pipes * lanes * fold_cycles(lanes) / max(1, extent_of(compute.reduce_axes[0].extent))
    copied = prod(extent_of(e) for e in read.source.shape)
    return ideal + copied * (lane_cycles + COPY_STORE) < COPY_GAIN * ideal * min(gathering, folding)
