"""Steps that repeat, found in a Program: chains of computes of one form, each reading what the one before gave.

An exporter that meets a loop of the model's source writes every round of it out. The rounds are found again from one
compute that every round has (the anchor): what it depends on and the anchor of the round before does not is one step.
Steps are equal when a walk back from their anchors meets the same forms in the same order; numbers in indices may grow
by the same amount from step to step. Every compute is walked once for an anchor, and those of a chain for one anchor
alone, so the work grows with the size of the Program.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.ir.forms.compute import Map, Program, Reduce, expressions, reads
from tilewright.ir.forms.expr import Expr, Load, loads
from tilewright.ir.forms.tensor import Tensor
from tilewright.transform.merge.forms import Views, compute_form

FEWEST = 4  # steps that are worth a loop
LARGEST_STEP = 256  # computes of a step


@dataclass(frozen=True, eq=False)
class RepeatNode:
    """A compute that may be part of a step, with views looked through; `kind` is None of one that may not."""

    place: int  # in the Program
    outputs: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]  # as often as they are read
    kind: Hashable = None
    compute: Map | Reduce | None = None
    values: tuple[Expr, ...] = ()
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ref:
    """What a compute of a step reads: what another of the same step gives, or one of the step before, or, where
    `node` is -1, something that is made before the steps."""

    node: int
    output: int = 0
    before: bool = False


_OUTSIDE = Ref(-1)


@dataclass(frozen=True)
class Chain:
    """Equal steps in order, each as its computes in order. `refs` and `growth` are those of every step: what each
    compute reads, and by how much each number of its indices grows from step to step."""

    steps: tuple[tuple[RepeatNode, ...], ...]
    refs: tuple[tuple[Ref, ...], ...]
    growth: tuple[tuple[int, ...], ...]


class Nodes:
    """A Program as nodes, who makes and who reads each tensor."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.views = Views()
        self.all: list[RepeatNode] = []
        outputs = set(program.outputs)
        kinds: dict[Hashable, Hashable] = {}
        for place, compute in enumerate(program.computes):
            if not isinstance(compute, Map | Reduce):
                self.all.append(RepeatNode(place, compute.outputs, tuple(map(self.views.source, reads(compute)))))
                continue
            values = self.views.through(expressions(compute))
            if isinstance(compute, Map) and isinstance(values[0], Load) and compute.output not in outputs:
                self.views.add(Map(compute.output, compute.axes, values[0], compute.origin))
                continue
            found = compute_form(compute, values)
            if found is None:
                self.all.append(RepeatNode(place, compute.outputs, tuple(n.source for n in loads(*values))))
                continue
            kind, form = found
            # long keys are hashed once: a number stands for each
            number = kinds.setdefault(kind, len(kinds))
            self.all.append(RepeatNode(place, compute.outputs, form.sources, number, compute, values, form.numbers))
        self.maker = {t: (n, place) for n in self.all for place, t in enumerate(n.outputs)}
        self.users: dict[RepeatNode, dict[RepeatNode, None]] = {}
        for node in self.all:
            for tensor in node.sources:
                if tensor in self.maker:
                    self.users.setdefault(self.maker[tensor][0], {})[node] = None


def find_chains(nodes: Nodes) -> list[Chain]:
    """Every chain of at least `FEWEST` equal steps, none of which shares a compute with another."""
    groups: dict[Hashable, list[RepeatNode]] = {}
    for node in nodes.all:
        if node.kind is not None:
            groups.setdefault(node.kind, []).append(node)
    candidates = [g for g in groups.values() if len(g) >= FEWEST]
    candidates.sort(key=lambda g: (-len(g), -g[0].place))
    chains: list[Chain] = []
    walked: set[RepeatNode] = set()  # computes of steps that were looked at, whatever came of it
    taken: set[RepeatNode] = set()
    for group in candidates:
        if any(n in walked for n in group):
            continue
        found = _Walk(nodes, group)
        if not found.is_chain:
            continue
        made = list(found.chains())
        # the last compute of a round ends it: an earlier one as its anchor leaves parts of rounds over
        kinds = {n.kind for chain in made for n in chain.steps[0]}
        last = max((groups[kind] for kind in kinds), key=lambda g: g[0].place, default=group)
        if last is not group and len(last) >= FEWEST:
            other = _Walk(nodes, last)
            chains_of_it = list(other.chains()) if other.is_chain else []
            if sum(len(c.steps) for c in chains_of_it) >= sum(len(c.steps) for c in made):
                found, made = other, chains_of_it
        walked.update(n for step in found.steps[1:] for n in step)
        for chain in made:
            own = {n for step in chain.steps for n in step}
            if taken.isdisjoint(own):
                chains.append(chain)
                taken |= own
    for place, chain in enumerate(chains):
        chains[place] = _with_readers(chain, nodes, taken)
        taken.update(n for step in chains[place].steps for n in step)
    return chains


