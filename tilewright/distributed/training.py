"""A training step of which this process does one rank's part: forward and back for every part of a batch, and update.

Stages are at different parts at a time, one forward and one back in turn (1F1B): a stage with so many behind it goes
forward with as many parts before the first comes back, and keeps what those need for the way back, never more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from tilewright.calls.arguments import Array, NotPickled, Port, bind, convert
from tilewright.distributed.about import CompiledRank
from tilewright.distributed.compiling import Asked, beside, device_of, segment
from tilewright.distributed.joining import joined
from tilewright.distributed.meshes import SPLIT, described, mesh_of, undecided
from tilewright.errors import OptionError, ToolError
from tilewright.ir.forms.sharded import Sharded, from_json
from tilewright.ir.forms.tensor import extents
from tilewright.ir.forms.training import Training, TrainingPhase
from tilewright.ir.text.text import program_text
from tilewright.options import Options
from tilewright.report.ranks import ranks_text
from tilewright.runtime.outputs import passing_memory
from tilewright.runtime.ranks import Passing, RankError, Ranks
from tilewright.schedule.cluster.pipeline import share_out_by_itself, share_out_in_stages
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.sharding.check import check_sharded
from tilewright.transform.gradient.optimisers import Optimiser
from tilewright.transform.spmd import KeptArray, RankProgram, Segment, Transfer, rank_program
from tilewright.version import VERSION

Step = CompiledRank | Transfer


def one_forward_one_back(behind: int, parts: int) -> Iterator[tuple[TrainingPhase, int]]:
    """The order in which a stage with so many stages behind it goes through the parts of a batch."""
    ahead = min(behind, parts)
    yield from ((TrainingPhase.FORWARD, part) for part in range(ahead))
    for part in range(parts):
        if part + ahead < parts:
            yield TrainingPhase.FORWARD, part + ahead
        yield TrainingPhase.BACKWARD, part


@dataclass(frozen=True)
class RankSteps:
    """What a rank does in each turn, and what it keeps: the arrays that the way back needs of the way forward, and
    those that are added up over all parts for the update."""

    turns: tuple[tuple[Step, ...], ...]
    kept: tuple[KeptArray, ...]
    for_back: frozenset[str]
    summed: tuple[str, ...]


def rank_steps(program: RankProgram, steps: Sequence[Step]) -> RankSteps:
    ends = (0, *program.turns, len(steps)) if program.turns else (0, 0, 0, len(steps))
    turns = tuple(tuple(steps[a:b]) for a, b in pairwise(ends))
    read = [frozenset(name for step in each for name in _takes(step)) for each in turns]
    made = [frozenset(name for step in each for name in _gives(step)) for each in turns]
    last = (read[TrainingPhase.UPDATE] | set(program.outputs.values())) - made[TrainingPhase.UPDATE]
    summed = last & (made[TrainingPhase.FORWARD] | made[TrainingPhase.BACKWARD])
    return RankSteps(turns, program.kept, read[TrainingPhase.BACKWARD] | summed, tuple(sorted(summed)))


def _takes(step: Step) -> tuple[str, ...]:
    if isinstance(step, CompiledRank):
        return step.takes
    return () if step.kind == "send" and step.takes else (step.source,)


def _gives(step: Step) -> tuple[str, ...]:
    if isinstance(step, CompiledRank):
        return tuple(name for name, _, _ in step.gives)
    return (step.target,) if step.takes or step.kind == "all-reduce" else ()


class RankedTraining(NotPickled):
    """A model that several processes train together, or one alone. All of them call it, once a step; the inputs are
    rank 0's, and so is the loss, which the others have as None."""

    def __init__(
        self, training: Training, sharded: Sharded, steps: RankSteps, optimiser: Optimiser, names: Mapping[str, str],
        ranks: Ranks | None,
    ) -> None:  # fmt: skip
        self._sharded, self._steps, self._optimiser, self._names, self._ranks = sharded, steps, optimiser, names, ranks
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._memory = passing_memory() if ranks is None else ranks.memory
        self.inputs = tuple(Port(t.name, t.dtype.numpy, _batched(extents(t), sharded.parts)) for t in training.inputs)
        self._loss = sharded.program.outputs[0]
        self._rates = training.rates.name
        initial = {tensor.name: array for tensor, array in training.initial.items()}
        self._state = {k.name: _cut(initial[k.tensor.name], k) for k in steps.kept}
        self._count = 0
        behind = [len(sharded.stages) - 1 - n for n, stage in enumerate(sharded.stages) if self.rank in stage.ranks]
        self._order = tuple(one_forward_one_back(behind[0], sharded.parts)) if behind else ()

    @property
    def steps(self) -> int:
        """How many have been done."""
        return self._count

    @property
    def bytes(self) -> int:
        """Of weights and what the optimiser keeps beside them, on this rank."""
        return sum(array.nbytes for array in self._state.values())

    def explain(self) -> str:
        return ranks_text(self._sharded)

    def __call__(self, /, *args: Any, **named: Any) -> float | None:
        """One step on a batch; what the loss was before it."""
        whole: dict[str, Array] = {}
        if self.rank == 0:
            arrays = bind([port.name for port in self.inputs], args, named)
            for array, port in zip(arrays, self.inputs, strict=True):
                whole[port.name] = np.ascontiguousarray(convert(array, port.name, port.dtype, port.shape))
        try:
            if self._ranks is not None:
                self._ranks.share(whole, [(port.name, port.shape, port.dtype) for port in self.inputs])
            found = self._step(whole)
        except RankError as error:
            raise ToolError(str(error)) from error
        return None if self.rank else float(found) / self._sharded.parts

    def weights(self) -> dict[str, Array]:
        """The weights by the names that the module has for them, on rank 0; all ranks call it."""
        whole: dict[str, Array] = {}
        for rank in range(self._sharded.ranks):
            kept = {k.tensor.name: k for k in reversed(rank_program(self._sharded, rank).kept)}
            for name in (name for name in self._names if name in kept):
                array = self._fetched(rank, kept[name])
                if array is not None:
                    into = whole.setdefault(self._names[name], np.empty(extents(kept[name].tensor), array.dtype))
                    into[tuple(slice(a, a + n) for a, n in kept[name].place)] = array
        return whole

    def _fetched(self, rank: int, kept: KeptArray) -> Array | None:
        """What a rank keeps, on rank 0."""
        if rank == 0:
            return self._state[kept.name] if self.rank == 0 else None
        if self._ranks is None or self.rank not in (0, rank):
            return None
        place = tuple(slice(0, n) for _, n in kept.place)
        shape = tuple(n for _, n in kept.place)
        ends = ((rank, place),) if self.rank == 0 else (), ((0, place),) if self.rank else ()
        move = Transfer("send", kept.name, kept.name, shape, kept.tensor.dtype.numpy, takes=ends[0], sends=ends[1])
        values = dict(self._state)
        self._ranks.move(move, values, f"weight '{kept.tensor.name}'")
        return values[kept.name] if self.rank == 0 else None

    def close(self) -> None:
        """Part from the other ranks; no step can be done afterwards."""
        if self._ranks is not None:
            self._ranks.leave()

    # --- one step

    def _step(self, whole: Mapping[str, Array]) -> Any:
        rates = self._optimiser.rates(self._count + 1)
        totals: dict[str, Array] = {}
        under_way: list[Passing] = []
        values: dict[int, dict[str, Array]] = {}
        for turn, part in self._order:
            if turn is TrainingPhase.FORWARD:
                values[part] = {**self._state, **self._part(whole, part)}
            here = values[part]
            under_way += self._turn(turn, here, f", part {part} of the batch" if self._sharded.parts > 1 else "")
            if turn is TrainingPhase.FORWARD:
                values[part] = {name: here[name] for name in here if name in self._steps.for_back}
                continue
            for name in self._steps.summed:
                totals[name] = totals[name] + here[name] if name in totals else here[name]
            del values[part]
        last = {**self._state, **totals, self._rates: rates}
        under_way += self._turn(TrainingPhase.UPDATE, last, "")
        for passing in under_way:
            assert self._ranks is not None
            self._ranks.finish(passing, {}, "the end of a step")
        self._state = {k.name: np.ascontiguousarray(last[k.following][k.part]) for k in self._steps.kept}
        self._count += 1
        return last.get(self._array_of_loss(), 0.0)

    def _array_of_loss(self) -> str:
        return rank_program(self._sharded, 0).outputs[self._loss.name] if self.rank == 0 else ""

    def _part(self, whole: Mapping[str, Array], part: int) -> dict[str, Array]:
        parts = self._sharded.parts
        sizes = {name: len(array) // parts if array.ndim else 0 for name, array in whole.items()}
        return {name: array[part * sizes[name] : (part + 1) * sizes[name]] if parts > 1 else array
                for name, array in whole.items()}  # fmt: skip

    def _turn(self, turn: TrainingPhase, values: dict[str, Array], where: str) -> list[Passing]:
        """The steps of a turn; what is sent to other stages goes on while the next is done."""
        sent: list[Passing] = []
        for number, step in enumerate(self._steps.turns[turn]):
            if isinstance(step, CompiledRank):
                outputs = [self._memory.empty(shape, dtype) for _, shape, dtype in step.gives]
                step.artifact.runner.run([values[name] for name in step.takes], outputs)
                values.update({name: array for (name, _, _), array in zip(step.gives, outputs, strict=True)})
                continue
            assert self._ranks is not None
            told = f"{turn.name.lower()}, step {number}{where}: {step.kind} of '{step.source}'"
            if step.kind == "send" and step.sends:
                sent.append(self._ranks.begin(step, values, told))
            else:
                self._ranks.move(step, values, told)
        return sent


def _batched(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    return (shape[0] * parts, *shape[1:]) if shape and parts > 1 else shape


def _cut(array: Array, kept: KeptArray) -> Array:
    """A rank's own part, in memory of its own: the module that the weights are from may be changed meanwhile."""
    return np.array(array[tuple(slice(first, first + count) for first, count in kept.place)], order="C")


# --- compiling


def compile_training(
    training: Training, names: Mapping[str, str], optimiser: Optimiser, asked: Asked | None, options: Options,
    parts: int = 1,
) -> RankedTraining:  # fmt: skip
    """The rank of this process, or all of a step where no mesh was asked for."""
    if asked is None:
        return _compiled(training, names, optimiser, Asked(mesh_of((("one", 1),)), parts), options, None)
    if asked.mesh.is_auto:
        raise OptionError("mesh='auto' does not find a mesh for a training step: say one, such as 'tp=2'")
    with joined(asked.timeout) as ranks:
        return _compiled(training, names, optimiser, asked, options, ranks)


def _compiled(
    training: Training, names: Mapping[str, str], optimiser: Optimiser, asked: Asked, options: Options,
    ranks: Ranks | None,
) -> RankedTraining:  # fmt: skip
    sharded = _agreed(training, asked, options, ranks)
    here = 1 if ranks is None else ranks.on_this_computer()
    check_sharded(sharded)
    mine = rank_program(sharded, 0 if ranks is None else ranks.rank)
    goal, memo = beside(device_of(options.target, options), here), Memo()
    steps = [segment(each, goal, options, memo) if isinstance(each, Segment) else each for each in mine.steps]
    if ranks is not None:
        ranks.wait("compiling")
    return RankedTraining(training, sharded, rank_steps(mine, steps), optimiser, names, ranks)


def _agreed(training: Training, asked: Asked, options: Options, ranks: Ranks | None) -> Sharded:
    """As rank 0 shares it out, when all have been found to be about the same step."""
    if ranks is None:
        return planned(training, asked, options)
    asked.mesh.check_ranks(ranks.size)
    ranks.same(_digest(training, asked, options), "training step")
    told = planned(training, asked, options).to_json() if ranks.rank == 0 else None
    ranks.wait("sharing the step out")
    return from_json(ranks.text(told), training.program)


def planned(training: Training, asked: Asked, options: Options) -> Sharded:
    """How a step is shared out, without any other rank."""
    most = options.memory if isinstance(options.memory, int) else inf
    if asked.mesh.is_auto:
        cluster = undecided(asked.cluster, None, lambda name: device_of(name, options))
        return share_out_by_itself(training.program, cluster, asked.micro_batches, most, training)
    clusters, along = described(asked.mesh, asked.cluster, lambda name: device_of(name, options))
    return share_out_in_stages(training.program, clusters, along, (SPLIT,), asked.micro_batches, training, most)


def _digest(training: Training, asked: Asked, options: Options) -> bytes:
    found = blake2b(f"{VERSION}\n{asked.mesh} {asked.micro_batches}\n{options.precision}\n".encode(), digest_size=32)
    found.update(program_text(training.program).encode())
    for array in training.initial.values():
        found.update(np.ascontiguousarray(array).tobytes())
    return found.digest()
