"""Rounding to bytes as one multiply-add and a clamp: the step of the result goes into constant factors before it.

    clamp(round((a·s + b) / t) + z, low, high) + c   =   round(clamp(a·(s/t) + b/t, low - z, high - z)) + (z + c)
where s and b are constants. A minimum or maximum before the rounding goes away where the clamp does the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import reduce
from math import prod

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    add,
    axes_of,
    cast,
    const,
    is_op,
    load,
    loads,
    maximum,
    minimum,
    op,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.transform.storage import all_computes, names_of, unique_name

_BYTES = (dtypes.int8, dtypes.uint8)


@dataclass(frozen=True)
class Rounding:
    """clamp(round(x / step) + zero, low, high) + shift, where all but x are whole numbers or the step."""

    x: Expr
    step: float
    zero: float
    low: float
    high: float
    shift: float


def merge_steps(program: Program) -> Program:
    """The Program with clamps before the rounding, and divisions by steps in constant factors, where there are some."""
    absorber = _Absorber(program)
    made: list[Compute] = []
    for compute in program.computes:
        made.extend(absorber.written(compute))
    return program.with_computes(tuple(made))


def rounding(value: Expr) -> Rounding | None:
    """A value as a rounding to bytes in steps; None where it is something else."""
    if not is_op(value, "cast") or value.dtype not in _BYTES:
        return None
    shift, value = _added(value.args[0])
    bounds = []
    for name in ("min", "max"):
        if not is_op(value, name) or not isinstance(value.args[1], Const):
            return None
        bounds.append(float(value.args[1].value))
        value = value.args[0]
    zero, value = _added(value)
    if not is_op(value, "round") or value.dtype is not dtypes.float32:
        return None
    x, step = value.args[0], 1.0
    if is_op(x, "div") and isinstance(by := x.args[1], Const) and by.value > 0:
        x, step = x.args[0], float(by.value)
    return Rounding(x, step, zero, bounds[1], bounds[0], shift)


def _added(value: Expr) -> tuple[float, Expr]:
    if is_op(value, "add") and isinstance(value.args[1], Const) and value.dtype is dtypes.float32:
        return float(value.args[1].value), value.args[0]
    return 0.0, value


@dataclass
class _Absorber:
    program: Program
    made: list[Compute] = field(default_factory=list)

    def __post_init__(self) -> None:
        computes = list(all_computes(self.program))
        self.taken = names_of(self.program)
        self.readers = Counter(t for c in computes for t in reads(c))
        self.producers = self.program.producers()
        self.maps = {c.output: c for c in self.program.computes if isinstance(c, Map)}
        self.known: set[Tensor] = set(self.program.constants)
        self.eligible: list[Tensor] = []
        self.inside: Tensor | None = None  # rounded bytes whose reader computes them itself
        self.places = {t: i for i, c in enumerate(self.program.computes) for t in c.outputs}
        for compute in self.program.computes:
            if isinstance(compute, Map | Reduce) and all(t in self.known for t in reads(compute)):
                self.known.update(compute.outputs)

    def written(self, compute: Compute) -> list[Compute]:
        """The compute, after the constants it now reads."""
        found = rounding(compute.value) if isinstance(compute, Map) else None
        if found is None or not isinstance(compute, Map):
            return [compute]
        self.made, self.eligible, self.inside = [], [], None
        scaled = self._divided(found.x, found.step, compute)
        if self.eligible:
            # of branches that meet here one ends with its sums in registers; others are kept, as bytes
            self.made, self.inside = [], max(self.eligible, key=self._work)
            scaled = self._divided(found.x, found.step, compute)
        if scaled is None:
            self.made, scaled = [], found.x
            if found.step != 1.0:
                scaled = found.x / const(found.step, dtypes.float32)
        low, high = found.low - found.zero, found.high - found.zero
        inner = _without_bounds(scaled, low, high)
        if not (is_op(inner, "max") and isinstance(inner.args[1], Const) and float(inner.args[1].value) >= low):
            inner = maximum(inner, const(low, dtypes.float32))
        clamped = minimum(inner, const(high, dtypes.float32))
        whole = op("round", clamped) + const(found.zero + found.shift, dtypes.float32)
        made = Map(compute.output, compute.axes, cast(whole, compute.value.dtype), compute.origin)
        self.maps[made.output] = made
        return [*self.made, made]

    def _divided(self, x: Expr, step: float, user: Map) -> Expr | None:
        """x / step, where constants in every term of x take the step; None where they do not."""
        terms = self._terms(x, step, user)
        if terms is None:
            return None
        moving, constant = terms
        if constant:
            moving = [*moving, self._constant(reduce(add, constant), step, user)]
        return reduce(add, moving)

    def _terms(self, x: Expr, step: float, user: Map) -> tuple[list[Expr], list[Expr]] | None:
        """Terms whose sum is x / step, and constant ones that are still to be divided."""
        if x.dtype is not dtypes.float32:
            return None
        if self._is_constant(x):
            return [], [x]
        if isinstance(x, Load):
            inside = self._inlined(x)
            return None if inside is None else self._terms(inside, step, user)
        if is_op(x, "mul"):
            for one, factor in (x.args, x.args[::-1]):
                if self._is_constant(factor):
                    whole, offset = self._byte(one, user)
                    more = [factor * const(offset, dtypes.float32)] if offset else []
                    return [whole * self._constant(factor, step, user)], more
            return None
        if is_op(x, "add"):
            left, right = (self._terms(a, step, user) for a in x.args)
            return None if left is None or right is None else (left[0] + right[0], left[1] + right[1])
        if any(is_op(x, name) for name in ("sub", "max", "min")):
            first, second = (self._divided(a, step, user) for a in x.args)
            return None if first is None or second is None else ([x.rebuild((first, second))], [])
        return None

    def _work(self, tensor: Tensor) -> tuple[int, int]:
        """Steps of the largest reduction behind a map, the first of them on a tie: its registers end in its readers."""
        best, waiting = (0, 0), [tensor]
        while waiting:
            compute = self.producers.get(waiting.pop())
            if isinstance(compute, Reduce):
                steps = prod(static(a.extent) or 0 for a in (*compute.axes, *compute.reduce_axes))
                best = max(best, (steps, -self.places[compute.outputs[0]]))
            elif isinstance(compute, Map):
                waiting.extend(t for t in reads(compute) if self.readers[t] == 1)
        return best

    def _is_constant(self, x: Expr) -> bool:
        return isinstance(x, Const) or (bool(loads(x)) and all(n.source in self.known for n in loads(x)))

    def _byte(self, value: Expr, user: Map) -> tuple[Expr, float]:
        """A byte less its zero point as a number and what to add to it; one rounded on the way is never made a byte."""
        whole, offset = value.args[0] if is_op(value, "cast") else value, 0.0
        while (is_op(whole, "sub") or is_op(whole, "add")) and isinstance(whole.args[1], Const):
            offset += float(whole.args[1].value) * (1 if is_op(whole, "add") else -1)
            whole = whole.args[0]
        if not is_op(whole, "cast") or not isinstance(whole.args[0], Load) or whole.args[0].dtype not in _BYTES:
            return value, 0.0
        read = whole.args[0]
        compute = self.maps.get(read.source)
        rounded = None if compute is None else _rounded(compute.value)
        is_own = self.readers[read.source] == 1 and read.source not in self.program.outputs
        if compute is None or rounded is None or not is_own or read.source.shape != user.output.shape:
            return cast(whole, dtypes.float32), offset
        self.eligible.append(read.source)
        if read.source is not self.inside:
            return cast(whole, dtypes.float32), offset
        number, more = rounded
        return substitute(number, dict(zip(compute.axes, read.indices, strict=True))), offset + more

    def _inlined(self, x: Load) -> Expr | None:
        """What a map that nobody else reads computes, in its reader's place."""
        compute = self.maps.get(x.source)
        if compute is None or self.readers[x.source] > 1 or x.source in self.program.outputs:
            return None
        return substitute(compute.value, dict(zip(compute.axes, x.indices, strict=True)))

    def _constant(self, x: Expr, step: float, user: Map) -> Expr:
        """x / step, computed once."""
        if isinstance(x, Const):
            return const(float(np.float32(x.value) / np.float32(step)), dtypes.float32)
        axes = tuple(axes_of(x))
        places: list[Expr] = [var(a) for a in axes]
        if not axes:
            axes, places = (Axis("one", 1),), [const(0)]
        name = unique_name(f"{user.output.name}_step", self.taken)
        tensor = Tensor(name, tuple(a.extent for a in axes), dtypes.float32)
        own = {a: Axis(a.name, a.extent) for a in axes}
        value = simplify(substitute(x / const(step, dtypes.float32), {a: var(b) for a, b in own.items()}))
        self.made.append(Map(tensor, tuple(own.values()), value, user.origin))
        self.known.add(tensor)
        return load(tensor, places)


def _rounded(value: Expr) -> tuple[Expr, float] | None:
    """round(x) and what is added to it, of a value as it is written here."""
    if not is_op(value, "cast") or value.dtype not in _BYTES:
        return None
    added, number = _added(value.args[0])
    return (number, added) if is_op(number, "round") else None


def _without_bounds(value: Expr, low: float, high: float) -> Expr:
    """The value less minima and maxima that lie outside a clamp that follows the rounding."""
    while (is_op(value, "max") or is_op(value, "min")) and isinstance(value.args[1], Const):
        bound = float(np.round(value.args[1].value))
        if bound > low if is_op(value, "max") else bound < high:
            break
        value = value.args[0]
    return value
