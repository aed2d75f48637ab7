"""The parts that the results of a sweep are left in: blocks of the largest, and of others what lies at that place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from tilewright.ir.forms.mesh import Interval, Place
from tilewright.ir.forms.tensor import Tensor, extents

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Blocks of so many elements along each dimension of a tensor of these extents."""

    shape: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-extent // block) for extent, block in zip(self.shape, self.blocks, strict=True))

    @property
    def cells(self) -> int:
        return prod(self.counts)

    @property
    def middle(self) -> Cell:
        """A cell with neighbours on all sides, where there is one: what it needs is what most need."""
        return tuple(min(count - 1, count // 2) for count in self.counts)

    def walk(self) -> Iterator[Cell]:
        yield from product(*map(range, self.counts))

    def place(self, tensor: Tensor, cell: Cell) -> Place | None:
        """What is left of a tensor at a cell; None for nothing. Of results with other dimensions the first leaves all.
        """
        shape = extents(tensor)
        if len(shape) != len(self.shape):
            return None if any(cell) else tuple((0, n) for n in shape)
        place = tuple(self._block(dim, n, cell[dim]) for dim, n in enumerate(shape))
        return None if any(not count for _, count in place) else place

    def _block(self, dim: int, extent: int, number: int) -> Interval:
        """The same part of a dimension of any extent: coarser results are left where the finer ones of them are."""
        whole, block = self.shape[dim], self.blocks[dim]
        first, end = (-(-min(whole, n * block) * extent // whole) for n in (number, number + 1))
        return first, end - first


def main_of(roots: Iterable[Tensor]) -> Tensor:
    """The largest, whose dimensions are cut."""
    return max(roots, key=lambda t: (t.rank, prod(extents(t))))


def grains(main: Tensor, inside: Iterable[Tensor]) -> tuple[int, ...]:
    """By dimension so many elements as one of the coarsest tensor of a sweep stands for: blocks of whole grains begin
    alike, so that the parts between the ends are one Program."""
    shape = extents(main)
    alike = [extents(t) for t in inside if t.rank == main.rank]
    return tuple(max((-(-n // max(1, e[dim])) for e in alike if e[dim] > 1), default=1) for dim, n in enumerate(shape))


def grid_of(shape: Sequence[int], counts: Sequence[int], grain: Sequence[int]) -> Grid:
    """At most so many parts along each dimension, in whole grains."""
    blocks = []
    for extent, count, unit in zip(shape, counts, grain, strict=True):
        block = -(-extent // count)
        unit = unit if unit <= block else 1
        blocks.append(min(extent, -(-block // unit) * unit))
    return Grid(tuple(shape), tuple(blocks))
