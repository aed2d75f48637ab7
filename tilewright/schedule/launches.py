"""Kernels that do not wait for each other as one launch, where the backend runs them so and less time is predicted.

A kernel that reads little of what one before it computes may compute that again, rather than wait for it: of a result
that is stored as a whole for others, the row that a classifier looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilewright.backend.protocol import Backend
from tilewright.schedule.connect import Group, microseconds
from tilewright.schedule.constants import NEARBY
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Estimate, Tile


@dataclass(frozen=True)
class Unit:
    """What is put in order as a whole: a kernel, kernels of one launch, or all steps of a Scan; what it writes and
    needs, by name."""

    tile: Tile
    writes: frozenset[str]
    needs: frozenset[str]
    group: Group | None = None  # of a kernel outside Scans


Again = Callable[[Group, Group], Unit | None]


def share_launches(
    units: Sequence[Unit], given: frozenset[str], again: Again, backend: Backend, target: Target
) -> list[Unit]:
    """Units, each after what it needs, with some of them as one. `given` are results of the model; `again` makes the
    second of two kernels compute what it reads of the first."""
    return _Launches(list(units), given, again, backend, target).found()


class _Launches:
    def __init__(
        self, units: list[Unit], given: frozenset[str], again: Again, backend: Backend, target: Target
    ) -> None:
        self.units, self.given, self.again = units, given, again
        self.backend, self.target = backend, target
        self.able = [u.tile.is_kernel and backend.share_launch((u.tile,), target) is not None for u in units]
        self.maker = {name: i for i, unit in enumerate(units) for name in unit.writes}
        self.before: list[int] = []  # by unit: a bit for each that it waits for, also through others
        for unit in units:
            self.before.append(self._waits(unit))
        self.taken: set[int] = set()
        self.with_others: dict[int, list[Unit]] = {}

    def _waits(self, unit: Unit) -> int:
        found = 0
        for name in unit.needs:
            place = self.maker.get(name)
            if place is not None and place < len(self.before):
                found |= self.before[place] | 1 << place
        return found

    def found(self) -> list[Unit]:
        for number in range(len(self.units)):
            while number not in self.taken and self.able[number] and self._grow(number):
                pass
        return [self._joined(self.with_others.get(i, [u])) for i, u in enumerate(self.units) if i not in self.taken]

    def _grow(self, number: int) -> bool:
        """The best of the kernels nearby taken into the launch of one; whether there was one."""
        members = self.with_others.get(number, [self.units[number]])
        best: tuple[float, int, Unit] | None = None
        for place in range(number + 1, min(number + 1 + NEARBY, len(self.units))):
            if place in self.taken or not self.able[place]:
                continue
            unit = self._apart(number, place)
            saved = None if unit is None else self._saved(members, self.units[place], unit)
            if unit is not None and saved is not None and (best is None or saved > best[0]):
                best = saved, place, unit
        if best is None:
            return False
        _, place, unit = best
        self.with_others[number] = [*members, unit]
        self.taken.add(place)
        self._merge(number, place, self._waits(unit))
        return True

    def _apart(self, number: int, place: int) -> Unit | None:
        """A later unit as it waits for nothing of an earlier one; None where there is no way."""
        if self.before[number] >> place & 1:
            return None
        unit = self.units[place]
        if not self.before[place] >> number & 1:
            return unit
        first = self.units[number]
        read = unit.needs & first.writes
        if not read or first.group is None or unit.group is None or number in self.with_others:
            return None
        through = replace(unit, needs=unit.needs - first.writes)
        if self._waits(through) >> number & 1:
            return None
        others = (u for u in self.units if u is not unit)
        if read.isdisjoint(self.given) and not any(read & u.needs for u in others):
            return None  # nobody else reads it: to be one kernel was looked at
        return self.again(first.group, unit.group)

    def _saved(self, members: Sequence[Unit], old: Unit, new: Unit) -> float | None:
        """Seconds that are predicted to be saved; None where the backend does not want them as one launch."""
        kernels = self.backend.share_launch([u.tile for u in (*members, new)], self.target)
        if kernels is None:
            return None
        now = [u.tile for u in members]
        before = self.backend.launch_seconds(now, self.target) + old.tile.estimate.seconds
        saved = before - self.backend.launch_seconds(kernels, self.target)
        return saved if saved > 0 else None

    def _merge(self, number: int, place: int, waits: int) -> None:
        both = 1 << number | 1 << place
        self.before[number] |= waits
        waits = self.before[number] | both
        for other in range(len(self.units)):
            if self.before[other] & both:
                self.before[other] |= waits

    def _joined(self, members: Sequence[Unit]) -> Unit:
        if len(members) == 1:
            return members[0]
        longest_first = sorted((u.tile for u in members), key=lambda k: -k.estimate.seconds)
        kernels = self.backend.share_launch(longest_first, self.target)
        assert kernels is not None
        seconds = self.backend.launch_seconds(kernels, self.target)
        apart = microseconds(*(k.estimate.seconds for k in kernels))
        reason = f"one launch: the prediction is {microseconds(seconds)} us against {apart} us apart"
        tile = Tile(self.target.main.name, body=kernels, runs="together",
                    estimate=Estimate(round(seconds, 9), reason=reason))  # fmt: skip
        return Unit(tile, frozenset().union(*(u.writes for u in members)),
                    frozenset().union(*(u.needs for u in members)))  # fmt: skip
