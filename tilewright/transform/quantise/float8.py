"""Contractions of 8-bit floats as tensor cores take them: scales are taken out of the sum.

    sum (a · s)·(b · t)  =  s · t · sum a·b       where s and t do not change along the sum

Numbers are read off the codes by a table in the Program; under such a sum they are conversions of the codes themselves,
which is what the hardware multiplies. Products are exact in float32, and so is what is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilewright.ir.analysis.products import factors, is_zero
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    all_of,
    axes_of,
    cast,
    const,
    is_op,
    load,
    mul,
    op,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.storage import names_of, unique_name

MULTIPLIED = dtypes.float8e4m3fn  # what tensor cores take; others stay numbers of a table
_NUMBERS = np.arange(256, dtype=np.uint8).view(MULTIPLIED.numpy).astype(np.float32)


@dataclass(frozen=True)
class _Scaled:
    """A value scale · number(read) where all conditions hold, and 0 elsewhere; scale None is 1."""

    scale: Expr | None
    read: Load
    conditions: tuple[Expr, ...] = ()

    def at(self, values: Mapping[Axis, Expr]) -> _Scaled:
        def moved(node: Expr) -> Expr:
            return simplify(substitute(node, values))

        read = moved(self.read)
        assert isinstance(read, Load)
        scale = None if self.scale is None else moved(self.scale)
        return _Scaled(scale, read, tuple(moved(c) for c in self.conditions))

    def times(self, factor: Expr) -> _Scaled:
        return replace(self, scale=factor if self.scale is None else mul(self.scale, factor))

    def number(self) -> Expr:
        """The read as it stands under the sum."""
        value = cast(self.read, dtypes.float32)
        return select(all_of(self.conditions), value, const(0.0, dtypes.float32)) if self.conditions else value


def multiply_codes(program: Program) -> Program:
    """The Program with contractions of two such operands on their codes."""
    forms = _Forms(program)
    taken = names_of(program)
    made = [new for compute in program.computes for new in _written(compute, forms, taken)]
    changed = len(made) > len(program.computes) or any(a is not b for a, b in zip(made, program.computes, strict=True))
    return without_dead(program.with_computes(tuple(made))) if changed else program


def _written(compute: Compute, forms: _Forms, taken: set[str]) -> list[Compute]:
    sides = forms.product(compute)
    if sides is None or not isinstance(compute, Reduce):
        return [compute]
    left, right = sides
    scales = [s.scale for s in sides if s.scale is not None]
    element = mul(left.number(), right.number())
    if not scales:
        return [replace(compute, elements=(element,))]
    name = unique_name(f"{compute.outputs[0].name}_products", taken)
    total = Tensor(name, compute.outputs[0].shape, dtypes.float32)
    own = tuple(Axis(a.name, a.extent) for a in compute.axes)
    value: Expr = load(total, [var(a) for a in own])
    for scale in scales:
        value = mul(value, substitute(scale, {a: var(b) for a, b in zip(compute.axes, own, strict=True)}))
    return [replace(compute, outputs=(total,), elements=(element,)),
            Map(compute.outputs[0], own, simplify(value), compute.origin)]  # fmt: skip


def _is_table(array: np.ndarray) -> bool:
    return array.shape == _NUMBERS.shape and array.dtype == _NUMBERS.dtype and (
        np.array_equal(array, _NUMBERS, equal_nan=True))  # fmt: skip


class _Forms:
    """What of a Program is codes times a scale, read off the expressions and the maps that they read from."""

    def __init__(self, program: Program) -> None:
        self.maps = {c.output: c for c in program.computes if isinstance(c, Map)}
        self.tables = {t for t, array in program.constants.items() if _is_table(array)}

    def product(self, compute: Compute) -> tuple[_Scaled, _Scaled] | None:
        if not isinstance(compute, Reduce) or compute.monoid.operator != "add" or len(compute.outputs) != 1:
            return None
        if not self.tables or compute.elements[0].dtype is not dtypes.float32:
            return None
        sides = []
        for part in factors(compute.elements[0], compute.axes, compute.reduce_axes):
            side = self._scaled(part.value)
            scale_axes = [] if side is None or side.scale is None else axes_of(side.scale)
            if side is None or not part.reductions or any(a in compute.reduce_axes for a in scale_axes):
                return None
            sides.append(side)
        return (sides[0], sides[1]) if len(sides) == 2 else None

    def _scaled(self, value: Expr) -> _Scaled | None:
        if isinstance(value, Load):
            return self._read(value)
        if is_op(value, "select"):
            condition, then, otherwise = value.args
            if is_zero(then):
                condition, then, otherwise = op("not", condition), otherwise, then
            inner = self._scaled(then) if is_zero(otherwise) else None
            return None if inner is None else replace(inner, conditions=(condition, *inner.conditions))
        if is_op(value, "mul"):
            for one, other in (value.args, value.args[::-1]):
                inner = self._scaled(one)
                if inner is not None:
                    return inner.times(other)
        return None

    def _read(self, value: Load) -> _Scaled | None:
        """A number of the table, or an element of a map of such numbers."""
        if value.source in self.tables:
            code = value.indices[0].args[0] if is_op(value.indices[0], "cast") else value.indices[0]
            read = code.args[0] if is_op(code, "bitcast") else code
            return _Scaled(None, read) if isinstance(read, Load) and read.dtype is MULTIPLIED else None
        made = self.maps.get(value.source)
        inner = None if made is None else self._scaled(made.value)
        return None if made is None or inner is None else inner.at(dict(zip(made.axes, value.indices, strict=True)))
