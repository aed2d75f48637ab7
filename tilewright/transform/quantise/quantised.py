"""Finds what a Program has quantised: values that are a scale times a byte less its zero point.

Nothing here knows an operator: a form is read off the expressions, through the maps they are read from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tilewright.ir.analysis.products import factors, is_zero
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    axes_of,
    cast,
    const,
    flattened,
    is_op,
    load,
    mul,
    op,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import fold, foldable
from tilewright.transform.storage import all_computes, names_of, unique_name

BYTES = (dtypes.int8, dtypes.uint8)
SHIFT = 128  # between the two readings of a byte
_REACH = 1 << 31  # what an int32 sum stays below


@dataclass(frozen=True)
class Quantised:
    """A value scale · (read - zero) where all conditions hold and 0 elsewhere; scale None is 1."""

    scale: Expr | None
    read: Load
    zero: Expr  # int32
    conditions: tuple[Expr, ...] = ()

    def at(self, values: Mapping[Axis, Expr]) -> Quantised:
        def moved(node: Expr) -> Expr:
            return simplify(substitute(node, values))

        read = moved(self.read)
        assert isinstance(read, Load)
        scale = None if self.scale is None else moved(self.scale)
        return Quantised(scale, read, moved(self.zero), tuple(moved(c) for c in self.conditions))

    def guarded(self, condition: Expr) -> Quantised:
        """The same where the condition holds, taken apart into what must hold of single axes."""
        parts = flattened(condition, "and")
        return replace(self, conditions=tuple(dict.fromkeys((*parts, *self.conditions))))


@dataclass(frozen=True)
class QuantisedProduct:
    """A contraction of two quantised factors."""

    compute: Reduce
    left: Quantised
    right: Quantised


@dataclass
class Forms:
    program: Program
    made: list[Compute] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.maps = {c.output: c for c in all_computes(self.program) if isinstance(c, Map)}
        self.constants = dict(self.program.constants)
        self.known: dict[Tensor, tuple[tuple[Axis, ...], Quantised] | None] = {}
        self.taken = names_of(self.program)

    def product(self, compute: Compute) -> QuantisedProduct | None:
        if not isinstance(compute, Reduce) or compute.monoid.operator != "add" or len(compute.outputs) != 1:
            return None
        if compute.elements[0].dtype not in (dtypes.float32, dtypes.int32):
            return None
        parts = factors(compute.elements[0], compute.axes, compute.reduce_axes)
        outside: list[Expr] = []
        sides: list[Quantised] = []
        for part in parts:
            if not part.reductions and not part.value.reads:
                outside.append(part.value)
                continue
            side = self.quantised(part.value)
            if side is None or any(a in compute.reduce_axes for a in _parameter_axes(side)):
                return None
            sides.append(side)
        if len(sides) != 2 or sides[0].read is sides[1].read:
            return None
        for value in outside:
            sides[0] = replace(sides[0], scale=_times(sides[0].scale, value))
        left, right = sides
        if left.read.source in self.constants:
            left, right = right, left
        if left.read.source in self.constants or not _fits(compute, right):
            return None
        return QuantisedProduct(compute, left, right)

    def quantised(self, value: Expr) -> Quantised | None:
        """A value as a scale times an integer less its zero point; looks through the maps it is read from."""
        if isinstance(value, Load):
            known = self.of_tensor(value.source)
            return None if known is None else known[1].at(dict(zip(known[0], value.indices, strict=True)))
        if is_op(value, "select"):
            return self._guarded(value)
        if is_op(value, "mul") and value.dtype is dtypes.float32:
            for one, other in (value.args, value.args[::-1]):
                inner = self.quantised(one)
                if inner is not None:
                    return replace(inner, scale=_times(inner.scale, other))
            return None
        if is_op(value, "cast"):
            return self._converted(value)
        if is_op(value, "sub") and value.dtype is dtypes.int32:
            inner = self.quantised(value.args[0])
            # a zero point is a parameter: looked for in what is not itself summed, which the caller checks
            if inner is not None and not inner.conditions:
                return replace(inner, zero=simplify(inner.zero + value.args[1]))
        return None

    def _guarded(self, value: Expr) -> Quantised | None:
        condition, then, otherwise = value.args
        if is_zero(then) and not is_zero(otherwise):
            condition, then, otherwise = op("not", condition), otherwise, then
        inner = self.quantised(then) if is_zero(otherwise) else None
        return None if inner is None else inner.guarded(condition)

    def _converted(self, value: Expr) -> Quantised | None:
        source = value.args[0]
        if isinstance(source, Load) and source.dtype in BYTES and value.dtype is dtypes.int32:
            read = self._origin(source)
            if read.source in self.constants and read.dtype is dtypes.uint8:
                return self.quantised(read)
            return Quantised(None, read, const(0, dtypes.int32))
        if value.dtype is dtypes.float32 and source.dtype is dtypes.int32:
            return self.quantised(source)
        return None

    def _origin(self, read: Load) -> Load:
        """The read behind maps that only move bytes, where one read stands behind it."""
        while (compute := self.maps.get(read.source)) is not None and isinstance(compute.value, Load):
            inner = simplify(substitute(compute.value, dict(zip(compute.axes, read.indices, strict=True))))
            assert isinstance(inner, Load)
            read = inner
        return read

    def of_tensor(self, tensor: Tensor) -> tuple[tuple[Axis, ...], Quantised] | None:
        """The quantised form of a tensor's element at some axes."""
        if tensor not in self.known:
            self.known[tensor] = None
            self.known[tensor] = self._of_tensor(tensor)
        return self.known[tensor]

    def _of_tensor(self, tensor: Tensor) -> tuple[tuple[Axis, ...], Quantised] | None:
        if tensor in self.constants:
            axes = _fresh_axes(tensor)
            value = load(tensor, [var(a) for a in axes])
            is_whole = tensor.dtype in (dtypes.uint8, dtypes.int32)
            return self._constant(tensor, axes, None, cast(value, dtypes.int32)) if is_whole else None
        compute = self.maps.get(tensor)
        if compute is None or tensor.dtype not in (dtypes.float32, dtypes.int32):
            return None
        form = self.quantised(compute.value)
        if form is None:
            return None
        is_ready = form.read.dtype is dtypes.int8 and isinstance(form.zero, Const)
        if form.read.source in self.constants and not is_ready and not form.conditions:
            whole = simplify(cast(form.read, dtypes.int32) - form.zero)
            small = self._constant(tensor, compute.axes, form.scale, whole)
            return small if small is not None else (compute.axes, form)
        return compute.axes, form

    def _constant(
        self, tensor: Tensor, axes: tuple[Axis, ...], scale: Expr | None, value: Expr
    ) -> tuple[tuple[Axis, ...], Quantised] | None:
        """Constants as int8 with their zero point taken off, or, where that does not fit, with one for all."""
        whole = Map(Tensor("whole", tuple(a.extent for a in axes), dtypes.int32), axes, value)
        if not foldable(whole, self.constants):
            return None
        array = fold(whole, self.constants)[whole.output]
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if high - low > 255:
            return None
        offset = 0 if low >= -SHIFT and high < SHIFT else low + SHIFT
        small = Tensor(unique_name(f"{tensor.name}_int8", self.taken), whole.output.shape, dtypes.int8)
        shifted = value if offset == 0 else value - const(offset, dtypes.int32)
        self.made.append(Map(small, axes, simplify(cast(shifted, dtypes.int8))))
        self.constants[small] = (array - offset).astype(np.int8)
        return axes, Quantised(scale, load(small, [var(a) for a in axes]), const(-offset, dtypes.int32))


