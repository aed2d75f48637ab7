"""Graphs and tables of a model in parts as JSON, with their arrays in a file beside it: plain data, never code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import IO, Any

import numpy as np

from tilewright.calls.arguments import Array
from tilewright.dynamic.borders import Border
from tilewright.dynamic.conforming import record
from tilewright.dynamic.stages import Tie
from tilewright.errors import InternalError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.graph import Form, Graph, Node, Part, Room, Value

_ALIGNMENT = 64  # bytes, of every array in the file
# What JSON has no word for is an object of one of these keys; a dictionary of any keys is a list of pairs.
_RECORDS = {kind.__name__: kind for kind in (Graph, Node, Value, Part, Room, Form, Tie, Border)}


class Encoder:
    """Values as what JSON knows; their arrays go to the file, each once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._rows: dict[int, Any] = {}
        self._arrays: list[Array] = []  # alive, so that no other array gets their identity

    def value(self, given: Any) -> Any:
        if given is None or isinstance(given, bool | int | float | str):
            return given
        if isinstance(given, np.generic):
            return self.value(given.item())
        if isinstance(given, list):
            return [self.value(item) for item in given]
        if isinstance(given, tuple):
            return {"tuple": [self.value(item) for item in given]}
        if isinstance(given, set | frozenset):
            return {"set": sorted((self.value(item) for item in given), key=repr)}
        if isinstance(given, Mapping):
            return {"map": [[self.value(key), self.value(item)] for key, item in given.items()]}
        if isinstance(given, bytes):
            return {"bytes": given.hex()}
        if isinstance(given, dtypes.DType):
            return {"type": given.name}
        if isinstance(given, np.dtype):
            return {"numpy": _type_of(given).name}
        if isinstance(given, np.ndarray):
            return self._array(given)
        name = type(given).__name__
        if _RECORDS.get(name) is not type(given):
            raise InternalError(f"a {name} has no place in a saved model")
        return {name: [self.value(getattr(given, field.name)) for field in fields(given)]}

    def _array(self, array: Array) -> Any:
        if array.dtype.kind in "OUS":
            return {"strings": [self.value(list(array.shape)), [self.value(item) for item in array.ravel().tolist()]]}
        if id(array) not in self._rows:
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            place = self._file.tell()
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self._arrays.append(array)
            self._rows[id(array)] = {"array": [_type_of(array.dtype).name, list(array.shape), place]}
        return self._rows[id(array)]


class RecordDecoder:
    """The values again; arrays are parts of `data`, the file as it lies in memory. What is not of this form raises
    ValueError, KeyError or TypeError."""

    def __init__(self, data: Array) -> None:
        self._data = data
        self._arrays: dict[tuple[Any, ...], Array] = {}

    def value(self, row: Any) -> Any:
        if isinstance(row, list):
            return [self.value(item) for item in row]
        if not isinstance(row, dict):
            return row
        ((kind, inside),) = row.items()
        match kind:
            case "tuple":
                return tuple(self.value(item) for item in inside)
            case "set":
                return {self.value(item) for item in inside}
            case "map":
                return {self.value(key): self.value(item) for key, item in inside}
            case "bytes":
                return bytes.fromhex(inside)
            case "type":
                return dtypes.by_name(inside)
            case "numpy":
                return dtypes.by_name(inside).numpy
            case "strings":
                shape, items = inside
                return np.array([self.value(item) for item in items], object).reshape(shape)
            case "array":
                return self._array(*inside)
        return record(_RECORDS[kind], *(self.value(item) for item in inside))

    def _array(self, name: str, shape: list[int], place: int) -> Array:
        key = (name, tuple(shape), place)
        if key not in self._arrays:
            dtype = dtypes.by_name(name).numpy
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            self._arrays[key] = self._data[place : place + size].view(dtype).reshape(shape)
        return self._arrays[key]


def _type_of(dtype: np.dtype[Any]) -> dtypes.DType:
    found = dtypes.by_numpy(dtype)
    if found is None:
        raise InternalError(f"arrays of {dtype.name} have no place in a saved model")
    return found
