"""Output axes of a contraction that are one run of all it reads and stores, as the rows and columns of an image under a
1x1 window are: walked as one, rows need not fill register tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from tilewright.ir.analysis.simplify import Linear
from tilewright.ir.forms.expr import Axis, Var, used_as_numbers, var
from tilewright.tile_graph.algebra.nest import Nest, period
from tilewright.tile_graph.algebra.propagate import Size, extent_of


def free_axes(nest: Nest, inner: Axis, taken: Sequence[Axis]) -> list[Axis]:
    """Axes that may be walked on to from `inner`: whatever moves along one of the two moves along the other."""
    if inner not in nest.axes or not isinstance(inner.extent, int) or period(nest, inner) is not None:
        return []
    reads = nest.loads()
    free = [a for a in nest.axes if a not in taken and a is not inner and extent_of(a.extent) > 1]
    free = [a for a in free if all((a in n.axes) == (inner in n.axes) for n in reads) and period(nest, a) is None]
    used = used_as_numbers((*nest.elements, *nest.values, *nest.initial)) if free else set()
    return [a for a in free if a not in used] if inner not in used else []


def axes_around(inner: Axis, free: Sequence[Axis], offsets: Sequence[Linear]) -> tuple[Axis, ...]:
    """The free axes that one run leads on to from `inner`, the nearest first; `offsets` say where everything lies."""
    found: list[Axis] = []
    last = inner
    while isinstance(last.extent, int):
        following = [a for a in free if a not in found and all(follows(o, a, last) for o in offsets)]
        if not following:
            break
        last = following[0]
        found.append(last)
    return tuple(found)


def follows(offset: Linear, axis: Axis, inner: Axis) -> bool:
    """Whether the end of `inner` is followed by the next place along `axis`."""
    if any(not isinstance(t, Var) and (axis in t.axes or inner in t.axes) for t in offset.terms):
        return False
    return offset.terms.get(var(axis), 0) == offset.terms.get(var(inner), 0) * extent_of(inner.extent)


def reach(axis: Axis, around: Sequence[Axis]) -> int:
    """Elements of a run."""
    return prod(extent_of(a.extent) for a in (axis, *around))


def stretch(axis: Axis, around: Sequence[Axis], tile: Mapping[Axis, Size]) -> tuple[Size, Size]:
    """How far a run reaches on a tile, and how often: it goes on only from an axis that the tile has whole."""
    length: Size = tile[axis]
    times: Size = 1
    goes_on: Size = True
    inner = axis
    for outer in around:
        goes_on = np.logical_and(goes_on, tile[inner] >= extent_of(inner.extent))
        length, times = np.where(goes_on, length * tile[outer], length), np.where(goes_on, times, times * tile[outer])
        inner = outer
    return length, times
