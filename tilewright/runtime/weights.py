"""Keeps a model's packed weights as one file in the cache and brings them back as aligned, read-only memory; of several
models, those that are alike once."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.errors import ToolError
from tilewright.runtime.cache import Cache, content_key
from tilewright.runtime.ownership import opened

WEIGHT_ALIGNMENT = 64
_SHARED_MARK = b"TWSHARED"  # a file begins so whose weights lie in another: tw_shared in native/driver.h
_SHARED_HEAD, _SHARED_PLACE = struct.Struct("=8sqq"), struct.Struct("=qq")
_LOOK_BYTES = 256
_WORTH_SHARING_BYTES = 4096  # less is no page less
_WORTH_FINDING_BYTES = 1 << 14  # inside of others, all of which are looked through for such lengths
_STREAMED_FROM_BYTES = 64 << 20  # what a process has room for twice


class WeightsError(ToolError):
    """A weights file is missing or is not the one the model was compiled with."""


class WeightPieces(Protocol):
    """Weights that are made piece by piece, again at every walk; no more than one piece need be in memory."""

    @property
    def nbytes(self) -> int: ...
    def __iter__(self) -> Iterator[memoryview]: ...


@dataclass(frozen=True)
class WeightPiece:
    """Weights from a place among all of a model's on, up to where the next piece begins."""

    begin: int
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class MappedWeights:
    """All weights of a model, read-only, wherever they lie."""

    pieces: tuple[WeightPiece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.data.size for piece in self.pieces)

    def __iter__(self) -> Iterator[memoryview]:
        return (piece.data.data for piece in self.pieces)

    def cut(self, begins: Sequence[int]) -> MappedWeights:
        """In pieces that begin here too."""
        found = []
        for piece in self.pieces:
            end = piece.begin + piece.data.size
            inside = [begin for begin in begins if piece.begin < begin < end]
            found += [WeightPiece(a, piece.data[a - piece.begin : b - piece.begin])
                      for a, b in pairwise((piece.begin, *inside, end))]  # fmt: skip
        return MappedWeights(tuple(found))

    def shared(self, others: Iterable[MappedWeights]) -> MappedWeights:
        """The same bytes, of which those that are pieces of others, too, or lie in them where equal pieces follow each
        other, are theirs."""
        known: dict[tuple[int, bytes, bytes], list[NDArray[np.uint8]]] = {}
        lengths = {piece.data.size for piece in self.pieces}
        for piece in chain.from_iterable(other.pieces for other in others):
            known.setdefault(_look(piece.data), []).append(piece.data)
            for length in (n for n in lengths if n < piece.data.size and divides(n, piece.data.size)):
                for begin in range(0, piece.data.size, length):
                    part = piece.data[begin : begin + length]
                    known.setdefault(_look(part), []).append(part)

        def lying(piece: WeightPiece) -> WeightPiece:
            if piece.data.size < _WORTH_SHARING_BYTES:
                return piece
            alike = known.get(_look(piece.data), ())
            return next(
                (WeightPiece(piece.begin, a) for a in alike if np.array_equal(_words(a), _words(piece.data))), piece
            )

        return MappedWeights(tuple(map(lying, self.pieces)))


def divides(length: int, whole: int) -> bool:
    """Whether parts of such a length, worth to be looked for, follow each other in so many bytes."""
    return length >= _WORTH_FINDING_BYTES and length % WEIGHT_ALIGNMENT == 0 and whole % length == 0


def _look(data: NDArray[np.uint8]) -> tuple[int, bytes, bytes]:
    """What is compared first."""
    return data.size, data[:_LOOK_BYTES].tobytes(), data[-_LOOK_BYTES:].tobytes()


def _words(data: NDArray[np.uint8]) -> NDArray[Any]:
    return data.view(np.uint64) if data.size % 8 == 0 else data


Weights = bytes | bytearray | memoryview | WeightPieces


def weight_bytes(weights: Weights) -> int:
    return len(weights) if isinstance(weights, bytes | bytearray) else weights.nbytes


