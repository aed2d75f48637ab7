"""A model for ranges of sizes: rooms that cover them, or blocks of a batch, are compiled ahead, and a call finds its
own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from tilewright.calls.arguments import Array, Port, as_array, bind, random_arrays
from tilewright.calls.profiles import Profile, joined
from tilewright.dynamic.model import Compiled, LateModel, Packed, fill, share_weights
from tilewright.dynamic.saved_ranges import save
from tilewright.dynamic.spans import Places, Span, covering
from tilewright.dynamic.variants import OpenPort
from tilewright.errors import CutError, InputError, ModelError, UnsupportedError, printable
from tilewright.ir.forms.blocks import Blocks
from tilewright.ir.forms.graph import Form, Graph, Room
from tilewright.ir.forms.tensor import Layout

T = TypeVar("T")
_MOST_VARIANTS = 64  # that one artifact has
_FACTOR = 16  # of a room's largest number over its smallest

CompileGraph = Callable[[Graph, Packed], Compiled]
Forms = Mapping[str, tuple[Form, ...]]
Rooms = tuple[Room, ...]
FindBlocks = Callable[[Callable[[int], Graph], int, int], Blocks | None]


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
        places: Places, kept: Sequence[Ranged], blocks: Blocks | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, inputs, outputs)
        told = {place for axes in places.values() for place in axes.values()}
        untold = next((span for place, span in enumerate(spans) if place not in told), None)
        if untold is not None:
            raise ModelError(f"no input that the model reads has the dimension {untold.name!r}: leave it out")
        self._spans = tuple(spans)
        self._places = places
        self._kept = tuple(kept)
        self._blocks = blocks
        self._compiled = len(kept)
        self._last: Sequence[Compiled] = [self._kept[-1].model]

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
    def blocks(self) -> Blocks | None:
        """How a batch is cut, where its samples go through the model in blocks: there is one dimension that varies
        then, and a compiled form for each size of a block."""
        return self._blocks

    @property
    def variants(self) -> tuple[RangeVariant, ...]:
        """What it is made of: a compiled form for each range."""
        return tuple(kept.variant for kept in self._kept)

    def address_caller(self) -> None:
        """There is none: which code runs depends on the sizes."""

    def prepare(self, /, *args: Any, **named: Any) -> Compiled:
        """The compiled form that inputs like these run in; in blocks, that of the first."""
        return self._parts(bind(self._names, args, named))[0][0]

    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None:
        """Run the model on arrays in order and fill arrays of the caller."""
        values = bind(self._names, inputs, {})
        parts = self._parts(values)
        if len(parts) == 1:
            parts[0][0].run_into(values, outputs, stream=stream)
            return
        if stream is not None:
            raise InputError("a stream is for outputs that lie on a GPU")
        fill(self._outputs, self._results(values), outputs)

    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile:
        """Time each kernel call: the median over `repeat` runs."""
        parts = self._parts(bind(self._names, args, named))
        return joined([model.profile(*own, repeat=repeat) for model, own in parts], repeat)

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
        sizes = [] if self._blocks is None else self._blocks.sizes
        cut = f", in blocks of {' and '.join(map(str, sizes))}" if sizes else ""
        lines = [f"{printable(self._name)}: {len(self._kept)} compiled forms for {ranges}{cut}"]
        lines += [f"  {kept.variant} ({kept.variant.compile_seconds:.2f} s)" for kept in self._kept]
        for kept in self._kept:
            lines += ["", f"{kept.variant}", kept.model.explain()]
        return "\n".join(lines)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model for all its sizes to a directory that `tilewright.load` starts from (docs/shapes.md)."""
        save(self, Path(folder))

    def _results(self, values: list[Any]) -> list[Any]:
        parts, seen = self._parts(values), self._cancels
        results: list[list[Any]] = []
        for model, own in parts:
            self._checked_cancels(seen)
            results.append(model(*own))
        if self._blocks is None or len(results) == 1:
            return results[0]
        dims = [self._blocks.outputs[port.name] for port in self._outputs]
        return [np.concatenate(found, dim) for found, dim in zip(zip(*results, strict=True), dims, strict=True)]

    def _parts(self, values: list[Any]) -> list[tuple[Compiled, list[Any]]]:
        """The compiled forms that values go through, and the part of them that each is given."""
        numbers = self._numbers(values)
        if self._blocks is None:
            parts = [(self._for(numbers), values)]
        else:
            parts = self._in_blocks(self._blocks, numbers[0], values)
        self._last = [model for model, _ in parts]
        return parts

    def _in_blocks(self, blocks: Blocks, samples: int, values: list[Any]) -> list[tuple[Compiled, list[Any]]]:
        sizes = blocks.of(samples)
        if len(sizes) == 1:
            return [(self._for(sizes), values)]
        cut = [(blocks.inputs.get(port.name), as_array(value, port.name))
               for port, value in zip(self._inputs, values, strict=True)]  # fmt: skip
        parts, begin = [], 0
        for size in sizes:
            own = [array if dim is None else _block(array, dim, begin, size, samples) for dim, array in cut]
            parts.append((self._for([size]), own))
            begin += size
        return parts

    def _for(self, numbers: Sequence[int]) -> Compiled:
        return next(kept.model for kept in self._kept if kept.has(numbers))

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
        return self._last


class Family(Protocol):
    """Graphs of one model for numbers of its spans."""

    def exact(self, numbers: tuple[int, ...]) -> Graph:
        """For these alone."""

    def open(self, rooms: tuple[Room, ...]) -> Graph:
        """For all in rooms: its part has them, and forms."""


