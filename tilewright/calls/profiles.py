"""Times of a compiled model, kernel call by kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class KernelTime:
    """One kernel call of a run: its place in the order of calls, and the median time over the repeats."""

    position: int
    kernel: str
    nanoseconds: int


@dataclass(frozen=True)
class Profile:
    """Time per kernel call; prints as a table, the slowest first."""

    calls: tuple[KernelTime, ...]
    repeat: int

    @property
    def total_nanoseconds(self) -> int:
        return sum(call.nanoseconds for call in self.calls)

    def to_json(self) -> dict[str, Any]:
        calls = [{"position": c.position, "kernel": c.kernel, "us": c.nanoseconds / 1e3} for c in self.calls]
        return {"repeat": self.repeat, "total_us": self.total_nanoseconds / 1e3, "calls": calls}

    def __str__(self) -> str:
        width = max((len(call.kernel) for call in self.calls), default=6)
        total = max(self.total_nanoseconds, 1)
        lines = [f"{'call':>5}  {'kernel':<{width}}  {'us':>10}  {'share':>6}"]
        for call in sorted(self.calls, key=lambda c: (-c.nanoseconds, c.position)):
            share = 100.0 * call.nanoseconds / total
            lines.append(f"{call.position:>5}  {call.kernel:<{width}}  {call.nanoseconds / 1e3:>10.1f}  {share:>5.1f}%")
        lines.append(f"{'':>5}  {'all':<{width}}  {self.total_nanoseconds / 1e3:>10.1f}  100.0%")
        return "\n".join(lines)


def joined(profiles: Sequence[Profile], repeat: int) -> Profile:
    """The profile of runs that follow each other."""
    calls = [call for profile in profiles for call in profile.calls]
    return Profile(tuple(replace(call, position=place) for place, call in enumerate(calls)), repeat)
