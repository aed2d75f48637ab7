"""Tunes a plan: in every round some kernels take another plan each, the whole model is built and timed kernel by kernel
beside the planner's own, and what was faster is measured once more, all together, in a process of its own.

Kernels are measured inside the model, so that weights, buffers and caches are what they will be.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tilewright.backend import backend_for
from tilewright.errors import InternalError, OptionError, ToolError, printable
from tilewright.ir.forms.compute import Program
from tilewright.options import Options, Tuning
from tilewright.runtime import CacheError, ToolchainError
from tilewright.schedule.planner import kernel_seconds
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.answers import Array, answers, are_same
from tilewright.tune.choices import TunedChoice, apart, with_choices
from tilewright.tune.families import Beliefs, Key, change, family, unchanged
from tilewright.tune.features import Told, features
from tilewright.tune.fresh import measured
from tilewright.tune.known import with_records
from tilewright.tune.log import Log, TrialOutcome
from tilewright.tune.models import BuiltTrials, CallTimes, TrialBuilder, calls_within, profiled, sat
from tilewright.tune.parts import edited
from tilewright.tune.subjects import Subject, Trial, TunedModel, find_subjects

_LOG = logging.getLogger("tilewright")

_LEAST_SHARE = 0.005  # of the model's time: kernels below it are left alone
LEAST_GAIN = 0.02  # of a kernel's time: less is not worth another plan
_SECONDS_A_SITTING = 0.8  # of runs, and of looking for what to run
_LONG_ROUND = 8.0  # seconds: longer ones have fewer trials the next time, shorter ones more
_FIRST_TRIALS, _MOST_TRIALS = 2, 64  # of a round; the first is soon over
_START_SECONDS = 3.0  # of a process that measures the choices together
_CHECK_SHARE = 0.3  # of all time, at most
_IN_VAIN = 24  # trials without a gain after which there is none to be expected
_IN_VAIN_SECONDS, _IN_VAIN_FEWEST = 13.0, 10
_LOOKED_AT = 3  # times as many trials as a round measures, of which it takes the most promising
_OVERTIME = 0.05  # of all time, that measuring choices once more may take beyond it
_TURNS = 2  # that a trial has where what else ran disturbed it


def tune_plan(program: Program, plan: Plan, target: Target, options: Options) -> Plan:
    """The plan with what measured faster; what was measured before is not again."""
    model = TunedModel(program, plan, target, options.tune_arithmetic)
    try:
        unable = backend_for(target).untunable(target)
        if options.tune is not None and unable is not None:
            raise OptionError(f"tuning measures, and target '{target.name}' cannot: {unable}; or leave out tune")
        log = Log(program, plan, target, options)
        chosen = _as_recorded(model, log) if options.tune is None else _Tuner(model, options, log).tuned()
        return with_records(program, chosen, target, options, log.records())
    except (CacheError, ToolchainError) as error:
        raise ToolError(str(error)) from error


def _as_recorded(model: TunedModel, log: Log) -> Plan:
    """What records say is faster, without measuring."""
    chosen = [TunedChoice(subject, trial, outcome.ratio) for subject in find_subjects(model)
              if (outcome := _best(log.outcomes(subject.part))) is not None
              and (trial := subject.trial(outcome.plan)) is not None]  # fmt: skip
    kept = apart(chosen, lambda choice: 1 - choice.ratio)
    if not kept:
        _LOG.warning("%s", printable(f"{log.path} has no faster plan of this model's kernels: the planner's own stay"))
    said = {name: f"as {log.path.name} has it: {c.said}" for c in kept for name in c.subject.tensors}
    return with_choices(model, kept, said)


def _best(outcomes: Sequence[TrialOutcome]) -> TrialOutcome | None:
    return next((o for o in outcomes if o.high < 1 and o.ratio < 1 - LEAST_GAIN), None)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A trial that waits for its turn, and what it changes."""

    trial: Trial
    change: Array


@dataclass
class _Turn:
    """A subject as it takes its turns."""

    subject: Subject
    share: float  # of the model's time: predicted, until it is measured
    own: Sequence[Told]  # its own plan; nothing where predictions know no such kernels
    best: float = 1.0  # ratio measured to its own
    looked_at: int = 0  # plans
    tried: int = 0  # of them
    waiting: list[_Waiting] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return (family(self.own) if self.own else self.subject.kind), self.subject.part.task

    def look(self, known: Callable[[str], bool]) -> None:
        """At one more plan, which waits then where it is a trial."""
        self.looked_at += 1
        trial = self.subject.following(known)
        if trial is not None:
            self.waiting.append(_Waiting(trial, self.change(trial.plan)))

    def change(self, plan: Plan) -> Array:
        told = _told(self.subject, plan) if self.own else ()
        return change(self.own, told) if told else unchanged()


