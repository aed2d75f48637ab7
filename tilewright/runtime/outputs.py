"""Memory for outputs: large arrays that a caller has let go are given out again, instead of pages the system clears."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Up to this size glibc's malloc keeps what is freed for the next array (its threshold for mapped memory rises no
# further); larger arrays go back to the system, and every page of the next one is mapped and cleared anew.
_LARGE = 32 << 20
_KEPT = 2  # `y = model(x)` in a loop holds one while the next is filled


class OutputMemory:
    """Arrays of the given forms, new ones or such as nobody else refers to any more."""

    def __init__(self, forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self._forms = tuple(forms)
        self._kept: tuple[list[NDArray[Any]], ...] = tuple([] for _ in forms)
        self._lock = Lock()

    def arrays(self) -> list[NDArray[Any]]:
        with self._lock:
            return [self._array(*form, kept) for form, kept in zip(self._forms, self._kept, strict=True)]

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any], kept: list[NDArray[Any]]) -> NDArray[Any]:
        for place in range(len(kept)):
            # a view of a view refers to the array that owns the memory: the list's reference and the argument are
            # left once all of them are gone
            if sys.getrefcount(kept[place]) <= 2:
                return kept[place][...]
        made = np.empty(shape, dtype)
        if made.nbytes <= _LARGE or len(kept) == _KEPT:
            return made
        kept.append(made)
        return made[...]


def output_memory(forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> OutputMemory | None:
    """None where no output is large, or where references are not counted at once: arrays are then new every time."""
    is_counted = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
    sizes = [dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for shape, dtype in forms]
    return OutputMemory(forms) if is_counted and max(sizes, default=0) > _LARGE else None
