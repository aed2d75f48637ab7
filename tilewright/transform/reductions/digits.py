"""Constants that were computed anew, in the type that they had: none where that has too few digits for them."""

from __future__ import annotations

import numpy as np

from tilewright.ir.forms.dtypes import DType

_LOST = 2.0  # times half the distance of neighbouring numbers of a type, of a sum's largest constant


def narrowed(exact: np.ndarray, dtype: DType, summed: tuple[int, ...]) -> np.ndarray | None:
    """The numbers in a type; None where they are too small or too large for it, beside those they are summed with."""
    wide = np.asarray(exact, np.float64)
    found = np.asarray(wide, dtype.numpy)
    if not found.size:
        return found
    lost = np.abs(np.asarray(found, np.float64) - wide).max(summed)
    allowed = _LOST * _spacing(dtype) / 2 * np.abs(wide).max(summed)
    return found if bool(np.all(lost <= allowed)) else None


def _spacing(dtype: DType) -> float:
    """From 1 to the next number of a type."""
    one = np.ones((), dtype.numpy)
    bits = np.dtype(f"u{dtype.numpy.itemsize}")
    return float((one.view(bits) + np.ones((), bits)).astype(bits).view(dtype.numpy)) - 1.0
