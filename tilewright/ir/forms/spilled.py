"""Large arrays that a stage makes of constants, kept in a file without a name instead of in memory."""

from __future__ import annotations

import tempfile

import numpy as np

_FROM_BYTES = 32 << 20  # smaller ones are not worth a file


def spilled(array: np.ndarray) -> np.ndarray:
    """The same elements; of a large array, mapped from a file that goes with it: its pages are the system's to drop.
    Where there is no room for the file, the array itself."""
    if array.nbytes < _FROM_BYTES or isinstance(array, np.memmap) or array.dtype.hasobject:
        return array
    try:
        with tempfile.TemporaryFile(prefix="tilewright-") as file:
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(file)
            return np.memmap(file, array.dtype, "r", shape=array.shape)
    except OSError:
        return array
