"""Conditions on places that are kept as tables become comparisons of indices.

    select(table[i, j], x, -inf)      with table[i, j] = j <= i + 3           is    select(j <= i + 3, x, -inf)
    select(first[j] <= second[i], x, -inf)    with first[j] = j, second[i] = i + 3    is the same

A causal mask is such a condition: nothing of it is read from memory then, and what it closes can be left out.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Program
from tilewright.ir.forms.expr import (
    Expr,
    Load,
    const,
    is_op,
    le,
    loads,
    op,
    rewrite,
    select,
    substitute,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead

_LEAST = 1 << 12  # elements of a condition that is worth a comparison at every read
_COMPARED = ("le", "lt")


def compare_indices(program: Program) -> Program:
    given = program.constants.items()
    tables = {t: table for t, array in given if (table := _triangle(array)) is not None}
    lines = {t: line for t, array in given if (line := _line(t, array)) is not None}
    known: dict[Tensor, Map] = {}  # conditions on places alone

    def opened(node: Expr) -> Expr | None:
        if isinstance(node, Load) and node.source in tables:
            return tables[node.source].at(node)
        if isinstance(node, Load) and node.source in known:
            made = known[node.source]
            return substitute(made.value, dict(zip(made.axes, node.indices, strict=True)))
        if any(is_op(node, name) for name in _COMPARED):
            both = [_index(part, lines) for part in node.args]
            return None if any(b is None for b in both) else op(node.op.name, *both)  # type: ignore[attr-defined, arg-type]
        return None

    def changed(compute: Compute) -> Compute:
        if not isinstance(compute, Map):
            return compute
        made = replace(compute, value=rewrite(compute.value, opened))
        is_long = prod(e if isinstance(e, int) else 0 for e in compute.output.shape) >= _LEAST
        if is_long and compute.output.dtype is dtypes.bool_ and not loads(made.value):
            known[compute.output] = made
        return made

    if not tables and not lines:
        return program
    return without_dead(program.with_computes(tuple(changed(c) for c in program.computes)))


class _Triangle:
    """One number up to a place that moves with the row, and another behind it."""

    def __init__(self, behind: int, near: object, far: object) -> None:
        self.behind, self.near, self.far = behind, near, far

    def at(self, node: Load) -> Expr:
        row, column = node.indices[-2:]
        inside = le(column, row + self.behind)
        if node.dtype is dtypes.bool_:
            return inside if self.near else op("not", inside)
        return select(inside, const(self.near, node.dtype), const(self.far, node.dtype))  # type: ignore[arg-type]


def _triangle(array: np.ndarray) -> _Triangle | None:
    if array.ndim < 2 or array.size < _LEAST or prod(array.shape[:-2]) != 1:
        return None
    rows, columns = int(array.shape[-2]), int(array.shape[-1])
    table = array.reshape(rows, columns)
    near, far = table[-1, 0], table[0, -1]
    if near == far or near != near or far != far:
        return None
    edge = np.concatenate((table[0], table[:, 0]))
    if not ((edge == near) | (edge == far)).all():  # a weight, most likely: not all of it is looked at
        return None
    behind = int(np.count_nonzero(table[0] == near)) - 1
    if behind < 0:  # the first row has nothing before the diagonal
        behind = -int(np.count_nonzero(table[:, 0] == far))
    if not np.array_equal(table, np.where(np.tri(rows, columns, behind, dtype=np.bool_), near, far)):
        return None
    return _Triangle(behind, near.item(), far.item())


def _line(tensor: Tensor, array: np.ndarray) -> tuple[int, int, int] | None:
    """The one axis along which whole numbers follow each other, the first of them, and the step."""
    if not tensor.dtype.is_int or array.size < 2 or array.size != max(array.shape):
        return None
    numbers = array.reshape(-1).astype(np.int64)
    first, step = int(numbers[0]), int(numbers[1]) - int(numbers[0])
    reach = abs(first) + abs(step) * array.size
    if reach >= 1 << 31 or not np.array_equal(numbers, first + step * np.arange(array.size)):
        return None
    return array.shape.index(array.size), first, step


def _index(node: Expr, lines: dict[Tensor, tuple[int, int, int]]) -> Expr | None:
    """A number of a line as an index; None where a node is something else."""
    if not isinstance(node, Load) or node.source not in lines:
        return None
    axis, first, step = lines[node.source]
    return node.indices[axis] * step + first
