"""Sizes that a model is compiled for ahead of its calls: which dimensions vary, from where to where, in which steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tilewright.calls.arguments import suggest
from tilewright.errors import InputError, OptionError
from tilewright.ir.forms.graph import Form, Room

_MOST = 1 << 30

Extents = Sequence[int | str | None]
Places = Mapping[str, Mapping[int, int]]  # by input and axis the number of the span that it varies over


@dataclass(frozen=True)
class Span:
    """Sizes of a dimension: `low`, `low + step` and so on to `high`. The number of a size counts its steps."""

    name: str
    low: int
    high: int
    step: int = 1

    @property
    def numbers(self) -> Room:
        return Room(self.low // self.step, self.high // self.step)

    def form(self, place: int) -> Form:
        """Its size, of the number at a place among all."""
        return Form(self.low % self.step, (*[0] * place, self.step))

    def size(self, number: int) -> int:
        return self.low % self.step + self.step * number

    def number(self, size: int, where: str) -> int:
        """The number of a size that a caller gives."""
        if self.low <= size <= self.high and (size - self.low) % self.step == 0:
            return size // self.step
        raise InputError(f"{where} is {size}, and the model is compiled for {self}")

    def __str__(self) -> str:
        steps = f" in steps of {self.step}" if self.step > 1 else ""
        return f"{self.name} from {self.low} to {self.high}{steps}"


def covering(span: Span, factor: int) -> list[Room]:
    """Rooms for all numbers of a span, as few as there can be when the largest number of each is about so many times
    the smallest at most, and that of all about as many times. Extents of none and one have rooms of their own, since
    operators treat them in their own ways."""
    whole = span.numbers
    alone = [n for n in range(whole.low, min(whole.low + 2, whole.high + 1)) if span.size(n) < 2]
    rooms = [Room(n, n) for n in alone]
    low, high = whole.low + len(alone), whole.high
    if low > high:
        return rooms
    times = high / max(1, low)
    count = 1
    while factor**count < times:
        count += 1
    tops = [round(high / times ** (k / count)) for k in reversed(range(count))]
    return [*rooms, *(Room(before + 1, top) for before, top in pairwise((low - 1, *tops)) if before < top)]


def read_spans(dynamic: Mapping[Any, Any], inputs: Mapping[str, Extents | None]) -> tuple[tuple[Span, ...], Places]:
    """What a caller's `dynamic` says of a model with these inputs: a dimension's name to a range, or an input's name to
    the ranges of its axes. Axes of one name are of one size."""
    if not isinstance(dynamic, Mapping):
        raise OptionError(f"dynamic must be a dict from a name to ranges, not a {type(dynamic).__name__}")
    named: dict[str, list[tuple[str, int]]] = {}
    for name, shape in inputs.items():
        for axis, extent in enumerate(shape or ()):
            if isinstance(extent, str):
                named.setdefault(extent, []).append((name, axis))
    spans: list[Span] = []
    places: dict[str, dict[int, int]] = {}
    for name, given in dynamic.items():
        if name in inputs and isinstance(given, Mapping | list | tuple) and not _is_range(given):
            pairs = given.items() if isinstance(given, Mapping) else enumerate(given)
            own = [(name, _axis(name, axis, inputs[name]), each) for axis, each in pairs if each is not None]
        elif name in named:
            own = [(port, axis, _named(name, given)) for port, axis in named[name]]
        else:
            known = [*named, *inputs]
            raise OptionError(f"dynamic: there is no input or open dimension {name!r}; {suggest(name, known)}")
        for port, axis, each in own:
            extents = inputs[port]
            told = extents[axis] if extents is not None else None
            span = _span(each, told if isinstance(told, str) else f"{port}[{axis}]")
            earlier = next((k for k, s in enumerate(spans) if s.name == span.name), None)
            if earlier is not None and spans[earlier] != span:
                raise OptionError(f"dynamic: {span.name!r} has two ranges, {spans[earlier]} and {span}")
            if earlier is None:
                spans.append(span)
            places.setdefault(port, {})[axis] = len(spans) - 1 if earlier is None else earlier
    if not spans:
        raise OptionError("dynamic names no dimension that varies; leave it out")
    return tuple(spans), places


def _is_range(given: Any) -> bool:
    plain = isinstance(given, tuple) and 2 <= len(given) <= 3
    return plain and all(isinstance(n, int) for n in given[-2:]) and isinstance(given[0], int | str)


def _named(name: str, given: Any) -> Any:
    return (name, *given) if isinstance(given, tuple) and len(given) == 2 else given


def _axis(name: str, axis: Any, shape: Extents | None) -> int:
    rank = None if shape is None else len(shape)
    if not isinstance(axis, int) or axis < 0 or (rank is not None and axis >= rank):
        raise OptionError(f"dynamic: input {name!r} has no axis {axis!r}")
    return axis


def _span(given: Any, name: str) -> Span:
    """A range as a caller may give it: (low, high), (name, low, high), a Python range, a torch.export.Dim."""
    step = 1
    if isinstance(given, range) and len(given) and given.step > 0:
        low, high, step = given[0], given[-1], given.step
    elif _is_range(given):
        *label, low, high = given
        name = label[0] if label else name
    elif hasattr(given, "min") and hasattr(given, "max") and hasattr(given, "__name__"):
        name, low, high = given.__name__, given.min, given.max
    else:
        raise OptionError(f"dynamic: the range of {name!r} is (low, high), (name, low, high) or a range, not {given!r}")
    low, high = int(low), int(high)
    if not 0 <= low <= high <= _MOST:
        raise OptionError(f"dynamic: {name!r} cannot be from {low} to {high}; give the least and the largest size")
    return Span(str(name), low, high, step)
