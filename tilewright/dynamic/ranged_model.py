"""A model for ranges of sizes: rooms that cover them are compiled ahead, and a call finds the one it falls in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.calls.arguments import Array, Port, as_array, bind, random_arrays
from tilewright.dynamic.model import Compiled, LateModel
from tilewright.dynamic.saved_ranges import save
from tilewright.dynamic.spans import Places, Span, covering
from tilewright.dynamic.variants import OpenPort
from tilewright.errors import CutError, InputError, ModelError, UnsupportedError, printable
from tilewright.ir.forms.graph import Graph, Room

if TYPE_CHECKING:
    from tilewright.calls.profiles import Profile

_MOST_VARIANTS = 64  # that one artifact has
_FACTOR = 8  # of a room's largest number over its smallest

CompileGraph = Callable[[Graph], Compiled]


@dataclass(frozen=True)
class RangeVariant:
    """A compiled form of a model: for all sizes of its spans whose numbers are in these rooms."""

    spans: tuple[Span, ...]
    rooms: tuple[Room, ...]
    compile_seconds: float

    def __str__(self) -> str:
        parts = []
        for span, room in zip(self.spans, self.rooms, strict=True):
            low, high = span.size(room.low), span.size(room.high)
            parts.append(f"{span.name} {low}" if low == high else f"{span.name} {low} to {high}")
        return printable(", ".join(parts))


@dataclass(frozen=True)
class Ranged:
    """A variant and the model compiled for it."""

    variant: RangeVariant
    model: Compiled

    def has(self, numbers: Sequence[int]) -> bool:
        return all(room.low <= n <= room.high for room, n in zip(self.variant.rooms, numbers, strict=True))


class RangedModel(LateModel[OpenPort]):
    """A model compiled for ranges of sizes, called like a `Model`: nothing is compiled at a call. Calls from several
    threads at once are safe."""

    def __init__(
        self, name: str, inputs: Sequence[OpenPort], outputs: Sequence[OpenPort], spans: Sequence[Span],
        places: Places, kept: Sequence[Ranged],
    ) -> None:  # fmt: skip
        super().__init__(name, inputs, outputs)
        told = {place for axes in places.values() for place in axes.values()}
        untold = next((span for place, span in enumerate(spans) if place not in told), None)
        if untold is not None:
            raise ModelError(f"no input that the model reads has the dimension {untold.name!r}: leave it out")
        self._spans = tuple(spans)
        self._places = places
        self._kept = tuple(kept)
        self._compiled = len(kept)
        self._last = self._kept[-1]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The sizes it takes."""
        return self._spans

    @property
    def places(self) -> Places:
        """By input and axis the span that it varies over."""
        return self._places

    @property
    def kept(self) -> tuple[Ranged, ...]:
        return self._kept

    @property
    def variants(self) -> tuple[RangeVariant, ...]:
        """What it is made of: a compiled form for each range."""
        return tuple(kept.variant for kept in self._kept)

    def address_caller(self) -> None:
        """There is none: which code runs depends on the sizes."""

    def prepare(self, /, *args: Any, **named: Any) -> Compiled:
        """The compiled form that inputs like these run in."""
        return self._for(bind(self._names, args, named)).model

    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None:
        """Run the model on arrays in order and fill arrays of the caller."""
        values = bind(self._names, inputs, {})
        self._for(values).model.run_into(values, outputs, stream=stream)

    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile:
        """Time each kernel call: the median over `repeat` runs."""
        values = bind(self._names, args, named)
        return self._for(values).model.profile(*values, repeat=repeat)

    def random_inputs(self, seed: int = 0) -> dict[str, Array]:
        """Inputs of the largest sizes to try the model on."""
        high = {span.name: span.high for span in self._spans}
        ports = []
        for port in self._inputs:
            assert port.dtype is not None and port.shape is not None  # or there would be no ranges
            shape = tuple(high[n] if isinstance(n, str) else n for n in port.shape if n is not None)
            ports.append(Port(port.name, port.dtype, shape))
        return random_arrays(ports, seed)

    def explain(self) -> str:
        """What became of the model for each range."""
        ranges = "; ".join(map(str, self._spans))
        lines = [f"{printable(self._name)}: {len(self._kept)} compiled forms for {ranges}"]
        lines += [f"  {kept.variant} ({kept.variant.compile_seconds:.2f} s)" for kept in self._kept]
        for kept in self._kept:
            lines += ["", f"{kept.variant}", kept.model.explain()]
        return "\n".join(lines)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model for all its sizes to a directory that `tilewright.load` starts from (docs/shapes.md)."""
        save(self, Path(folder))

    def _results(self, values: list[Any]) -> list[Any]:
        return self._for(values).model(*values)

    def _for(self, values: Sequence[Any]) -> Ranged:
        numbers = self._numbers(values)
        found = next(kept for kept in self._kept if kept.has(numbers))
        self._last = found
        return found

    def _numbers(self, values: Sequence[Any]) -> tuple[int, ...]:
        """The number of every span, which all axes of one name tell alike."""
        found: dict[int, tuple[int, str]] = {}
        for port, value in zip(self._inputs, values, strict=True):
            shape = getattr(value, "shape", None)
            shape = tuple(as_array(value, port.name).shape if shape is None else shape)
            if port.shape is not None and len(shape) != len(port.shape):
                raise InputError(f"input {port.name!r} has {len(port.shape)} axes, and {len(shape)} were given")
            for axis, place in self._places.get(port.name, {}).items():
                where = f"axis {axis} of input {port.name!r}"
                number = self._spans[place].number(int(shape[axis]), where)
                before, other = found.setdefault(place, (number, where))
                if before != number:
                    sizes = self._spans[place].size(before), int(shape[axis])
                    raise InputError(f"{self._spans[place].name!r} is {sizes[0]} in {other} and {sizes[1]} in {where}")
        return tuple(found[place][0] for place in range(len(self._spans)))

    def _held(self) -> Sequence[Compiled]:
        return [kept.model for kept in self._kept]

    def _ran(self) -> Sequence[Compiled]:
        return [self._last.model]


class Family(Protocol):
    """Graphs of one model for numbers of its spans."""

    def exact(self, numbers: tuple[int, ...]) -> Graph:
        """For these alone."""

    def open(self, rooms: tuple[Room, ...]) -> Graph:
        """For all in rooms: its part has them, and forms."""


def compile_ranges(
    family: Family, spans: Sequence[Span], compile_open: CompileGraph, compile_graph: CompileGraph
) -> list[Ranged]:
    """The model compiled for rooms that cover its spans; a room that operators do not treat alike is halved."""
    waiting = list(product(*(covering(span, _FACTOR) for span in spans)))
    made: list[Ranged] = []
    while waiting:
        rooms = waiting.pop(0)
        start = time.perf_counter()
        try:
            is_one = all(room.low == room.high for room in rooms)
            model = compile_graph(family.exact(tuple(room.low for room in rooms))) if is_one else compile_open(
                family.open(rooms))  # fmt: skip
        except CutError as error:
            raise ModelError(f"not compiled for ranges of sizes, since its data decide shapes on the way: {error}; "
                             f"leave out dynamic= and what comes is compiled for") from error  # fmt: skip
        except (ModelError, UnsupportedError) as error:
            halves = list(product(*map(_halves, rooms)))
            if len(halves) == 1:
                raise
            waiting = [*halves, *waiting]
            if len(made) + len(waiting) > _MOST_VARIANTS:
                sizes = "; ".join(map(str, spans))
                raise ModelError(
                    f"not compiled for {sizes}: the sizes need more than {_MOST_VARIANTS} compiled forms, since "
                    f"{error}; leave out dynamic= and each is compiled when it comes"
                ) from error
            continue
        made.append(Ranged(RangeVariant(tuple(spans), rooms, time.perf_counter() - start), model))
    return made


def ranged_graphs(
    family: Family, spans: Sequence[Span], largest: Graph, places: Places, *, compile_open: CompileGraph,
    compile_graph: CompileGraph,
) -> RangedModel:  # fmt: skip
    """A model of whatever front end, which takes what its Graph for the largest sizes takes."""
    kept = compile_ranges(family, spans, compile_open, compile_graph)
    inputs = []
    for value in largest.inputs:
        varying = places.get(value.name, {})
        shape = tuple(spans[varying[k]].name if k in varying else int(n) for k, n in enumerate(value.shape))  # type: ignore[arg-type]
        inputs.append(OpenPort(value.name, value.dtype.numpy, shape))
    outputs = [OpenPort(port.name, port.dtype, port.shape) for port in kept[-1].model.outputs]
    return RangedModel(largest.name, inputs, outputs, spans, places, kept)


def _halves(room: Room) -> list[Room]:
    return [room] if room.low == room.high else [room.around(room.low), room.around(room.high)]
