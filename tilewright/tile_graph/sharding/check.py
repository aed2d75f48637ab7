"""The grammar of a Sharded Program: every rank has what its pieces read, every exchange is one of the known kinds."""

from __future__ import annotations

from tilewright.errors import InternalError
from tilewright.ir.analysis.pieces import gives
from tilewright.ir.forms.compute import Compute, Map, Reduce, reads
from tilewright.ir.forms.mesh import WHOLE, AxisPart, Spread, inside
from tilewright.ir.forms.sharded import EXCHANGES, Exchange, PipelineStage, Sharded, ShardedCompute
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.tile_graph.algebra.nest import build_nest
from tilewright.tile_graph.sharding.strategies import read_places


def check_sharded(sharded: Sharded) -> None:
    """Raises an InternalError that names the step where something is wrong."""
    given = {*sharded.program.inputs, *sharded.program.constants}
    done: set[Compute] = set()
    sendable: set[Tensor] = set()
    gathered: set[Tensor] = set()
    for stage in sharded.stages:
        if stage.turns:  # on the way back a stage takes from later ones
            sendable |= _whole(stage)
    first = 0
    for stage in sharded.stages:
        if stage.first > first or (stage.turns and stage.first < first):
            raise InternalError(f"sharded: a stage begins at rank {stage.first}, and those before end at {first}")
        first = max(first, stage.ranks.stop)
        own = _Stage(stage, given, sendable, done)
        sendable |= own.check()
        gathered |= own.gathered
    missing = [c.outputs[0].name for c in sharded.program.computes if c not in done]
    if missing:
        raise InternalError(f"sharded: nobody computes '{missing[0]}'")
    absent = [t.name for t in sharded.program.outputs if t not in sendable | given | gathered]
    if absent:
        raise InternalError(f"sharded: the output '{absent[0]}' is whole nowhere")


def _whole(stage: PipelineStage) -> set[Tensor]:
    """What some step of a stage leaves whole on all of its ranks."""
    pieces = {t for s in stage.steps if isinstance(s, ShardedCompute) and s.gives.is_whole for t in s.compute.outputs}
    exchanges = [s for s in stage.steps if isinstance(s, Exchange) and s.axis is not None]
    return pieces | {s.tensor for s in exchanges if s.after.is_whole}


class _Stage:
    def __init__(self, stage: PipelineStage, given: set[Tensor], sendable: set[Tensor], done: set[Compute]) -> None:
        self.stage, self.mesh, self.given, self.sendable, self.done = stage, stage.mesh, given, sendable, done
        self.held: set[tuple[Tensor, Spread]] = set()
        self.gathered: set[Tensor] = set()  # whole on the first rank

    def check(self) -> set[Tensor]:
        """What is whole on every rank in the end."""
        for step in self.stage.steps:
            if isinstance(step, Exchange):
                self._exchange(step)
            else:
                self._piece(step)
        for keep in self.stage.keeps:
            if (keep.following, keep.held) not in self.held:
                raise InternalError(f"sharded: '{keep.following.name}' is kept as {keep.held}, and does not lie so")
        return {tensor for tensor, spread in self.held if spread.is_whole}

    def _piece(self, piece: ShardedCompute) -> None:
        name = piece.compute.outputs[0].name
        if piece.compute in self.done:
            raise InternalError(f"sharded: '{name}' is computed twice")
        if piece.gives != gives(piece.compute, piece.cuts):
            raise InternalError(f"sharded: '{name}' does not lie as it is cut")
        for tensor in reads(piece.compute):
            self._read(piece, tensor, name)
        if isinstance(piece.compute, Map | Reduce) and any(cut is not None for cut in piece.cuts):
            self._places(piece, name)
        self.held.update((t, piece.gives) for t in piece.compute.outputs)
        self.done.add(piece.compute)

    def _read(self, piece: ShardedCompute, tensor: Tensor, name: str) -> None:
        spread = piece.reads.get(tensor)
        if spread is None:
            raise InternalError(f"sharded: '{name}' does not say how it reads '{tensor.name}'")
        if tensor not in self.given and (tensor, spread) not in self.held:
            raise InternalError(f"sharded: '{name}' reads '{tensor.name}' as {spread}, and it does not lie so")
        if spread.is_partial or (all(cut is None for cut in piece.cuts) and not spread.is_whole):
            raise InternalError(f"sharded: '{name}' reads all of '{tensor.name}', of which a rank has a part")

    def _places(self, piece: ShardedCompute, name: str) -> None:
        assert isinstance(piece.compute, Map | Reduce)
        nest = build_nest(piece.compute, (), {})
        for at in self.mesh.coordinates:
            for tensor, place in read_places(nest, piece, self.mesh, at).items():
                if not inside(place, piece.reads[tensor].place(extents(tensor), self.mesh, at)):
                    raise InternalError(f"sharded: '{name}' reads more of '{tensor.name}' than rank {at} has")

    def _exchange(self, step: Exchange) -> None:
        name = step.tensor.name
        if step.kind not in EXCHANGES:
            raise InternalError(f"sharded: there is no exchange '{step.kind}'")
        if step.kind == "send":
            if step.tensor not in self.sendable or not step.after.is_whole or step.axis is not None:
                raise InternalError(f"sharded: '{name}' is sent, and no earlier stage has it whole")
        elif (step.tensor, step.before) not in self.held:
            raise InternalError(f"sharded: {step.kind} of '{name}' as {step.before}, and it does not lie so")
        elif step.axis is None or not _is_change(step.kind, step.before.parts[step.axis], step.after.parts[step.axis]):
            raise InternalError(f"sharded: no {step.kind} of '{name}' leads from {step.before} to {step.after}")
        elif step.before.with_part(step.axis, step.after.parts[step.axis]) != step.after:
            raise InternalError(f"sharded: {step.kind} of '{name}' is along one mesh axis")
        if step.kind != "gather":
            self.held.add((step.tensor, step.after))
        elif step.after.is_whole:
            self.gathered.add(step.tensor)


def _is_change(kind: str, before: AxisPart, after: AxisPart) -> bool:
    if kind == "all-reduce":
        return before.operator is not None and after == WHOLE
    if kind == "reduce-scatter":
        return before.operator is not None and after.dim is not None and not after.before and not after.after
    if kind in ("all-gather", "gather"):
        return before.dim is not None and after == WHOLE
    if kind == "all-to-all":
        return before.dim is not None and after.dim not in (None, before.dim) and not after.before and not after.after
    return kind == "halo" and before.dim is not None and before.dim == after.dim
