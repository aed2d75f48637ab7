"""A mesh of ranks, and how a tensor lies over it: whole, cut along a dimension, or as terms of a sum, by mesh axis.

mesh dp=2 x tp=4;  y: [0 over dp, sum over tp]    rank (1, 3) has the second half of y's rows, and of those a term
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

Interval = tuple[int, int]  # the first index, and how many
Place = tuple[Interval, ...]  # of every dimension
Coordinates = tuple[int, ...]  # of every mesh axis

OPERATORS = {"add": "sum", "mul": "product", "max": "largest", "min": "smallest"}  # what terms are put together by


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid: names and sizes of its axes, the last one running fastest."""

    axes: tuple[tuple[str, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    @cached_property
    def coordinates(self) -> tuple[Coordinates, ...]:
        """Those of every rank, in order."""
        return tuple(product(*(range(size) for size in self.sizes)))

    def peers(self, axis: int) -> Iterator[tuple[int, ...]]:
        """The groups of ranks that differ along one axis alone, each in the order of that axis."""
        found: dict[Coordinates, list[int]] = {}
        for rank, place in enumerate(self.coordinates):
            found.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
        yield from map(tuple, found.values())

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.axes) or "one rank"


@dataclass(frozen=True)
class AxisPart:
    """What a rank has along one mesh axis: a block of dimension `dim` and so many neighbouring indices before and after
    it; a term, where `operator` puts the terms of all ranks together; all of it, where there is neither."""

    dim: int | None = None
    before: int = 0
    after: int = 0
    operator: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.dim is None and self.operator is None

    def __str__(self) -> str:
        if self.operator is not None:
            return OPERATORS[self.operator]
        if self.dim is None:
            return "whole"
        reach = f" -{self.before} +{self.after}" if self.before or self.after else ""
        return f"{self.dim}{reach}"


WHOLE = AxisPart()


@dataclass(frozen=True)
class Spread:
    """How a tensor lies over a mesh,
    an AxisPart for every mesh axis. A dimension that several axes cut is cut by the first
    of them, and its blocks by the next."""

    parts: tuple[AxisPart, ...]

    @staticmethod
    def whole(mesh: Mesh) -> Spread:
        return Spread((WHOLE,) * len(mesh.axes))

    @property
    def is_whole(self) -> bool:
        return all(part.is_whole for part in self.parts)

    @property
    def is_partial(self) -> bool:
        return any(part.operator is not None for part in self.parts)

    def with_part(self, axis: int, part: AxisPart) -> Spread:
        return Spread((*self.parts[:axis], part, *self.parts[axis + 1 :]))

    def place(self, shape: Sequence[int], mesh: Mesh, at: Coordinates) -> Place:
        """Where in the tensor lies what a rank has."""
        blocks = [(0, extent) for extent in shape]
        reach = [(0, 0)] * len(shape)
        for part, size, number in zip(self.parts, mesh.sizes, at, strict=True):
            if part.dim is not None:
                blocks[part.dim] = block(blocks[part.dim], size, number)
                before, after = reach[part.dim]
                reach[part.dim] = (max(before, part.before), max(after, part.after))
        return tuple(_widened(each, *more, extent) for each, more, extent in zip(blocks, reach, shape, strict=True))

    def fits(self, shape: Sequence[int], mesh: Mesh) -> bool:
        """Whether every rank has something, and neighbours along the mesh axis have what lies around a block: of blocks
        of blocks those at the ends have theirs elsewhere."""
        blocks = list(shape)
        dims = [part.dim for part in self.parts if part.dim is not None]
        if any((part.before or part.after) and dims.count(part.dim) > 1 for part in self.parts):  # type: ignore[arg-type]
            return False
        for part, size in zip(self.parts, mesh.sizes, strict=True):
            if part.dim is None:
                continue
            each = -(-blocks[part.dim] // size)
            last = blocks[part.dim] - each * (size - 1)
            if last < 1 or max(part.before, part.after) > last:
                return False
            blocks[part.dim] = last
        return True

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.parts))}]"


def block(of: Interval, parts: int, number: int) -> Interval:
    """One of so many parts of an interval, all but the last of one size."""
    first, count = of
    each = -(-count // parts)
    start = min(number * each, count)
    return first + start, min(each, count - start)


def inside(inner: Place, outer: Place) -> bool:
    """Whether one place holds another; nothing is held everywhere."""
    if any(n == 0 for _, n in inner):
        return True
    return all(a >= c and a + n <= c + m for (a, n), (c, m) in zip(inner, outer, strict=True))


def slices(place: Place) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in place)


def relative(place: Place, to: Place) -> Place:
    """The same place, counted from where another begins."""
    return tuple((first - base, count) for (first, count), (base, _) in zip(place, to, strict=True))


def overlap(a: Place, b: Place) -> Place | None:
    """What two places have in common; None where that is nothing."""
    found: list[Interval] = []
    for (first, n), (other, m) in zip(a, b, strict=True):
        start, stop = max(first, other), min(first + n, other + m)
        if stop <= start:
            return None
        found.append((start, stop - start))
    return tuple(found)


def _widened(of: Interval, before: int, after: int, extent: int) -> Interval:
    start, stop = max(0, of[0] - before), min(extent, sum(of) + after)
    return start, stop - start
