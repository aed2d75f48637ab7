"""The meaning of a Sharded Program: all ranks in turn, each with what it holds and nothing else.

A rank computes on whole tensors in which everything it does not hold is poisoned, so that a step that needs more than
its spreads say gives no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.analysis.pieces import part_of
from tilewright.ir.forms.compute import Compute
from tilewright.ir.forms.mesh import Place, Spread, overlap, relative, slices
from tilewright.ir.forms.sharded import Exchange, PipelineStage, Sharded, ShardedCompute
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.ir.meaning.interpret import bind_inputs, evaluate_computes

Array = np.ndarray
_UFUNCS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def evaluate_sharded(sharded: Sharded, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs by name, as the first rank of the last stage has them."""
    given = bind_inputs(sharded.program, inputs)
    sent: dict[Tensor, Array] = {}
    for stage in sharded.stages:
        run = _Run(stage, {**given, **sent})
        for step in stage.steps:
            if isinstance(step, Exchange):
                run.exchange(step)
            else:
                run.compute(step)
        whole = Spread.whole(stage.mesh)
        sent.update({t: arrays[0] for (t, spread), arrays in run.held.items() if spread == whole})
    known = {**given, **sent}
    return {t.name: known[t] for t in sharded.program.outputs}


@dataclass
class _Run:
    stage: PipelineStage
    given: Mapping[Tensor, Array]  # inputs, constants, and what earlier stages have whole
    held: dict[tuple[Tensor, Spread], list[Array]] = field(default_factory=dict)  # of every rank

    def array(self, tensor: Tensor, spread: Spread, rank: int) -> Array:
        if (tensor, spread) in self.held:
            return self.held[tensor, spread][rank]
        if tensor not in self.given:
            raise InternalError(f"'{tensor.name}' is read as {spread}, and does not lie so")
        return self.given[tensor][slices(self.place(tensor, spread, rank))]

    def place(self, tensor: Tensor, spread: Spread, rank: int) -> Place:
        return spread.place(extents(tensor), self.stage.mesh, self.stage.mesh.coordinates[rank])

    def compute(self, piece: ShardedCompute) -> None:
        results: dict[Tensor, list[Array]] = {t: [] for t in piece.compute.outputs}
        for rank in range(self.stage.mesh.ranks):
            known = {t: self._poisoned(t, spread, rank) for t, spread in piece.reads.items()}
            shapes = {t: self.place(t, piece.gives, rank) for t in results}
            outputs = tuple(Tensor(t.name, tuple(n for _, n in shapes[t]), t.dtype) for t in results)
            part: Compute = part_of(piece, self.stage.mesh, self.stage.mesh.coordinates[rank], outputs, {})
            found = evaluate_computes((part,), known)
            for tensor, here in zip(results, part.outputs, strict=True):
                results[tensor].append(found[here])
        self.held.update({(t, piece.gives): arrays for t, arrays in results.items()})

    def _poisoned(self, tensor: Tensor, spread: Spread, rank: int) -> Array:
        array = self.array(tensor, spread, rank)
        poison = np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).min if array.dtype.kind in "iu" else False
        full = np.full(extents(tensor), poison, array.dtype)
        full[slices(self.place(tensor, spread, rank))] = array
        return full

    def exchange(self, step: Exchange) -> None:
        """What each rank then has, put together from what its peers had."""
        if step.axis is None:
            self.held[step.tensor, step.after] = [self.given[step.tensor]] * self.stage.mesh.ranks
            return
        had = [self.array(step.tensor, step.before, rank) for rank in range(self.stage.mesh.ranks)]
        result: list[Array] = [np.empty(0)] * len(had)
        for peers in self.stage.mesh.peers(step.axis):
            for rank in peers:
                result[rank] = self._taken(step, {peer: had[peer] for peer in peers}, rank)
        self.held[step.tensor, step.after] = result

    def _taken(self, step: Exchange, had: Mapping[int, Array], rank: int) -> Array:
        wanted = self.place(step.tensor, step.after, rank)
        own = {peer: self.place(step.tensor, step.before, peer) for peer in had}
        assert step.axis is not None
        operator = step.before.parts[step.axis].operator
        if operator is not None:
            terms = [had[peer][slices(relative(wanted, own[peer]))] for peer in had]
            return np.asarray(reduce(_UFUNCS[operator], terms))
        full = np.zeros([n for _, n in wanted], next(iter(had.values())).dtype)
        for peer, array in had.items():
            common = overlap(wanted, own[peer])
            if common is not None:
                full[slices(relative(common, wanted))] = array[slices(relative(common, own[peer]))]
        return full
