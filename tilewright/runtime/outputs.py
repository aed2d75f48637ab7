"""Memory of arrays that callers let go, given out again, instead of pages that the system clears."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Up to this size glibc's malloc keeps what is freed for the next array (its threshold for mapped memory rises no
# further); larger arrays go back to the system, and every page of the next one is mapped and cleared anew.
_LARGE = 32 << 20
_KEPT = 2  # `y = model(x)` in a loop holds one while the next is filled
# What the steps of one run pass on is let go together, and malloc then gives it back to the system all the same.
_PASSED = 64 << 10
_KEPT_PASSED = 16  # several parts of a batch are on their way, each from several ranks


class ArrayMemory:
    """Arrays of more than `least` bytes are given out again when nobody refers to them any more; of each size at most
    `kept` stay here."""

    def __init__(self, least: int, kept: int) -> None:
        self._least, self._most = least, kept
        self._kept: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock = Lock()
        # where references are not counted at once nobody knows who has let go
        self._is_counted = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        size = prod(shape) * dtype.itemsize
        if size <= self._least or not self._is_counted:
            return np.empty(shape, dtype)
        with self._lock:
            return self._bytes(size).view(dtype).reshape(shape)

    def _bytes(self, size: int) -> NDArray[np.uint8]:
        kept = self._kept.setdefault(size, [])
        for place in range(len(kept)):
            # a view of a view refers to the array that owns the memory: the list's reference and the argument are
            # left once all of them are gone
            if sys.getrefcount(kept[place]) <= 2:
                return kept[place][...]
        made = np.empty(size, np.uint8)
        if len(kept) < self._most:
            kept.append(made)
        return made[...]


def output_memory(forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> ArrayMemory | None:
    """For results of these forms; None where none of them is large."""
    sizes = [dtype.itemsize * prod(shape) for shape, dtype in forms]
    return ArrayMemory(_LARGE, _KEPT * len(forms)) if max(sizes, default=0) > _LARGE else None


def passing_memory() -> ArrayMemory:
    """For what steps of one run pass on to each other."""
    return ArrayMemory(_PASSED, _KEPT_PASSED)
