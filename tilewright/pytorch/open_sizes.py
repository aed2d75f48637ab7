"""Graphs of torch.compile whose sizes are symbols: one model for all numbers around those of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from tilewright.errors import ModelError, UnsupportedError
from tilewright.frontend.open_graphs import opened, with_rooms
from tilewright.frontend.pytorch.tensors import array_of, tensor_of
from tilewright.ir.forms.graph import Graph, Room
from tilewright.pytorch.calls import Build

FACTOR = 8  # rooms begin behind its powers
_MOST = 1 << 20  # a larger number is compiled for as it is

GraphAt = Callable[[Sequence[Any]], tuple[Graph, Sequence[int]]]  # of arguments: the Graph, and which of them it takes


class RoomCallee(Protocol):
    """A model that is told the numbers of a run."""

    def at(self, numbers: Sequence[int], values: Sequence[Any]) -> list[Any]: ...


@dataclass(frozen=True)
class Symbols:
    """The symbols of a graph's placeholders, each with a placeholder, and an axis of it, that tells its number."""

    tellers: Mapping[Any, tuple[int, int | None]]
    shapes: Mapping[int, Any]  # by placeholder an expression, or those of a tensor's extents

    @staticmethod
    def of(placeholders: Sequence[fx.Node]) -> Symbols | None:
        """None where some symbol is told by none of them alone."""
        tellers: dict[Any, tuple[int, int | None]] = {}
        shapes: dict[int, Any] = {}
        for place, node in enumerate(placeholders):
            value = node.meta.get("val")
            extents: list[Any] = list(value.shape) if isinstance(value, torch.Tensor) else []
            if isinstance(value, torch.SymInt):
                shapes[place] = value.node.expr
                found: list[tuple[Any, int | None]] = [(value.node.expr, None)]
            elif any(isinstance(n, torch.SymInt) for n in extents):
                shapes[place] = [n.node.expr if isinstance(n, torch.SymInt) else n for n in extents]
                found = [(e, axis) for axis, e in enumerate(shapes[place]) if not isinstance(e, int)]
            elif isinstance(value, torch.Tensor) or value is None:
                continue
            else:
                return None  # a float, which no size follows from
            for expression, axis in found:
                if expression.is_symbol:
                    tellers.setdefault(expression, (place, axis))
        used = {s for e in shapes.values() for x in (e if isinstance(e, list) else [e]) if not isinstance(x, int)
                for s in x.free_symbols}  # fmt: skip
        return Symbols(tellers, shapes) if tellers and used <= tellers.keys() else None

    def numbers(self, args: Sequence[Any]) -> tuple[int, ...]:
        """What the symbols stand for in a call."""
        return tuple(int(args[place]) if axis is None else args[place].shape[axis]
                     for place, axis in self.tellers.values())  # fmt: skip

    def rooms(self, args: Sequence[Any]) -> tuple[Room, ...] | None:
        """Around the numbers of a call; None where it is compiled for these alone."""
        rooms = tuple(room for room in map(room_around, self.numbers(args)) if room is not None)
        tensors = [args[k] for k, shape in self.shapes.items() if isinstance(shape, list)]
        is_plain = all(t.is_cpu and t.is_contiguous() for t in tensors)
        return rooms if is_plain and len(rooms) == len(self.tellers) else None

    def args(self, given: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        """Arguments like those given, of other sizes."""
        values = dict(zip(self.tellers, numbers, strict=True))

        def value(expression: Any) -> int:
            return expression if isinstance(expression, int) else int(expression.subs(values))

        made = list(given)
        for place, shape in self.shapes.items():
            if isinstance(shape, list):
                made[place] = torch.empty([value(e) for e in shape], dtype=given[place].dtype)
            else:
                made[place] = value(shape)
        return made


def room_around(number: int) -> Room | None:
    """All numbers from behind a power of the factor up to the next one; None where a number stands for itself."""
    if not 1 < number <= _MOST:
        return None
    high = FACTOR
    while high < number:
        high *= FACTOR
    return Room(max(2, high // FACTOR + 1), high)


@dataclass(frozen=True)
class OpenRun:
    """The graph compiled for all numbers in rooms."""

    symbols: Symbols
    rooms: tuple[Room, ...]
    model: RoomCallee
    takes: Sequence[int]

    def has(self, numbers: Sequence[int]) -> bool:
        return all(room.low <= n <= room.high for room, n in zip(self.rooms, numbers, strict=True))

    def __call__(self, args: Sequence[Any]) -> list[torch.Tensor]:
        results = self.model.at(self.symbols.numbers(args), [array_of(args[k].resolve_neg()) for k in self.takes])
        return [tensor_of(result) for result in results]


def open_run(
    symbols: Symbols, rooms: tuple[Room, ...], args: Sequence[Any], graph_at: GraphAt, build: Build
) -> OpenRun | None:
    """The graph for all numbers in rooms; None where it differs in more than these."""
    takes: list[Sequence[int]] = []

    def at(numbers: tuple[int, ...]) -> Graph:
        graph, places = graph_at(symbols.args(args, numbers))
        takes.append(places)
        return graph

    try:
        graph = opened(at, rooms)
        if any(places != takes[0] for places in takes):
            return None
        return OpenRun(symbols, rooms, build(with_rooms(graph, rooms)), takes[0])  # type: ignore[arg-type]
    except (UnsupportedError, ModelError):
        return None
