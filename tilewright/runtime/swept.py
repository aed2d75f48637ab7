"""A model in sweeps: parts of arrays are brought to its kernels one after the other, and results put together.

On a device copies of one part go on beside the kernels of another; where there is one memory, parts follow each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.cores import usable_cores
from tilewright.runtime.cpu_model import CpuModel
from tilewright.runtime.sweep_order import Passage, Slices, SweepStep, steps_of

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Moved = Callable[[int, Sequence[Bytes]], None]  # of a part, by number, between the host's arrays and those of a slot


class Runner(Protocol):
    """What runs the Program of some parts."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None: ...

    def profile(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Iterable[int]: ...


class SweptResult(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Kind:
    """Parts with one code: the arrays they read by name, what the code gives, and a way to have it run. What it holds
    while it runs is given back behind it."""

    takes: tuple[str, ...]
    gives: tuple[SweptResult, ...]
    opened: Callable[[], AbstractContextManager[Runner]]


@dataclass(frozen=True)
class Visit:
    """One part: what it takes of each array, and where what it gives goes, as (there, in the result) for each."""

    kind: int
    takes: tuple[Slices, ...]
    gives: tuple[tuple[Slices, Slices], ...]


@dataclass(frozen=True)
class Round:
    """One sweep."""

    kinds: tuple[Kind, ...]
    visits: tuple[Visit, ...]

    def by_kind(self) -> Iterator[tuple[Kind, list[Visit]]]:
        """Parts with one code follow each other: what it holds is there once."""
        for number, kind in enumerate(self.kinds):
            yield kind, [visit for visit in self.visits if visit.kind == number]

    def ordered(self) -> Iterator[tuple[Kind, Visit]]:
        yield from ((kind, visit) for kind, visits in self.by_kind() for visit in visits)


@dataclass(frozen=True)
class Course:
    """All parts of a run in order, what of each of their results goes back, and who waits for whom."""

    passages: tuple[Passage, ...]
    gives: tuple[tuple[tuple[SweptResult, Slices], ...], ...]
    steps: tuple[SweepStep, ...]


class Device(Protocol):
    """Runs parts while others are copied."""

    def sweep(self, course: Course, pack: Moved, unpack: Moved) -> None: ...

    def rest(self) -> None:
        """Gives memory back until the next run."""
        ...


class Copied(NamedTuple):
    """Bytes that went to the parts in a run, and back."""

    into: int
    back: int


class SweptModel:
    """Calls from several threads are safe: each has arrays of its own, and on a device they take turns."""

    def __init__(
        self, rounds: Sequence[Round], inputs: Sequence[str], outputs: Sequence[str], between: Sequence[SweptResult],
        constants: Mapping[str, Array], device: Device | None = None,
    ) -> None:  # fmt: skip
        """`between` are the results that later sweeps read, `constants` those of which parts take parts."""
        self.rounds = tuple(rounds)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.between = {result.name: result for result in between if result.name not in outputs}
        self.constants = dict(constants)
        self.device = device
        self.parts = tuple(part for each in self.rounds for part in each.ordered())
        self.last = {name: number for number, (kind, _) in enumerate(self.parts) for name in kind.takes}
        self._course: Course | None = None

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self.copied(inputs, outputs)

    def copied(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Copied:
        """A run, and what was copied in it."""
        if self.device is None:
            return self._one_by_one(inputs, outputs, _run)
        host = _Host(self, inputs, outputs, copy_together)
        self.device.sweep(self.course(), host.pack, host.unpack)
        return host.end(outputs)

    def profile(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[int]:
        """Nanoseconds of each kernel call, part by part in the order of a run."""
        times: list[int] = []

        def timed(model: Runner, given: Sequence[Array], results: Sequence[Array]) -> None:
            times.extend(int(each) for each in model.profile(given, results))

        if self.device is not None:
            self.device.rest()
        self._one_by_one(inputs, outputs, timed)
        return times

    def course(self) -> Course:
        """What a device does in a run."""
        if self._course is None:
            first = 0
            passages: list[Passage] = []
            for each in self.rounds:
                for kind, visit in each.ordered():
                    takes = tuple(zip(kind.takes, visit.takes, strict=True))
                    gives = tuple((r.name, there) for r, (there, _) in zip(kind.gives, visit.gives, strict=True))
                    passages.append(Passage(first + visit.kind, takes, gives))
                first += len(each.kinds)
            left = [tuple((r, own) for r, (_, own) in zip(kind.gives, visit.gives, strict=True))
                    for kind, visit in self.parts]  # fmt: skip
            self._course = Course(tuple(passages), tuple(left), steps_of(passages))
        return self._course

    def _one_by_one(
        self, inputs: Sequence[Array], outputs: Sequence[Array],
        run: Callable[[Runner, Sequence[Array], Sequence[Array]], None],
    ) -> Copied:  # fmt: skip
        host = _Host(self, inputs, outputs)
        number = 0
        for each in self.rounds:
            for kind, visits in each.by_kind():
                with kind.opened() as model:
                    for visit in visits:
                        given = host.taken(number)
                        results = [np.empty(result.shape, result.dtype) for result in kind.gives]
                        run(model, given, results)
                        owns = [own for _, own in visit.gives]
                        host.left(number, [array[own] for array, own in zip(results, owns, strict=True)])
                        number += 1
        return host.end(outputs)


class _Host:
    """The host's arrays in one run, and what of them passed. Parts are packed in order, and unpacked in order."""

    def __init__(
        self, model: SweptModel, inputs: Sequence[Array], outputs: Sequence[Array],
        copy: Callable[[Array, Array], None] = np.copyto,
    ) -> None:  # fmt: skip
        self._model, self._copy = model, copy
        self._here: dict[str, Array] = {**model.constants, **dict(zip(model.inputs, inputs, strict=True))}
        for name, array in zip(model.outputs, outputs, strict=True):
            self._here.setdefault(name, array)
        self._into = self._back = 0

    def taken(self, number: int) -> list[Array]:
        """What a part takes, each in one piece."""
        found = [np.ascontiguousarray(part) for part in self._parts(number)]
        self._took(number, found)
        return found

    def pack(self, number: int, slots: Sequence[Bytes]) -> None:
        """As `taken`, into bytes of others."""
        parts = self._parts(number)
        for part, slot in zip(parts, slots, strict=True):
            self._copy(slot.view(part.dtype).reshape(part.shape), part)
        self._took(number, parts)

    def unpack(self, number: int, slots: Sequence[Bytes]) -> None:
        """As `left`, from bytes of others."""
        kind, visit = self._model.parts[number]
        given = zip(kind.gives, slots, visit.gives, strict=True)
        self.left(
            number, [slot.view(r.dtype).reshape([at.stop - at.start for at in own]) for r, slot, (_, own) in given]
        )

    def left(self, number: int, arrays: Sequence[Array]) -> None:
        """Results put where they belong."""
        kind, visit = self._model.parts[number]
        for result, array, (there, _) in zip(kind.gives, arrays, visit.gives, strict=True):
            if result.name not in self._here:
                whole = self._model.between[result.name]
                self._here[result.name] = np.empty(whole.shape, whole.dtype)
            self._copy(self._here[result.name][there], array)
            self._back += array.nbytes

    def end(self, outputs: Sequence[Array]) -> Copied:
        for name, array in zip(self._model.outputs, outputs, strict=True):
            if self._here[name] is not array:  # an input that is an output too, or one result twice
                np.copyto(array, self._here[name])
        return Copied(self._into, self._back)

    def _parts(self, number: int) -> list[Array]:
        kind, visit = self._model.parts[number]
        return [self._here[name][at] for name, at in zip(kind.takes, visit.takes, strict=True)]

    def _took(self, number: int, parts: Sequence[Array]) -> None:
        self._into += sum(part.nbytes for part in parts)
        for name in self._model.parts[number][0].takes:
            if name in self._model.between and self._model.last[name] == number:
                del self._here[name]  # nobody's any more


_TOGETHER = 4  # threads that copy one array: a single one is slower than a link
_WORTH_IT = 1 << 20  # bytes, for which it pays


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_TOGETHER, usable_cores()), "tilewright-copy")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_copiers.cache_clear)  # a child has none of its threads


def copy_together(target: Array, source: Array) -> None:
    """One array into another of its form, by several threads where it is large."""
    if source.nbytes < _WORTH_IT or source.ndim < 2:
        np.copyto(target, source)
        return
    dim = max(range(source.ndim - 1), key=lambda d: source.shape[d])
    bounds = [source.shape[dim] * n // _TOGETHER for n in range(_TOGETHER + 1)]
    ahead = (slice(None),) * dim
    list(_copiers().map(lambda a, b: np.copyto(target[*ahead, a:b], source[*ahead, a:b]), bounds, bounds[1:]))


def _run(model: Runner, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    model.run(inputs, outputs)


def device_of(runners: Sequence[Any]) -> Device | None:
    """Where the parts of these models, which are one kind each, run while others are copied; None on the host."""
    return None if not runners or isinstance(runners[0], CpuModel) else runners[0].beside(runners)


def opener(runner: Any) -> Callable[[], AbstractContextManager[Runner]]:
    """A way to have a part's code run. Its arena is there as long as that takes alone."""
    if not isinstance(runner, CpuModel):
        return lambda: _resting(runner)
    built, threads = runner.built, runner.threads
    runner.close()
    return lambda: CpuModel(built, threads)


@contextmanager
def _resting(runner: Any) -> Iterator[Runner]:
    """A device's code, which keeps its weights there."""
    try:
        yield runner
    finally:
        runner.rest()
