"""The order in which the parts of sweeps pass through a device: copies of one part go on beside the kernels of another.

    pack      part 0   part 1    part 2 ...            the host puts what a part takes together
    up           part 0   part 1 ...                   brought to the device
    run               part 0 ------- part 1 ------- ...
    down                             part 0 ...        what it gives, back
    unpack                              part 0 ...     put where it belongs

Each of these is a queue, which does its steps one after the other; between queues nothing is in order but by events.
What passes has two slots on every way, so that one is filled while the other is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations

from tilewright.errors import InternalError

Slices = tuple[slice, ...]
SLOTS = 2


class Queue(Enum):
    PACK = "pack"
    UP = "up"
    RUN = "run"
    DOWN = "down"
    UNPACK = "unpack"


ON_HOST = (Queue.PACK, Queue.UNPACK)


@dataclass(frozen=True)
class Passage:
    """One part: whose code it runs, and which places of arrays on the host it takes and leaves."""

    kind: int
    takes: tuple[tuple[str, Slices], ...]
    gives: tuple[tuple[str, Slices], ...]


@dataclass(frozen=True)
class SweepStep:
    """What a queue does for a part, by number, when some earlier steps of other queues have ended."""

    queue: Queue
    part: int
    waits: tuple[int, ...]

    @property
    def slot(self) -> int:
        return self.part % SLOTS


class OrderFault(InternalError):
    """Two steps that are in no order touch the same, and one of them writes it."""


def steps_of(passages: Sequence[Passage]) -> tuple[SweepStep, ...]:
    """All steps, each behind those that it waits for, with no event more than is needed."""
    return tuple(_Ordered(passages).run())


@dataclass
class _Ordered:
    passages: Sequence[Passage]
    steps: list[SweepStep] = field(default_factory=list)
    number: dict[tuple[Queue, int], int] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)  # by step the set of all that have ended before it, as bits

    def __post_init__(self) -> None:
        self.left: dict[str, list[int]] = {}  # by array the parts that leave some of it
        for part, passage in enumerate(self.passages):
            for name, _ in passage.gives:
                self.left.setdefault(name, []).append(part)

    def run(self) -> list[SweepStep]:
        for part, passage in enumerate(self.passages):
            self._pack(part)
            if part + 1 < len(self.passages) and not _reads(self.passages[part + 1], passage):
                self._pack(part + 1)  # before this part's results are waited for
            self._add(Queue.UP, part, (Queue.PACK, part), (Queue.RUN, part - SLOTS))
            self._add(Queue.RUN, part, (Queue.UP, part), (Queue.DOWN, part - SLOTS))
            self._add(Queue.DOWN, part, (Queue.RUN, part), (Queue.UNPACK, part - SLOTS))
            self._add(Queue.UNPACK, part, (Queue.DOWN, part))
        return self.steps

    def _pack(self, part: int) -> None:
        if (Queue.PACK, part) in self.number:
            return
        mine = self.passages[part]
        makers = {n for name, _ in mine.takes for n in self.left.get(name, ()) if n < part}
        last = next((n for n in sorted(makers, reverse=True) if _reads(mine, self.passages[n])), None)
        self._add(Queue.PACK, part, (Queue.UP, part - SLOTS), *([] if last is None else [(Queue.UNPACK, last)]))

    def _add(self, queue: Queue, part: int, *after: tuple[Queue, int]) -> None:
        before = _and_before(self.number.get((queue, part - 1)), self.before)
        waits: list[int] = []
        for step in sorted((self.number[each] for each in after if each in self.number), reverse=True):
            if not before >> step & 1:  # what waits for a later one has it already
                waits.append(step)
                before |= _and_before(step, self.before)
        self.number[queue, part] = len(self.steps)
        self.steps.append(SweepStep(queue, part, tuple(waits)))
        self.before.append(before)


def _and_before(step: int | None, before: Sequence[int]) -> int:
    return 0 if step is None else before[step] | 1 << step


def _reads(passage: Passage, earlier: Passage) -> bool:
    """Whether a part takes what an earlier one leaves."""
    return any(name == left and _meet(at, there) for name, at in passage.takes for left, there in earlier.gives)


def _meet(one: Slices, other: Slices) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))


# --- for the emulator


def check_order(steps: Sequence[SweepStep], passages: Sequence[Passage]) -> None:
    """An OrderFault where a device might do two steps at once, or the other way round, that touch the same."""
    before: list[int] = []
    last: dict[Queue, int] = {}
    for number, step in enumerate(steps):
        found = _and_before(last.get(step.queue), before)
        for each in step.waits:
            found |= _and_before(each, before)
        before.append(found)
        last[step.queue] = number
    touched: dict[str, list[tuple[int, Slices, bool]]] = {}
    for number, step in enumerate(steps):
        for name, at, writes in _touched(step, passages[step.part]):
            touched.setdefault(name, []).append((number, at, writes))
    for name, uses in touched.items():
        for (first, here, wrote), (second, there, writes) in combinations(uses, 2):
            if (wrote or writes) and not before[second] >> first & 1 and _meet(here, there):
                told = [f"{steps[n].queue.value} of part {steps[n].part}" for n in (first, second)]
                raise OrderFault(f"nothing keeps {told[1]} behind {told[0]}: both touch {name}")


def _touched(step: SweepStep, passage: Passage) -> Iterator[tuple[str, Slices, bool]]:
    """Names, places, and whether they are written."""
    ways = {Queue.PACK: (None, "packed"), Queue.UP: ("packed", "taken"), Queue.RUN: ("taken", "given"),
            Queue.DOWN: ("given", "fetched"), Queue.UNPACK: ("fetched", None)}  # fmt: skip
    for name, writes in zip(ways[step.queue], (False, True), strict=True):
        if name is not None:
            yield f"what is {name} in slot {step.slot}", (), writes
        else:
            for array, at in passage.gives if writes else passage.takes:
                yield f"'{array}'", at, writes


def early(steps: Sequence[SweepStep], do: Callable[[SweepStep], None]) -> None:
    """Every step as early as its events allow, copies to the device before all else: what is overwritten while it is
    still read spoils the results."""
    waiting = {queue: [n for n, step in enumerate(steps) if step.queue is queue] for queue in Queue}
    done: set[int] = set()
    while any(waiting.values()):
        ready = [rest for rest in waiting.values() if rest and done.issuperset(steps[rest[0]].waits)]
        if not ready:
            raise OrderFault("steps wait for each other in a circle")
        number = ready[0].pop(0)
        do(steps[number])
        done.add(number)
