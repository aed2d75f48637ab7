"""What one part of a kernel runs, in order: leaves, loops, what runs ahead of them, side by side, and barriers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewright.ir.forms.expr import Axis, Expr
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.streams import Work


@dataclass(frozen=True)
class Loop:
    """A Tile walked in order: its parts one after the other; of what it holds in `staged` stages, several at a time."""

    axis: Axis
    body: tuple[Item, ...]
    staged: frozenset[Tensor] = frozenset()

    def works(self) -> Iterator[Work]:
        return works(self.body)


@dataclass(frozen=True)
class Ahead:
    """What runs where there is something for it to do: fills a Hold in stages, some parts ahead, as long as there are
    parts, or computes what a tile may need nothing of."""

    condition: Expr
    body: tuple[Item, ...]


@dataclass(frozen=True)
class Together:
    """The children of a Tile side by side, each on some of a block's threads."""

    sides: tuple[tuple[int, tuple[Item, ...]], ...]  # threads, and what they run


@dataclass(frozen=True)
class GridBarrier:
    """A barrier of all units that the kernel is handed out to."""


Item = Work | Loop | Ahead | Together | GridBarrier


def works(items: Sequence[Item]) -> Iterator[Work]:
    """What runs, in order, whatever is around it."""
    for item in items:
        if isinstance(item, Loop | Ahead):
            yield from works(item.body)
        elif isinstance(item, Together):
            for _, side in item.sides:
                yield from works(side)
        elif isinstance(item, Work):
            yield item
