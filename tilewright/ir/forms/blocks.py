"""A batch in blocks that go through a model one after the other, each of a size that the model is compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """Sizes of blocks, the largest first and 1 last, and by name the dimension that inputs and outputs have their
    samples along; inputs without one are every block's."""

    sizes: tuple[int, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]

    def __post_init__(self) -> None:
        if self.sizes[-1:] != (1,) or list(self.sizes) != sorted(set(self.sizes), reverse=True):
            raise ValueError(f"blocks of {self.sizes} do not make up every batch")

    def of(self, samples: int) -> list[int]:
        """The blocks of so many samples, in order."""
        return in_blocks(samples, self.sizes)


def in_blocks(samples: int, sizes: Sequence[int]) -> list[int]:
    """As many of each size as go in, from the first on."""
    found: list[int] = []
    for size in sizes:
        found += [size] * (samples // size)
        samples %= size
    return found
