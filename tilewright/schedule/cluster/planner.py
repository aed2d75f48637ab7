"""A Program shared out to one mesh: cut where one tensor alone passes from computes to computes, each such section
solved once for every spread that this tensor may come and go in, and sections put together by dynamic programming."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

from tilewright.errors import InternalError, OptionError
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.mesh import Mesh, Spread
from tilewright.ir.forms.sharded import Exchange, Sharded, Stage, Step
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.schedule.cluster.choices import Choices, Hub, Reader
from tilewright.schedule.cluster.cost import Costs
from tilewright.schedule.cluster.reduced import solve
from tilewright.schedule.cluster.stages import best_stages
from tilewright.target import Cluster, Link
from tilewright.tile_graph.algebra.nest import build_nest
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.sharding.check import check_sharded
from tilewright.tile_graph.sharding.routes import is_held, route
from tilewright.tile_graph.sharding.strategies import Strategy, strategies

_SLACK = 1.02  # times its share of the weights that a rank may have: what is small beside them is not worth a cut
_MANY = 1 << 20  # parts of a batch: the slowest stage alone counts
_NOTHING = 0.0005  # the part of all weights below which those of a compute do not count
_SMALL = 0.005  # the part of all weights that a section has without being asked to share them out


# by the spread of what passes, the seconds up to there and the ways chosen in every section
Paths = dict[Spread | None, tuple[float, list[tuple[int, ...]]]]


@dataclass(frozen=True)
class Section:
    """Computes in order between two places that one tensor alone passes, which is None at the ends."""

    computes: tuple[Compute, ...]
    comes: Tensor | None
    goes: Tensor | None


@dataclass(frozen=True)
class Way:
    strategy: Strategy
    seconds: float
    bytes: int  # of weights


@dataclass(frozen=True)
class Solved:
    seconds: float
    chosen: tuple[int, ...]  # the number of each compute's way


def share_out(program: Program, cluster: Cluster, split: Sequence[str] = (), stages: str | None = None) -> Sharded:
    """Every compute in the way that takes least with the exchanges between them. Along the links named by `split` the
    weights are shared out too, so that together they hold them once. Along the link named by `stages` stages of the
    model follow each other, as even as they can be, each on a mesh of the other links."""
    along = next((link for link in cluster.links if link.name == stages), None)
    within = replace(cluster, links=tuple(link for link in cluster.links if link is not along))
    return _Planner(program, within, split, along).run()


@dataclass
class _Planner:
    program: Program
    cluster: Cluster
    split: Sequence[str]
    along: Link | None
    costs: Costs = field(init=False)
    mesh: Mesh = field(init=False)
    all_weights: int = field(init=False)
    ways: dict[Compute, list[Way]] = field(default_factory=dict)
    everywhere: set[Tensor] = field(default_factory=set)  # inputs, constants, and what is sooner computed than sent
    solved: dict[Hashable, Solved | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.costs = Costs(self.cluster)
        self.mesh = self.costs.mesh
        self.all_weights = sum(array.nbytes for array in self.program.constants.values())
        self.everywhere.update(self.program.inputs, self.program.constants)

    def run(self) -> Sharded:
        for compute in self.program.computes:
            self.ways[compute] = self._ways(compute)
        self._find_everywhere()
        sections = self.sections()
        chosen: dict[Compute, Way] = {}
        seconds, picked = self._chain(sections)
        for section, numbers in zip(sections, picked, strict=True):
            chosen.update({c: self.ways[c][n] for c, n in zip(section.computes, numbers, strict=True)})
        held: dict[Tensor, list[Spread]] = {}
        parts = self._parts(sections, chosen)
        made: list[Stage] = []
        for number, computes in enumerate(parts):
            later = {t for others in parts[number + 1 :] for c in others for t in reads(c)}
            made.append(Stage(self.mesh, number * self.mesh.ranks, self._steps(computes, chosen, held, later)))
        sharded = Sharded(self.program, tuple(made), seconds + self._sent(made))
        check_sharded(sharded)
        return sharded

    # --- stages

    def _parts(self, sections: Sequence[Section], chosen: Mapping[Compute, Way]) -> list[tuple[Compute, ...]]:
        """The computes of each stage: stages end where sections do, and the slowest is as quick as can be."""
        if self.along is None or self.along.size == 1:
            return [self.program.computes]
        times = [sum(chosen[c].seconds for c in section.computes) for section in sections]
        before = [0.0, *accumulate(times)]
        found = best_stages(len(sections), self.along.size, (1,), lambda i, j, _: before[j] - before[i], _MANY)
        if found is None:
            few = f"{len(sections)} sections, and {self.along.size} stages were asked for along '{self.along.name}'"
            raise OptionError(f"the model has {few}: take fewer")
        return [tuple(c for section in sections[p.first : p.last] for c in section.computes) for p in found[1]]

    def _sent(self, stages: Sequence[Stage]) -> float:
        """Seconds of what passes from stage to stage."""
        sends = [step for stage in stages for step in stage.steps if isinstance(step, Exchange) and step.kind == "send"]
        if self.along is None:
            return 0.0
        return sum(self.along.latency + step.tensor.most_bytes / self.along.bandwidth for step in sends)

    # --- ways

    def _ways(self, compute: Compute) -> list[Way]:
        constants = self.program.constants
        found = []
        for strategy in strategies(compute, self.mesh):
            weights = [(t, needs) for t, needs in strategy.needs.items() if t in constants]
            size = sum(min(self.costs.bytes_of(t, spread) for spread in needs) for t, needs in weights)
            # what is small beside the weights is not asked for: a node without any is decided by its neighbours
            size = size if size >= _NOTHING * self.all_weights else 0
            found.append(Way(strategy, self.costs.piece(compute, strategy, constants), size))
        return found

    def _find_everywhere(self) -> None:
        """What costs less with all that leads to it than one exchange: no rank waits for another's."""
        behind: dict[Tensor, float] = dict.fromkeys(self.everywhere, 0.0)
        links = [*self.cluster.links, *([] if self.along is None else [self.along])]
        latency = min((link.latency for link in links if link.size > 1), default=0.0)
        for compute in self.program.computes:
            before = sum(behind.get(t, inf) for t in reads(compute))
            total = before + self.ways[compute][0].seconds
            has_weights = self.ways[compute][0].bytes > _SMALL * self._weights(self.program.computes)
            if total < latency and not has_weights:
                behind.update(dict.fromkeys(compute.outputs, total))
                self.everywhere.update(compute.outputs)
                self.ways[compute] = self.ways[compute][:1]

    def _weights(self, computes: Sequence[Compute]) -> int:
        """Bytes of the weights that are read, each time they are."""
        return sum(self.ways[compute][0].bytes for compute in computes)

    # --- sections

    def sections(self) -> list[Section]:
        last = {t: i for i, c in enumerate(self.program.computes) for t in reads(c)}
        found: list[Section] = []
        alive: list[Tensor] = []
        begin, comes = 0, None
        for number, compute in enumerate(self.program.computes):
            alive = [t for t in (*alive, *compute.outputs) if t not in self.everywhere and last.get(t, -1) > number]
            if len(alive) <= 1 or number == len(self.program.computes) - 1:
                goes = alive[0] if alive else None
                found.append(Section(self.program.computes[begin : number + 1], comes, goes))
                begin, comes = number + 1, goes
        return found

    def _spreads(self, tensor: Tensor | None) -> list[Spread | None]:
        """Those that a tensor may lie in when it is made."""
        if tensor is None:
            return [None]
        maker = next(c for c in self.ways if tensor in c.outputs)
        return list(dict.fromkeys(way.strategy.gives for way in self.ways[maker]))

    def _chain(self, sections: Sequence[Section]) -> tuple[float, list[tuple[int, ...]]]:
        """The sections one behind the other: for every spread of what passes between two of them the best way there."""
        best: Paths = {None: (0.0, [])}
        for section in sections:
            # weights that no compute can share out stay where they are
            reached = self._reached(best, section, self._most_bytes(section)) or self._reached(best, section, inf)
            if not reached:
                raise InternalError(f"no way to share out '{section.computes[0].outputs[0].name}'")
            best = self._worth(reached, section.goes)
        return min(best.values(), key=lambda each: each[0])

    def _worth(self, reached: Paths, passing: Tensor | None) -> Paths:
        """Without spreads that are sooner reached from another one by an exchange."""
        if passing is None:
            return reached
        kept: Paths = {}
        for spread, (seconds, path) in sorted(reached.items(), key=lambda each: each[1][0]):
            assert spread is not None
            nearer = [s + self.costs.routed(passing, other, (spread,)) for other, (s, _) in kept.items() if other]
            if min(nearer, default=inf) > seconds:
                kept[spread] = (seconds, path)
        return kept

    def _reached(self, best: Paths, section: Section, most_bytes: float) -> Paths:
        reached: Paths = {}
        for goes in self._spreads(section.goes):
            for comes, (before, path) in best.items():
                found = self._solve(section, comes, goes, most_bytes)
                if found is not None and (goes not in reached or before + found.seconds < reached[goes][0]):
                    reached[goes] = (before + found.seconds, [*path, found.chosen])
        return reached

    def _solve(self, section: Section, comes: Spread | None, goes: Spread | None, most_bytes: float) -> Solved | None:
        if section.goes is not None and section.goes is section.comes and comes != goes:
            return None
        key = self._key(section, comes, goes, most_bytes)
        if key is None or key not in self.solved:
            problem, ways = self._problem(section, comes, goes, most_bytes)
            found = solve(problem) if all(problem.seconds) else None
            result = None if found is None else Solved(
                found[0], tuple(able[n] for able, n in zip(ways, found[1], strict=False))
            )  # fmt: skip
            if key is None:
                return result
            self.solved[key] = result
        return self.solved[key]

    def _key(self, section: Section, comes: Spread | None, goes: Spread | None, most_bytes: float) -> Hashable | None:
        """Equal for sections that compute the same on tensors of the same shapes."""
        if any(not isinstance(c, Map | Reduce) for c in section.computes):
            return None
        nests = [build_nest(c, (), {}) for c in section.computes]
        outputs = set(self.program.outputs)
        about = signature(nests, lambda t: (
            t in self.program.constants, t in self.everywhere, t is section.comes, t is section.goes, t in outputs
        ))  # fmt: skip
        return about, comes, goes, most_bytes

    def _most_bytes(self, section: Section) -> float:
        parts = 1
        for link in self.cluster.links:
            parts *= link.size if link.name in self.split else 1
        own = self._weights(section.computes)
        if parts == 1 or own < _SMALL * self._weights(self.program.computes):
            return inf
        return _SLACK * own / parts

    def _problem(
        self, section: Section, comes: Spread | None, goes: Spread | None, most_bytes: float
    ) -> tuple[Choices, list[list[int]]]:
        """The integer program of a section, and which ways of each compute it chooses among."""
        able: list[list[int]] = []
        for compute in section.computes:
            numbers = range(len(self.ways[compute]))
            fixed = section.goes in compute.outputs
            able.append([n for n in numbers if not fixed or self.ways[compute][n].strategy.gives == goes])
        ways = [[self.ways[c][n] for n in numbers] for c, numbers in zip(section.computes, able, strict=True)]
        makers = {t: i for i, c in enumerate(section.computes) for t in c.outputs}
        readers: dict[Tensor, list[int]] = {}
        for i, compute in enumerate(section.computes):
            for tensor in reads(compute):
                if tensor not in self.everywhere:
                    readers.setdefault(tensor, []).append(i)
        tensors = dict.fromkeys((*readers, *(t for t in self.program.outputs if t in makers)))
        nodes_seconds = [tuple(way.seconds for way in each) for each in ways]
        nodes_bytes = [tuple(way.bytes for way in each) for each in ways]
        hubs: list[Hub] = []
        for tensor in tensors:
            if not all(ways):
                break
            maker = makers.get(tensor)
            made = [comes] if maker is None else [way.strategy.gives for way in ways[maker]]
            hubs.append(self._hub(tensor, maker, made, readers.get(tensor, []), ways, nodes_seconds, nodes_bytes))
        return Choices(tuple(nodes_seconds), tuple(nodes_bytes), tuple(hubs), most_bytes), able

    def _hub(
        self, tensor: Tensor, maker: int | None, made: Sequence[Spread | None], readers: Sequence[int],
        ways: Sequence[Sequence[Way]], seconds: list[tuple[float, ...]], sizes: list[tuple[int, ...]],
    ) -> Hub:  # fmt: skip
        spreads = list(dict.fromkeys(made))
        wanted: dict[tuple[Spread, ...], int] = {}
        found: list[Reader] = []
        for node in readers:
            needs = [way.strategy.needs[tensor] for way in ways[node]]
            found.append(Reader(node, tuple(wanted.setdefault(each, len(wanted)) for each in needs)))
        if tensor in self.program.outputs and maker is not None:
            # whoever asks for the results is a node with one choice
            found.append(Reader(len(seconds), (wanted.setdefault((Spread.whole(self.mesh),), len(wanted)),)))
            seconds.append((0.0,))
            sizes.append((0,))
        costs = tuple(tuple(self.costs.routed(tensor, s, each) for each in wanted) for s in spreads if s is not None)
        return Hub(maker, tuple(spreads.index(each) for each in made), tuple(found), costs)

    # --- steps

    def _steps(
        self, computes: Sequence[Compute], chosen: Mapping[Compute, Way], held: dict[Tensor, list[Spread]],
        later: Container[Tensor],
    ) -> tuple[Step, ...]:  # fmt: skip
        """What the ranks of a stage do; it leaves whole what others need of it. `held` has what earlier ones left."""
        whole = Spread.whole(self.mesh)
        made = {t for c in computes for t in c.outputs}
        sent = dict.fromkeys(t for c in computes for t in reads(c) if t in held)
        steps: list[Step] = [Exchange("send", tensor, None, whole, whole) for tensor in sent]
        held.update({tensor: [whole] for tensor in sent})
        for compute in computes:
            strategy = chosen[compute].strategy
            read_as = {t: self._brought(t, needs, held, steps) for t, needs in strategy.needs.items()}
            steps.append(strategy.piece(compute, read_as))
            held.update({t: [strategy.gives] for t in compute.outputs})
        for tensor in [t for t in held if t in made and (t in later or t in self.program.outputs)]:
            self._brought(tensor, (whole,), held, steps)
        return tuple(steps)

    def _brought(
        self, tensor: Tensor, wants: Sequence[Spread], held: dict[Tensor, list[Spread]], steps: list[Step]
    ) -> Spread:
        """The spread in which a tensor is read, which it lies in already or after exchanges."""
        if tensor not in held:  # given: each rank has of it what it reads
            return min(wants, key=lambda want: self.costs.bytes_of(tensor, want))
        have = held[tensor]
        if any(not isinstance(extent, int) for extent in tensor.shape):
            return have[0]
        for want in wants:
            for spread in have:
                if is_held(extents(tensor), spread, want, self.mesh):
                    return spread
        want = min(wants, key=lambda each: self.costs.routed(tensor, have[0], (each,)))
        exchanges, final = route(tensor, have[0], want, self.mesh)
        steps.extend(exchanges)
        have.extend(step.after for step in exchanges)
        return final
