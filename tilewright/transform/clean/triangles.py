"""Constant tables of two numbers, one below a diagonal and one above it, become comparisons of indices.

    select(table[i, j], x, -inf)   with table[i, j] = j <= i + 3    is    select(j <= i + 3, x, -inf)

A causal mask is such a table: nothing of it is read from memory then, and what it closes can be left out.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Program
from tilewright.ir.forms.expr import Expr, Load, const, le, op, rewrite, select
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead

_LEAST = 1 << 12  # elements of a table that is worth a comparison at every read
_Table = tuple[int, object, object]  # how far behind i the first number reaches, and both numbers


def compare_indices(program: Program) -> Program:
    known = {t: found for t, array in program.constants.items() if (found := _triangle(t, array)) is not None}
    if not known:
        return program

    def opened(node: Expr) -> Expr | None:
        table = known.get(node.source) if isinstance(node, Load) and isinstance(node.source, Tensor) else None
        if table is None:
            return None
        assert isinstance(node, Load)
        behind, near, far = table
        row, column = node.indices[-2:]
        inside = le(column, row + behind)
        if node.dtype is dtypes.bool_:
            return inside if near else op("not", inside)
        return select(inside, const(near, node.dtype), const(far, node.dtype))

    def changed(compute: Compute) -> Compute:
        if not isinstance(compute, Map) or not any(t in known for t in compute.sources):
            return compute
        return replace(compute, value=rewrite(compute.value, opened))

    return without_dead(program.with_computes(tuple(changed(c) for c in program.computes)))


def _triangle(tensor: Tensor, array: np.ndarray) -> _Table | None:
    if array.ndim < 2 or array.size < _LEAST or prod(array.shape[:-2]) != 1 or tensor.dtype.bits > 64:
        return None
    table = array.reshape(array.shape[-2:])
    rows, columns = table.shape
    near, far = table[-1, 0], table[0, -1]
    if near == far or near != near or far != far:
        return None
    behind = int(np.count_nonzero(table[0] == near)) - 1
    if behind < 0:  # the first row has nothing below the diagonal
        behind = -int(np.count_nonzero(table[:, 0] == far))
    if not np.array_equal(table, np.where(np.tri(rows, columns, behind, dtype=np.bool_), near, far)):
        return None
    return behind, near.item(), far.item()
