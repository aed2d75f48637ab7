"""A model of which this process has one rank: its segments compiled, run in turns for every part of a batch, with
exchanges in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewright.calls.arguments import Array, NotPickled, Port, bind, by_name, convert, random_arrays
from tilewright.distributed.about import About, CompiledRank
from tilewright.distributed.saved import save
from tilewright.distributed.turns import Turn, Verb, turns
from tilewright.errors import ToolError
from tilewright.ir.forms.loops import Call
from tilewright.options import Options
from tilewright.runtime.cuda_device import identity
from tilewright.runtime.device_arrays import expected
from tilewright.runtime.ranks import Passing, RankError, Ranks
from tilewright.transform.spmd import Transfer


class Timed(NamedTuple):
    """Seconds at which a turn began and ended."""

    turn: Turn
    begin: float
    end: float


class RankedModel(NotPickled):
    """A model that several processes run together. All of them call it; the inputs are rank 0's and so are the results,
    which the others have as None."""

    def __init__(self, about: About, steps: Sequence[CompiledRank | Transfer], ranks: Ranks, options: Options) -> None:
        self.about, self.steps = about, tuple(steps)
        self._ranks, self._options = ranks, options
        self._moves = tuple(step if isinstance(step, Transfer) else None for step in self.steps)
        self._last = _last_uses(self.steps, about.results)
        self._timed: list[Timed] | None = None  # where a run is timed
        self._callers = {n: each for n, step in enumerate(self.steps) if (each := _caller(step)) is not None}
        segments = [step for step in self.steps if isinstance(step, CompiledRank)]
        self._there = ranks.on_devices(identity() if len(self._callers) == len(segments) > 0 else b"")

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._ranks.size

    @property
    def inputs(self) -> tuple[Port, ...]:
        return tuple(each.port for each in self.about.inputs)

    @property
    def outputs(self) -> tuple[Port, ...]:
        return tuple(each.port for each in self.about.outputs)

    @property
    def on_devices(self) -> bool:
        """Whether what the ranks of a stage exchange stays on GPUs of their own."""
        return self._there is not None

    @property
    def can_run(self) -> bool:
        return True

    @property
    def calls(self) -> tuple[Call, ...]:
        """Kernel calls of one part of a batch on this rank, in order."""
        return tuple(call for step in self.steps if isinstance(step, CompiledRank) for call in step.artifact.calls)

    @property
    def weights(self) -> int:
        """Bytes of weights that this rank has."""
        return self.about.weights

    def __call__(self, /, *args: Any, **named: Any) -> list[Array | None]:
        """Run the model on arrays given to rank 0 in order, by name, or as one dict; what other ranks give is left
        aside. The outputs come in order on rank 0."""
        whole: dict[str, Array] = {}
        if self.rank == 0:
            arrays = bind([port.name for port in self.inputs], args, named)
            for array, each in zip(arrays, self.about.inputs, strict=True):
                port = each.port
                whole[each.array] = np.ascontiguousarray(convert(array, port.name, port.dtype, port.shape))
        try:
            wanted = [(each.array, each.port.shape, each.port.dtype) for each in self.about.inputs]
            self._ranks.share(whole, wanted, self._there)
            values = [self._part(whole, part) for part in range(self.about.parts)]
            self._run(values)
        except RankError as error:
            raise ToolError(str(error)) from error
        return [None] * len(self.outputs) if self.rank else [self._joined(n, values) for n in range(len(self.outputs))]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Array | None]:
        """Run the model on arrays by name; the outputs come by name too."""
        return by_name([port.name for port in self.outputs], self(**inputs) if self.rank else self(inputs))

    def timeline(self, inputs: Mapping[str, Any]) -> list[Timed]:
        """A run, and when each turn of this rank began and ended, by a clock that all processes of a computer share."""
        self._timed = []
        try:
            self.run(inputs)
            return self._timed
        finally:
            self._timed = None

    def random_inputs(self, seed: int = 0) -> dict[str, Array]:
        """Inputs to try the model on: normal floats, and integers 0 or 1, in range for indices and masks alike."""
        return random_arrays(self.inputs, seed)

    def explain(self) -> str:
        """How the model is shared out: stages, shards, exchanges and their bytes."""
        return self.about.explanation

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this rank's part of the model to a directory of its own below `folder`; all ranks do. `tilewright.load`
        starts from it, in as many processes, without compiling."""
        try:
            save(self.about, self.steps, self._ranks, Path(folder), self._options)
        except RankError as error:
            raise ToolError(str(error)) from error

    def close(self) -> None:
        """Part from the other ranks; the model cannot be called afterwards."""
        self._ranks.leave()

    # --- one run

    def _part(self, whole: Mapping[str, Any], part: int) -> dict[str, Any]:
        """The inputs of one part of the batch."""
        found: dict[str, Any] = dict(self.about.fixed)
        for each in self.about.inputs:
            array = whole[each.array]
            if each.dim is not None:
                size = array.shape[each.dim] // self.about.parts
                array = array[(slice(None),) * each.dim + (slice(part * size, (part + 1) * size),)]
            found[each.array] = np.ascontiguousarray(array) if self._there is None else array.contiguous()
        return found

    def _joined(self, number: int, values: Sequence[Mapping[str, Array]]) -> Array:
        """An output of all parts."""
        each = self.about.outputs[number]
        found = [part[each.array] for part in values]
        if self._there is not None:
            found = [each if isinstance(each, np.ndarray) else self._there.fetched(each) for each in found]
        return found[0] if each.dim is None else np.concatenate(found, each.dim)

    def _run(self, values: Sequence[dict[str, Array]]) -> None:
        under_way: dict[tuple[int, int], Passing] = {}
        for turn in turns(self._moves, self.about.when, self.about.results, self.about.parts):
            begin = time.perf_counter()
            here = values[turn.part]
            move, name = self._moves[turn.step], self._name(turn.step, turn.part)
            if move is None:
                self._compute(turn.step, here)
            elif turn.verb is Verb.BEGIN:
                under_way[turn.step, turn.part] = self._ranks.begin(move, self._sent(move, here), name)
            elif turn.verb is Verb.FINISH:
                self._ranks.finish(under_way.pop((turn.step, turn.part)), here, name)
                if self._there is not None and move.takes:
                    here[move.target] = self._there.brought(here[move.target])
            else:
                self._ranks.move(move, here, name, self._there)
            if self._timed is not None:
                self._timed.append(Timed(turn, begin, time.perf_counter()))
            if turn.verb is not Verb.BEGIN:
                for gone in self._last.get(turn.step, ()):
                    here.pop(gone, None)

    def _sent(self, move: Transfer, values: Mapping[str, Any]) -> Mapping[str, Array]:
        """What goes from stage to stage does so by the host, while computing goes on: on a device, what is waited for
        first would keep back all that is sent later."""
        if self._there is None or not move.sends:
            return values
        return {move.source: self._there.fetched(values[move.source])}

    def _compute(self, number: int, values: dict[str, Any]) -> None:
        step = self.steps[number]
        assert isinstance(step, CompiledRank)
        if self._there is not None and step.takes:
            found = self._callers[number]([values[name] for name in step.takes])
            values.update({name: tensor for (name, _, _), tensor in zip(step.gives, found, strict=True)})
            return
        outputs = [self._ranks.memory.empty(shape, dtype) for _, shape, dtype in step.gives]
        step.artifact.runner.run([values[name] for name in step.takes], outputs)
        own = outputs if self._there is None else list(map(self._there.brought, outputs))
        values.update({name: array for (name, _, _), array in zip(step.gives, own, strict=True)})

    def _name(self, number: int, part: int) -> str:
        """An exchange, for people: behind which segment it is."""
        move = self._moves[number]
        if move is None:
            return ""
        segment = sum(each is None for each in self._moves[:number])
        over = f" over {move.axis}" if move.axis else ""
        batch = f", part {part} of the batch" if self.about.parts > 1 else ""
        return f"after segment {segment}{batch}: {move.kind} of '{move.source}'{over}"


def _caller(step: CompiledRank | Transfer) -> Callable[[Sequence[Any]], Any] | None:
    """A segment on arrays that lie on a GPU, where it runs on one."""
    if not isinstance(step, CompiledRank) or not hasattr(step.artifact.runner, "device_caller"):
        return None
    takes = [expected(f"'{name}'", dtype.numpy, shape) for name, dtype, shape in step.artifact.inputs]
    gives = [expected(f"'{name}'", dtype, shape) for name, shape, dtype in step.gives]
    call: Callable[[Sequence[Any]], Any] = step.artifact.runner.device_caller(takes, gives, lambda value, _: value)
    return call


def _last_uses(steps: Sequence[CompiledRank | Transfer], kept: frozenset[str]) -> dict[int, list[str]]:
    """By step the arrays that nobody reads after it."""
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        read = (step.source, step.target) if isinstance(step, Transfer) else step.takes
        made = () if isinstance(step, Transfer) else tuple(name for name, _, _ in step.gives)
        last.update(dict.fromkeys((*read, *made), number))
    found: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in kept:
            found.setdefault(number, []).append(name)
    return found
