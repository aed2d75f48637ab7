"""Keeps a model's packed weights as one file in the cache and brings them back as aligned, read-only memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.errors import ToolError
from tilewright.runtime.cache import Cache, content_key
from tilewright.runtime.ownership import opened

WEIGHT_ALIGNMENT = 64
_STREAMED_FROM_BYTES = 64 << 20  # what a process has room for twice


class WeightsError(ToolError):
    """A weights file is missing or is not the one the model was compiled with."""


class WeightPieces(Protocol):
    """Weights that are made piece by piece, again at every walk; no more than one piece need be in memory."""

    @property
    def nbytes(self) -> int: ...
    def __iter__(self) -> Iterator[memoryview]: ...


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


def map_weights(path: Path, expected_bytes: int, *, trust: bool = False) -> NDArray[np.uint8]:
    """The file as read-only memory: loaded page by page as used, shared between processes. Pages start aligned."""
    try:
        with opened(path, trust=trust) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected_bytes:
                raise WeightsError(f"{path} has {size} bytes of weights, the model was compiled with {expected_bytes}")
            # An empty file cannot be mapped.
            return np.memmap(file, np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise WeightsError(f"cannot read the weights file {path}: {error.strerror}") from error


def aligned_copy(weights: bytes | bytearray | memoryview | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A private copy at the alignment that kernels rely on, for weights that are not worth a file."""
    data = np.frombuffer(weights, np.uint8)
    room = np.empty(data.size + WEIGHT_ALIGNMENT, np.uint8)
    start = -room.ctypes.data % WEIGHT_ALIGNMENT
    copy = room[start : start + data.size]
    copy[:] = data
    copy.flags.writeable = False
    return copy
