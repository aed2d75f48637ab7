"""Expressions compared as forms: equal up to the tensors they read and the whole numbers in their indices.

A form is a sequence of tokens, an expression read from its root; what may differ is kept beside it in the order met.
Indices are compared as sums, so that x[i] and x[i + 4] are of one form.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    Var,
    const,
    is_op,
    load,
    loads,
    rewrite,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor

LARGEST = 4096  # tokens of an expression that is looked at: a shared operand counts each time it is used


@dataclass(frozen=True)
class ComputeForm:
    """`tokens` with holes for the tensors read and the numbers in indices, which follow in order.

    Of the n-th read, `starts[n]` is the place of its first number: one an index, what is added to the index's terms."""

    tokens: tuple[Hashable, ...]
    sources: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    reads: tuple[Load, ...]
    starts: tuple[int, ...]


def form_of(values: Sequence[Expr], axes: Mapping[Axis, int]) -> ComputeForm | None:
    """The form of expressions over numbered axes; None of one that is too large or uses something else."""
    tokens: list[Hashable] = []
    reads: list[Load] = []
    starts: list[int] = []
    numbers: list[int] = []
    stack: list[tuple[Expr, bool]] = [(v, False) for v in reversed(values)]
    while stack:
        node, inside = stack.pop()
        if len(tokens) > LARGEST:
            return None
        if isinstance(node, Var):
            if node.axis not in axes:
                return None
            tokens.append(axes[node.axis])
        elif isinstance(node, Const):
            if inside and node.dtype is dtypes.index:
                tokens.append("number")
                numbers.append(int(node.value))
            else:
                tokens.append(node)  # interned: one object a value and type
        elif isinstance(node, Load):
            sums = sums_of(node)
            tokens.append((node.dtype.name, tuple(tuple(s.terms.values()) for s in sums)))
            reads.append(node)
            starts.append(len(numbers))
            numbers.extend(s.constant for s in sums)
            stack.extend((term, True) for s in reversed(sums) for term in reversed(s.terms))
        elif isinstance(node, Op):
            tokens.append((node.op.name, node.dtype.name))
            stack.extend((arg, inside) for arg in reversed(node.args))
        else:
            return None
    return ComputeForm(tuple(tokens), tuple(n.source for n in reads), tuple(numbers), tuple(reads), tuple(starts))


def sums_of(node: Load) -> list[Linear]:
    """The indices of a read as sums of terms."""
    return [linear(simplify(index)) for index in node.args]


Read = Callable[[int, tuple[Expr, ...]], Expr]
"""What stands in the place of the n-th tensor read, given its indices."""


def rebuilt(values: Sequence[Expr], read: Read, number: Callable[[int], Expr]) -> tuple[Expr, ...]:
    """The expressions with other reads and numbers in the holes of their form."""
    made: list[Expr] = []
    met = numbered = 0
    # a node is met going down, in the order of its form, and again, as what finishes it, when its operands are made
    stack: list[tuple[Expr, bool] | Callable[[], None]] = [(v, False) for v in reversed(values)]
    while stack:
        item = stack.pop()
        if callable(item):
            item()
            continue
        node, inside = item
        if isinstance(node, Load):
            sums = sums_of(node)
            shifts = [number(numbered + place) for place in range(len(sums))]
            stack.append(_finished_load(made, sums, shifts, met, read))
            stack.extend((term, True) for s in reversed(sums) for term in reversed(s.terms))
            met, numbered = met + 1, numbered + len(sums)
        elif isinstance(node, Op):
            stack.append(_finished_op(made, node))
            stack.extend((arg, inside) for arg in reversed(node.args))
        elif isinstance(node, Const) and inside and node.dtype is dtypes.index:
            made.append(number(numbered))
            numbered += 1
        else:
            made.append(node)
    return tuple(made)


def _finished_op(made: list[Expr], node: Op) -> Callable[[], None]:
    return lambda: made.append(node.rebuild(tuple(_taken(made, len(node.args)))))


def _finished_load(
    made: list[Expr], sums: Sequence[Linear], shifts: Sequence[Expr], place: int, read: Read
) -> Callable[[], None]:
    def finish() -> None:
        terms = iter(_taken(made, sum(len(s.terms) for s in sums)))
        indices: list[Expr] = []
        for total, shift in zip(sums, shifts, strict=True):
            for factor in total.terms.values():
                shift = shift + next(terms) * factor
            indices.append(simplify(shift))
        made.append(read(place, tuple(indices)))

    return finish


