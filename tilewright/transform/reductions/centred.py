"""A mean that is subtracted from what products with constants give is subtracted from their constants instead.

The mean along columns of x W is x times the mean column of W: with that taken from every column before the model runs,
each result is centred as soon as it is summed, rows need no pass for their mean, and what is left has the digits that
the difference of two large numbers would lose. The same holds through sums, conversions and factors of whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isclose, prod

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    Var,
    cast,
    const,
    flattened,
    is_op,
    load,
    op,
    replace_nodes,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.spilled import spilled
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.reductions.digits import narrowed
from tilewright.transform.storage import names_of, unique_name

_SAME = 1e-6  # of a factor that is 1 over a count as well as its type can say it


def centre_products(program: Program) -> Program:
    """The Program with such means taken from constants, where nothing but their difference is read of the products."""
    change = _Centring(program)
    for compute in program.computes:
        if isinstance(compute, Map) and any(is_op(n, "sub") and n.dtype.is_float for n in walk(compute.value)):
            change = _centred_in(compute, change)
    return change.program


def _centred_in(compute: Map, given: _Centring) -> _Centring:
    for node in walk(compute.value):
        found = _mean_subtracted(node, given.makers)
        if found is None:
            continue
        change = _Centring(given.program)
        value = change.centred(node.args[0], found.along, frozenset((compute, found.summed)))
        if value is not None:
            made = replace(compute, value=simplify(replace_nodes(compute.value, {node: value})))
            return _Centring(without_dead(change.whole({compute: made})))
    return given


@dataclass(frozen=True)
class _Mean:
    """The axes along which all of a value is averaged, and the sum that does it."""

    along: frozenset[Axis]
    summed: Reduce


def _mean_subtracted(node: Expr, makers: Mapping[Tensor, Compute]) -> _Mean | None:
    """The mean of a value, where that is what is subtracted from it."""
    if not is_op(node, "sub") or not node.dtype.is_float:
        return None
    whole, mean = _read(node.args[0]), _scaled_sum(node.args[1], makers, 1.0)
    if whole is None or mean is None:
        return None
    total, scale = mean
    reduce = makers[total.source]
    assert isinstance(reduce, Reduce)
    read = _read(reduce.elements[0])
    if read is None or read.source is not whole.source:
        return None
    at = dict(zip(reduce.axes, total.indices, strict=True))
    along: dict[Axis, Axis] = {}
    for summed, here in zip(read.indices, whole.indices, strict=True):
        if isinstance(summed, Var) and summed.axis in reduce.reduce_axes and isinstance(here, Var):
            along[summed.axis] = here.axis
        elif substitute(summed, at) is not here:
            return None
    if set(along) != set(reduce.reduce_axes) or len(set(along.values())) != len(along):
        return None
    if any(a.extent != b.extent for a, b in along.items()):
        return None
    count = prod(static(a.extent) or 0 for a in along)
    return _Mean(frozenset(along.values()), reduce) if count and isclose(scale * count, 1.0, rel_tol=_SAME) else None


def _read(value: Expr) -> Load | None:
    """The read below conversions between floating-point numbers."""
    while is_op(value, "cast") and value.args[0].dtype.is_float:
        value = value.args[0]
    return value if isinstance(value, Load) else None


def _scaled_sum(value: Expr, makers: Mapping[Tensor, Compute], scale: float) -> tuple[Load, float] | None:
    """A sum, and what it is multiplied by, maps on the way written out; None for anything else."""
    if is_op(value, "cast"):
        return _scaled_sum(value.args[0], makers, scale) if value.args[0].dtype.is_float else None
    if is_op(value, "mul") or is_op(value, "div"):
        first, second = value.args
        if is_op(value, "mul") and isinstance(first, Const):
            first, second = second, first
        if not isinstance(second, Const) or not second.value:
            return None
        factor = float(second.value)
        return _scaled_sum(first, makers, scale * factor if is_op(value, "mul") else scale / factor)
    if not isinstance(value, Load):
        return None
    maker = makers.get(value.source)
    if isinstance(maker, Map):
        return _scaled_sum(_at(maker, value), makers, scale)
    if isinstance(maker, Reduce) and maker.monoid.operator == "add":
        return value, scale
    return None


def _at(maker: Map, read: Load) -> Expr:
    return substitute(maker.value, dict(zip(maker.axes, read.indices, strict=True)))


@dataclass
class _Centring:
    """Values less their mean along some axes, made of products with other constants."""

    program: Program
    constants: dict[Tensor, np.ndarray] = field(default_factory=dict)
    made: dict[Compute, list[Compute]] = field(default_factory=dict)  # by what they stand behind

    @cached_property
    def makers(self) -> Mapping[Tensor, Compute]:
        return self.program.producers()

    @cached_property
    def readers(self) -> Mapping[Tensor, Sequence[Compute]]:
        return self.program.consumers()

    @cached_property
    def taken(self) -> set[str]:
        return names_of(self.program)

    def whole(self, changed: Mapping[Compute, Compute]) -> Program:
        computes = [n for c in self.program.computes for n in (*self.made.get(c, ()), changed.get(c, c))]
        return replace(self.program, computes=tuple(computes),
                       constants={**self.program.constants, **self.constants})  # fmt: skip

    def centred(self, value: Expr, along: frozenset[Axis], by: frozenset[Compute]) -> Expr | None:
        """The value less its mean; None where it is no sum of products with constants and of constants, or where others
        read of them: both would be computed, or kept."""
        if along.isdisjoint(value.axes):
            return const(0, value.dtype)
        if isinstance(value, Load):
            return self._centred_read(value, along, by)
        if not isinstance(value, Op) or not value.dtype.is_float:
            return None
        name, args = value.op.name, value.args
        if name == "cast" and args[0].dtype.is_float:
            inner = self.centred(args[0], along, by)
            return None if inner is None else cast(inner, value.dtype)
        if name in ("add", "sub"):
            first = self.centred(args[0], along, by)
            second = None if first is None else self.centred(args[1], along, by)
            return None if first is None or second is None else op(name, first, second)
        if name == "mul" and along.isdisjoint(args[0].axes):
            inner = self.centred(args[1], along, by)
            return None if inner is None else op(name, args[0], inner)
        if name in ("mul", "div") and along.isdisjoint(args[1].axes):
            inner = self.centred(args[0], along, by)
            return None if inner is None else op(name, inner, args[1])
        return None

    def _centred_read(self, read: Load, along: frozenset[Axis], by: frozenset[Compute]) -> Expr | None:
        places = _places(read, along)
        if places is None or read.source in self.program.outputs or not by.issuperset(self.readers[read.source]):
            return None
        found = self._centred_tensor(read.source, places)
        return None if found is None else load(found, read.indices)

    def _centred_tensor(self, tensor: Tensor, places: tuple[int, ...]) -> Tensor | None:
        if tensor in self.program.constants:
            return self._centred_constant(tensor, places)
        maker = self.makers.get(tensor)
        if not isinstance(maker, Map | Reduce):
            return None
        along = frozenset(maker.axes[n] for n in places)
        if isinstance(maker, Map):
            value = self.centred(maker.value, along, frozenset((maker,)))
            if value is None:
                return None
            return self._add(maker, replace(maker, output=self._like(tensor), value=simplify(value)))
        element = self._centred_element(maker, along)
        if element is None:
            return None
        return self._add(maker, replace(maker, outputs=(self._like(tensor),), elements=(element,)))

    def _centred_element(self, reduce: Reduce, along: frozenset[Axis]) -> Expr | None:
        """A product whose constant alone has these axes, with the mean taken from that."""
        if len(reduce.outputs) != 1 or reduce.monoid.operator != "add" or not reduce.outputs[0].dtype.is_float:
            return None
        own = [p for p in flattened(reduce.elements[0], "mul") if not along.isdisjoint(p.axes)]
        read = _read(own[0]) if len(own) == 1 else None
        if read is None or read.source not in self.program.constants:
            return None
        centred = self._centred_read(read, along, frozenset((reduce,)))
        return None if centred is None else replace_nodes(reduce.elements[0], {read: centred})

    def _centred_constant(self, tensor: Tensor, places: tuple[int, ...]) -> Tensor | None:
        if not tensor.dtype.is_float:
            return None
        wide = np.asarray(self.program.constants[tensor], np.float64)
        others = tuple(n for n in range(tensor.rank) if n not in places)
        found = narrowed(wide - wide.mean(places, keepdims=True), tensor.dtype, others)
        if found is None:
            return None
        made = self._like(tensor)
        self.constants[made] = spilled(found)
        return made

    def _add(self, maker: Map | Reduce, made: Map | Reduce) -> Tensor:
        self.made.setdefault(maker, []).append(_with_own_axes(made))
        return made.outputs[0]

    def _like(self, tensor: Tensor) -> Tensor:
        return Tensor(unique_name(f"{tensor.name}_centred", self.taken), tensor.shape, tensor.dtype)


def _places(read: Load, along: frozenset[Axis]) -> tuple[int, ...] | None:
    """The dimensions that are read along these axes, from end to end; None where some are read otherwise."""
    found: list[int] = []
    for number, index in enumerate(read.indices):
        if along.isdisjoint(index.axes):
            continue
        if not isinstance(index, Var) or index.axis.extent != read.source.shape[number]:
            return None
        found.append(number)
    axes = [read.indices[n].axes[0] for n in found]
    return tuple(found) if set(axes) == along and len(axes) == len(along) else None


def _with_own_axes(compute: Map | Reduce) -> Map | Reduce:
    axes: Sequence[Axis] = (*compute.axes, *(compute.reduce_axes if isinstance(compute, Reduce) else ()))
    fresh = {a: Axis(a.name, a.extent) for a in axes}
    here = {a: var(b) for a, b in fresh.items()}
    own = tuple(fresh[a] for a in compute.axes)
    if isinstance(compute, Map):
        return replace(compute, axes=own, value=substitute(compute.value, here))
    elements = tuple(substitute(e, here) for e in compute.elements)
    return replace(compute, axes=own, reduce_axes=tuple(fresh[a] for a in compute.reduce_axes), elements=elements)
