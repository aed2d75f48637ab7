"""What records say of a plan's kernels: what they took, and what is to be expected of them by what others took.

A prediction is corrected by how far those of the same family were off, a kernel's own records left out, so that what
is measured of it can be held against it. A family's correction is the mean of the logarithms, drawn towards that of
all kernels, and that towards none, each as if one more of them had said so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tilewright.tune.features import Told, features
from tilewright.tune.groups import find_groups
from tilewright.tune.parts import TunedPart, part_of, plan_key
from tilewright.tune.reader import RecordReader
from tilewright.tune.records import Machine, Measurement, Records, digest

Believed = Callable[[TunedPart], float | None]  # seconds


@dataclass(frozen=True)
class _Task:
    """A kernel that was measured as the planner had it."""

    program: str
    family: object
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
    alone = list(_alone(program, plan, target))
    corrected = believed or _ByFamilies.of([parts[0] for _, parts in alone], target, records, ours).seconds
    told = {}
    for places, parts in alone:
        measured = next((taken[key] for key in map(_key, parts) if key in taken), 0.0)
        seconds = corrected(parts[0]) or 0.0
        for place in places:
            kernel = plan.kernels[place]
            about = replace(kernel.estimate, corrected=round(seconds, 9), measured=round(measured, 9))
            told[kernel.name] = replace(kernel, estimate=about)
    return plan.with_kernels(told)


def _alone(program: Program, plan: Plan, target: Target) -> Iterator[tuple[tuple[int, ...], list[TunedPart]]]:
    """Kernels that start by themselves, by position, equal ones together, and each as a part."""
    for group in find_groups(program, plan, target):
        kernels = [plan.kernels[place] for place in group.members]
        if plan.scan_of(kernels[0]) is None:
            yield group.members, [part_of(program, plan, [kernel.name], target) for kernel in kernels]


def _key(part: TunedPart) -> tuple[str, str]:
    """Program and plan, as records have them."""
    return digest(part.text), plan_key(part.own)


def _fitting(records: Records, target: Target, options: Options) -> list[Measurement]:
    measuring = backend_for(target).measuring(target, options)
    here = Machine.of(target, measuring.processor, measuring.microarchitecture)
    like = {name for name, machine in records.targets.items() if machine.is_like(here)}
    return [m for m in records.measurements if m.target in like and m.threads == measuring.threads]


@dataclass(frozen=True)
class _ByFamilies:
    tasks: tuple[_Task, ...]
    told: Mapping[tuple[str, str], Sequence[Told]]  # of the parts that are asked for

    @staticmethod
    def of(parts: Sequence[TunedPart], target: Target, records: Records, ours: Sequence[Measurement]) -> _ByFamilies:
        told = {_key(part): _told(part.program, part.own, target) for part in parts}
        return _ByFamilies(tuple(_tasks(records, ours, told)), told)

    def seconds(self, part: TunedPart) -> float | None:
        """None where nothing else was measured, or predictions know no such kernel."""
        own = self.told[_key(part)]
        others = [task for task in self.tasks if task.program != digest(part.text)]
        if not others or not own:
            return None
        of_all = _mean([task.surprise for task in others])
        kin = [task.surprise - of_all for task in others if task.family == family(own)]
        return sum(t.seconds for t in own) * exp(of_all + _mean(kin))


def _tasks(
    records: Records, ours: Sequence[Measurement], known: Mapping[tuple[str, str], Sequence[Told]]
) -> Iterator[_Task]:
    """By the first that was measured of each: the planner's own plan. What is `known` is not priced again."""
    reader = RecordReader(records)
    for one in {m.task: m for m in reversed(ours)}.values():
        key = (one.program, digest(json.dumps(one.plan, sort_keys=True)))
        told = known[key] if key in known else _told(*reader.parts(one))
        if told:
            yield _Task(one.program, family(told), log(1e-6 * one.microseconds / sum(t.seconds for t in told)))


def _told(program: Program, plan: Plan, target: Target) -> Sequence[Told]:
    """Nothing where it is no plan, of an older version perhaps, or predictions know no such kernel."""
    try:
        check_plan(plan, program, target)
        return features(program, plan, target)
    except InternalError:
        return ()


def _mean(values: Sequence[float]) -> float:
    """With one more that says nothing."""
    return sum(values) / (len(values) + 1)