def _taken(made: list[Expr], count: int) -> list[Expr]:
    start = len(made) - count
    taken = made[start:]
    del made[start:]
    return taken


def compute_form(compute: Map | Reduce, values: Sequence[Expr]) -> tuple[Hashable, ComputeForm] | None:
    """What computes of one kind have in common, and the form of the values one of them computes."""
    summed = compute.reduce_axes if isinstance(compute, Reduce) else ()
    form = form_of(values, {a: n for n, a in enumerate((*compute.axes, *summed))})
    if form is None:
        return None
    extents = tuple(a.extent for a in compute.axes), tuple(a.extent for a in summed)
    outputs = tuple((t.shape, t.dtype.name) for t in compute.outputs)
    monoid = compute.monoid if isinstance(compute, Reduce) else None
    return (extents, outputs, monoid, form.tokens), form


def affine(first: int, difference: int, index: Expr) -> Expr:
    """first + difference * index."""
    return const(first) if difference == 0 else index * difference + first


class Views:
    """Maps that only move what they read, looked through: what is read of one is read of its source."""

    def __init__(self, below: Views | None = None) -> None:
        """What is added is not added to those `below`, which are looked through as well."""
        self._maps: MutableMapping[Tensor, Map] = {} if below is None else ChainMap({}, below._maps)

    def add(self, compute: Map) -> None:
        self._maps[compute.output] = compute

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._maps

    def source(self, tensor: Tensor) -> Tensor:
        """Whose elements it shows."""
        seen = self._maps.get(tensor)
        return tensor if seen is None else loads(seen.value)[-1].source

    def through(self, values: Sequence[Expr]) -> tuple[Expr, ...]:
        def rule(node: Expr) -> Expr | None:
            seen = self._maps.get(node.source) if isinstance(node, Load) else None
            return None if seen is None else substitute(seen.value, dict(zip(seen.axes, node.args, strict=True)))

        return tuple(rewrite(v, rule) for v in values)


def without_choices(value: Expr, axes: Mapping[Axis, int]) -> Expr:
    """select(i < 1, x[0], select(i < 2, x[1], ...)) as x[i]: parts of one form, each as wide as the others, put one
    behind the other."""
    parts, limits, axis = choices_of(value)
    if axis is None or len(parts) < 2 or limits[0] < 1 or not isinstance(axis.extent, int):
        return value
    width = limits[0]
    rest = axis.extent - width * len(limits)  # the last part may be shorter
    if any(b - a != width for a, b in pairwise(limits)) or not 0 < rest <= width:
        return value
    within = [Axis(axis.name, width if k < len(limits) else rest) for k in range(len(parts))]  # the place in a part
    own = {**axes, **dict.fromkeys(within, len(axes))}
    moved = [simplify(substitute(p, {axis: var(within[k]) + k * width})) for k, p in enumerate(parts)]
    forms = [form_of((part,), own) for part in moved]
    first, second = forms[0], forms[1]
    if first is None or second is None or len(first.numbers) != len(second.numbers):
        return value
    steps = [b - a for a, b in zip(first.numbers, second.numbers, strict=True)]
    for place, form in enumerate(forms):
        if form is None or form.tokens != first.tokens or form.sources != first.sources:
            return value
        if any(n != a + place * d for n, a, d in zip(form.numbers, first.numbers, steps, strict=True)):
            return value
    part = simplify(var(axis) // width)
    (joined,) = rebuilt(
        moved[:1], lambda n, i: load(first.sources[n], i), lambda n: affine(first.numbers[n], steps[n], part)
    )
    return simplify(substitute(joined, {within[0]: simplify(var(axis) % width)}))


def choices_of(value: Expr) -> tuple[list[Expr], list[int], Axis | None]:
    """Parts chosen between by ever larger limits of one axis."""
    parts: list[Expr] = []
    limits: list[int] = []
    axis: Axis | None = None
    while is_op(value, "select") and is_op(value.args[0], "lt"):
        left, right = value.args[0].args
        if not isinstance(left, Var) or not isinstance(right, Const) or (axis is not None and left.axis is not axis):
            break
        axis = left.axis
        limits.append(int(right.value))
        parts.append(value.args[1])
        value = value.args[2]
    return [*parts, value], limits, axis
