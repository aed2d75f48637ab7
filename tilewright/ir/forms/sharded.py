"""A Program over a mesh of ranks: what part of each compute a rank does, and what ranks exchange in between.

    Sharded = stages, one behind the other, on ranks that a stage has to itself or several stages share
    Stage   = mesh, its first rank, and steps in order
    Piece   = a compute: by mesh axis, which of its axes is cut; of every tensor it reads, which spread it is read in
    Exchange = one tensor from one spread to another along one mesh axis, or from stage to stage

Every rank does every step of its stages. A tensor may lie there in several spreads at a time. Each stage has the inputs
whole on all of its ranks, and each rank has of the constants what its pieces read. Outputs end whole on the first rank
of the stage that computes them: a gather leaves a tensor whole on the first of the ranks along a mesh axis alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.ir.forms.compute import Compute, Map, Program, Reduce
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.mesh import AxisPart, Mesh, Spread
from tilewright.ir.forms.tensor import Tensor

EXCHANGES = ("all-reduce", "all-gather", "gather", "reduce-scatter", "all-to-all", "halo", "send")


@dataclass(frozen=True)
class ShardedCompute:
    """A compute, of which every rank does a part. `cuts` has by mesh axis the axis that is cut, of the output or of
    those summed over, a tensor whose rows are looked up and shared out, or None where all ranks do the same."""

    compute: Compute
    cuts: tuple[Axis | Tensor | None, ...]
    reads: Mapping[Tensor, Spread]
    gives: Spread


@dataclass(frozen=True)
class Exchange:
    """One tensor, from one spread to another: along one mesh axis, or sent whole from the stage before (axis None)."""

    kind: str
    tensor: Tensor
    axis: int | None
    before: Spread
    after: Spread


Step = ShardedCompute | Exchange


@dataclass(frozen=True)
class Keep:
    """A tensor that is kept from one training step to the next: how it is read, and which tensor, lying so, has all of
    that for the next step."""

    tensor: Tensor
    spread: Spread
    following: Tensor
    held: Spread


@dataclass(frozen=True)
class PipelineStage:
    """Steps in order on ranks that follow each other from `first`. Those of a training step go forward, from the first
    of `turns` on back, and from the second on are the update, once for all parts of a batch."""

    mesh: Mesh
    first: int
    steps: tuple[Step, ...]
    seconds: float = field(default=0.0, compare=False)  # predicted, of one part of a batch
    turns: tuple[int, ...] = ()
    keeps: tuple[Keep, ...] = ()

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.mesh.ranks)


@dataclass(frozen=True)
class Sharded:
    """A Program over ranks. Where a batch is cut into `parts` that follow each other, it is the Program of one of them,
    and a stage is at the next while later stages are at those before."""

    program: Program
    stages: tuple[PipelineStage, ...]
    parts: int = 1
    remarks: tuple[str, ...] = field(default=(), compare=False)  # how it was searched for, where not to the end

    @property
    def ranks(self) -> int:
        return max((stage.ranks.stop for stage in self.stages), default=0)

    @property
    def seconds(self) -> float:
        """Predicted, of one run: of a rank with one stage, the first part of a batch goes through all stages and each
        further one is as late as the slowest. A rank with several is at the last one first, and all of a stage's ranks
        begin it together."""
        free = [0.0] * self.ranks
        done = [0.0] * self.parts  # with the stages so far
        for beat in range(self.parts + len(self.stages) - 1):
            for number in reversed(range(max(0, beat - self.parts + 1), min(beat + 1, len(self.stages)))):
                stage, part = self.stages[number], beat - number
                done[part] = max(done[part], *(free[rank] for rank in stage.ranks)) + stage.seconds
                free[stage.first : stage.ranks.stop] = [done[part]] * len(stage.ranks)
        return max(done)

    def stages_of(self, rank: int) -> tuple[PipelineStage, ...]:
        """In order; no stage where a rank has nothing to do."""
        return tuple(stage for stage in self.stages if rank in stage.ranks)

    def exchanges(self) -> Iterator[tuple[PipelineStage, Exchange]]:
        for stage in self.stages:
            yield from ((stage, step) for step in stage.steps if isinstance(step, Exchange))

    def to_json(self) -> str:
        """All but the Program, whose tensors and axes are named."""
        stages = [_stage_data(stage) for stage in self.stages]
        about = {"stages": stages, "parts": self.parts, "seconds": self.seconds, "remarks": self.remarks}
        return json.dumps(about, indent=1) + "\n"


def from_json(text: str, program: Program) -> Sharded:
    """What `to_json` wrote, for the same Program."""
    data = json.loads(text)
    tensors = {tensor.name: tensor for tensor in program.tensors()}
    makers = {t.name: c for c in program.computes for t in c.outputs}
    stages = tuple(_stage(each, tensors, makers) for each in data["stages"])
    return Sharded(program, stages, data["parts"], tuple(data["remarks"]))


def cut_axes(compute: Compute) -> dict[str, Axis]:
    """Axes along which a compute can be cut, by names that tell those of the output and those summed over apart."""
    if not isinstance(compute, Map | Reduce):
        return {}
    found = {f"o{i}": axis for i, axis in enumerate(compute.axes)}
    if isinstance(compute, Reduce):
        found.update({f"r{i}": axis for i, axis in enumerate(compute.reduce_axes)})
    return found


def cut_name(compute: Compute, cut: Axis | Tensor | None) -> str | None:
    if cut is None:
        return None
    if isinstance(cut, Tensor):
        return f"rows of {cut.name}"
    return next(name for name, axis in cut_axes(compute).items() if axis is cut)


def _stage_data(stage: PipelineStage) -> dict[str, Any]:
    steps = [_piece_data(s) if isinstance(s, ShardedCompute) else _exchange_data(s) for s in stage.steps]
    keeps = [[k.tensor.name, _spread_data(k.spread), k.following.name, _spread_data(k.held)] for k in stage.keeps]
    return {"mesh": [list(axis) for axis in stage.mesh.axes], "first": stage.first, "steps": steps,
            "seconds": stage.seconds, "turns": stage.turns, "keeps": keeps}  # fmt: skip


def _piece_data(piece: ShardedCompute) -> dict[str, Any]:
    return {
        "compute": piece.compute.outputs[0].name,
        "cuts": [cut_name(piece.compute, cut) for cut in piece.cuts],
        "reads": {tensor.name: _spread_data(spread) for tensor, spread in piece.reads.items()},
        "gives": _spread_data(piece.gives),
    }


def _exchange_data(step: Exchange) -> dict[str, Any]:
    return {"exchange": step.kind, "tensor": step.tensor.name, "axis": step.axis, "before": _spread_data(step.before),
            "after": _spread_data(step.after)}  # fmt: skip


def _spread_data(spread: Spread) -> list[list[Any]]:
    return [[part.dim, part.before, part.after, part.operator] for part in spread.parts]


def _spread(data: list[list[Any]]) -> Spread:
    return Spread(tuple(AxisPart(*each) for each in data))


def _stage(data: Mapping[str, Any], tensors: Mapping[str, Tensor], makers: Mapping[str, Compute]) -> PipelineStage:
    steps = tuple(_step(each, tensors, makers) for each in data["steps"])
    keeps = tuple(Keep(tensors[a], _spread(b), tensors[c], _spread(d)) for a, b, c, d in data["keeps"])
    return PipelineStage(Mesh(tuple((name, size) for name, size in data["mesh"])), data["first"], steps,
                         data["seconds"], tuple(data["turns"]), keeps)  # fmt: skip


def _step(data: Mapping[str, Any], tensors: Mapping[str, Tensor], makers: Mapping[str, Compute]) -> Step:
    if "exchange" in data:
        return Exchange(data["exchange"], tensors[data["tensor"]], data["axis"], _spread(data["before"]),
                        _spread(data["after"]))  # fmt: skip
    compute = makers[data["compute"]]
    known = cut_axes(compute)
    cuts = tuple(_cut(name, known, tensors) for name in data["cuts"])
    reads = {tensors[name]: _spread(each) for name, each in data["reads"].items()}
    return ShardedCompute(compute, cuts, reads, _spread(data["gives"]))


def _cut(name: str | None, axes: Mapping[str, Axis], tensors: Mapping[str, Tensor]) -> Axis | Tensor | None:
    if name is None:
        return None
    return tensors[name.removeprefix("rows of ")] if name.startswith("rows of ") else axes[name]