def weight_pieces(weights: Weights) -> Iterator[memoryview]:
    if isinstance(weights, bytes | bytearray | memoryview):
        yield memoryview(weights).cast("B")
    else:
        yield from weights


def store_weights(weights: Weights, cache: Cache) -> Path:
    """The cached file with exactly these bytes. Large ones are written as they are made, and get their name then."""
    size = weight_bytes(weights)
    if size >= _STREAMED_FROM_BYTES:
        return cache.put_pieces("weights", size, lambda: weight_pieces(weights), ".weights")
    data = b"".join(weight_pieces(weights))
    key = content_key("weights", data, suffix=".weights")
    found = cache.get(key)
    return found if found is not None else cache.put(key, data)


def write_weights(weights: Weights, path: Path) -> None:
    with path.open("wb") as file:
        for piece in weight_pieces(weights):
            file.write(piece)


def map_weights(path: Path, expected_bytes: int, *, trust: bool = False) -> MappedWeights:
    """The file as read-only memory: loaded page by page as used, shared between processes. Pages start aligned. Its
    weights may lie in another file, which several models share."""
    whole = _mapped(path, trust=trust)
    if whole.size == expected_bytes:
        return MappedWeights((WeightPiece(0, whole),) if whole.size else ())
    if whole[: len(_SHARED_MARK)].tobytes() == _SHARED_MARK:
        return _shared_weights(path, whole.tobytes(), expected_bytes, trust=trust)
    raise WeightsError(f"{path} has {whole.size} bytes of weights, the model was compiled with {expected_bytes}")


def _mapped(path: Path, *, trust: bool) -> NDArray[np.uint8]:
    try:
        with opened(path, trust=trust) as file:
            # An empty file cannot be mapped.
            size = os.fstat(file.fileno()).st_size
            return np.memmap(file, np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise WeightsError(f"cannot read the weights file {path}: {error.strerror}") from error


def shared_table(places: Sequence[tuple[int, int]], shared_bytes: int, name: str, own_bytes: int) -> bytes:
    """A file of weights that lie in another of so many bytes and this name: of each piece, where it begins among the
    `own_bytes` of the model, and where it lies there. No model's weights have its size."""
    rows = b"".join(_SHARED_PLACE.pack(*place) for place in places)
    text = _SHARED_HEAD.pack(_SHARED_MARK, shared_bytes, len(places)) + rows + name.encode() + b"\0"
    return text + b"\0" * (len(text) == own_bytes)


def _shared_weights(path: Path, table: bytes, expected_bytes: int, *, trust: bool) -> MappedWeights:
    damaged = WeightsError(f"{path} does not tell where the weights of this model lie; save the model again")
    try:
        _, size, count = _SHARED_HEAD.unpack_from(table)
        rows = list(_SHARED_PLACE.iter_unpack(table[_SHARED_HEAD.size :][: count * _SHARED_PLACE.size]))
        name = table[_SHARED_HEAD.size + count * _SHARED_PLACE.size :].rstrip(b"\0").decode()
    except (struct.error, ValueError) as error:
        raise damaged from error
    if not name or not rows or len(rows) != count or rows[0][0] != 0:
        raise damaged
    shared = _mapped(path.parent / name, trust=trust)
    if shared.size != size:
        raise damaged
    pieces = []
    for (begin, at), end in zip(rows, [*(begin for begin, _ in rows[1:]), expected_bytes], strict=True):
        if begin >= end or at < 0 or at % WEIGHT_ALIGNMENT or at + end - begin > size:
            raise damaged
        pieces.append(WeightPiece(begin, shared[at : at + end - begin]))
    return MappedWeights(tuple(pieces))


def aligned_copy(weights: bytes | bytearray | memoryview | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A private copy at the alignment that kernels rely on, for weights that are not worth a file."""
    data = np.frombuffer(weights, np.uint8)
    room = np.empty(data.size + WEIGHT_ALIGNMENT, np.uint8)
    start = -room.ctypes.data % WEIGHT_ALIGNMENT
    copy = room[start : start + data.size]
    copy[:] = data
    copy.flags.writeable = False
    return copy