def starts_of(chain: Chain) -> dict[tuple[int, int], Tensor] | None:
    """What the first step reads in the place of what a step before would have given; None where that is not one
    tensor of the same shape."""
    found: dict[tuple[int, int], Tensor] = {}
    for node, refs in zip(chain.steps[0], chain.refs, strict=True):
        for ref, tensor in zip(refs, node.sources, strict=True):
            if not ref.before:
                continue
            like = chain.steps[0][ref.node].outputs[ref.output]
            start = found.setdefault((ref.node, ref.output), tensor)
            if start is not tensor or tensor.shape != like.shape or tensor.dtype is not like.dtype:
                return None
    return found


@dataclass(frozen=True)
class _Step:
    """What a step looks like from its anchor."""

    form: tuple[tuple[Hashable, tuple[Ref, ...]], ...]
    outside: tuple[Tensor, ...]
    numbers: tuple[int, ...]


@dataclass
class _Walk:
    """The steps that a group of anchors ends."""

    nodes: Nodes
    group: Sequence[RepeatNode]
    steps: list[list[RepeatNode]] = field(default_factory=list)
    number: dict[RepeatNode, tuple[int, int]] = field(default_factory=dict)  # the step and the place in it
    is_chain: bool = True

    def __post_init__(self) -> None:
        for turn, anchor in enumerate(self.group):
            self.steps.append(self._new(anchor, turn))
        # without a read of the step before, computes of one form merely lie beside each other
        linked = sum(self._reads_before(turn) for turn in range(1, len(self.steps)))
        self.is_chain = linked >= FEWEST - 1

    def _reads_before(self, turn: int) -> bool:
        maker, number = self.nodes.maker, self.number
        for node in self.steps[turn]:
            for tensor in node.sources:
                made = maker.get(tensor)
                if made is not None and number.get(made[0], (-1,))[0] == turn - 1:
                    return True
        return False

    def _new(self, anchor: RepeatNode, turn: int) -> list[RepeatNode]:
        """The anchor and what it depends on that no anchor before it does, operands first."""
        maker, number = self.nodes.maker, self.number
        step: list[RepeatNode] = []
        open_: set[RepeatNode] = {anchor}
        stack = [(anchor, iter(anchor.sources))]
        if anchor in number:
            return step
        while stack:
            node, sources = stack[-1]
            for tensor in sources:
                made = maker.get(tensor)
                if made is None or made[0] in number or made[0] in open_:
                    continue
                open_.add(made[0])
                stack.append((made[0], iter(made[0].sources)))
                break
            else:
                stack.pop()
                number[node] = (turn, len(step))
                step.append(node)
        return step

    def chains(self) -> Iterator[Chain]:
        """Runs of equal steps, each with as many steps before it as fit."""
        seen = [self._step(turn) for turn in range(len(self.steps))]
        first = 1
        while first < len(seen):
            last = first
            growth: tuple[int, ...] | None = None
            while last + 1 < len(seen):
                more = self._growth(seen[last], seen[last + 1])
                if more is None or (growth is not None and growth != more):
                    break
                growth, last = more, last + 1
            step = seen[last]
            if growth is not None and step is not None and last - first + 1 >= FEWEST - 1:
                chain = self._chain(first, last, step, growth)
                if starts_of(chain) is None:
                    chain = replace(chain, steps=chain.steps[1:])
                if len(chain.steps) >= FEWEST:
                    yield chain
            first = last + 1

    def _step(self, turn: int) -> _Step | None:
        nodes = self.steps[turn]
        if not nodes or len(nodes) > LARGEST_STEP or any(n.kind is None for n in nodes):
            return None
        outside: list[Tensor] = []
        form = []
        for node in nodes:
            refs = []
            for tensor in node.sources:
                made = self.nodes.maker.get(tensor)
                when, place = (-1, 0) if made is None else self.number[made[0]]
                ref = _OUTSIDE
                if made is not None and when >= turn - 1:
                    ref = Ref(place, made[1], when == turn - 1)
                else:
                    outside.append(tensor)
                refs.append(ref)
            form.append((node.kind, tuple(refs)))
        return _Step(tuple(form), tuple(outside), tuple(n for node in nodes for n in node.numbers))

    def _growth(self, one: _Step | None, next_: _Step | None) -> tuple[int, ...] | None:
        """By how much numbers grow between equal steps; None where they are not equal."""
        if one is None or next_ is None or one.form != next_.form:
            return None
        if not all(_alike(a, b, self.nodes.program) for a, b in zip(one.outside, next_.outside, strict=True)):
            return None
        return tuple(b - a for a, b in zip(one.numbers, next_.numbers, strict=True))

    def _chain(self, first: int, last: int, step: _Step, flat: tuple[int, ...]) -> Chain:
        refs = tuple(r for _, r in step.form)
        numbers = iter(flat)
        growth = tuple(tuple(next(numbers) for _ in n.numbers) for n in self.steps[last])
        steps = [tuple(self.steps[turn]) for turn in range(first, last + 1)]
        for turn in range(first - 1, -1, -1):
            before = self._fitted(self.group[turn], steps[0], refs, growth)
            if before is None:
                break
            steps.insert(0, before)
        return Chain(tuple(steps), refs, growth)

    def _fitted(
        self,
        anchor: RepeatNode,
        after: tuple[RepeatNode, ...],
        refs: Sequence[tuple[Ref, ...]],
        growth: Sequence[tuple[int, ...]],
    ) -> tuple[RepeatNode, ...] | None:
        """The step that the anchor ends, as the one after it is made; None where it is made in another way. A first
        step differs in what it depends on: its state comes from anywhere."""
        maker = self.nodes.maker
        found: list[RepeatNode | None] = [None] * len(after)
        found[-1] = anchor
        for place in range(len(after) - 1, -1, -1):
            node, template = found[place], after[place]
            if node is None or node.kind != template.kind:
                return None
            if any(b - a != d for a, b, d in zip(node.numbers, template.numbers, growth[place], strict=True)):
                return None
            for ref, own, other in zip(refs[place], node.sources, template.sources, strict=True):
                made = maker.get(own)
                if ref.node < 0:
                    if not _alike(own, other, self.nodes.program):
                        return None
                elif ref.before:
                    if own.shape != other.shape or own.dtype is not other.dtype:
                        return None
                elif made is None or made[1] != ref.output or found[ref.node] not in (None, made[0]):
                    return None
                else:
                    found[ref.node] = made[0]
        step = tuple(n for n in found if n is not None)
        if len(set(step)) != len(after):
            return None
        for place, node in enumerate(after):  # what the step after reads is what this one gives
            for ref, tensor in zip(refs[place], node.sources, strict=True):
                if ref.before and tensor is not step[ref.node].outputs[ref.output]:
                    return None
        return step


