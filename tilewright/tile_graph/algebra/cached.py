"""Where the bytes of a tensor are when a step of a Scan wants them: the step before left the caches warm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cached:
    """The parts of a tensor in the nearest cache and in the tile level, and how long a byte takes that is farther."""

    near: float
    level: float
    far_byte: float  # seconds
    read: float = 1.0  # the part of the tensor that one step reads

    @property
    def far(self) -> float:
        return max(0.0, 1.0 - self.near - self.level)