def _parameter_axes(side: Quantised) -> list[Axis]:
    return axes_of(side.zero, *((side.scale,) if side.scale is not None else ()))


def _fits(compute: Reduce, right: Quantised) -> bool:
    """Whether an int32 holds any sum: a difference of bytes on the left, times one on the right."""
    extents = [static(a.extent) for a in compute.reduce_axes]
    largest = SHIFT if is_zero(right.zero) else 255
    return None not in extents and prod(extents) * 255 * largest < _REACH  # type: ignore[arg-type]


def _times(scale: Expr | None, value: Expr) -> Expr:
    return value if scale is None else simplify(mul(scale, value))


def _fresh_axes(tensor: Tensor) -> tuple[Axis, ...]:
    return tuple(Axis(f"i{n}", extent) for n, extent in enumerate(tensor.shape))


def quantiser(value: Expr) -> tuple[Expr, Expr, float] | None:
    """x, its scale and zero point where the value is x rounded to a byte and saturated; constants alone."""
    steps = []
    for name in ("cast", "min", "max"):
        if not is_op(value, name) or not all(isinstance(a, Const) for a in value.args[1:]):
            return None
        steps.append(value)
        value = value.args[0]
    info = np.iinfo(steps[0].dtype.numpy)
    if [a.value for s in steps[1:] for a in s.args[1:]] != [info.max, info.min]:  # type: ignore[attr-defined]
        return None
    zero = 0.0
    if is_op(value, "add") and isinstance(value.args[1], Const):
        zero = float(value.args[1].value)
        value = value.args[0]
    if not is_op(value, "round") or not is_op(value.args[0], "div"):
        return None
    x, scale = value.args[0].args
    return (x, scale, zero) if isinstance(scale, Const) else None
