"""Plans chosen by a network in place of a clock: of the plans that tuning would try, those that it believes faster.

The network is fitted once to a file of records, and kept in the cache for as long as neither they nor this code change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tilewright.backend import backend_for
from tilewright.errors import OptionError, TilewrightError, printable
from tilewright.ir.forms.compute import Program
from tilewright.learn.encode import Encoded, encoded, with_trees
from tilewright.options import Options
from tilewright.packages.stored import own_code
from tilewright.runtime import Cache, content_key
from tilewright.schedule.planner import kernel_seconds
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.choices import TunedChoice, apart, with_choices
from tilewright.tune.known import with_records
from tilewright.tune.parts import TunedPart
from tilewright.tune.reader import RecordReader
from tilewright.tune.records import Machine, RecordError, Records, read
from tilewright.tune.subjects import Subject, Trial, TunedModel, find_subjects

try:
    from tilewright.learn.fit import Learned, Sample, fitted
except ImportError as error:  # torch is an extra
    raise OptionError(f"a network as cost_model needs torch ({error}): pip install 'tilewright[learn]'") from error

_LOG = logging.getLogger("tilewright")

_LEAST_SHARE = 0.005  # of the predicted time: kernels below it stay as they are
_PLANS = 24  # of a kernel that are looked at
_FEWEST = 30  # measured plans that a network learns anything from


def choose_plan(program: Program, plan: Plan, target: Target, options: Options) -> Plan:
    """The plan with those kernels run another way of which all networks believe that it is faster."""
    learned = learned_from(options, target)
    model = TunedModel(program, plan, target, options.tune_arithmetic)
    seconds = kernel_seconds(plan, program)
    whole = max(sum(seconds.values()), 1e-12)
    choices: list[TunedChoice] = []
    shares: dict[int, float] = {}
    for subject in find_subjects(model):
        share = sum(seconds[name] for name in subject.kernels) / whole
        best = _best(subject, learned) if share >= _LEAST_SHARE else None
        if best is not None:
            choices.append(best)
            shares[id(subject)] = share
    kept = apart(choices, lambda choice: shares[id(choice.subject)] * (1 - choice.ratio))
    said = {name: f"chosen by the network '{learned.kind}': believed to take {c.ratio:.2f} of the best predicted"
            for c in kept for name in c.subject.tensors}  # fmt: skip
    assert options.tune_records is not None  # options are checked
    return with_records(program, with_choices(model, kept, said), target, options, read(options.tune_records),
                        partial(_believed, learned, target))  # fmt: skip


def _believed(learned: Learned, target: Target, part: TunedPart) -> float | None:
    """Seconds of a kernel, by the mean of what the networks say of its logarithm."""
    kernels = _encoded(part.program, part.own, target)
    return float(2.0 ** learned.log_seconds([kernels]).mean()) if kernels else None


def _best(subject: Subject, learned: Learned) -> TunedChoice | None:
    """The plan that is believed to be fastest, where every network says that it is faster than the subject's own."""
    target = subject.model.target
    own = _encoded(subject.part.program, subject.part.own, target)
    if not own:
        return None
    trials = [(trial, kernels) for trial in _trials(subject)
              if (kernels := _encoded(subject.part.program, trial.plan, target))]  # fmt: skip
    if not trials:
        return None
    found = learned.log_seconds([own, *(kernels for _, kernels in trials)])
    doublings = found[:, 1:] - found[:, :1]  # over the subject's own, by member
    place = int(np.argmin(doublings.mean(0)))
    if doublings[:, place].max() >= 0:
        return None
    return TunedChoice(subject, trials[place][0], float(2.0 ** doublings[:, place].mean()))


def _trials(subject: Subject) -> Iterator[Trial]:
    for _ in range(_PLANS):
        trial = subject.following(lambda key: False)
        if trial is not None:
            yield trial
        if subject.is_done:
            return


def _encoded(program: Program, plan: Plan, target: Target) -> list[Encoded]:
    """Nothing where the fold knows no such kernels."""
    try:
        return encoded(program, plan, target)
    except TilewrightError:
        return []


def learned_from(options: Options, target: Target) -> Learned:
    """The network of the kind that is asked for, fitted to the records that are given."""
    path = options.tune_records
    assert path is not None  # options are checked
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read records of {path}: {error.strerror}") from error
    measuring = backend_for(target).measuring(target, options)
    machine = Machine.of(target, measuring.processor, measuring.microarchitecture)
    cache = Cache(options.cache_dir)
    key = content_key("network", options.cost_model, data.hex(), json.dumps(machine.description, sort_keys=True),
                      machine.microarchitecture, own_code(), suffix=".npz")  # fmt: skip
    if (kept := cache.get(key)) is not None:
        return Learned.loaded(kept.read_bytes())
    learned = fitted(options.cost_model, _samples(read(path), machine, path))
    cache.put(key, learned.dumped())
    return learned


def _samples(records: Records, machine: Machine, path: Path) -> list[Sample]:
    ours = {digest for digest, each in records.targets.items() if each.is_like(machine)}
    samples = list(samples_of(records, ours))
    if len(samples) < _FEWEST:
        raise RecordError(f"{path} has {len(samples)} measured plans of {machine.processor} "
                          f"({machine.microarchitecture}), too few to learn from: {_FEWEST} are the least, "
                          "and with tune= and the same tune_records= more are measured")  # fmt: skip
    _LOG.info("%s", printable(f"a network is fitted to {len(samples)} plans of {path}"))
    return samples


def samples_of(records: Records, targets: Container[str]) -> Iterator[Sample]:
    """Measured plans of these machines that the fold can price."""
    reader = RecordReader(records)
    for one in records.measurements:
        told = reader.told(one) if one.target in targets else ()
        if told:
            kernels = with_trees(*reader.parts(one), told)
            yield Sample(f"{one.target} {one.task}", tuple(kernels), one.microseconds)
