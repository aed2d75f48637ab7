"""A Program shared out to one mesh: cut where one tensor alone passes from computes to computes, each such section
solved once for every spread that this tensor may come and go in, and sections put together by dynamic programming."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, prod
from typing import NamedTuple

from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.mesh import WHOLE, Mesh, Spread
from tilewright.ir.forms.sharded import Exchange, Keep, ShardedCompute, Step
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.ir.forms.training import Training, TrainingPhase
from tilewright.schedule.cluster.axes import Admitted, AxesOutcome, Cuts, at_a_time, one_by_one
from tilewright.schedule.cluster.choices import Choices, Hub, TensorReader
from tilewright.schedule.cluster.cost import Costs
from tilewright.schedule.cluster.reduced import solve
from tilewright.schedule.constants import WEIGHTS_NOTHING, WEIGHTS_SLACK, WEIGHTS_SMALL
from tilewright.target import Cluster
from tilewright.tile_graph.algebra.nest import Nest, build_nest
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.sharding.routes import is_held, route
from tilewright.tile_graph.sharding.strategies import Cut, Strategy, cut_choices, strategy_of

_AT_A_TIME = 50_000  # pairs of ways that are looked at for all mesh axes together


# by the spread of what passes, the seconds up to there and the ways chosen in every section
Paths = dict[Spread | None, tuple[float, list["Solved"]]]


@dataclass(frozen=True)
class Section:
    """Computes in order between two places that one tensor alone passes, which is None at the ends. In a training step
    those of the way back and of the update are there too; what passes on the way back lies as what passes forward
    does."""

    computes: tuple[Compute, ...]
    comes: Tensor | None
    goes: Tensor | None
    comes_back: Tensor | None = None
    goes_back: Tensor | None = None
    far: frozenset[Tensor] = frozenset()  # that sections further away make or read, which have them whole


@dataclass(frozen=True)
class Way:
    strategy: Strategy
    seconds: float
    bytes: int  # of weights


class _Form(NamedTuple):
    """What computes that do the same on tensors of the same shapes have alike, and which tensors these are here."""

    key: Hashable
    tensors: tuple[Tensor, ...]
    cuttable: tuple[Cut, ...]


class _Alike(NamedTuple):
    """A way of all computes of a form, with what it needs of their tensors, in the order of the form."""

    gives: Spread
    needs: tuple[tuple[Spread, ...] | None, ...]
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Solved:
    seconds: float
    chosen: tuple[int, ...]  # the number of each compute's way
    is_least: bool


@dataclass(frozen=True)
class Decided:
    """The sections of a Program, the seconds of each with what ranks exchange in it, and the way of every compute."""

    sections: tuple[Section, ...]
    seconds: tuple[float, ...]
    ways: Mapping[Compute, Way]
    remarks: tuple[str, ...]


@dataclass
class MeshPlanner:
    """How the computes of a Program are cut over one mesh, whichever of them it then has. What passes between ranks
    takes `latency` seconds at least."""

    program: Program
    cluster: Cluster
    split: Sequence[str]
    latency: float
    training: Training | None = None
    batch_parts: int = 1  # of a training step, which is updated once for all of them
    nests: dict[Compute, Nest] = field(default_factory=dict)  # of its computes, whatever the mesh
    costs: Costs = field(init=False)
    mesh: Mesh = field(init=False)
    all_weights: int = field(init=False)
    all_read: int = 0  # of weights, each time they are
    choices: dict[Compute, tuple[tuple[Cut, ...], ...]] = field(default_factory=dict)  # by mesh axis
    whole: dict[Compute, Way] = field(default_factory=dict)  # all of it everywhere
    known: dict[tuple[Compute, Cuts], Way | None] = field(default_factory=dict)
    alike: dict[Hashable, _Alike | None] = field(default_factory=dict)  # of computes that do the same elsewhere
    forms: dict[Compute, _Form | None] = field(default_factory=dict)
    numbered: dict[Section, Hashable] = field(default_factory=dict)  # of the ways that are looked at now
    ways: dict[Compute, list[Way]] = field(default_factory=dict)  # that are looked at now
    described: dict[Section, Hashable | None] = field(default_factory=dict)
    everywhere: set[Tensor] = field(default_factory=set)  # inputs, constants, and what is sooner computed than sent
    parts: int = 1  # in which weights are shared out
    solved: dict[Hashable, Solved | None] = field(default_factory=dict)
    summed_up: set[Tensor] = field(default_factory=set)  # gradients, which the parts of a batch add up to
    tied: dict[Tensor, Spread] = field(default_factory=dict)  # weights of several computes, as all are to read them

    def __post_init__(self) -> None:
        self.costs = Costs(self.cluster)
        self.mesh = self.costs.mesh
        self.states: Mapping[Tensor, Tensor] = {} if self.training is None else self.training.states
        self.kept = {*self.program.constants, *self.states}
        self.makers = {t: c for c in self.program.computes for t in c.outputs}
        self.all_weights = sum(tensor.most_bytes for tensor in self.kept)
        self.everywhere.update(t for t in (*self.program.inputs, *self.program.constants) if t not in self.states)

    def run(self) -> Decided:
        self.summed_up.update(t for c in self.program.computes if self._is_update(c) for t in reads(c))
        for compute in self.program.computes:
            self.choices[compute] = cut_choices(compute, self.mesh)
            self.whole[compute] = self._admitted(compute, (None,) * len(self.mesh.axes))
        self.all_read = self._weights(self.program.computes)
        self._find_everywhere()
        sections = self.sections()
        best, remarks = self._decided(sections)
        if self.training is None and any(size > 1 and name in self.split for name, size in self.mesh.axes):
            self.tied = self._several_times(best)
        if self.tied:
            again, said = self._decided(sections)
            best, remarks = (again, said) if again.over <= best.over else (best, remarks)
        chosen = {compute: self._admitted(compute, cuts) for compute, cuts in best.cuts.items()}
        return Decided(tuple(sections), best.sections, chosen, remarks)

    def _several_times(self, found: AxesOutcome) -> dict[Tensor, Spread]:
        """Weights that several computes read, each in parts of its own: as the one reads them that takes longest."""
        read: dict[Tensor, list[tuple[float, Spread]]] = {}
        for compute, cuts in found.cuts.items():
            way = self._admitted(compute, cuts)
            for tensor, needs in way.strategy.needs.items():
                if tensor in self.kept and tensor.most_bytes > WEIGHTS_SMALL * self.all_weights:
                    spread = min(needs, key=lambda each: self.costs.bytes_of(tensor, each))
                    read.setdefault(tensor, []).append((way.seconds, spread))
        return {t: max(each, key=lambda one: one[0])[1] for t, each in read.items() if len({s for _, s in each}) > 1}

    # --- mesh axes

    def _decided(self, sections: Sequence[Section]) -> tuple[AxesOutcome, tuple[str, ...]]:
        """How every compute is cut, and what is to be said of how that was found."""
        axes = [axis for axis, size in enumerate(self.mesh.sizes) if size > 1]
        remarks: list[str] = []
        if len(axes) < 2 or self._pairs(sections) <= _AT_A_TIME:
            best = self._outcome(sections, at_a_time(self.choices), axes)
        else:
            axes.sort(key=lambda axis: self.mesh.axes[axis][0] not in self.split)
            best = one_by_one(self.choices, axes, lambda admitted, done: self._outcome(sections, admitted, done))
            remarks.append("decided one mesh axis after the other: all at a time have too many ways to look at")
        if not best.is_least:
            remarks.append("the search for the quickest way ended at its bound: there may be a quicker one")
        return best, tuple(remarks)

    def _pairs(self, sections: Sequence[Section]) -> int:
        """About how many pairs of ways there are to look at for all mesh axes at a time."""
        ways = {c: prod(map(len, choices)) for c, choices in self.choices.items()}
        ends = [1, *(max((ways[c] for c in s.computes if s.goes in c.outputs), default=1) for s in sections)]
        each = [sum(ways[c] ** 2 for c in section.computes) for section in sections]
        return sum(own * ends[i] * ends[i + 1] for i, own in enumerate(each))

    def _outcome(self, sections: Sequence[Section], admitted: Admitted, done: Sequence[int]) -> AxesOutcome:
        """The best of some ways of every compute, with weights shared out along the mesh axes that are done."""
        for compute, cuts in admitted.items():
            found = (self._way(compute, each) for each in cuts)
            ways = [way for way in found if way is not None]
            tied = {t: spread for t, spread in self.tied.items() if t in reads(compute)}
            agreeing = [w for w in ways if all(spread in w.strategy.needs[t] for t, spread in tied.items())]
            self.ways[compute] = agreeing or ways
        self.numbered.clear()
        self.parts = prod(self.mesh.sizes[axis] for axis in done if self.mesh.axes[axis][0] in self.split)
        return self._chain(sections)

    # --- ways

    def _way(self, compute: Compute, cuts: Cuts) -> Way | None:
        if (compute, cuts) not in self.known:
            self.known[compute, cuts] = self._found(compute, cuts)
        return self.known[compute, cuts]

    def _found(self, compute: Compute, cuts: Cuts) -> Way | None:
        """Worked out once for all computes that are alike: layers of a model have most of theirs in common."""
        if compute not in self.forms:
            self.forms[compute] = self._form(compute)
        form = self.forms[compute]
        if form is None:
            strategy = strategy_of(compute, cuts, self.mesh)
            return None if strategy is None else self._priced(compute, strategy)
        key = form.key, tuple(form.cuttable.index(cut) for cut in cuts)
        if key not in self.alike:
            strategy = strategy_of(compute, cuts, self.mesh)
            way = None if strategy is None else self._priced(compute, strategy)
            self.alike[key] = None if way is None else _Alike(
                way.strategy.gives, tuple(way.strategy.needs.get(t) for t in form.tensors), way.seconds, way.bytes
            )  # fmt: skip
            return way
        same = self.alike[key]
        if same is None:
            return None
        needs = {t: each for t, each in zip(form.tensors, same.needs, strict=True) if each is not None}
        return Way(Strategy(cuts, same.gives, {t: needs[t] for t in reads(compute)}), same.seconds, same.bytes)

    def _form(self, compute: Compute) -> _Form | None:
        if not isinstance(compute, Map | Reduce):
            return None
        outline = self._nest(compute).outline
        about = tuple((t.shape, t.dtype.name, t in self.kept) for t in outline.tensors)
        axes = (*compute.axes, *(compute.reduce_axes if isinstance(compute, Reduce) else ()))
        key = outline.key, about, self._is_update(compute)
        return None if outline.outside else _Form(key, outline.tensors, (None, *axes, *outline.tensors))

    def _nest(self, compute: Map | Reduce) -> Nest:
        if compute not in self.nests:
            self.nests[compute] = build_nest(compute, (), {})
        return self.nests[compute]

    def _admitted(self, compute: Compute, cuts: Cuts) -> Way:
        way = self._way(compute, cuts)
        assert way is not None, f"'{compute.outputs[0].name}' is not cut so"
        return way

    def _priced(self, compute: Compute, strategy: Strategy) -> Way:
        weights = [(t, needs) for t, needs in strategy.needs.items() if t in self.kept]
        size = sum(min(self.costs.bytes_of(t, spread) for spread in needs) for t, needs in weights)
        # what is small beside the weights is not asked for: a node without any is decided by its neighbours
        size = size if size >= WEIGHTS_NOTHING * self.all_weights else 0
        seconds = self.costs.piece(compute, strategy, self.kept)
        return Way(strategy, seconds / (self.batch_parts if self._is_update(compute) else 1), size)

    def _is_update(self, compute: Compute) -> bool:
        return self.training is not None and self.training.turns[compute] is TrainingPhase.UPDATE

    def _find_everywhere(self) -> None:
        """What costs less with all that leads to it than one exchange: no rank waits for another's."""
        behind: dict[Tensor, float] = dict.fromkeys(self.everywhere, 0.0)
        for compute in self.program.computes:
            before = sum(behind.get(t, inf) for t in reads(compute))
            total = before + self.whole[compute].seconds
            has_weights = self.whole[compute].bytes > WEIGHTS_SMALL * self.all_read
            if total < self.latency and not has_weights:
                behind.update(dict.fromkeys(compute.outputs, total))
                self.everywhere.update(compute.outputs)
                self.choices[compute] = ((None,),) * len(self.mesh.axes)

    def _weights(self, computes: Sequence[Compute]) -> int:
        """Bytes of the weights that are read, each time they are."""
        return sum(self.whole[compute].bytes for compute in computes)

    # --- sections

    def sections(self) -> list[Section]:
        computes = self.program.computes
        if self.training is not None:
            computes = tuple(c for c in computes if self.training.turns[c] is TrainingPhase.FORWARD)
        last = {t: i for i, c in enumerate(computes) for t in reads(c)}
        found: list[Section] = []
        alive: list[Tensor] = []
        begin, comes = 0, None
        for number, compute in enumerate(computes):
            alive = [t for t in (*alive, *compute.outputs) if t not in self.everywhere and last.get(t, -1) > number]
            if len(alive) <= 1 or number == len(computes) - 1:
                goes = alive[0] if alive else None
                found.append(Section(computes[begin : number + 1], comes, goes))
                begin, comes = number + 1, goes
        return found if self.training is None else self._with_the_way_back(self.training, found)

    def _with_the_way_back(self, training: Training, sections: Sequence[Section]) -> list[Section]:
        """Every section with those computes of the way back and of the update that belong to its own."""
        number = {c: n for n, section in enumerate(sections) for c in section.computes}
        for compute in self.program.computes:
            if compute not in number:
                number[compute] = number[training.beside[compute]]
        members: list[list[Compute]] = [[] for _ in sections]
        for compute in self.program.computes:
            members[number[compute]].append(compute)
        made = {t: number[c] for c in self.program.computes for t in c.outputs}
        made |= {old: made[new] for old, new in training.states.items()}
        crossing: list[dict[Tensor, None]] = [{} for _ in sections]  # what a section takes or gives
        for compute in self.program.computes:
            for t in reads(compute):
                if t not in self.everywhere and made[t] != number[compute]:
                    crossing[made[t]][t] = crossing[number[compute]][t] = None
        returned = {t for c in self.program.computes if training.turns[c] is TrainingPhase.BACKWARD for t in c.outputs}
        # what a section takes from the one behind it on the way back: the gradient of what it gives that one
        back = [next((t for t in b if t in a and t in returned), None) for a, b in pairwise(crossing)]
        ends = [None, *back, None]
        return [
            replace(each, computes=tuple(members[n]), comes_back=ends[n + 1], goes_back=ends[n],
                    far=frozenset(crossing[n]) - {each.comes, each.goes, *ends[n : n + 2]})
            for n, each in enumerate(sections)
        ]  # fmt: skip

    def _spreads(self, tensor: Tensor | None) -> list[Spread | None]:
        """Those that a tensor may lie in when it is made."""
        if tensor is None:
            return [None]
        return list(dict.fromkeys(way.strategy.gives for way in self.ways[self.makers[tensor]]))

    def _chain(self, sections: Sequence[Section]) -> AxesOutcome:
        """The sections one behind the other: for every spread of what passes between two of them the best way there."""
        best: Paths = {None: (0.0, [])}
        over = 0
        for section in sections:
            reached = self._reached(best, section, self._most_bytes(section))
            if not reached:  # weights that no compute can share out stay where they are
                over += self._weights(section.computes)
                reached = self._reached(best, section, inf)
            if not reached:
                raise InternalError(f"no way to share out '{section.computes[0].outputs[0].name}'")
            best = self._worth(reached, section.goes)
        seconds, picked = min(best.values(), key=lambda each: each[0])
        cuts = {c: self.ways[c][n].strategy.cuts for section, found in zip(sections, picked, strict=True)
                for c, n in zip(section.computes, found.chosen, strict=True)}  # fmt: skip
        each = tuple(found.seconds for found in picked)
        return AxesOutcome(over, seconds, cuts, all(found.is_least for found in picked), each)

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
                    reached[goes] = (before + found.seconds, [*path, found])
        return reached

    def _solve(self, section: Section, comes: Spread | None, goes: Spread | None, most_bytes: float) -> Solved | None:
        if section.goes is not None and section.goes is section.comes and comes != goes:
            return None
        key = self._key(section, comes, goes, most_bytes)
        if key is None or key not in self.solved:
            problem, ways = self._problem(section, comes, goes, most_bytes)
            found = solve(problem) if all(problem.seconds) else None
            result = None if found is None else Solved(
                found.seconds, tuple(able[n] for able, n in zip(ways, found.chosen, strict=False)), found.is_least
            )  # fmt: skip
            if key is None:
                return result
            self.solved[key] = result
        return self.solved[key]

    def _key(self, section: Section, comes: Spread | None, goes: Spread | None, most_bytes: float) -> Hashable | None:
        """Equal for sections that compute the same on tensors of the same shapes, in the same ways."""
        if section not in self.described:
            self.described[section] = self._description(section)
        if section not in self.numbered:
            self.numbered[section] = self._numbers(section)
        about = self.described[section]
        return None if about is None else (about, self.numbered[section], comes, goes, most_bytes)

    def _numbers(self, section: Section) -> Hashable:
        """Which ways of each compute are looked at, by the numbers of what they cut."""
        return tuple(
            tuple(tuple(each.index(cut) for each, cut in zip(self.choices[c], way.strategy.cuts, strict=True))
                  for way in self.ways[c])
            for c in section.computes
        )  # fmt: skip

    def _description(self, section: Section) -> Hashable | None:
        plain = [c for c in section.computes if isinstance(c, Map | Reduce)]
        if len(plain) < len(section.computes):
            return None
        nests = [self._nest(c) for c in plain]
        outputs = set(self.program.outputs)
        following = set(self.states.values())
        return signature(nests, lambda t: (
            t in self.program.constants, t in self.everywhere, t is section.comes, t is section.goes, t in outputs,
            t in self.states, t is section.comes_back, t is section.goes_back, t in section.far, t in following,
        )), tuple(map(self._is_update, section.computes))  # fmt: skip

    def _most_bytes(self, section: Section) -> float:
        own = self._weights(section.computes)
        if self.parts == 1 or own < WEIGHTS_SMALL * self.all_read:
            return inf
        return WEIGHTS_SLACK * own / self.parts

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
        # what is kept lies as the update leaves it
        makers |= {old: makers[new] for old, new in self.states.items() if new in makers}
        readers: dict[Tensor, list[int]] = {}
        for i, compute in enumerate(section.computes):
            for tensor in reads(compute):
                # an update takes what it keeps as it leaves it
                if tensor not in self.everywhere and makers.get(tensor) != i:
                    readers.setdefault(tensor, []).append(i)
        ends = [t for t in (*self.program.outputs, section.goes_back, *section.far) if t in makers]
        tensors = dict.fromkeys((*readers, *(t for t in ends if t is not None)))
        nodes_seconds = [tuple(way.seconds for way in each) for each in ways]
        nodes_bytes = [tuple(way.bytes for way in each) for each in ways]
        hubs: list[Hub] = []
        for tensor in tensors:
            if not all(ways):
                break
            maker = makers.get(tensor)
            made = [self._outside(section, tensor, comes, goes)] if maker is None else \
                [way.strategy.gives for way in ways[maker]]  # fmt: skip
            end = self._outside(section, tensor, comes, goes) if tensor in ends else None
            hubs.append(self._hub(tensor, maker, made, readers.get(tensor, []), ways, nodes_seconds, nodes_bytes, end))
        return Choices(tuple(nodes_seconds), tuple(nodes_bytes), tuple(hubs), most_bytes), able

    def _outside(self, section: Section, tensor: Tensor, comes: Spread | None, goes: Spread | None) -> Spread | None:
        """How a tensor lies where a section takes it from another or gives it to one."""
        if tensor is section.comes:
            return comes
        lies = goes if tensor is section.comes_back else comes if tensor is section.goes_back else None
        if lies is None:
            return Spread.whole(self.mesh)
        return Spread(tuple(WHOLE if part.operator is not None else part for part in lies.parts))

    def _hub(
        self, tensor: Tensor, maker: int | None, made: Sequence[Spread | None], readers: Sequence[int],
        ways: Sequence[Sequence[Way]], seconds: list[tuple[float, ...]], sizes: list[tuple[int, ...]],
        end: Spread | None,
    ) -> Hub:  # fmt: skip
        spreads = list(dict.fromkeys(made))
        wanted: dict[tuple[Spread, ...], int] = {}
        found: list[TensorReader] = []
        for node in readers:
            needs = [way.strategy.needs[tensor] for way in ways[node]]
            found.append(TensorReader(node, tuple(wanted.setdefault(each, len(wanted)) for each in needs)))
        if end is not None and maker is not None:
            # whoever asks for the results is a node with one choice
            found.append(TensorReader(len(seconds), (wanted.setdefault((end,), len(wanted)),)))
            seconds.append((0.0,))
            sizes.append((0,))
        once = self.batch_parts if tensor in self.summed_up or tensor in self.states else 1
        costs = tuple(tuple(self.costs.routed(tensor, s, each) / once for each in wanted)
                      for s in spreads if s is not None)  # fmt: skip
        return Hub(maker, tuple(spreads.index(each) for each in made), tuple(found), costs)

    # --- what a rank holds

    def taken(self, decided: Decided) -> list[tuple[int, int]]:
        """Of every section of a training step the bytes on a rank: what it keeps and the gradients that it adds up, and
        what each part of a batch needs for its way back."""
        assert self.training is not None
        turns = self.training.turns
        made = {t: (turns[c], decided.ways[c].strategy.gives) for c in self.program.computes for t in c.outputs}
        found: list[tuple[int, int]] = []
        for section in decided.sections:
            kept: dict[tuple[Tensor, Spread], None] = {}
            back: dict[tuple[Tensor, Spread], None] = {}
            for compute in section.computes:
                for tensor, needs in decided.ways[compute].strategy.needs.items():
                    if tensor in self.kept:
                        kept[tensor, min(needs, key=lambda spread: self.costs.bytes_of(tensor, spread))] = None
                    elif (
                        tensor in made
                        and turns[compute] is TrainingPhase.UPDATE
                        and made[tensor][0] is not TrainingPhase.UPDATE
                    ):
                        kept[tensor, made[tensor][1]] = None
                    elif (
                        tensor in made
                        and turns[compute] is TrainingPhase.BACKWARD
                        and made[tensor][0] is TrainingPhase.FORWARD
                    ):
                        back[tensor, made[tensor][1]] = None
            found.append((self._sizes(kept), self._sizes(back)))
        return found

    def _sizes(self, held: Iterable[tuple[Tensor, Spread]]) -> int:
        return sum(self.costs.bytes_of(tensor, spread) for tensor, spread in held)

    # --- steps

    def steps(
        self, computes: Sequence[Compute], chosen: Mapping[Compute, Way], held: dict[Tensor, list[Spread]],
        elsewhere: Container[Tensor], later: Container[Tensor],
    ) -> tuple[Step, ...]:  # fmt: skip
        """What the ranks of a stage do; it leaves whole what others need of it, and on its first rank what the caller
        does. `held` has what lies here already, and `elsewhere` are what other stages have whole."""
        whole = Spread.whole(self.mesh)
        made = {t for c in computes for t in c.outputs}
        sent = dict.fromkeys(t for c in computes for t in reads(c) if t in elsewhere and t not in held)
        steps: list[Step] = [Exchange("send", tensor, None, whole, whole) for tensor in sent]
        held.update({tensor: [whole] for tensor in sent})
        for compute in computes:
            strategy = chosen[compute].strategy
            read_as = {t: self._brought(t, needs, held, steps) for t, needs in strategy.needs.items()}
            steps.append(strategy.piece(compute, read_as))
            held.update({t: [strategy.gives] for t in compute.outputs})
        for tensor in [t for t in held if t in made and (t in later or t in self.program.outputs)]:
            lies = held[tensor][0]
            cut = [axis for axis, part in enumerate(lies.parts) if not part.is_whole]
            if tensor not in later and len(cut) == 1 and not lies.is_partial and whole not in held[tensor]:
                steps.append(Exchange("gather", tensor, cut[0], lies, whole))
            else:
                self._brought(tensor, (whole,), held, steps)
        return tuple(steps)

    def keeps(
        self, steps: Sequence[Step], held: dict[Tensor, list[Spread]], elsewhere: Container[Tensor]
    ) -> tuple[tuple[Step, ...], tuple[Keep, ...]]:  # fmt: skip
        """How what these steps read of states comes to lie so again for the next step."""
        whole = Spread.whole(self.mesh)
        more: list[Step] = []
        found: list[Keep] = []
        read = dict.fromkeys((t, spread) for step in steps if isinstance(step, ShardedCompute)
                             for t, spread in step.reads.items() if t in self.states)  # fmt: skip
        for tensor, spread in read:
            new = self.states[tensor]
            if new in elsewhere and new not in held:
                more.append(Exchange("send", new, None, whole, whole))
                held[new] = [whole]
            found.append(Keep(tensor, spread, new, self._brought(new, (spread,), held, more)))
        return tuple(more), tuple(found)

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
