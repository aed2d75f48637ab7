"""What was measured of a model: every trial a record in a file, and beside it, in the cache, what became of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tilewright.backend import backend_for
from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program
from tilewright.ir.text.text import program_text
from tilewright.options import Options
from tilewright.runtime import Cache, content_key
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.parts import TunedPart, plan_key
from tilewright.tune.records import Anchor, Machine, Measurement, RecordError, Records, Writer, digest, read
from tilewright.tune.subjects import Subject, why_illegal
from tilewright.tune.timing import Beside

FOLDER = "records"  # of the cache
SUFFIX = ".twr"
_FORMAT = "3"  # of what is kept in the cache
_NOTCH = 1.57  # the bound of a median by the spread between quartiles, over the root of the number


@dataclass(frozen=True)
class TrialOutcome:
    """What a plan of a part took over the planner's own."""

    plan: Plan
    ratio: float
    high: float  # its upper bound


@dataclass
class TuningState:
    """What tuning of a model has come to."""

    seconds: float = 0.0  # spent so far
    trials: int = 0  # measured so far
    asked: float = 0.0  # the longest time that was asked for and came to its end
    asked_trials: int | None = 0  # at most, then; None: as many as there was time for
    whole: bool = False  # there is nothing more to measure
    plan: str | None = None  # chosen, as JSON; None: the planner's own
    told: dict[str, str] = field(default_factory=dict)  # by kernel of the planner's: what was measured of it
    refused: list[str] = field(default_factory=list)  # trials whose answers differ

    def covers(self, seconds: float, trials: int | None) -> bool:
        """Whether as much was asked for before."""
        most = self.asked_trials
        as_many = most is None or (trials is not None and trials <= most)
        return self.whole or (as_many and seconds <= self.asked)


class Log:
    """Reads what is known and appends what is learned."""

    def __init__(self, program: Program, plan: Plan, target: Target, options: Options) -> None:
        self.target = target
        measuring = backend_for(target).measuring(target, options)
        self.machine = Machine.of(target, measuring.processor, measuring.microarchitecture)
        self.threads, self.clock = measuring.threads, measuring.clock
        self.cache = Cache(options.cache_dir)
        self.key = content_key(
            "tuned", _FORMAT, program_text(program), plan.to_json(), json.dumps(target.describe()),
            *backend_for(target).built_by(target, options), str(self.threads), str(options.tune_arithmetic),
            str(options.tune_records), suffix=".json",
        )  # fmt: skip
        self.state = self._kept()
        given = options.tune_records
        self.path = given if given is not None else options.cache_dir / FOLDER / f"{self.key[:32]}{SUFFIX}"
        self.known: dict[str, dict[str, tuple[Measurement, TrialOutcome | None]]] = {}
        if options.tune is None and not self.path.is_file():
            raise RecordError(f"there is no file {self.path} of records; with tune='2m' it is written")
        self._take(self.records())
        self._writer: Writer | None = None

    def records(self) -> Records:
        """All that the file has by now."""
        return read(self.path) if self.path.is_file() else Records()

    def _kept(self) -> TuningState:
        found = self.cache.get(self.key)
        return TuningState() if found is None else TuningState(**json.loads(found.read_text()))

    def keep(self) -> None:
        self.cache.put(self.key, json.dumps(asdict(self.state)).encode())

    def _take(self, records: Records) -> None:
        ours = {name for name, machine in records.targets.items() if machine.is_like(self.machine)}
        fitting = [m for m in records.measurements if m.target in ours and m.threads == self.threads]
        if records.measurements and not fitting:
            raise RecordError(f"{self.path} was measured on {_machines(records)}, and this is {self._shown()}: "
                              "give a file of this machine, or another name to begin one")  # fmt: skip
        for measurement in fitting:
            self._add(measurement)

    def _shown(self) -> str:
        return f"{self.machine.processor} ({self.machine.microarchitecture}), threads={self.threads}"

    def _add(self, measurement: Measurement) -> None:
        plans = self.known.setdefault(measurement.task, {})
        plans[digest(json.dumps(measurement.plan, sort_keys=True))] = (measurement, None)

    def is_known(self, part: TunedPart, key: str) -> bool:
        return key in self.known.get(part.task, {}) or f"{part.task} {key}" in self.state.refused

    def count(self, part: TunedPart) -> int:
        """Plans of a part that were measured, its own not counted."""
        return max(0, len(self.known.get(part.task, {})) - 1)

    def outcomes(self, part: TunedPart) -> list[TrialOutcome]:
        """What is known of other plans of a part than its own, fastest first; they are checked as a planner's are."""
        plans = self.known.get(part.task, {})
        own = plan_key(part.own)
        for key, (measurement, made) in plans.items():
            if key != own and made is None:
                plans[key] = (measurement, self._outcome(part, measurement))
        return sorted((o for key, (_, o) in plans.items() if o is not None and key != own), key=lambda o: o.ratio)

    def _outcome(self, part: TunedPart, measurement: Measurement) -> TrialOutcome:
        try:
            plan = Plan.from_json(json.dumps(measurement.plan))
        except InternalError as error:
            raise RecordError(f"{self.path}: a plan of task {measurement.task}: {error}") from error
        wrong = why_illegal(part, plan, self.target)
        if wrong is not None:
            raise RecordError(f"{self.path}: a plan of task {measurement.task}: {wrong}")
        ratio = measurement.microseconds / measurement.anchor.around
        return TrialOutcome(plan, ratio, ratio * (1 + _NOTCH * measurement.spread / measurement.rounds**0.5))

    def refuse(self, part: TunedPart, key: str) -> None:
        self.state.refused.append(f"{part.task} {key}")
        self.keep()

    def append(self, subject: Subject, plan: Plan, found: Beside, members: int) -> None:
        """A trial, and before the first of a part its own plan."""
        part = subject.part
        if part.task not in self.known:
            spread, rounds = found.itself.spread, found.itself.rounds
            self._write(self._measurement(subject, part.own, found.anchor, spread, rounds, found, members), part)
        self._write(self._measurement(subject, plan, found.seconds, found.ratio.spread, found.ratio.rounds, found,
                                      members), part)  # fmt: skip

    def _measurement(
        self, subject: Subject, plan: Plan, seconds: float, spread: float, rounds: int, found: Beside, members: int
    ) -> Measurement:
        anchor = 1e6 * found.anchor / members
        return Measurement(
            digest(subject.part.text), self.machine.digest, json.loads(plan.to_json()), subject.part.task,
            subject.kind, "tuned", self.threads, self.clock, "model", 1e6 * seconds / members, spread, rounds,
            Anchor(anchor, anchor * found.itself.middle),
        )  # fmt: skip

    def _write(self, measurement: Measurement, part: TunedPart) -> None:
        if self._writer is None:
            self._make_room()
            self._writer = Writer(self.path)
        self._writer.append(measurement, part.text, self.machine)
        self._add(measurement)

    def _make_room(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot write records to {self.path}: {error.strerror}") from error


def _machines(records: Records) -> str:
    threads = {m.target: m.threads for m in records.measurements}
    shown = [f"{machine.processor} ({machine.microarchitecture}), threads={threads[name]}"
             for name, machine in records.targets.items() if name in threads]  # fmt: skip
    return " and on ".join(dict.fromkeys(shown))


def stored(cache_dir: Path) -> list[Path]:
    """Files of records in the cache."""
    return sorted((cache_dir / FOLDER).glob(f"*{SUFFIX}"))
