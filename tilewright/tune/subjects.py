"""What is tuned: kernels of a model with all that are equal to them, alone or two that follow each other. What else
they may be is made when it is asked for, and is a plan that can be lowered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest

from tilewright.backend import backend_for
from tilewright.backend.cpu.kernel.variants import CpuVariants, shared_constants
from tilewright.errors import InternalError, printable
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.lower.program import lower_program
from tilewright.schedule.policies import PolicyKernels, policy_plans
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.tune.arithmetic import sums_of, sums_of_plan
from tilewright.tune.groups import KernelGroup, find_groups
from tilewright.tune.kinds import kind_of_nests
from tilewright.tune.pairs import Surroundings, beside, launches, neighbours
from tilewright.tune.parts import Edit, TunedPart, bare, kernels_of, part_of, plan_key, renamed, replaced, units_of
from tilewright.tune.structures import apart, joins, structures, together

_LOG = logging.getLogger("tilewright")
_OVER = object()
_WORTH_A_LOOK = 1.5  # times as long as planned that another structure may be predicted to take


@dataclass(frozen=True)
class TunedModel:
    """What is tuned, as it is planned."""

    program: Program
    plan: Plan
    target: Target
    arithmetic: bool  # whether sums may be taken in another order

    @cached_property
    def nests(self) -> Mapping[str, Sequence[Nest]]:
        """By kernel."""
        computes = all_computes(self.program)
        return {kernel.name: plan_nests(kernel, computes) for kernel in self.plan.kernels}

    @cached_property
    def shared(self) -> frozenset[str]:
        """Constants that several kernels read: they stay as they lie."""
        return frozenset(t.name for t in shared_constants(self.program, self.plan))

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(self.program, self.plan, self.target, self.nests, self.shared)

    def part(self, kernels: Sequence[str]) -> TunedPart:
        return part_of(self.program, self.plan, kernels, self.target)


@dataclass(frozen=True)
class Trial:
    """Another plan of a subject."""

    plan: Plan  # of the subject's part
    edits: tuple[Edit, ...]  # of the model's

    @cached_property
    def key(self) -> str:
        return plan_key(self.plan)


@dataclass
class Subject:
    """Equal parts of a model, of which the first stands for all, and the other plans there are of it."""

    model: TunedModel
    part: TunedPart
    others: tuple[tuple[TunedPart, Mapping[str, str]], ...]  # with their names of what the first names
    plans: Iterator[Plan | None]  # nothing where one that was looked at is none
    met: set[str] = field(init=False)  # plans that have had their turn, by key
    is_done: bool = False
    refused: int = 0  # variants that turned out to be no plans

    def __post_init__(self) -> None:
        self.met = {plan_key(self.part.own)}

    @cached_property
    def kernels(self) -> frozenset[str]:
        return frozenset(name for part in (self.part, *(p for p, _ in self.others)) for name in part.kernels)

    @cached_property
    def tensors(self) -> frozenset[str]:
        """What the leaves of all parts store."""
        return frozenset(name for part in (self.part, *(p for p, _ in self.others)) for name in part.tensors)

    @cached_property
    def kind(self) -> str:
        if any(unit.over == "steps" for unit in units_of(self.part.own)):
            return "scan"
        nests = [nest for name in self.part.kernels for nest in self.model.nests[name]]
        return kind_of_nests(nests, all_computes(self.model.program))

    def following(self, known: Callable[[str], bool]) -> Trial | None:
        """The next trial that is not known; None where this turn makes none, since there are no more or since what was
        looked at was none."""
        plan = next(self.plans, _OVER)
        self.is_done = plan is _OVER
        if not isinstance(plan, Plan):
            return None
        key = plan_key(plan)
        if key in self.met or known(key):
            return None
        self.met.add(key)
        return self.trial(plan)

    def keeps_sums(self, plan: Plan) -> bool:
        """Whether a plan of the part takes all sums in the same order."""
        copies = {t.name for t in self.part.program.staged}
        return sums_of_plan(plan, copies) == sums_of_plan(self.part.own, copies)

    def trial(self, plan: Plan) -> Trial | None:
        """With this plan of the part; None where constants that other kernels read would lie otherwise, or sums be
        taken in another order though that is not asked for."""
        own, wanted = dict(self.part.own.layouts), dict(plan.layouts)
        constants = {t.name for t in self.part.program.constants}
        if any(own.get(name) != wanted.get(name) for name in constants & self.model.shared):
            return None
        if not self.model.arithmetic and not self.keeps_sums(plan):
            return None
        edits = list(_edits(self.part, plan, constants))
        for part, names in self.others:
            edits += _edits(part, renamed(plan, names), {names.get(name, name) for name in constants})
        return Trial(plan, tuple(edits))


def _edits(part: TunedPart, plan: Plan, constants: set[str]) -> Iterator[Edit]:
    """What makes of a part's kernels in the model those of another plan of the part."""
    wanted = dict(plan.layouts)
    packed = {name: wanted.get(name) for name in constants}
    before, after = part.own.kernels, plan.kernels
    if _stored(part.own) != _stored(plan):
        yield Edit(frozenset(part.kernels), tuple(units_of(plan)), packed)
        return
    for number, (name, own, other) in enumerate(zip(part.kernels, before, after, strict=True)):
        if own != other or not number:
            yield Edit(frozenset({name}), (other,), packed if not number else {})


def _stored(plan: Plan) -> list[list[list[str]]]:
    """What leaves store, by kernel, by what is started at once."""
    return [[[leaf.tensor for leaf in kernel.leaves] for kernel in kernels_of(unit)] for unit in units_of(plan)]


