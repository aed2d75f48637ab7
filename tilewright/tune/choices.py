"""Other plans that were chosen for subjects of a model, put into its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.schedule.price import priced
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.parts import edited
from tilewright.tune.subjects import Subject, Trial, TunedModel


@dataclass(frozen=True)
class TunedChoice:
    """A subject with a plan that measured, or is believed to be, faster than its own."""

    subject: Subject
    trial: Trial
    ratio: float  # of the time its own plan takes

    @property
    def said(self) -> str:
        """What it gains, and what it changes beside the time."""
        sums = "" if self.subject.keeps_sums(self.trial.plan) else ", sums in another order"
        return f"{1 / self.ratio:.2f} times as fast as the best predicted{sums}"


def apart(choices: Sequence[TunedChoice], gain: Callable[[TunedChoice], float]) -> list[TunedChoice]:
    """Choices of which no two change the same kernel, those first that gain most."""
    taken: set[str] = set()
    kept = []
    for choice in sorted(choices, key=lambda c: -gain(c)):
        if taken.isdisjoint(choice.subject.kernels):
            taken |= choice.subject.kernels
            kept.append(choice)
    return kept


def with_choices(model: TunedModel, choices: Sequence[TunedChoice], said: Mapping[str, str]) -> Plan:
    """The plan with these choices; every kernel says, for people, what is `said` of what it stores."""
    edits = [edit for choice in choices for edit in choice.trial.edits]
    plan = edited(model.program, model.plan, model.target, edits)
    changed = frozenset(tensor for choice in choices for tensor in choice.subject.tensors)
    predicted = {k.name: k.estimate for k in priced(model.program, plan, model.target).kernels} if choices else {}
    told = {}
    for kernel in plan.kernels:
        root = kernel.leaves[-1].tensor
        own = predicted[kernel.name] if root in changed else kernel.estimate
        reason = "; ".join(part for part in (own.reason, said.get(root, "")) if part)
        told[kernel.name] = replace(kernel, estimate=replace(own, reason=reason))
    return plan.with_kernels(told)
