"""What records say of a plan's kernels: what they took, and what is to be expected of them by what others took.

A prediction is corrected by how far those of the same family were off, a kernel's own records left out, so that what
is measured of it can be held against it. A family's correction is the mean of the logarithms, drawn towards that of
all kernels, and that towards none, each as if one more of them had said so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from math import exp, log

from tilewright.backend import backend_for
from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program
from tilewright.options import Options
from tilewright.target import Target
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.families import family
from tilewright.tune.features import features
from tilewright.tune.groups import find_groups
from tilewright.tune.parts import Part, part_of, plan_key
from tilewright.tune.reader import Reader
from tilewright.tune.records import Machine, Measurement, Records, digest

Believed = Callable[[Part], float | None]  # seconds


@dataclass(frozen=True)
class _Task:
    """A kernel that was measured as the planner had it."""

    program: str
    family: Hashable
    surprise: float  # the logarithm of measured over predicted


def with_records(
    program: Program, plan: Plan, target: Target, options: Options, records: Records, believed: Believed | None = None
) -> Plan:  # fmt: skip
    """The Plan whose kernels say what records of machines like this one have of them, and what predictions become:
    as `believed` has it, or by their families. Kernels that share a launch or the steps of a Scan say nothing."""
    ours = _fitting(records, target, options)
    if not ours:
        return plan
    taken = {(m.program, digest(json.dumps(m.plan, sort_keys=True))): 1e-6 * m.microseconds for m in ours}
    corrected = believed or _ByFamilies(target, list(_tasks(records, ours))).seconds
    told = {}
    for group in find_groups(program, plan, target):
        names = [plan.kernels[place].name for place in group.members]
        parts = [part for name in names if (part := part_of(program, plan, [name], target)).kernels == (name,)]
        if not parts or plan.scan_of(plan.kernels[group.members[0]]) is not None:
            continue
        keys = ((digest(part.text), plan_key(part.own)) for part in parts)
        measured = next((taken[key] for key in keys if key in taken), 0.0)
        seconds = corrected(parts[0]) or 0.0
        for place in group.members:
            kernel = plan.kernels[place]
            about = replace(kernel.estimate, corrected=round(seconds, 9), measured=round(measured, 9))
            told[kernel.name] = replace(kernel, estimate=about)
    return plan.with_kernels(told)


def _fitting(records: Records, target: Target, options: Options) -> list[Measurement]:
    measuring = backend_for(target).measuring(target, options)
    here = Machine.of(target, measuring.processor, measuring.microarchitecture)
    like = {name for name, machine in records.targets.items() if machine.is_like(here)}
    return [m for m in records.measurements if m.target in like and m.threads == measuring.threads]


def _tasks(records: Records, ours: list[Measurement]) -> Iterator[_Task]:
    """By the first that was measured of each: the planner's own plan."""
    reader = Reader(records)
    for one in {m.task: m for m in reversed(ours)}.values():
        program, plan, target = reader.parts(one)
        try:
            check_plan(plan, program, target)
            told = features(program, plan, target)
        except InternalError:  # of an older version, perhaps: it says nothing
            continue
        if told:
            yield _Task(one.program, family(told), log(1e-6 * one.microseconds / sum(t.seconds for t in told)))


@dataclass(frozen=True)
class _ByFamilies:
    target: Target
    tasks: list[_Task]

    def seconds(self, part: Part) -> float | None:
        """None where nothing else was measured, or predictions know no such kernel."""
        own = digest(part.text)
        others = [task for task in self.tasks if task.program != own]
        try:
            told = features(part.program, part.own, self.target) if others else []
        except InternalError:
            return None
        if not told:
            return None
        of_all = _mean([task.surprise for task in others])
        kin = [task.surprise - of_all for task in others if task.family == family(told)]
        return sum(t.seconds for t in told) * exp(of_all + _mean(kin))


def _mean(values: list[float]) -> float:
    """With one more that says nothing."""
    return sum(values) / (len(values) + 1)