def find_subjects(model: TunedModel) -> Iterator[Subject]:
    """Kernels, then kernels that share a launch, then neighbours, then kernels that may share a launch."""
    groups = find_groups(model.program, model.plan, model.target)
    groups.sort(key=lambda group: -group.own.estimate.seconds * len(group.members))
    for group in groups:
        names = [model.plan.kernels[place].name for place in group.members]
        found = _subject(model, [[name] for name in names])
        if found is not None:
            found.plans = _in_turn(_variants(found, group), _structures(found))
            yield found
    for members in launches(model.surroundings):
        found = _subject(model, members)
        if found is not None:
            found.plans = _fitting(found, apart(found.part.program, model.target))
            yield found
    alone = {model.plan.kernels[place].name for group in groups for place in group.members}
    for members in neighbours(model.surroundings, alone):
        found = _subject(model, members)
        if found is not None:
            found.plans = _joined(found)
            yield found
    for members in beside(model.surroundings, alone):
        found = _subject(model, members)
        if found is not None:
            found.plans = _fitting(found, together(found.part, model.plan, model.target))
            yield found


def why_illegal(part: TunedPart, plan: Plan, target: Target) -> InternalError | None:
    """What is wrong with a plan of a part: with its grammar, its Loops, or what the machine can start."""
    backend = backend_for(target)
    try:
        check_plan(plan, part.program, target)
        backend.check_limits(lower_program(part.program, plan, backend.lower_kernel), target)
    except InternalError as error:
        return error
    return None


def _subject(model: TunedModel, members: Sequence[Sequence[str]]) -> Subject | None:
    """None where the kernels cannot stand for themselves."""
    part = model.part(members[0])
    if why_illegal(part, part.own, model.target) is not None:
        return None
    others: list[tuple[TunedPart, Mapping[str, str]]] = []
    taken = set(part.kernels)
    for names in members[1:]:
        other = model.part(names)  # of a Scan all that is in its steps, which may be two of the members
        if len(other.kernels) == len(part.kernels) and taken.isdisjoint(other.kernels):
            others.append((other, _names(model, part.kernels, other.kernels)))
            taken.update(other.kernels)
    return Subject(model, part, tuple(others), iter(()))


def _names(model: TunedModel, theirs: Sequence[str], ours: Sequence[str]) -> dict[str, str]:
    """What equal kernels call what others call by other names."""
    found: dict[str, str] = {}
    by_name = {kernel.name: kernel for kernel in model.plan.kernels}
    for one, two in zip(theirs, ours, strict=True):
        for a, b in zip(model.nests[one], model.nests[two], strict=True):
            pairs = zip(a.outline.tensors, b.outline.tensors, strict=True)
            found.update({x.name: y.name for x, y in pairs})
        for x, y in zip(by_name[one].leaves, by_name[two].leaves, strict=True):
            first = (x.tensor, x.core, *x.epilogue, *x.composed)
            found.update(zip(first, (y.tensor, y.core, *y.epilogue, *y.composed), strict=True))
    return found


def _variants(subject: Subject, group: KernelGroup) -> Iterator[Plan | None]:
    """The kernel run another way."""
    model, part, first = subject.model, subject.part, group.variants[0]
    place = part.own.kernels[part.kernels.index(group.own.name)].name
    own = sums_of(group.own.leaves)

    def admits(leaves: Sequence[Leaf]) -> bool:
        return model.arithmetic or sums_of(leaves) == own

    # what objectives count is counted of a CPU's leaves
    ranked = (
        first.ranked(admits, partial(_by_policies, first)) if isinstance(first, CpuVariants) else first.ranked(admits)
    )
    for tile in ranked:
        layouts = {**{t.name: None for t in first.layouts(first.kernel)},
                   **{t.name: layout for t, layout in first.layouts(tile).items()}}  # fmt: skip
        made = bare(replaced(part.program, part.own, [Edit(frozenset({place}), (tile,), layouts)]))
        wrong = why_illegal(part, made, model.target)
        if wrong is not None:
            subject.refused += 1
            _LOG.warning("%s", printable(f"tune: a variant of kernel '{part.kernels[0]}' is left out: {wrong}"))
        yield made if wrong is None else None


def _by_policies(variants: CpuVariants, plans: Sequence[Tile]) -> list[Tile]:
    """Those that are worth measuring first, by the kernel's dependences."""
    return policy_plans(PolicyKernels(plans, variants.nests, variants.context)) if plans else []


def _structures(subject: Subject) -> Iterator[Plan | None]:
    """The part's computes apart, or walked otherwise."""
    if subject.kind != "scan":  # how its steps are planned is not told by its computes alone
        yield from _fitting(subject, structures(subject.part.program, subject.part.own, subject.model.target))


def _joined(subject: Subject) -> Iterator[Plan | None]:
    """The part's kernels as fewer."""
    for plan in _fitting(subject, joins(subject.part.program, subject.model.target)):
        yield plan if plan is not None and len(plan.kernels) < len(subject.part.own.kernels) else None


def _fitting(subject: Subject, plans: Iterator[Plan]) -> Iterator[Plan | None]:
    """Plans that were made with other machines in mind, where this one can run them and they are worth a look."""
    model, part = subject.model, subject.part
    by_name = {kernel.name: kernel for kernel in model.plan.kernels}
    limit = _WORTH_A_LOOK * sum(by_name[name].estimate.seconds for name in part.kernels)
    for plan in plans:
        seconds = sum(kernel.estimate.seconds for kernel in plan.kernels)
        fits = (not seconds or seconds <= limit) and why_illegal(part, plan, model.target) is None
        yield bare(replace(plan, target=part.own.target, schedule=part.own.schedule)) if fits else None


def _in_turn(one: Iterator[Plan | None], other: Iterator[Plan | None]) -> Iterator[Plan | None]:
    """Plans of both, one each as long as both have some."""
    for pair in zip_longest(one, other):
        yield from pair
