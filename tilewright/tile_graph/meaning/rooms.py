"""Where tensors are while a tree of tiles is interpreted: rooms at levels of memory, found by the nearest Hold.

What nobody wrote, or another unit wrote since the last barrier, is not a number: a wrong tree gives wrong answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.meaning.outside import Span, span_bytes

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(eq=False)
class HeldPart:
    """A part of a tensor, element by element: its value, whether it was written, by which unit and when."""

    tensor: Tensor
    level: str
    span: Span
    data: Array
    written: Array
    unit: Array
    epoch: Array
    keeps: bool = False  # what is there already is not computed again: in a window, or filled ahead

    @staticmethod
    def empty(tensor: Tensor, level: str, span: Span, dtype: Any) -> HeldPart:
        shape = [count for _, count in span]
        data = np.full(shape, _poison(np.dtype(dtype)), dtype)
        return HeldPart(tensor, level, span, data, np.zeros(shape, bool), np.zeros(shape, int), np.full(shape, -1))

    @staticmethod
    def given(tensor: Tensor, level: str, data: Array) -> HeldPart:
        span = tuple((0, n) for n in data.shape)
        shape = data.shape
        return HeldPart(tensor, level, span, data, np.ones(shape, bool), np.zeros(shape, int), np.full(shape, -1))

    @property
    def bytes(self) -> int:
        return span_bytes(self.tensor, self.span)

    def read(self, indices: tuple[Array, ...], unit: int, epoch: int) -> Array:
        """Elements at places of the whole tensor; what may not be seen is poison."""
        shape = np.broadcast_shapes(*(i.shape for i in indices)) if indices else ()
        if not self.data.size:
            return np.full(shape, _poison(self.data.dtype), self.data.dtype)
        inside = np.ones(shape, bool)
        places = []
        for index, (low, count) in zip(indices, self.span, strict=True):
            place = index.astype(np.int64) - low
            inside = inside & (place >= 0) & (place < count)
            places.append(np.clip(place, 0, count - 1))
        where = tuple(places)
        foreign = (self.epoch[where] == epoch) & (self.unit[where] != unit)
        seen = inside & self.written[where] & ~foreign
        return np.where(seen, self.data[where], _poison(self.data.dtype))

    def write(self, span: Span, values: Array, unit: int, epoch: int) -> None:
        where = self._where(span)
        clash = self.written[where] & (self.epoch[where] == epoch) & (self.unit[where] != unit)
        same = (self.data[where] == values) | (values != values)
        if np.any(clash & ~same):
            raise InternalError(f"tree: two units write different values to '{self.tensor.name}'")
        self.data[where] = values
        self.written[where] = True
        self.unit[where], self.epoch[where] = unit, epoch

    def take(self, other: HeldPart) -> int:
        """What another room has of the same part; gives the bytes that were there."""
        both = common(self.span, other.span)
        mine, theirs = self._where(both), other._where(both)
        known = other.written[theirs]
        self.data[mine] = np.where(known, other.data[theirs], self.data[mine])
        self.written[mine] |= known
        self.epoch[mine] = np.where(known, -1, self.epoch[mine])
        return int(known.sum()) * self.tensor.dtype.bytes

    def missing(self) -> Span:
        """The smallest box around what was not written."""
        found = []
        for dim, (low, _) in enumerate(self.span):
            others = tuple(d for d in range(len(self.span)) if d != dim)
            places = np.flatnonzero((~self.written).any(axis=others))
            found.append((low + int(places[0]), int(places[-1] - places[0]) + 1))
        return tuple(found)

    def _where(self, span: Span) -> tuple[slice, ...]:
        found = []
        for (low, count), (first, room) in zip(span, self.span, strict=True):
            if low < first or low + count > first + room:
                raise InternalError(f"tree: '{self.tensor.name}' is written at {low} to {low + count}, of which "
                                    f"{first} to {first + room} are held")  # fmt: skip
            found.append(slice(low - first, low - first + count))
        return tuple(found)


def common(a: Span, b: Span) -> Span:
    lows = [max(x[0], y[0]) for x, y in zip(a, b, strict=True)]
    ends = [min(sum(x), sum(y)) for x, y in zip(a, b, strict=True)]
    return tuple((low, max(0, end - low)) for low, end in zip(lows, ends, strict=True))


def _poison(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return np.iinfo(dtype).max
    return True if dtype.kind == "b" else np.nan


@dataclass(eq=False)
class TileScope:
    """A part of a Tile: what it holds, and what is around it."""

    rooms: dict[str, HeldPart] = field(default_factory=dict)
    parent: TileScope | None = None
    unit: int = 0
    steps: Mapping[Axis, int] = field(default_factory=dict)

    def inner(self, **changed: Any) -> TileScope:
        made = TileScope({}, self, self.unit, self.steps)
        for name, value in changed.items():
            setattr(made, name, value)
        return made

    def found(self, name: str) -> HeldPart | None:
        here: TileScope | None = self
        while here is not None:
            if name in here.rooms:
                return here.rooms[name]
            here = here.parent
        return None

    def room(self, name: str) -> HeldPart:
        found = self.found(name)
        if found is None:
            raise InternalError(f"tree: nothing holds '{name}'")
        return found
