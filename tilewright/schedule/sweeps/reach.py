"""Propagation in numbers: what a part of one tensor, at a known place, needs of every other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.ir.forms import bounds
from tilewright.ir.forms.compute import Compute, Map, Reduce, reads
from tilewright.ir.forms.expr import Axis, Expr
from tilewright.ir.forms.mesh import Interval, Place
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.tile_graph.algebra.nest import build_nest

Places = dict[Tensor, Place]


@dataclass
class Reach:
    """What parts of computes read. Dimensions are mostly independent of each other, so that what is found for rows is
    found for rows of any width."""

    _indices: dict[Compute, Mapping[Tensor, tuple[list[Expr], ...]]] = field(default_factory=dict)
    _known: dict[tuple[Expr, int, tuple[Interval, ...]], Interval] = field(default_factory=dict)

    def needed(self, computes: Sequence[Compute], roots: Mapping[Tensor, Place]) -> Places:
        """Of every tensor what is needed for parts of some that are to be left behind; nothing of those that are not
        in it."""
        found = dict(roots)
        for compute in reversed(computes):
            self.before(compute, found)
        return found

    def before(self, compute: Compute, found: Places) -> bool:
        """Adds what one compute reads to what is needed behind it; whether it is needed at all."""
        wanted = [found[t] for t in compute.outputs if t in found]
        if not wanted:
            return False
        if not isinstance(compute, Map | Reduce):  # all of a Scan, a sort or a scatter, or nothing
            found.update({t: whole(t) for t in (*compute.outputs, *reads(compute))})
            return True
        place = wanted[0]
        for other in wanted[1:]:
            place = both(place, other)
        found.update(dict.fromkeys(compute.outputs, place))
        for tensor, read in self._read(compute, place).items():
            found[tensor] = both(found[tensor], read) if tensor in found else read
        return True

    def _read(self, compute: Map | Reduce, place: Place) -> Places:
        if compute not in self._indices:
            self._indices[compute] = build_nest(compute, (), {}).reach
        ranges = dict(zip(compute.axes, place, strict=True))
        found: Places = {}
        for tensor, dims in self._indices[compute].items():
            along = zip(dims, extents(tensor), strict=True)
            found[tensor] = tuple(self._covered(indices, ranges, extent) for indices, extent in along)
        return found

    def _covered(self, indices: Sequence[Expr], ranges: Mapping[Axis, Interval], extent: int) -> Interval:
        found = self._of_index(indices[0], ranges, extent)
        for index in indices[1:]:
            found = _both(found, self._of_index(index, ranges, extent))
        return found

    def _of_index(self, index: Expr, ranges: Mapping[Axis, Interval], extent: int) -> Interval:
        mine = {axis: ranges[axis] for axis in index.axes if axis in ranges}
        key = index, extent, tuple(mine.values())
        found = self._known.get(key)
        if found is None:
            inclusive = {axis: (first, first + count - 1) for axis, (first, count) in mine.items()}
            found = self._known[key] = _clipped(bounds.bounds(index, inclusive), extent)
        return found


def _clipped(limits: tuple[float, float], extent: int) -> Interval:
    """What of it lies inside a dimension. A read that a condition keeps from being made may lie beyond: of such a one
    an element remains, since tensors without any are none of a Program's."""
    first = int(min(max(limits[0], 0), extent - 1))
    return first, int(max(first + 1, min(limits[1] + 1, extent))) - first


def whole(tensor: Tensor) -> Place:
    return tuple((0, n) for n in extents(tensor))


def both(one: Place, other: Place) -> Place:
    """The least that has both."""
    return tuple(_both(a, b) for a, b in zip(one, other, strict=True))


def _both(one: Interval, other: Interval) -> Interval:
    first = min(one[0], other[0])
    return first, max(one[0] + one[1], other[0] + other[1]) - first
