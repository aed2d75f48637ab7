"""Reads of a sum that may come from a copy instead: the conditions around them, and where the copy has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, static
from tilewright.ir.forms.compute import Program, Reduce
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, flattened, is_op, le, loads, lt, var, walk
from tilewright.transform.layout.staging_cost import GuardedRead


@dataclass(frozen=True)
class Dimension:
    """One axis of the copy: where the copy reads, and where the contraction then reads the copy."""

    axis: Axis
    place: Expr
    index: Expr


def guarded_reads(compute: Reduce, program: Program) -> list[GuardedRead]:
    """Reads of activations in a sum of products or a pooling window, each with the conditions that guard it."""
    operands = loads(*compute.elements)
    if compute.monoid.operator is None or len(compute.elements) != 1 or len(operands) > 2:
        return []
    if len(operands) == 2 and compute.monoid.operator != "add":
        return []
    if not compute.axes or not compute.reduce_axes:  # a sum of everything reads nothing twice
        return []
    if any(static(a.extent) is None for a in (*compute.axes, *compute.reduce_axes)):
        return []
    found = []
    for read in operands:
        if read.source in program.constants or loads(*read.indices):
            continue
        guarded: Expr = read
        conditions: tuple[Expr, ...] = ()
        for node in walk(*compute.elements):
            if not is_op(node, "select") or not _is_neutral(node.args[2], compute):
                continue
            # the neutral element of a sum is zero in any type, others may not exist in a narrower one
            if (_unwidened(node.args[1]) if compute.monoid.operator == "add" else node.args[1]) is read:
                guarded, conditions = node, tuple(flattened(node.args[0], "and"))
        found.append(GuardedRead(guarded, read, conditions))
    return found


def _is_neutral(node: Expr, compute: Reduce) -> bool:
    identity = compute.monoid.identity[0]
    return isinstance(node, Const) and isinstance(identity, Const) and node.value == identity.value


def _unwidened(node: Expr) -> Expr:
    """What is widened on the way into a sum."""
    if not is_op(node, "cast"):
        return node
    given = node.args[0].dtype
    return node.args[0] if given.bytes < node.dtype.bytes or dtypes.widens(given, node.dtype) else node


def dimension_of(number: int, found: GuardedRead, compute: Reduce) -> Dimension:
    index = simplify(found.read.indices[number])
    extent = int(static(found.read.source.shape[number]) or 0)
    form = linear(index)
    name = f"s{number}"
    if not all(isinstance(t, Var) for t in form.terms) or not form.terms:
        axis = Axis(name, extent)
        return Dimension(axis, var(axis), index)
    low, high = (int(b) for b in bounds(index))
    if len(form.terms) == 1:
        (term,) = form.terms
        (coefficient,) = form.terms.values()
        assert isinstance(term, Var)
        if coefficient > 1 and term.axis in compute.axes:  # only every so manyth element is wanted
            axis = Axis(name, term.axis.extent)
            return Dimension(axis, simplify(var(axis) * coefficient + form.constant), term)
    axis = Axis(name, high - low + 1)
    return Dimension(axis, simplify(var(axis) + low), simplify(index - low))


def moved_condition(condition: Expr, read: Load, dimensions: Sequence[Dimension]) -> Expr | None:
    """A condition on an index of the read as one on the place that the copy reads; None when it is something else."""
    if not (is_op(condition, "le") or is_op(condition, "lt")):
        return None
    build = le if is_op(condition, "le") else lt
    gap = linear(simplify(condition.args[1])).plus(linear(simplify(condition.args[0])).scaled(-1))
    for index, dimension in zip(read.indices, dimensions, strict=True):
        form = linear(simplify(index))
        if not form.terms:
            continue
        if gap.terms == form.terms:
            return build(0, dimension.place + (gap.constant - form.constant))
        if gap.terms == form.scaled(-1).terms:
            return build(dimension.place, gap.constant + form.constant)
    return None
