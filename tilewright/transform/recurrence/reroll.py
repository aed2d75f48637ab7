"""Steps that an exporter wrote out, as one Scan again: the same computes at every step, numbers that grow by the step.

What does not depend on the step before is no part of the recurrence. Products among it are made for all steps at once
before the Scan, and products with weights of what the steps give at once after it: as one product each, in which the
weights are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, expressions, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, load, loads, substitute, var
from tilewright.ir.forms.tensor import Tensor, elements
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.merge.forms import Views, affine, rebuilt, without_choices
from tilewright.transform.recurrence.repeats import Chain, Nodes, Ref, RepeatNode, find_chains, starts_of

Predict = Callable[[Program], float]  # with all that later stages make of it

LARGEST_TABLE = 1 << 14  # bytes of constants that may differ from step to step: layers of a network are not steps
_MOST_WRITTEN_OUT = 128  # computes that may be as fast written out: more than these are several kernels in any case


def reroll(program: Program, predict: Predict | None = None) -> Program:
    """The Program with steps that repeat as Scans; steps of a layer may come to light when those below it are found.
    Few steps, between which more can be connected than between those of a Scan, stay as they are where `predict`
    says that they take no longer."""
    while True:
        nodes = Nodes(program)
        chains = [c for c in find_chains(nodes) if is_worth_it(c, program)]
        if predict is not None:
            chains = [c for c in chains if not _stays(c, nodes, predict)]
        if not chains:
            return program
        program = _rewritten(program, nodes, chains)


def _stays(chain: Chain, nodes: Nodes, predict: Predict) -> bool:
    """Whether the steps of a chain take no longer as they are than as a Scan, by themselves."""
    if sum(len(step) for step in chain.steps) > _MOST_WRITTEN_OUT:
        return False
    alone = _written_out(chain, nodes)
    return predict(alone) <= predict(reroll(alone))


def _written_out(chain: Chain, nodes: Nodes) -> Program:
    """The steps of a chain as a Program of their own."""
    program = nodes.program
    members = {n: None for step in chain.steps for n in step}
    computes = [_like(n, n.outputs, (), n.values) for n in sorted(members, key=lambda n: n.place)]
    made = {t for c in computes for t in c.outputs}
    read = dict.fromkeys(t for c in computes for t in reads(c) if t not in made)
    constants = {t: program.constants[t] for t in read if t in program.constants}
    wanted = {*program.outputs, *(t for n in nodes.all if n not in members for t in n.sources)}
    outputs = tuple(t for c in computes for t in c.outputs if t in wanted)
    return Program(tuple(t for t in read if t not in constants), outputs, tuple(computes), constants)


def is_worth_it(chain: Chain, program: Program) -> bool:
    """Whether a loop is no loss. Maps alone, each reading its own place of the step before, are one kernel as they
    are, whose state stays in registers. Layers with weights of their own are kernels of one form already."""
    if sum(_bytes(t) for tables in _tables(chain) for t in tables) > LARGEST_TABLE:
        return False
    return any(isinstance(n.compute, Reduce) for n in chain.steps[0]) or not _is_pointwise(chain)


def _is_pointwise(chain: Chain) -> bool:
    for node, refs in zip(chain.steps[0], chain.refs, strict=True):
        assert node.compute is not None
        places = tuple(var(a) for a in node.compute.axes if a.extent != 1)
        inside = {t for ref, t in zip(refs, node.sources, strict=True) if ref.node >= 0}
        for read in loads(*node.values):
            moved = tuple(i for i, size in zip(read.indices, read.source.shape, strict=True) if size != 1)
            if read.source in inside and moved != places:
                return False
    return True


def _tables(chain: Chain) -> list[tuple[Tensor, ...]]:
    """Constants that differ from step to step."""
    found: dict[tuple[Tensor, ...], None] = {}
    for place, refs in enumerate(chain.refs):
        for number, ref in enumerate(refs):
            own = tuple(step[place].sources[number] for step in chain.steps)
            if ref.node < 0 and any(t is not own[0] for t in own):
                found[own] = None
    return list(found)


def _bytes(tensor: Tensor) -> int:
    return elements(tensor.shape) * tensor.dtype.bytes


def _rewritten(program: Program, nodes: Nodes, chains: Iterable[Chain]) -> Program:
    names = {t.name for t in _all_tensors(program)}
    constants = dict(program.constants)
    inside: set[Compute] = set()
    views = Views()
    units: list[tuple[int, list[Compute]]] = []
    for chain in chains:
        made = _Loop(chain, nodes, names)
        constants.update({t: np.stack([constants[p] for p in parts]) for t, parts in made.tables.items()})
        first = min(n.place for n in chain.steps[0])
        units.append((first, made.computes))
        inside.update(c for step in chain.steps for n in step if (c := n.compute) is not None)
        for view in made.views:
            views.add(view)
            units.append((first, [view]))
    for place, compute in enumerate(program.computes):
        if compute in inside:
            continue
        new = _read_through(compute, nodes.views, views)
        units.append((place, [new]))
        if new is not compute and isinstance(new, Map) and isinstance(new.value, Load):
            views.add(new)  # parts put one behind the other that are one part of the stack
    units.sort(key=lambda unit: unit[0])
    ordered = _in_order([unit for _, unit in units])
    return without_dead(replace(program, computes=tuple(ordered), constants=constants))


def _read_through(compute: Compute, views: Views, made: Views) -> Compute:
    """What reads the tensors of single steps reads their stack."""
    if not isinstance(compute, Map | Reduce):
        return compute
    values = views.through(expressions(compute))
    if not any(n.source in made for n in loads(*values)):
        return compute
    values = made.through(values)
    if isinstance(compute, Reduce):
        return replace(compute, elements=values)
    return replace(compute, value=without_choices(values[0], {a: n for n, a in enumerate(compute.axes)}))


def _in_order(units: list[list[Compute]]) -> list[Compute]:
    """Each unit after those that make what it reads; else as they come."""
    maker = {t: place for place, unit in enumerate(units) for c in unit for t in c.outputs}
    needs = [list(dict.fromkeys(maker[t] for c in unit for t in reads(c) if t in maker)) for unit in units]
    state = [0] * len(units)  # 1: being visited, 2: done
    ordered: list[Compute] = []
    for start in range(len(units)):
        stack = [start]
        while stack:
            place = stack[-1]
            waiting = [n for n in needs[place] if n != place and state[n] != 2] if state[place] == 0 else []
            if any(state[n] == 1 for n in waiting):
                raise InternalError("steps found in the program depend on each other")
            if waiting:
                state[place] = 1
                stack.extend(waiting)
                continue
            stack.pop()
            if state[place] != 2:
                state[place] = 2
                ordered.extend(units[place])
    return ordered


def _all_tensors(program: Program) -> Iterable[Tensor]:
    yield from program.tensors()
    for compute in program.computes:
        if isinstance(compute, Scan):
            yield from compute.carry
            yield from (t for c in compute.body for t in c.outputs)


@dataclass
class _Loop:
    """A chain as a Scan with what comes before and after it: `computes`. `views` say what single steps gave."""

    chain: Chain
    nodes: Nodes
    names: set[str]
    tables: dict[Tensor, tuple[Tensor, ...]] = field(default_factory=dict)
    computes: list[Compute] = field(init=False)
    views: list[Map] = field(init=False)

    def __post_init__(self) -> None:
        chain = self.chain
        self.count = len(chain.steps)
        self.first = chain.steps[0]
        starts = starts_of(chain)
        if starts is None:
            raise InternalError("the first step reads several tensors as one state")
        self.starts = starts
        self.step = Axis("t", self.count)
        self.outside = self._seen_outside()
        self.early = self._early()
        self.late = self._late()
        self.carry = {key: self._tensor(self._own(key), "_before") for key in starts}
        self.inner: dict[tuple[int, int], Tensor] = {}  # inside the Scan
        self.whole: dict[tuple[int, int], Tensor] = {}  # of all steps
        self._table: dict[tuple[Tensor, ...], Tensor] = {}
        before, body, after = [], [], []
        for place, node in enumerate(self.first):
            if place in self.early:
                before.append(self._of_all_steps(place, node))
            elif place not in self.late:
                body.append(self._of_a_step(place, node))
        for key in self._kept():
            self.whole[key] = self._tensor(self.inner[key], "_steps", (self.count,))
        for place in sorted(self.late):
            after.append(self._of_all_steps(place, self.first[place]))
        self.views = self._views()
        self.computes = [*before, self._scan(body), *after]

    # --- what belongs where

    def _early(self) -> set[int]:
        """Reductions that do not depend on the step before, with what they are made of."""
        bound = {node for node, _ in self.starts}  # what is handed on is made inside
        for place, refs in enumerate(self.chain.refs):
            if any(r.before or r.node in bound for r in refs):
                bound.add(place)
        found = {p for p, n in enumerate(self.first) if isinstance(n.compute, Reduce) and p not in bound}
        for place in range(len(self.first) - 1, -1, -1):
            if place in found:
                found.update(r.node for r in self.chain.refs[place] if r.node >= 0)
        return found

    def _late(self) -> set[int]:
        """Reductions that no later step needs and that read the same weights at every step, with what is made of
        them."""
        needed = {node for node, _ in self.starts}
        for place in range(len(self.first) - 1, -1, -1):
            if place in needed:
                needed.update(r.node for r in self.chain.refs[place] if r.node >= 0)
        # what reads the step before is made inside, and so is all that it reads
        bound = {place for place, refs in enumerate(self.chain.refs) if any(r.before for r in refs)}
        for place in range(len(self.first) - 1, -1, -1):
            if place in bound:
                bound.update(r.node for r in self.chain.refs[place] if r.node >= 0)
        found: set[int] = set()
        for place, node in enumerate(self.first):
            refs = self.chain.refs[place]
            if place in needed or place in bound or place in self.early:
                continue
            if any(r.node in found for r in refs) or self._reads_weights(node, refs):
                found.add(place)
        return found

    def _reads_weights(self, node: RepeatNode, refs: Iterable[Ref]) -> bool:
        if not isinstance(node.compute, Reduce):
            return False
        return any(r.node < 0 and t in self.nodes.program.constants for r, t in zip(refs, node.sources, strict=True))

    def _kept(self) -> list[tuple[int, int]]:
        """What the Scan makes that is read of single steps outside, or for all steps after it."""
        wanted: dict[tuple[int, int], None] = {}
        for place in sorted(self.late):
            for ref in self.chain.refs[place]:
                if ref.node >= 0 and (ref.node, ref.output) in self.inner:
                    wanted[ref.node, ref.output] = None
        for key, turns in self.outside.items():
            if key in self.inner and (turns != [self.count - 1] or key not in self.starts):
                wanted[key] = None
        return list(wanted)

    def _seen_outside(self) -> dict[tuple[int, int], list[int]]:
        """Which steps' tensors others read."""
        chain, outputs = self.chain, set(self.nodes.program.outputs)
        inside = {n for step in chain.steps for n in step}
        found: dict[tuple[int, int], list[int]] = {}
        for turn, step in enumerate(chain.steps):
            for place, node in enumerate(step):
                strangers = [u for u in self.nodes.users.get(node, ()) if u not in inside]
                read = {t for u in strangers for t in u.sources}
                for number, tensor in enumerate(node.outputs):
                    if tensor in outputs or tensor in read:
                        found.setdefault((place, number), []).append(turn)
        return found

    # --- computes

    def _own(self, key: tuple[int, int]) -> Tensor:
        return self.first[key[0]].outputs[key[1]]

    def _of_a_step(self, place: int, node: RepeatNode) -> Compute:
        outputs = tuple(self._tensor(t, "_step") for t in node.outputs)
        values = self._values(place, node, var(self.step), inside=True)
        self.inner.update({(place, n): t for n, t in enumerate(outputs)})
        return _like(node, outputs, (), values)

    def _of_all_steps(self, place: int, node: RepeatNode) -> Compute:
        outputs = tuple(self._tensor(t, "_steps", (self.count,)) for t in node.outputs)
        axis = Axis("t", self.count)
        values = self._values(place, node, var(axis), inside=False)
        self.whole.update({(place, n): t for n, t in enumerate(outputs)})
        return _like(node, outputs, (axis,), values)

    def _values(self, place: int, node: RepeatNode, now: Expr, inside: bool) -> tuple[Expr, ...]:
        refs, growth = self.chain.refs[place], self.chain.growth[place]

        def read(number: int, indices: tuple[Expr, ...]) -> Expr:
            ref = refs[number]
            key = ref.node, ref.output
            if ref.node < 0:
                own = tuple(step[place].sources[number] for step in self.chain.steps)
                if all(t is own[0] for t in own):
                    return load(own[0], indices)
                return load(self._stacked(own), (now, *indices))
            if ref.before:
                return load(self.carry[key], indices)
            if inside and key in self.inner:
                return load(self.inner[key], indices)
            return load(self.whole[key], (now, *indices))

        return rebuilt(node.values, read, lambda n: affine(node.numbers[n], growth[n], now))

    def _stacked(self, own: tuple[Tensor, ...]) -> Tensor:
        if own not in self._table:
            self._table[own] = self._tensor(own[0], "_table", (self.count,))
            self.tables[self._table[own]] = own
        return self._table[own]

    def _scan(self, body: list[Compute]) -> Scan:
        keys = list(self.starts)
        finals = tuple(self._last(key) for key in keys)
        stacked = tuple((self.inner[k], t) for k, t in self.whole.items() if k in self.inner)
        origins = [step[-1].compute.origin for step in (self.chain.steps[0], self.chain.steps[-1]) if step[-1].compute]
        return Scan(
            self.step, tuple(self.starts[k] for k in keys), tuple(self.carry[k] for k in keys), tuple(body),
            tuple(self.inner[k] for k in keys), finals, stacked, False, " to ".join(origins),
        )  # fmt: skip

    def _last(self, key: tuple[int, int]) -> Tensor | None:
        """The tensor of the last step, where only that is wanted."""
        is_wanted = self.outside.get(key) == [self.count - 1] and key not in self.whole
        return self.chain.steps[-1][key[0]].outputs[key[1]] if is_wanted else None

    def _views(self) -> list[Map]:
        found = []
        for (place, number), turns in self.outside.items():
            for turn in turns if (place, number) in self.whole else ():
                node = self.chain.steps[turn][place]
                tensor = node.outputs[number]
                axes = tuple(Axis(f"i{d}", extent) for d, extent in enumerate(tensor.shape))
                value = load(self.whole[place, number], (turn, *(var(a) for a in axes)))
                found.append(Map(tensor, axes, value, node.compute.origin if node.compute else ""))
        return found

    def _tensor(self, like: Tensor, suffix: str, first: tuple[int, ...] = ()) -> Tensor:
        name = like.name + suffix
        while name in self.names:
            name += "_"
        self.names.add(name)
        return Tensor(name, (*first, *like.shape), like.dtype)


def _like(node: RepeatNode, outputs: tuple[Tensor, ...], more: tuple[Axis, ...], values: tuple[Expr, ...]) -> Compute:
    """The node's compute with other outputs and values, over axes of its own."""
    compute = node.compute
    assert compute is not None
    new = {a: Axis(a.name, a.extent) for a in compute.axes}
    places: Mapping[Axis, Expr] = {a: var(n) for a, n in new.items()}
    axes = (*more, *new.values())
    if isinstance(compute, Map):
        return Map(outputs[0], axes, substitute(values[0], places), compute.origin)
    new.update({a: Axis(a.name, a.extent) for a in compute.reduce_axes})
    places = {a: var(n) for a, n in new.items()}
    over = tuple(new[a] for a in compute.reduce_axes)
    return Reduce(outputs, axes, over, tuple(substitute(v, places) for v in values), compute.monoid, compute.origin)
