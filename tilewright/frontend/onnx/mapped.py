"""Large tensors of model files stay in their files: the model is read without them, and each is mapped where it lies.

Such a tensor says where that is as ONNX says it of external data, with the file's whole path and our mark. Pages
of a mapped file are the system's to drop, so that weights of any size are compiled in little memory.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from tilewright.errors import ModelError
from tilewright.ir.forms import dtypes

MAPPED_FROM_BYTES = 1 << 20  # of a tensor; smaller ones are read
_READ_WHOLE = 64 << 20  # bytes of a model file that is read as it is
_MAPPED = frozenset(d.onnx for d in dtypes.ALL if d.kind in "fiu")  # elements that lie in files as they do in memory
_MARK = secrets.token_hex(16)  # of paths that were written here: no file can know it

# fields of the messages of onnx.proto
_GRAPH, _INITIALIZER, _RAW_DATA, _LOCATION, _EXTERNAL = 7, 5, 9, 14, 13
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def model_bytes(path: Path) -> bytes:
    """The file, of a large one without the data of large initializers: those say where in it they lie."""
    if path.stat().st_size < _READ_WHOLE:
        return path.read_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return b"".join(_model(memoryview(data), str(path.resolve())))
        except _NotPlain:
            return bytes(data)


def point_to_files(model: onnx.ModelProto, folder: Path) -> None:
    """Large initializers that lie in files of the model's folder say where, whole path and all."""
    root = folder.resolve()
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location != onnx.TensorProto.EXTERNAL or "location" not in entries or is_mapped(tensor):
            continue
        place = root / entries["location"]
        # anything but a plain file inside the folder is left to ONNX, which refuses it or reads it
        if place.resolve() != place or not place.is_relative_to(root) or not place.is_file():
            continue
        try:
            first = int(entries.get("offset", 0))
            count = int(entries.get("length", place.stat().st_size - first))
        except ValueError:
            continue
        if tensor.data_type in _MAPPED and count >= MAPPED_FROM_BYTES and first >= 0:
            _say_where(tensor, str(place), first, count)


def is_mapped(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor lies in a file whose path was written here; what a model file says itself is not trusted."""
    return any(entry.key == _MARK for entry in tensor.external_data)


def mapped_array(tensor: onnx.TensorProto, label: str) -> np.ndarray:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    first, count = int(entries["offset"]), int(entries["length"])
    dtype, shape = dtypes.by_onnx(tensor.data_type), tuple(tensor.dims)
    assert dtype is not None
    if any(n < 0 for n in shape) or np.prod(shape, dtype=object) * dtype.bytes != count:
        raise ModelError(f"{label} cannot be read: {count} bytes are no {dtype.name}{list(shape)}")
    try:
        # a file that is too short is refused here
        return np.memmap(entries["location"], dtype.numpy, "r", first, shape)
    except (OSError, ValueError) as error:
        raise ModelError(f"{label} cannot be read: {error}") from error


def _say_where(tensor: onnx.TensorProto, location: str, first: int, count: int) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(first)), ("length", str(count)), (_MARK, "")):
        tensor.external_data.add(key=key, value=value)


# the wire format of protobuf: fields one behind the other, messages and bytes behind their length


class _NotPlain(Exception):
    """The bytes are damaged, or say something twice; protobuf's own reader tells what of it."""


def _model(data: memoryview, location: str) -> Iterator[bytes | memoryview]:
    seen = False
    for number, kind, start, body, end in _fields(data, 0, len(data)):
        if number != _GRAPH or kind != _BYTES:
            yield data[start:end]
            continue
        if seen:
            raise _NotPlain
        seen = True
        yield from _message(_GRAPH, list(_graph(data, body, end, location)))


def _graph(data: memoryview, first: int, last: int, location: str) -> Iterator[bytes | memoryview]:
    for number, kind, start, body, end in _fields(data, first, last):
        if number == _INITIALIZER and kind == _BYTES and end - body >= MAPPED_FROM_BYTES:
            yield from _message(_INITIALIZER, _tensor(data, body, end, location))
        else:
            yield data[start:end]


def _tensor(data: memoryview, first: int, last: int, location: str) -> list[bytes | memoryview]:
    fields = list(_fields(data, first, last))
    raw = [(body, end) for number, kind, _, body, end in fields if number == _RAW_DATA and kind == _BYTES]
    others = [data[start:end] for number, _, start, _, end in fields if number != _RAW_DATA]
    tensor = onnx.TensorProto()
    tensor.ParseFromString(b"".join(others))
    if len(raw) != 1 or {_LOCATION, _EXTERNAL} & {f[0] for f in fields} or tensor.data_type not in _MAPPED:
        return [data[first:last]]
    ((begin, end),) = raw
    _say_where(tensor, location, begin, end - begin)
    return [tensor.SerializeToString()]


def _message(number: int, parts: list[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    yield _varint(number << 3 | _BYTES) + _varint(sum(map(len, parts)))
    yield from parts


def _fields(data: memoryview, at: int, last: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, kind, where the field begins, where its content does, and where it ends."""
    while at < last:
        key, body = _number(data, at, last)
        kind, start = key & 7, at
        if kind == _VARINT:
            _, at = _number(data, body, last)
        elif kind == _BYTES:
            length, body = _number(data, body, last)
            at = body + length
        elif kind in (_FIXED64, _FIXED32):
            at = body + (8 if kind == _FIXED64 else 4)
        else:
            raise _NotPlain
        if at > last:
            raise _NotPlain
        yield key >> 3, kind, start, body, at


def _number(data: memoryview, at: int, last: int) -> tuple[int, int]:
    value = shift = 0
    while at < last and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise _NotPlain


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])