def _with_readers(chain: Chain, nodes: Nodes, taken: set[RepeatNode]) -> Chain:
    """The chain with what is made of each step and of nothing later: outputs of a step that no step reads."""
    number = {n: (turn, place) for turn, step in enumerate(chain.steps) for place, n in enumerate(step)}
    steps = [list(step) for step in chain.steps]
    refs, growth = list(chain.refs), list(chain.growth)
    start = min(n.place for n in chain.steps[0])
    new = [list(step) for step in chain.steps]
    while all(new) and len(steps[0]) < LARGEST_STEP:
        offered = [_readers(turn, added, nodes, number, taken, start) for turn, added in enumerate(new)]
        new = [[] for _ in steps]
        for signature, group in offered[0].items():
            others = [o.get(signature, []) for o in offered]
            if any(len(o) != len(group) for o in others):
                continue
            for readers in zip(*others, strict=True):
                grows = _common_growth(readers, signature[1], nodes.program)
                if grows is None:
                    continue
                refs.append(signature[1])
                growth.append(grows)
                for turn, node in enumerate(readers):
                    number[node] = (turn, len(steps[turn]))
                    steps[turn].append(node)
                    new[turn].append(node)
    return Chain(tuple(map(tuple, steps)), tuple(refs), tuple(growth))


def _readers(
    turn: int,
    added: Sequence[RepeatNode],
    nodes: Nodes,
    number: Mapping[RepeatNode, tuple[int, int]],
    taken: set[RepeatNode],
    start: int,
) -> dict[tuple[Hashable, tuple[Ref, ...]], list[RepeatNode]]:
    found: dict[tuple[Hashable, tuple[Ref, ...]], list[RepeatNode]] = {}
    for reader in dict.fromkeys(u for n in added for u in nodes.users.get(n, ())):
        if reader in number or reader in taken or reader.kind is None:
            continue
        refs: list[Ref] = []
        for tensor in reader.sources:
            made = nodes.maker.get(tensor)
            when, place = (-1, 0) if made is None else number.get(made[0], (-1, 0))
            if made is not None and when == turn:
                refs.append(Ref(place, made[1]))
            elif made is None or (when < 0 and made[0].place < start):
                refs.append(_OUTSIDE)
            else:
                break
        else:
            found.setdefault((reader.kind, tuple(refs)), []).append(reader)
    return found


def _common_growth(readers: Sequence[RepeatNode], refs: Sequence[Ref], program: Program) -> tuple[int, ...] | None:
    first, second = readers[0], readers[1]
    growth = tuple(b - a for a, b in zip(first.numbers, second.numbers, strict=True))
    for turn, node in enumerate(readers):
        if any(n != a + turn * d for n, a, d in zip(node.numbers, first.numbers, growth, strict=True)):
            return None
        pairs = zip(refs, first.sources, node.sources, strict=True)
        if any(ref.node < 0 and not _alike(a, b, program) for ref, a, b in pairs):
            return None
    return growth


def _alike(a: Tensor, b: Tensor, program: Program) -> bool:
    """The same tensor, or constants of one shape, which can be stacked."""
    constants = program.constants
    return a is b or (a in constants and b in constants and a.shape == b.shape and a.dtype is b.dtype)
