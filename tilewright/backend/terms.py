"""What a kernel takes, by its terms: arithmetic, bytes at every level, waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.target import MemoryLevel, Target
from tilewright.tile_graph.algebra.propagate import Size
from tilewright.tile_graph.traffic.touch import least, most
from tilewright.tile_graph.traffic.traffic import LeafTrace


@dataclass(frozen=True)
class FoundBytes:
    """Bytes that a kernel finds at a level when it reads them, and that it leaves there: each byte at one level."""

    read: Size = 0.0
    written: Size = 0.0
    read_runs: Size = 0.0  # stretches without a gap that these are walked in
    written_runs: Size = 0.0


@dataclass(frozen=True)
class LevelTerm:
    """What is found at a level, and the seconds that takes; the nearest level's are in the arithmetic's."""

    read: Size
    written: Size
    seconds: Size


@dataclass(frozen=True)
class Terms:
    """Of one kernel in one run of the model. The seconds are at least the longest of the terms, and at most their sum:
    arithmetic and movement hide each other but for a part."""

    seconds: Size = 0.0
    compute: Size = 0.0
    by_level: tuple[LevelTerm, ...] = ()  # by place in the target's levels
    waits: Size = 0.0  # starts of kernels and tiles, barriers, and what one tile waits for that no other hides

    @property
    def moving(self) -> Size:
        return sum((level.seconds for level in self.by_level), 0.0)


@dataclass(frozen=True)
class KernelWork:
    """All that a kernel does in one run of the model, on all its units together."""

    name: str
    tiles: Size  # that are handed out in one run of the kernel
    threads: int  # that share a tile
    starts: int  # of the kernel
    barriers: int  # of all its units, in all its runs
    leaves: Sequence[tuple[LeafTrace, Size]]  # with how often each runs
    found: Sequence[FoundBytes]  # by place in the target's levels


def rate(target: Target, level: MemoryLevel, active: Size, writes: bool = False) -> Size:
    """Bytes a second that each of so many units reads from a level, or writes to it, at once: all that the level gives,
    shared, and no more than one unit draws alone. What is farther away is never faster."""
    found: Size = 0.0
    for each in (level, *target.beyond(level)):
        found = most(found, _own_rate(target, each, active, writes))
    return found


def _own_rate(target: Target, level: MemoryLevel, active: Size, writes: bool) -> Size:
    one = level.writing if writes else level.bandwidth
    alone = one * max(1.0, level.alone / level.bandwidth)
    return least(alone, one * target.units / most(active, 1.0))


def level_terms(
    found: Sequence[FoundBytes], target: Target, active: Size, beyond_a_run: int = 0
) -> tuple[LevelTerm, ...]:
    """What is found at every level, and what that takes so many units that share it evenly beyond the nearest memory;
    every run costs so many lines more where it is found beyond what a unit has to itself."""
    made = []
    for level, each in zip(target.levels, found, strict=True):
        seconds: Size = 0.0
        if level in target.beyond(target.nearest):
            more = beyond_a_run * level.transaction if level in target.beyond(target.local) else 0
            seconds = (each.read + more * each.read_runs) / rate(target, level, active)
            seconds = seconds + (each.written + more * each.written_runs) / rate(target, level, active, writes=True)
            seconds = seconds / most(active, 1.0)
        made.append(LevelTerm(each.read, each.written, seconds))
    return tuple(made)


def hidden(one: Size, other: Size, exposed: float) -> Size:
    """Two things at once, of which the shorter hides behind the longer but for a part."""
    return most(one, other) + exposed * least(one, other)
