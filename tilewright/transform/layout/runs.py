"""Neighbouring axes of a reduction summed as one where all that is read is one run: no loop ends with every row. What
reduces one element is no reduction."""

from __future__ import annotations

from dataclasses import replace

from tilewright.ir.analysis.simplify import join_divisions, linear, simplify
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    Var,
    axes_of,
    const,
    loads,
    replace_nodes,
    substitute,
    used_as_numbers,
    var,
)


def merge_reductions(program: Program) -> Program:
    return program.with_computes(tuple(_merged(c, program) for c in program.computes))


def lone_elements(program: Program) -> Program:
    """Reductions of one element as maps: a 1x1 window over single channels, a mean along an axis of one."""
    return program.with_computes(tuple(_alone(c) for c in program.computes))


def _alone(compute: Compute) -> Compute:
    if not isinstance(compute, Reduce) or len(compute.outputs) != 1 or len(compute.elements) != 1:
        return compute
    if not compute.reduce_axes or any(a.extent != 1 for a in compute.reduce_axes):
        return compute
    element = substitute(compute.elements[0], dict.fromkeys(compute.reduce_axes, const(0)))
    value = replace_nodes(compute.monoid.final[0], {compute.monoid.left[0]: element})
    return Map(compute.outputs[0], compute.axes, simplify(value), compute.origin)


def _merged(compute: Compute, program: Program) -> Compute:
    if not isinstance(compute, Reduce):
        return compute
    moving = [n for n in loads(*compute.elements) if any(a in compute.reduce_axes for a in axes_of(n))]
    if len(moving) != 1:  # rows of several operands meet in ways that plans make use of
        return compute
    place = len(compute.reduce_axes) - 2
    while place >= 0:  # from the inside out
        outer, inner = compute.reduce_axes[place : place + 2]
        compute = _as_one(compute, outer, inner, program) or compute
        place -= 1
    return compute


def _as_one(compute: Reduce, outer: Axis, inner: Axis, program: Program) -> Reduce | None:
    """The reduction with the two axes as one; None where that would not be one run of everything read."""
    if not isinstance(outer.extent, int) or not isinstance(inner.extent, int) or min(outer.extent, inner.extent) < 2:
        return None
    merged = Axis(inner.name, outer.extent * inner.extent)
    places = {outer: var(merged) // inner.extent, inner: var(merged) % inner.extent}
    elements = tuple(simplify(substitute(e, places)) for e in compute.elements)
    if any(merged in axes_of(n) and not _is_run(n, merged, program) for n in loads(*elements)):
        return None
    if merged in used_as_numbers(elements):
        return None
    kept = tuple(merged if a is inner else a for a in compute.reduce_axes if a is not outer)
    return replace(compute, reduce_axes=kept, elements=elements)


def _is_run(node: Load, axis: Axis, program: Program) -> bool:
    layout = program.layout(node.source)
    offset: Expr = const(0)
    for index, size in zip(layout.storage_indices(node.indices), layout.storage_shape(node.source.shape), strict=True):
        offset = offset * size + index
    total = join_divisions(linear(simplify(offset)))
    return var(axis) in total.terms and all(isinstance(t, Var) or axis not in t.axes for t in total.terms)
