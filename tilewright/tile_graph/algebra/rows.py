"""Numbers of candidate tiles by their sizes: batches of candidates overlap, and every tile is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.tile_graph.algebra.propagate import Size

_MOST_CODES = 1 << 62
_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Rows:
    """A sorted table: one number stands for the sizes of a tile along all axes."""

    codes: _Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    values: _Array = field(default_factory=lambda: np.zeros(0))

    def of(self, sizes: Sequence[Size], extents: Sequence[int], work: Callable[[list[Size]], Size]) -> Size:
        """An entry a candidate; `work` gives them by sizes, each by itself, and is asked for new ones alone."""
        codes: Size = 0
        step = 1
        for size, extent in zip(sizes, extents, strict=True):
            codes = codes + size * step
            step *= extent + 1
        if not isinstance(codes, np.ndarray) or step > _MOST_CODES:
            return work(list(sizes))
        places, missing = self._find(codes)
        if missing.any():
            new, first = np.unique(codes[missing], return_index=True)
            picked = np.flatnonzero(missing)[first]
            found = work([n[picked] if isinstance(n, np.ndarray) else n for n in sizes])
            self._add(new, np.broadcast_to(found, new.shape))
            places, _ = self._find(codes)
        return self.values[places]

    def _find(self, codes: _Array) -> tuple[_Array, _Array]:
        """Where candidates are, and which are not there yet."""
        places = np.searchsorted(self.codes, codes)
        if not len(self.codes):
            return places, np.ones(codes.shape, dtype=bool)
        places = np.minimum(places, len(self.codes) - 1)
        return places, self.codes[places] != codes

    def _add(self, codes: _Array, values: _Array) -> None:
        every = np.concatenate((self.codes, codes))
        order = np.argsort(every)
        self.codes, self.values = every[order], np.concatenate((self.values, values))[order]