def _told(subject: Subject, plan: Plan) -> Sequence[Told]:
    try:
        return features(subject.part.program, plan, subject.model.target)
    except InternalError:
        return ()  # it is measured without a prediction


class _Tuner:
    def __init__(self, model: TunedModel, options: Options, log: Log) -> None:
        assert isinstance(options.tune, float)
        self.model, self.options, self.log = model, options, log
        self.builder = TrialBuilder(model.program, model.target, options)
        self.before = log.state.seconds
        self.whole = options.tune
        self.begin = time.perf_counter()  # of measuring: the model as planned is built for whoever compiles it, too
        self.turns: list[_Turn] = []
        self.subjects = self._subjects()
        self.beliefs = Beliefs()
        self.trials = 0
        self.size = _FIRST_TRIALS  # trials of the next round
        self.trial_seconds = 0.0  # of a trial in the round before, with its part of what all have in common
        self.round_seconds = 0.0  # of the shortest round
        self.written_seconds = 0.0  # until compilers have all text of the model
        self.seconds = 0.0  # that go by in one run
        self.times: Array | None = None  # of every call of the planner's own
        self.own: BuiltTrials | None = None
        self.asked: dict[str, int] = {}

    @property
    def spent(self) -> float:
        return self.before + time.perf_counter() - self.begin

    @property
    def left(self) -> float:
        return self.whole - self.spent

    def tuned(self) -> Plan:
        state = self.log.state
        if self.left <= 0 or state.covers(self.whole, self.options.tune_trials):
            return self._kept()
        try:
            with self.builder.built(self.model.plan, self._while_compiling) as self.own:
                self.begin = time.perf_counter()
                self._rounds(self.own)
            state.asked, state.asked_trials = self.whole, self.options.tune_trials
        except KeyboardInterrupt:
            self._say("interrupted: what was found is kept")
            _LOG.warning("tuning was interrupted after %d trials; what was found is kept, and the next time it goes on",
                         self.trials)  # fmt: skip
        plan = self._chosen()
        state.seconds = self.spent
        self.log.keep()
        return plan

    def _kept(self) -> Plan:
        """What was chosen before."""
        state = self.log.state
        if state.plan is not None:
            return Plan.from_json(state.plan)
        return with_choices(self.model, [], state.told)

    # ---- rounds

    def _while_compiling(self) -> None:
        """The first trials are looked for by what is predicted, while compilers make the model that is to be timed."""
        self.written_seconds = time.perf_counter() - self.begin
        self._look(self.size)

    def _rounds(self, own: BuiltTrials) -> None:
        expected = answers(own.runner, self.model.program)
        self.times, self.seconds = profiled(self.model.program, own, _SECONDS_A_SITTING / 4)
        for turn in self.turns:
            turn.share = self._share(turn.subject)
        while True:
            chosen = self._collected()
            if not chosen:
                self.log.state.whole = self.options.tune_trials is None and self._has_time
                return
            begin = time.perf_counter()
            self._round(own, expected, chosen)
            took = time.perf_counter() - begin
            self.trial_seconds = took / len(chosen)
            self.round_seconds = min(took, self.round_seconds or took)
            larger = 2 * self.size if len(chosen) == self.size else self.size
            self.size = max(1, self.size // 2) if took > _LONG_ROUND else min(_MOST_TRIALS, larger)
            self.log.state.seconds = self.spent
            self.log.keep()
            if self._is_in_vain():
                return

    def _subjects(self) -> Iterator[_Turn]:
        for subject in find_subjects(self.model):
            known = self.log.count(subject.part)
            turn = _Turn(subject, self._share(subject), _told(subject, subject.part.own), looked_at=known, tried=known)
            for outcome in self.log.outcomes(subject.part):
                self._believe(turn, turn.change(outcome.plan), outcome.ratio)
            yield turn

    def _share(self, subject: Subject) -> float:
        """Of the model's time."""
        if self.times is None or self.own is None:
            seconds = kernel_seconds(self.model.plan, self.model.program)
            return sum(seconds[name] for name in subject.kernels) / max(sum(seconds.values()), 1e-9)
        calls = calls_within(subject.tensors, self.model.program, self.own)
        return float(self.times[calls].sum() / self.times.sum())

    @property
    def _has_time(self) -> bool:
        """Whether one more trial fits: it is compiled, the model built, and run some times."""
        return self.left - self._check_seconds > max(self.round_seconds, self._sitting_seconds)

    @property
    def _sitting_seconds(self) -> float:
        return max(_SECONDS_A_SITTING, 24 * self.seconds)

    @property
    def _check_seconds(self) -> float:
        """What the choices together take in the end."""
        wanted = _START_SECONDS + 3 * self.written_seconds + 2 * self._sitting_seconds
        return min(wanted, _CHECK_SHARE * self.whole)

    def _collected(self) -> list[tuple[_Turn, Trial]]:
        """Trials of the next round, of different kernels: those of most promise first, as many as are soon compiled."""
        if not self._has_time:
            return []
        most = self.size
        if self.trial_seconds:
            time_left = self.left - self._check_seconds - self.round_seconds
            most = max(1, min(most, int(time_left / self.trial_seconds)))
        if self.options.tune_trials is not None:
            most = min(most, self.options.tune_trials - self.log.state.trials)
        if self._waiting < most:
            self._look(_LOOKED_AT * most)
        return self._most_promising(most)

    @property
    def _waiting(self) -> int:
        return sum(len(turn.waiting) for turn in self.turns)

    def _look(self, wanted: int) -> None:
        """Makes trials of subjects that take much of the time and were looked at little, until so many wait or it has
        taken as long as they are run."""
        end = time.perf_counter() + 2 * _SECONDS_A_SITTING
        while (count := self._waiting) < wanted and (time.perf_counter() < end or not count):
            new = next(self.subjects, None)
            if new is not None:
                self.turns.append(new)
            able = [t for t in self.turns if t.share >= _LEAST_SHARE and not t.subject.is_done]
            if self.left <= self._check_seconds or (not able and new is None):
                return
            if able:
                turn = max(able, key=lambda t: t.share / (1 + t.looked_at))
                turn.look(lambda key, part=turn.subject.part: self.log.is_known(part, key))  # type: ignore[misc]

    def _most_promising(self, most: int) -> list[tuple[_Turn, Trial]]:
        """Trials of different kernels, by what the model is expected to gain."""
        waiting = [(turn, one) for turn in self.turns if turn.share >= _LEAST_SHARE for one in turn.waiting]
        if self.log.clock == "device":  # replays say that beliefs cost trials on GPUs: groups take turns
            gains = [turn.share / (1 + turn.tried) for turn, _ in waiting]
        else:
            expected = self.beliefs.expected([(turn.key, one.change) for turn, one in waiting])
            gains = [turn.share * e.gain(turn.best) for (turn, _), e in zip(waiting, expected, strict=True)]
        chosen: list[tuple[_Turn, Trial]] = []
        taken: set[str] = set()
        for place in sorted(range(len(waiting)), key=lambda i: -gains[i]):
            turn, one = waiting[place]
            if len(chosen) < most and taken.isdisjoint(turn.subject.kernels):
                turn.waiting.remove(one)
                turn.tried += 1
                taken |= turn.subject.kernels
                chosen.append((turn, one.trial))
        return chosen

    def _believe(self, turn: _Turn, changed: Array, ratio: float) -> None:
        turn.best = min(turn.best, ratio)
        self.beliefs.learn(turn.key, changed, ratio)

    def _round(self, own: BuiltTrials, expected: Sequence[Array], chosen: Sequence[tuple[_Turn, Trial]]) -> None:
        """Measures trials together; where their answers are not the planner's, in halves, until it is known whose."""
        self._say(f"{len(chosen)} trials of {', '.join(sorted({t.subject.kind for t, _ in chosen}))}")
        try:
            plan = self._plan([trial for _, trial in chosen])
            with self.builder.built(plan, lambda: self._look(_LOOKED_AT * self.size)) as other:
                found = answers(other.runner, self.model.program)
                if are_same(self.model.program, expected, found, exact=not self.model.arithmetic):
                    self._learn(own, other, chosen)
                    return
                wrong = "its answers differ"
        except (InternalError, ToolError) as error:
            wrong = str(error)
        if len(chosen) > 1:
            for half in (chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]):
                if self._has_time:
                    self._round(own, expected, half)
            return
        ((turn, trial),) = chosen
        self.log.refuse(turn.subject.part, trial.key)
        _LOG.warning("%s", printable(f"tune: a plan of kernel '{min(turn.subject.kernels)}' is left out: {wrong}"))

    def _plan(self, trials: Sequence[Trial]) -> Plan:
        edits = [edit for trial in trials for edit in trial.edits]
        return edited(self.model.program, self.model.plan, self.model.target, edits)

    def _learn(self, own: BuiltTrials, other: BuiltTrials, chosen: Sequence[tuple[_Turn, Trial]]) -> None:
        times = sat(self.model.program, own, other, self._sitting_seconds)
        for turn, trial in chosen:
            calls = (calls_within(turn.subject.tensors, self.model.program, side) for side in (own, other))
            found = times.beside(*calls)
            if found.is_disturbed:
                key = f"{turn.subject.part.task} {trial.key}"
                self.asked[key] = self.asked.get(key, 1) + 1
                if self.asked[key] <= _TURNS:
                    turn.waiting.append(_Waiting(trial, turn.change(trial.plan)))
                continue
            self._believe(turn, turn.change(trial.plan), found.ratio.middle)
            self.trials += 1
            self.log.state.trials += 1
            self.log.append(turn.subject, trial.plan, found, 1 + len(turn.subject.others))

    def _is_in_vain(self) -> bool:
        """Whether so much was tried without a gain that none is to be expected."""
        if self._gains():
            return False
        spent = time.perf_counter() - self.begin
        if self.trials >= _IN_VAIN or (spent > _IN_VAIN_SECONDS and self.trials >= _IN_VAIN_FEWEST):
            said = f"nothing to gain: {self.trials} other plans, and none is faster"
            self._say(said)
            _LOG.info("%s", said)
            return True
        return False

    # ---- what is chosen

    def _gains(self) -> list[tuple[_Turn, TrialOutcome]]:
        found = ((turn, _best(self.log.outcomes(turn.subject.part))) for turn in self.turns)
        return [(turn, outcome) for turn, outcome in found if outcome is not None]

    def _candidates(self) -> list[TunedChoice]:
        shares = {id(turn.subject): turn.share for turn in self.turns}
        choices = [TunedChoice(turn.subject, trial, outcome.ratio) for turn, outcome in self._gains()
                   if (trial := turn.subject.trial(outcome.plan)) is not None]  # fmt: skip
        return apart(choices, lambda c: shares[id(c.subject)] * (1 - c.ratio))

    def _chosen(self) -> Plan:
        """The best of all subjects together, as far as they hold once more in a process of its own."""
        state, candidates = self.log.state, self._candidates()
        kept: list[TunedChoice] = []
        gain = 1.0
        if candidates:
            self._say(f"measuring {len(candidates)} choices once more")
            kept, gain = self._held(candidates)
        told = {name: f"tuned: the best predicted stays, {1 + self.log.count(turn.subject.part)} plans measured"
                for turn in self.turns for name in turn.subject.tensors}  # fmt: skip
        for choice in kept:
            said = f"tuned: {choice.said}, {1 + self.log.count(choice.subject.part)} plans measured"
            told.update(dict.fromkeys(choice.subject.tensors, said))
        plan = with_choices(self.model, kept, told)
        state.plan, state.told = (plan.to_json() if kept else None), told
        self._say(f"{len(kept)} kernels changed, {gain:.2f} times as fast" if kept else "nothing is faster", gain)
        return plan

    def _held(self, candidates: Sequence[TunedChoice]) -> tuple[list[TunedChoice], float]:
        """The choices that are faster there too, and what the model gains; none where it is no faster as a whole."""
        plan = self._plan([c.trial for c in candidates])
        seconds = max(_SECONDS_A_SITTING, min(2 * self._sitting_seconds, self.left / 3))
        times = self._once_more(plan, seconds)
        if times is None:
            _LOG.warning("no time was left to measure %d choices once more, so none is taken; more time (tune=) goes "
                         "on from here", len(candidates))  # fmt: skip
            return [], 1.0
        sides = [BuiltTrials(each, self.builder.lowered(each), None) for each in (self.model.plan, plan)]
        kept = []
        for choice in candidates:
            found = times.beside(*(calls_within(choice.subject.tensors, self.model.program, side) for side in sides))
            if found.is_disturbed:
                continue
            self.log.append(choice.subject, choice.trial.plan, found, 1 + len(choice.subject.others))
            if found.ratio.high < 1:
                kept.append(replace(choice, ratio=found.ratio.middle))
        whole = times.whole
        if whole.ratio.high >= 1 or whole.is_disturbed:
            return [], 1.0
        return kept, 1 / whole.ratio.middle

    def _once_more(self, plan: Plan, seconds: float) -> CallTimes | None:
        """None where the time is out before."""
        model = self.model
        most = max(seconds, self.left + _OVERTIME * self.whole)
        try:
            models = (model.program, model.plan), (model.program, plan)
            times = measured(models, model.target, self.options, seconds, most)
        except TimeoutError:
            return None
        if times is not None:
            return times
        with self.builder.built(model.plan) as own, self.builder.built(plan) as other:  # there is no process to be had
            return sat(model.program, own, other, seconds)

    # ---- what is told

    def _say(self, said: str, gain: float | None = None) -> None:
        if self.options.progress is not None:
            self.options.progress(f"tune, {said}")
        if self.options.tune_watch is not None:
            now = gain if gain is not None else self._gain()
            self.options.tune_watch(Tuning(max(0.0, self.left), self.whole, self.trials, now, said))

    def _gain(self) -> float:
        shares = {id(turn.subject): turn.share for turn in self.turns}
        return 1 / (1 - sum(shares[id(c.subject)] * (1 - c.ratio) for c in self._candidates()))
