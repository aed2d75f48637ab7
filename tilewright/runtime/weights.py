"""Keeps a model's packed weights as one file in the cache and brings them back as aligned, read-only memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewright.errors import ToolError
from tilewright.runtime.cache import Cache, content_key
from tilewright.runtime.ownership import opened

WEIGHT_ALIGNMENT = 64


class WeightsError(ToolError):
    """A weights file is missing or is not the one the model was compiled with."""


def store_weights(weights: bytes | bytearray | memoryview, cache: Cache) -> Path:
    """The cached file with exactly these bytes."""
    data = memoryview(weights).cast("B")
    key = content_key("weights", data, suffix=".weights")
    found = cache.get(key)
    return found if found is not None else cache.put(key, data)


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
