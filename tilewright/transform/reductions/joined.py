"""Reductions over tensors that lie one behind the other, such as keys of earlier tokens and of new ones, part by part.

A product that reads a concatenation chooses between two tensors at every element. Where the larger of them is an input,
which would otherwise have to be copied to lie beside the other, the reduction is done once for each part: results are
joined where the parts are apart in the result, and combined where they are summed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    Var,
    is_op,
    load,
    loads,
    lt,
    maximum,
    minimum,
    replace_nodes,
    rewrite,
    select,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.target import Target
from tilewright.transform.storage import names_of, unique_name


@dataclass(frozen=True)
class Joined:
    """A reduction with the moves and joins of what it reads written into it, and where an axis changes its tensor."""

    reduce: Reduce
    axis: Axis
    at: int

    def computes(self, taken: set[str]) -> list[Compute]:
        """Both parts, and what makes one of them."""
        whole = self.reduce
        last = _extent(self.axis) - self.at
        parts = [self._part(0, self.at, taken), self._part(self.at, last, taken)]
        axes = tuple(Axis(a.name, a.extent) for a in whole.axes)
        (first,), (second,) = (part.outputs for part in parts)
        if self.axis in whole.axes:
            place = whole.axes.index(self.axis)
            index = [var(a) for a in axes]
            behind = [*index[:place], maximum(index[place] - self.at, 0), *index[place + 1 :]]
            within = [*index[:place], minimum(index[place], self.at - 1), *index[place + 1 :]]
            value = select(lt(index[place], self.at), load(first, within), load(second, behind))
        else:
            index = [var(a) for a in axes]
            monoid = whole.monoid
            states: dict[Expr, Expr] = {monoid.left[0]: load(first, index), monoid.right[0]: load(second, index)}
            value = replace_nodes(monoid.combine[0], states)
        return [*parts, Map(whole.outputs[0], axes, value, whole.origin)]

    def _part(self, start: int, length: int, taken: set[str]) -> Reduce:
        whole = self.reduce
        inside = Axis(self.axis.name, length)
        fresh = {a: inside if a is self.axis else Axis(a.name, a.extent) for a in (*whole.axes, *whole.reduce_axes)}
        values = {a: var(new) + start if a is self.axis else var(new) for a, new in fresh.items()}
        elements = tuple(simplify(substitute(e, values)) for e in whole.elements)
        axes = tuple(fresh[a] for a in whole.axes)
        output = whole.outputs[0]
        name = unique_name(f"{output.name}_{'behind' if start else 'before'}", taken)
        made = Tensor(name, tuple(a.extent for a in axes), output.dtype)
        return Reduce((made,), axes, tuple(fresh[a] for a in whole.reduce_axes), elements, whole.monoid, whole.origin)


def split_joined(program: Program, target: Target) -> Program:
    """The Program with such reductions part by part."""
    made = {c.output: c for c in program.computes if isinstance(c, Map)}
    taken = names_of(program)
    computes: list[Compute] = []
    remarks: list[str] = []
    for compute in program.computes:
        found = _found(compute, made, program, target) if isinstance(compute, Reduce) else None
        if found is None:
            computes.append(compute)
            continue
        computes.extend(found.computes(taken))
        remarks.append(f"{compute.origin or found.reduce.outputs[0].name}: {found.at} of {_extent(found.axis)} "
                       f"elements of an axis lie in an input, so it is computed in two parts")  # fmt: skip
    if not remarks:
        return program
    return without_dead(replace(program, computes=tuple(computes), remarks=(*program.remarks, *remarks)))


def _found(reduce: Reduce, made: Mapping[Tensor, Map], program: Program, target: Target) -> Joined | None:
    if len(reduce.outputs) != 1 or len(reduce.elements) != 1:
        return None
    written: dict[Expr, Expr] = {}
    for node in loads(*reduce.elements):
        found = _followed(node, made, program)
        if found is not None:
            written[node] = found
    if not written:
        return None
    element = simplify(replace_nodes(reduce.elements[0], written))
    for choice in walk(element):
        cut = _cut(choice)
        if cut is None or not _is_large(choice, cut[1], program, target):
            continue
        axis, at = cut
        if axis in reduce.reduce_axes and not _combines(reduce):
            continue
        if axis in (*reduce.axes, *reduce.reduce_axes) and 0 < at < _extent(axis):
            return Joined(replace(reduce, elements=(element,)), axis, at)
    return None


def _followed(node: Load, made: Mapping[Tensor, Map], program: Program) -> Expr | None:
    """What is read here, moves of data written out as far as a join of tensors; None where there is none."""
    value: Expr = node
    while isinstance(value, Load):
        source = made.get(value.source)
        if source is None or source.output in program.outputs:
            return None
        value = _value(source, value)
    if not _is_join(value):
        return None

    def moved(part: Expr) -> Expr | None:
        while isinstance(part, Load) and part.source in made and part.source not in program.outputs:
            following = _value(made[part.source], part)
            if not isinstance(following, Load):
                break
            part = following
        return part if isinstance(part, Load) else None

    return simplify(rewrite(value, moved))


def _value(compute: Map, read: Load) -> Expr:
    return simplify(substitute(compute.value, dict(zip(compute.axes, read.indices, strict=True))))


def _is_join(value: Expr) -> bool:
    """Whether a value is one of several loads, by where it stands."""
    if isinstance(value, Load):
        return True
    if not isinstance(value, Op) or not is_op(value, "select"):
        return False
    return _cut(value) is not None and all(_is_join(part) for part in value.args[1:])


def _cut(node: Expr) -> tuple[Axis, int] | None:
    """The axis and the place at which a selection changes."""
    if not is_op(node, "select") or not is_op(node.args[0], "lt"):
        return None
    place, limit = node.args[0].args
    if isinstance(place, Var) and isinstance(limit, Const):
        return place.axis, int(limit.value)
    return None


def _is_large(node: Expr, at: int, program: Program, target: Target) -> bool:
    """Whether what comes first is an input that is more than stays at the first level of memory."""
    first = node.args[1]
    if not isinstance(first, Load) or first.source not in program.inputs:
        return False
    source = first.source
    size = prod(n for n in source.shape if isinstance(n, int)) * source.dtype.bytes
    return at > 1 and size > target.nearest.capacity


def _combines(reduce: Reduce) -> bool:
    """Whether results of parts can be combined as they are."""
    monoid = reduce.monoid
    return monoid.final == monoid.left and monoid.left[0].dtype is reduce.outputs[0].dtype


def _extent(axis: Axis) -> int:
    return axis.extent if isinstance(axis.extent, int) else 0