@dataclass(frozen=True)
class Ways:
    """How a family's Graphs are compiled, with constants packed as others have them: one with rooms and the forms of
    what it gives, one for its sizes alone; and which blocks a batch goes in."""

    output_forms: Callable[[Graph], Forms]
    compile_open: Callable[[Graph, Forms, Packed], Compiled]
    compile_graph: CompileGraph
    find_blocks: FindBlocks


def compile_ranges(family: Family, spans: Sequence[Span], ways: Ways) -> tuple[list[Ranged], Blocks | None]:
    """The model compiled for all its sizes, with one copy of the weights that its forms have in common."""
    made, blocks = _compile_ranges(family, spans, ways)
    share_weights(ranged.model for ranged in made)
    return made, blocks


def _compile_ranges(family: Family, spans: Sequence[Span], ways: Ways) -> tuple[list[Ranged], Blocks | None]:
    """The model compiled for sizes of blocks, or for rooms that cover its spans; a room that operators do not treat
    alike is halved."""
    blocks = None
    if len(spans) == 1 and spans[0].step == 1:
        blocks = ways.find_blocks(lambda samples: family.exact((samples,)), spans[0].low, spans[0].high)
    if blocks is not None:
        alike = _Alike(ways)
        sizes = sorted(blocks.sizes, reverse=True)
        return [alike.compiled(spans, (Room(n, n),), family.exact((n,)), None) for n in sizes][::-1], blocks

    def opened(rooms: Rooms) -> tuple[Rooms, Graph, Forms | None]:
        if all(room.low == room.high for room in rooms):
            return rooms, family.exact(tuple(room.low for room in rooms)), None
        graph = family.open(rooms)
        return rooms, graph, ways.output_forms(graph)

    alike = _Alike(ways)

    def compiled(rooms: Rooms) -> Ranged:
        return alike.compiled(spans, *known.pop(rooms, None) or opened(rooms))

    # what operators treat alike is known before anything is compiled
    known = {found[0]: found for found in _covered(spans, product(*(covering(s, _FACTOR) for s in spans)), opened)}
    made = _covered(spans, list(known)[::-1], compiled)
    return sorted(made, key=lambda ranged: [room.low for room in ranged.variant.rooms]), None


def _covered(spans: Sequence[Span], rooms: Iterable[Rooms], give: Callable[[Rooms], T]) -> list[T]:
    """What is given for all rooms; those for which there is nothing are halved."""
    waiting, made = list(rooms), list[T]()
    while waiting:
        room = waiting.pop(0)
        try:
            made.append(give(room))
        except CutError as error:
            raise ModelError(f"not compiled for ranges of sizes, since its data decide shapes on the way: {error}; "
                             f"leave out dynamic= and what comes is compiled for") from error  # fmt: skip
        except (ModelError, UnsupportedError) as error:
            halves = list(product(*map(_halves, room)))
            if len(halves) == 1:
                raise
            waiting = [*halves, *waiting]
            if len(made) + len(waiting) > _MOST_VARIANTS:
                raise _too_many(spans, error) from error
    return made


def _too_many(spans: Sequence[Span], why: Exception) -> ModelError:
    sizes, first = "; ".join(map(str, spans)), spans[0]
    steps = f"range({first.low}, {first.high + 1}, {2 * first.step})"
    return ModelError(
        f"not compiled for {sizes}: the sizes need more than {_MOST_VARIANTS} compiled forms, since {why}; give sizes "
        f"in steps that operators treat alike, as {steps}, or leave out dynamic= and each is compiled when it comes"
    )


@dataclass
class _Alike:
    """Compiles forms of one model, the largest sizes first: those after it read weights as it has them packed."""

    ways: Ways
    packed: dict[str, Layout] = field(default_factory=dict)

    def compiled(self, spans: Sequence[Span], rooms: Rooms, graph: Graph, forms: Forms | None) -> Ranged:
        start, packed = time.perf_counter(), tuple(self.packed.items())
        if forms is None:
            model = self.ways.compile_graph(graph, packed)
        else:
            model = self.ways.compile_open(graph, forms, packed)
        self.packed = {**dict(model.packed), **self.packed}
        return Ranged(RangeVariant(tuple(spans), rooms, time.perf_counter() - start), model)


def ranged_graphs(
    family: Family, spans: Sequence[Span], largest: Graph, places: Places, *, ways: Ways
) -> RangedModel:  # fmt: skip
    """A model of whatever front end, which takes what its Graph for the largest sizes takes."""
    kept, blocks = compile_ranges(family, spans, ways)
    inputs = []
    for value in largest.inputs:
        varying = places.get(value.name, {})
        shape = tuple(spans[varying[k]].name if k in varying else int(n) for k, n in enumerate(value.shape))  # type: ignore[arg-type]
        inputs.append(OpenPort(value.name, value.dtype.numpy, shape))
    outputs = [OpenPort(port.name, port.dtype, port.shape) for port in kept[-1].model.outputs]
    return RangedModel(largest.name, inputs, outputs, spans, places, kept, blocks)


def _block(array: Array, dim: int, begin: int, size: int, samples: int) -> Array:
    """Samples from `begin` on, of which each may have several places along a dimension."""
    each = array.shape[dim] // samples
    return array[(slice(None),) * dim + (slice(begin * each, (begin + size) * each),)]


def _halves(room: Room) -> list[Room]:
    return [room] if room.low == room.high else [room.around(room.low), room.around(room.high)]
