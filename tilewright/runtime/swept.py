"""A model in sweeps: parts of arrays are brought to its kernels one after the other, and results put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.cpu_model import CpuModel

Array = NDArray[Any]
Slices = tuple[slice, ...]


class Runner(Protocol):
    """What runs the Program of some parts."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None: ...

    def profile(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Iterable[int]: ...


class Result(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Kind:
    """Parts with one code: the arrays they read by name, what the code gives, and a way to have it run. What it holds
    while it runs is given back behind it."""

    takes: tuple[str, ...]
    gives: tuple[Result, ...]
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


class Copied(NamedTuple):
    """Bytes that went to the parts in a run, and back."""

    into: int
    back: int


class SweptModel:
    """Calls from several threads are safe: each has arrays of its own."""

    def __init__(
        self, rounds: Sequence[Round], inputs: Sequence[str], outputs: Sequence[str], between: Sequence[Result],
        constants: Mapping[str, Array],
    ) -> None:  # fmt: skip
        """`between` are the results that later sweeps read, `constants` those of which parts take parts."""
        self.rounds = tuple(rounds)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.between = {result.name: result for result in between if result.name not in outputs}
        self.constants = dict(constants)
        self._last = {name: number for number, each in enumerate(rounds) for kind in each.kinds for name in kind.takes}

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self.copied(inputs, outputs)

    def copied(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Copied:
        """A run, and what was copied in it."""
        return self._copied(inputs, outputs, _run)

    def profile(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[int]:
        """Nanoseconds of each kernel call, part by part in the order of a run."""
        times: list[int] = []

        def timed(model: Runner, given: Sequence[Array], results: Sequence[Array]) -> None:
            times.extend(int(each) for each in model.profile(given, results))

        self._copied(inputs, outputs, timed)
        return times

    def _copied(
        self, inputs: Sequence[Array], outputs: Sequence[Array],
        run: Callable[[Runner, Sequence[Array], Sequence[Array]], None],
    ) -> Copied:  # fmt: skip
        here: dict[str, Array] = {**self.constants, **dict(zip(self.inputs, inputs, strict=True))}
        for name, array in zip(self.outputs, outputs, strict=True):
            if name not in here:
                here[name] = array
        into = back = 0
        for number, each in enumerate(self.rounds):
            for kind, visits in each.by_kind():
                with kind.opened() as model:
                    for visit in visits:
                        taken = zip(kind.takes, visit.takes, strict=True)
                        given = [np.ascontiguousarray(here[name][at]) for name, at in taken]
                        results = [np.empty(result.shape, result.dtype) for result in kind.gives]
                        run(model, given, results)
                        into += sum(array.nbytes for array in given)
                        back += self._leave(here, kind, visit, results)
            for name in [n for n in here if n in self.between and self._last.get(n, -1) <= number]:
                del here[name]  # nobody's any more
        for name, array in zip(self.outputs, outputs, strict=True):
            if here[name] is not array:  # an input that is an output too, or one result twice
                np.copyto(array, here[name])
        return Copied(into, back)

    def _leave(self, here: dict[str, Array], kind: Kind, visit: Visit, results: Sequence[Array]) -> int:
        """Results put where they belong; how many bytes."""
        left = 0
        for result, array, (there, own) in zip(kind.gives, results, visit.gives, strict=True):
            if result.name not in here:
                whole = self.between[result.name]
                here[result.name] = np.empty(whole.shape, whole.dtype)
            part = array[own]
            here[result.name][there] = part
            left += part.nbytes
        return left


def _run(model: Runner, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    model.run(inputs, outputs)


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
