"""Constants that are others with their dimensions in another order, read as those: ranks then hold them once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import numpy as np

from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import Expr, Load, load, rewrite
from tilewright.ir.forms.tensor import Tensor

_SAMPLES = 16  # elements that are compared before all are
_DIMENSIONS = 4  # at most: of more there are too many orders

Order = tuple[int, ...]  # by dimension of one, the dimension of the other


def without_turned(program: Program) -> Program:
    """The same with one constant in the place of several that are equal but for the order of their dimensions."""
    plain = {t for c in program.computes if not isinstance(c, Map | Reduce) for t in reads(c)} | set(program.outputs)
    twins: dict[Tensor, tuple[Tensor, Order]] = {}
    alike: dict[tuple[str, Order], list[Tensor]] = {}
    for tensor, array in program.constants.items():
        others = alike.setdefault((tensor.dtype.name, tuple(sorted(array.shape))), [])
        found = ((o, order) for o in others if (order := _order(program.constants[o], array)) is not None)
        twin = next(found, None) if tensor not in plain and array.size and 1 < array.ndim <= _DIMENSIONS else None
        if twin is None:
            others.append(tensor)
        else:
            twins[tensor] = twin
    if not twins:
        return program
    constants = {t: array for t, array in program.constants.items() if t not in twins}
    return replace(program, computes=tuple(_reading(c, twins) for c in program.computes), constants=constants)


def _order(one: np.ndarray, other: np.ndarray) -> Order | None:
    """The order of dimensions in which one array is the other."""
    at = np.unravel_index(np.linspace(0, other.size - 1, _SAMPLES).astype(np.int64), other.shape)
    for order in permutations(range(other.ndim)):
        turned = one.transpose(order)
        if turned.shape == other.shape and np.array_equal(turned[at], other[at]) and np.array_equal(turned, other):
            return order
    return None


def _reading(compute: Compute, twins: Mapping[Tensor, tuple[Tensor, Order]]) -> Compute:
    if not isinstance(compute, Map | Reduce) or twins.keys().isdisjoint(reads(compute)):
        return compute

    def turned(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.source not in twins:
            return None
        one, order = twins[node.source]
        return load(one, tuple(node.args[order.index(dim)] for dim in range(len(order))))

    if isinstance(compute, Map):
        return replace(compute, value=rewrite(compute.value, turned))
    return replace(compute, elements=tuple(rewrite(each, turned) for each in compute.elements))
