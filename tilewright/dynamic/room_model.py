"""A model whose dimensions a call tells, inside the rooms that it is compiled for: called with arrays as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.calls.arguments import Array, as_array, bind
from tilewright.dynamic.model import Compiled, LateModel, fill
from tilewright.dynamic.stages import cropped, padded
from tilewright.dynamic.variants import OpenPort
from tilewright.errors import InputError
from tilewright.ir.forms.graph import Form, Graph, Room

if TYPE_CHECKING:
    from tilewright.calls.profiles import Profile


@dataclass(frozen=True)
class RoomPort:
    """An input or output, its extents as they follow from the numbers."""

    name: str
    dtype: np.dtype[Any]
    forms: tuple[Form, ...]

    @property
    def open(self) -> OpenPort:
        return OpenPort(self.name, self.dtype, tuple(None if f.varies else f.constant for f in self.forms))


class RoomModel(LateModel[OpenPort]):
    """One compiled model for all numbers in its rooms. Arrays are given and come as large as they are; the kernels see
    them with room behind their elements, and are told how many there are."""

    def __init__(
        self, name: str, rooms: Sequence[Room], takes: Sequence[RoomPort], gives: Sequence[RoomPort], model: Compiled
    ) -> None:
        super().__init__(name, [port.open for port in takes], [port.open for port in gives])
        self._model = model
        self._rooms = tuple(rooms)
        self._takes, self._gives = tuple(takes), tuple(gives)
        self._shapes = [tuple(f.most(rooms) for f in port.forms) for port in takes]
        self._tellers = [_teller(place, takes) for place in range(len(rooms))]

    @staticmethod
    def of(graph: Graph, model: Compiled, forms: Mapping[str, tuple[Form, ...]]) -> RoomModel:
        """A Graph with rooms as it was compiled; `forms` are of the outputs' extents, by name."""
        part = graph.part
        assert part is not None and part.rooms
        takes = [RoomPort(v.name, v.dtype.numpy, part.forms.get(v.name, tuple(Form(int(n)) for n in v.shape)))  # type: ignore[arg-type]
                 for v in graph.inputs]  # fmt: skip
        gives = [RoomPort(port.name, port.dtype, forms[port.name]) for port in model.outputs]
        return RoomModel(graph.name, part.rooms, takes, gives, model)

    @property
    def rooms(self) -> tuple[Room, ...]:
        return self._rooms

    @property
    def takes(self) -> tuple[RoomPort, ...]:
        return self._takes

    @property
    def gives(self) -> tuple[RoomPort, ...]:
        return self._gives

    @property
    def model(self) -> Compiled:
        """What is compiled: it takes arrays with room, and the numbers behind them."""
        return self._model

    def address_caller(self) -> None:
        """There is none: arrays are given with as much room as they have."""

    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None:
        """Run the model on arrays in order and fill arrays of the caller."""
        if stream is not None:
            raise InputError("a stream is for outputs that lie on a GPU")
        fill(self._outputs, self._results(bind(self._names, inputs, {})), outputs)

    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile:
        """Time each kernel call: the median over `repeat` runs."""
        numbers, given = self._given(bind(self._names, args, named))
        return self._model.profile(*given, np.array(numbers, np.int64), repeat=repeat)

    def explain(self) -> str:
        return self._model.explain()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """What is compiled, as a directory: a program that starts from it gives arrays with room, and the numbers."""
        self._model.save(folder)

    def at(self, numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
        """Run the model on arrays in order, where the caller knows the numbers."""
        arrays = [as_array(value, name) for value, name in zip(values, self._names, strict=True)]
        return self._run_at(numbers, self._with_room(numbers, arrays))

    def _results(self, values: list[Any]) -> list[Any]:
        return self._run_at(*self._given(values))

    def _run_at(self, numbers: Sequence[int], given: Sequence[Array]) -> list[Any]:
        results = self._model(*given, np.array(numbers, np.int64))
        return [cropped(result, port.forms, numbers) for result, port in zip(results, self._gives, strict=True)]

    def _given(self, values: Sequence[Any]) -> tuple[tuple[int, ...], list[Array]]:
        """The numbers that the arrays tell, and the arrays with room."""
        arrays = [as_array(value, name) for value, name in zip(values, self._names, strict=True)]
        numbers = []
        for room, teller in zip(self._rooms, self._tellers, strict=True):
            if teller is None:
                raise InputError("no input's extent tells the numbers of a run: use `at`, which is told them")
            place, axis, form = teller
            factor = next(f for f in form.factors if f)
            size = arrays[place].shape[axis] if axis < arrays[place].ndim else -1
            number, rest = divmod(size - form.constant, factor)
            if rest or not room.low <= number <= room.high:
                raise InputError(f"axis {axis} of input {self._names[place]!r} is {size}, which is not among the sizes "
                                 f"that this was compiled for")  # fmt: skip
            numbers.append(number)
        return tuple(numbers), self._with_room(numbers, arrays)

    def _with_room(self, numbers: Sequence[int], arrays: Sequence[Array]) -> list[Array]:
        for port, array in zip(self._takes, arrays, strict=True):
            shape = tuple(f.at(numbers) for f in port.forms)
            if array.shape != shape or array.dtype != port.dtype:
                raise InputError(
                    f"input {port.name!r} must be {port.dtype.name} of shape {shape} beside the other inputs, not "
                    f"{array.dtype.name} of shape {array.shape}"
                )
        return [padded(array, room) for array, room in zip(arrays, self._shapes, strict=True)]

    def _held(self) -> Sequence[Compiled]:
        return [self._model]

    def _ran(self) -> Sequence[Compiled]:
        return [self._model]


def _teller(place: int, takes: Sequence[RoomPort]) -> tuple[int, int, Form] | None:
    """An input and an axis of it whose extent tells a number."""
    for which, port in enumerate(takes):
        for axis, form in enumerate(port.forms):
            if [k for k, factor in enumerate(form.factors) if factor] == [place]:
                return which, axis, form
    return None
