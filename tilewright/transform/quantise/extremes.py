"""Largest and smallest of dequantised values, quantised again as they were: the largest and smallest of their bytes.

round(max (q - z)·s / s) + z  =  max q,  since s is positive.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tilewright.ir.analysis.products import is_zero
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, plain_monoid, reads
from tilewright.ir.forms.expr import Const, Expr, Load, cast, const, is_op, load, select, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.transform.quantise.quantised import BYTES, SHIFT
from tilewright.transform.quantise.requantise import rounding
from tilewright.transform.storage import all_computes, names_of, unique_name


def extremes_of_bytes(program: Program) -> Program:
    """The Program with such reductions done on bytes."""
    finder = _Finder(program)
    return program.with_computes(tuple(made for compute in program.computes for made in finder.written(compute)))


@dataclass
class _Finder:
    program: Program

    def __post_init__(self) -> None:
        self.readers = Counter(t for c in all_computes(self.program) for t in reads(c))
        self.made_by = {t: c for c in self.program.computes for t in c.outputs}
        self.taken = names_of(self.program)

    def written(self, compute: Compute) -> list[Compute]:
        found = rounding(compute.value) if isinstance(compute, Map) else None
        if not isinstance(compute, Map) or found is None or not isinstance(found.x, Load):
            return [compute]
        source = self._reduction(found.x, compute)
        if source is None:
            return [compute]
        number, guard = _unguarded(source.elements[0])
        if isinstance(number, Load) and isinstance(inner := self.made_by.get(number.source), Map):
            number = substitute(inner.value, dict(zip(inner.axes, number.indices, strict=True)))
        byte = _dequantised(number, found.step, found.zero + found.shift, compute.output)
        info = np.iinfo(compute.output.dtype.numpy)
        is_whole = found.low + found.shift <= info.min and found.high + found.shift >= info.max
        if byte is None or not is_whole:
            return [compute]
        assert source.monoid.operator is not None
        monoid = plain_monoid(source.monoid.operator, byte.dtype)
        element = byte if guard is None else select(guard, byte, monoid.identity[0])
        is_same = byte.dtype is compute.output.dtype
        name = compute.output.name if is_same else unique_name(f"{compute.output.name}_byte", self.taken)
        output = compute.output if is_same else Tensor(name, compute.output.shape, byte.dtype)
        made = Reduce((output,), source.axes, source.reduce_axes, (element,), monoid, compute.origin)
        if is_same:
            return [made]
        # in 8 bits adding and taking away 128 are the same
        step = const(-SHIFT if byte.dtype is dtypes.int8 else SHIFT, byte.dtype)
        value = cast(load(output, [var(a) for a in compute.axes]) + step, compute.output.dtype)
        return [made, Map(compute.output, compute.axes, value, compute.origin)]

    def _reduction(self, x: Load, user: Map) -> Reduce | None:
        """The reduction behind a read that nothing else reads, point for point."""
        source = self.made_by.get(x.source)
        if not isinstance(source, Reduce) or len(source.elements) != 1 or source.monoid.operator not in ("max", "min"):
            return None
        if self.readers[x.source] > 1 or x.source in self.program.outputs:
            return None
        is_point = all(i is var(a) or (a.extent == 1 and is_zero(i)) for i, a in zip(x.indices, user.axes, strict=True))
        return source if is_point else None


def _unguarded(element: Expr) -> tuple[Expr, Expr | None]:
    """The value and the condition under which it counts: outside stands what is beyond every number."""
    if is_op(element, "select") and isinstance(element.args[2], Const) and np.isinf(float(element.args[2].value)):
        return element.args[1], element.args[0]
    return element, None


def _dequantised(value: Expr, step: float, back: float, stored: Tensor) -> Load | None:
    """q of (q - back)·step, or of one of the other type that is 128 away."""
    if not is_op(value, "mul") or not isinstance(value.args[1], Const) or value.args[1].value != step:
        return None
    whole = value.args[0]
    if not is_op(whole, "cast") or whole.args[0].dtype is not dtypes.int32:
        return None
    whole, offset = whole.args[0], 0
    while (is_op(whole, "sub") or is_op(whole, "add")) and isinstance(whole.args[1], Const):
        offset += int(whole.args[1].value) * (1 if is_op(whole, "add") else -1)
        whole = whole.args[0]
    if not is_op(whole, "cast") or not isinstance(whole.args[0], Load) or whole.args[0].dtype not in BYTES:
        return None
    read = whole.args[0]
    away = 0 if read.dtype is stored.dtype else -SHIFT if stored.dtype is dtypes.int8 else SHIFT
    return read if offset + back == away else None
