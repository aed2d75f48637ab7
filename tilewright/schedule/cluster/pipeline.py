"""A Program shared out to a cluster: which sections of it are a stage, and over which mesh each stage is shared out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from math import ceil, inf, prod

from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Compute, Program, reads
from tilewright.ir.forms.mesh import Spread
from tilewright.ir.forms.sharded import Exchange, Keep, PipelineStage, Sharded, Step
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.forms.training import Training, TrainingPhase
from tilewright.schedule.cluster.even import Shared, even_stages
from tilewright.schedule.cluster.layers import Layer, LayerRun, PricedLayers, grouped, in_layers
from tilewright.schedule.cluster.planner import Decided, MeshPlanner
from tilewright.schedule.cluster.stages import Fits, Seconds, StagePlan, best_stages
from tilewright.target import Cluster, Link
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.sharding.check import check_sharded

_MANY = 1 << 20  # parts of a batch with which the slowest stage alone counts
_LAYERS = 96  # places where stages may end, at most: about a hundredth of the model is as even as it needs to be
_FEWER_LAYERS = 32  # where stages of any number are looked at for each number of stages behind them


def share_out(
    program: Program, cluster: Cluster, split: Sequence[str] = (), stages: str | None = None, parts: int = 1
) -> Sharded:
    """Every compute in the way that takes least with the exchanges between them. Along the links named by `split` the
    weights are shared out too, so that together they hold them once. Along the link named by `stages` stages of the
    model follow each other, as even as they can be, each on a mesh of the other links."""
    along = next((link for link in cluster.links if link.name == stages), None)
    within = replace(cluster, links=tuple(link for link in cluster.links if link is not along))
    return share_out_in_stages(program, [within] * (1 if along is None else along.size), along, split, parts)


def share_out_in_stages(
    program: Program, meshes: Sequence[Cluster], along: Link | None, split: Sequence[str] = (), parts: int = 1,
    training: Training | None = None, most_bytes: float = inf,
) -> Sharded:  # fmt: skip
    """The same with stages on these meshes, one behind the other, and a link between them; of a training step, where
    the Program is one. A rank has at most so many bytes of weights; of a training step, with them their gradients, what
    the optimiser keeps, and what the parts of a batch that are under way need for their way back."""
    kinds = [mesh for number, mesh in enumerate(meshes) if mesh not in meshes[:number]]
    order = [kinds.index(mesh) for mesh in meshes]
    found: Sequence[StagePlan] | None
    if along is not None and len(meshes) > 1 and len(kinds) == 1 and training is None:
        all_of_them = replace(kinds[0], links=(replace(along, size=len(meshes)), *kinds[0].links))
        plans = _Plans(program, [kinds[0], all_of_them], along, (*split, along.name), None, parts, shared=1)
        found = plans.even(len(meshes), most_bytes)
    else:
        plans = _Plans(program, kinds, along, split, training, parts)
        best = best_stages(len(plans.layers), sum(map(_devices, meshes)), [_devices(kind) for kind in kinds],
                           plans.computing, _MANY, order, plans.fits(most_bytes))  # fmt: skip
        found = None if best is None else best[1]
    if found is None and len(meshes) <= len(plans.layers):
        raise OptionError(f"no {len(meshes)} stages fit: a rank may have {most_bytes / 2**20:.1f} MiB, and "
                          f"all of the model takes {plans.taken(0, len(plans.layers), order[0], 1) / 2**20:.1f} on one "
                          f"stage; take more ranks or give more memory")  # fmt: skip
    if found is None:
        where = f" along '{along.name}'" if along else ""
        few = f"{len(plans.layers)} layers, and {len(meshes)} stages were asked for{where}"
        raise OptionError(f"the model has {few}: take fewer")
    return plans.sharded(found, parts)


def share_out_by_itself(
    program: Program, cluster: Cluster, parts: int = 1, most_bytes: float = inf, training: Training | None = None
) -> Sharded:
    """Meshes and stages as are predicted to take least, on as many of the devices as that takes, with at most so many
    bytes of weights on each; of a training step, where the Program is one, of all that `share_out_in_stages` counts."""
    meshes = list(_sub_meshes(cluster))
    if training is not None:  # along outer links stages follow each other: gradients between nodes take longest
        meshes = [mesh for mesh in meshes if len(mesh.links) == 1]
    split = tuple(link.name for link in cluster.links) if most_bytes < inf else ()
    plans = _Plans(program, meshes, cluster.links[0], split, training, parts,
                   _LAYERS if training is None else _FEWER_LAYERS)  # fmt: skip
    sizes = [_devices(mesh) for mesh in meshes]
    alone = plans.seconds(0, len(plans.layers), 0) * parts
    fits = None if training is None else plans.fits(most_bytes)
    seconds: Seconds = partial(plans.fitting, most_bytes) if training is None else plans.seconds
    best = best_stages(len(plans.layers), _devices(cluster), sizes, seconds, parts, fits=fits, fewer=True)
    if best is None:
        least = min(plans.taken(0, len(plans.layers), mesh, 1) for mesh in range(len(meshes)))
        what = "the weights do not fit" if training is None else "what a step keeps does not fit"
        raise OptionError(f"{what}: a rank may have {most_bytes / 2**20:.1f} MiB, and shared out to all it has "
                          f"{least / 2**20:.1f}; take more ranks or give more memory")  # fmt: skip
    return plans.sharded(best[1], parts, (_told(best, meshes, alone),))


def _told(found: tuple[float, tuple[StagePlan, ...]], meshes: Sequence[Cluster], alone: float) -> str:
    text = "/".join(",".join(f"{link.name}={link.size}" for link in meshes[plan.mesh].links) for plan in found[1])
    if len(found[1]) == 1 and found[1][0].mesh == 0:
        return f"mesh {text} was chosen: one rank alone is predicted to take least, and the others wait"
    return f"mesh {text} was chosen: predicted {1e3 * found[0]:.3g} ms, and {1e3 * alone:.3g} ms on one rank"


def _sub_meshes(cluster: Cluster) -> Iterator[Cluster]:
    """One device, powers of two of them along the innermost link, all along it, and all along further links."""
    for place in reversed(range(len(cluster.links))):
        size = cluster.links[place].size
        for count in sorted({1 << i for i in range(size.bit_length()) if 1 << i <= size} | {size}):
            if count > 1 or place == len(cluster.links) - 1:
                inner = cluster.links[place + 1 :]
                yield replace(cluster, links=(replace(cluster.links[place], size=count), *inner))


def _devices(cluster: Cluster) -> int:
    return prod(link.size for link in cluster.links)


@dataclass
class _Plans:
    """The Program as it is cut over each of some meshes, and stages made of these."""

    program: Program
    meshes: Sequence[Cluster]
    along: Link | None
    split: Sequence[str]
    training: Training | None = None
    parts: int = 1
    most_layers: int = _LAYERS
    shared: int | None = None  # which of the meshes has the ranks of all stages
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        links = [link for mesh in self.meshes for link in mesh.links if link.size > 1]
        links += [self.along] if self.along is not None else []
        latency = min((link.latency for link in links), default=0.0)
        nests: dict[Compute, Nest] = {}
        about = (self.split, latency, self.training, self.parts, nests)
        self.planners = [MeshPlanner(self.program, mesh, *about) for mesh in self.meshes]
        self.decided: list[Decided] = [planner.run() for planner in self.planners]
        whole = self.planners[0].whole
        self.sections: list[tuple[int, int]] = []  # of a training step, of each layer the first and the one behind it
        if self.training is not None:  # what passes back between sections lies as what passes forward
            self.sections = grouped(self.decided[0].seconds, self.most_layers)
            found = self.decided[0].sections
            self.layers: list[Layer] = [tuple(c for s in found[a:b] for c in s.computes) for a, b in self.sections]
        else:
            self.layers = in_layers(self.program.computes, {c: way.seconds for c, way in whole.items()},
                                    {c: way.bytes for c, way in whole.items()}, self.most_layers)  # fmt: skip
        self.priced = [PricedLayers(planner, decided, self.layers, self.along)
                       for planner, decided in zip(self.planners, self.decided, strict=True)]  # fmt: skip
        self.runs = [each.runs_of_sections(self.sections) if self.sections else each.runs()
                     for number, each in enumerate(self.priced) if number != self.shared]  # fmt: skip
        if self.training is not None:
            taken = [planner.taken(each) for planner, each in zip(self.planners, self.decided, strict=True)]
            self._taken_before = [tuple([0, *accumulate(side)] for side in zip(*each, strict=True)) for each in taken]

    def even(self, count: int, most_bytes: float) -> list[StagePlan] | None:
        """Stages on so many groups of ranks, each with the first mesh, and layers that the second, which has all ranks,
        has together."""
        own, together = self.priced[0], self.priced[1]
        found = even_stages(self.runs[0], lambda layers: Shared(layers, *together.together(layers), own.runs(layers)),
                            count, self.parts, most_bytes)  # fmt: skip
        if found is None:
            return None
        if found.quicker is not None:
            milliseconds, room = 1e3 * found.quicker.seconds, ceil(found.quicker.room / 2**20)
            self.remarks = (f"even shares of the weights have their price: {milliseconds:.3g} ms are predicted where a "
                            f"rank may have {room} MiB (memory=)",)  # fmt: skip
        plans: list[StagePlan] = []
        for group, alike in groupby(enumerate(found.split.groups), key=lambda each: each[1]):
            numbers = [number for number, _ in alike]
            plans.append(StagePlan(numbers[0], numbers[-1] + 1, 1 if group is None else 0, group))
        return plans

    def seconds(self, first: int, last: int, mesh: int) -> float:
        """Of a stage of some layers over one of the meshes, with what it takes from those before."""
        return float(self.runs[mesh].seconds[first, last])

    def computing(self, first: int, last: int, mesh: int) -> float:
        """The same without that: what passes between stages may do so while they compute."""
        return float(self.runs[mesh].computing[first, last])

    def bytes(self, first: int, last: int, mesh: int) -> int:
        """Of weights on a rank."""
        return int(self.runs[mesh].held[first, last])

    def taken(self, first: int, last: int, mesh: int, under_way: int) -> int:
        """Bytes on a rank that has so many parts of a batch under way."""
        if self.training is None:
            return self.bytes(first, last, mesh)
        begin, end = self.sections[first][0], self.sections[last - 1][1]
        fixed, each = (before[end] - before[begin] for before in self._taken_before[mesh])
        return fixed + each * under_way

    def fits(self, most_bytes: float) -> Fits | None:
        """Whether a stage takes no more: the further from the end, the more parts are under way in it."""
        if most_bytes == inf:
            return None
        return lambda first, last, mesh, behind: (
            self.taken(first, last, mesh, min(self.parts, behind + 1)) <= most_bytes
        )

    def fitting(self, most_bytes: float, first: int, last: int, mesh: int) -> float:
        return self.seconds(first, last, mesh) if self.bytes(first, last, mesh) <= most_bytes else inf

    def sharded(self, plans: Sequence[StagePlan], parts: int, remarks: tuple[str, ...] = ()) -> Sharded:
        computes = [self._computes(plan) for plan in plans]
        made = [{t for c in own for t in c.outputs} for own in computes]
        read = [{t for c in own for t in (*reads(c), *self._kept(c))} for own in computes]
        stages: list[PipelineStage] = []
        first = 0
        for number, plan in enumerate(plans):
            planner = self.planners[plan.mesh]
            before = made[:number] if self.training is None else [*made[:number], *made[number + 1 :]]
            elsewhere = {t for others in before for t in others}
            later = {t for place, others in enumerate(read) if place != number for t in others}
            steps, turns, keeps = self._steps(plan, computes[number], elsewhere, later)
            own = first if plan.group is None else plan.group * planner.mesh.ranks
            stages.append(PipelineStage(planner.mesh, 0 if plan.mesh == self.shared else own, steps, 0.0, turns, keeps))
            first += planner.mesh.ranks
        seconds = self._seconds_of(plans, stages)
        stages = [replace(stage, seconds=each) for stage, each in zip(stages, seconds, strict=True)]
        said = dict.fromkeys(remark for plan in plans for remark in self.decided[plan.mesh].remarks)
        shared = Sharded(self.program, tuple(stages), parts, (*remarks, *self.remarks, *said))
        check_sharded(shared)
        return shared

    def _steps(
        self, plan: StagePlan, computes: Sequence[Compute], elsewhere: set[Tensor], later: set[Tensor]
    ) -> tuple[tuple[Step, ...], tuple[int, ...], tuple[Keep, ...]]:
        """What the ranks of a stage do, turn by turn."""
        planner, ways = self.planners[plan.mesh], self.decided[plan.mesh].ways
        held: dict[Tensor, list[Spread]] = {}
        if self.training is None:
            return planner.steps(computes, ways, held, elsewhere, later), (), ()
        steps: list[Step] = []
        ends: list[int] = []
        for turn in TrainingPhase:
            own = [c for c in computes if self.training.turns[c] is turn]
            steps.extend(planner.steps(own, ways, held, elsewhere, later))
            ends.append(len(steps))
        more, keeps = planner.keeps(steps, held, elsewhere)
        return (*steps, *more), tuple(ends[:-1]), keeps

    def _kept(self, compute: Compute) -> Iterator[Tensor]:
        """What has to come from another stage, so that a compute has its states for the next step."""
        if self.training is not None:
            yield from (self.training.states[t] for t in reads(compute) if t in self.training.states)

    def _computes(self, plan: StagePlan) -> list[Compute]:
        own = {c for layer in self.layers[plan.first : plan.last] for c in layer}
        return [c for c in self.program.computes if c in own]

    def _seconds_of(self, plans: Sequence[StagePlan], stages: Sequence[PipelineStage]) -> Iterator[float]:
        """Of each stage, with what its ranks do not have from an earlier stage of theirs."""
        if self.training is not None:
            yield from (self.seconds(plan.first, plan.last, plan.mesh) for plan in plans)
            return
        having: dict[Tensor, set[int]] = {}  # ranks
        made: dict[Tensor, PipelineStage] = {}
        for plan, stage in zip(plans, stages, strict=True):
            run = LayerRun(self.priced[plan.mesh])
            for number in range(plan.first, plan.last):
                run.add(number)
            total = run.seconds + run.whole_again(plan.last)
            for tensor in (step.tensor for step in stage.steps if isinstance(step, Exchange) and step.axis is None):
                lacking = set(stage.ranks) - having[tensor]
                total += run.priced.sent(tensor, -(-len(lacking) // made[tensor].mesh.ranks)) if lacking else 0.0
                having[tensor] |= lacking
            outputs = [t for t in run.made if t in run.priced.outputs]
            yield total + (sum(map(run.priced.sent, outputs)) if stage.first else 0.0)
            made.update(dict.fromkeys(run.made, stage))
            having.update((t, set(stage.ranks)) for t in run.made)
