"""Forms of a whole model: what is decided before there are kernels, measured as well.

Alike computes stay apart, operands are read where they lie; and, where sums may be taken otherwise, long ones stay
whole and windows and products run by other algorithms. Each form is the model planned and built once more, timed beside
the fastest so far, and taken where it is faster in a process of its own, too. Kernels are tuned in what is taken.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from tilewright.backend import backend_for
from tilewright.compiler.pipeline import Artifact, build
from tilewright.compiler.within import build_within
from tilewright.errors import InternalError, TilewrightError, printable
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ir.text.text import program_text
from tilewright.options import Options, Tuning
from tilewright.runtime import Cache, content_key
from tilewright.target import Target
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.answers import answers, are_same
from tilewright.tune.arithmetic import sums_in_common
from tilewright.tune.fresh import measured
from tilewright.tune.models import TrialBuilder, profiled, sat
from tilewright.tune.timing import Beside
from tilewright.tune.tuner import LEAST_GAIN, tune_plan

_LOG = logging.getLogger("tilewright")

_FORMAT = "1"  # of what is kept in the cache
_SHARE = 0.25  # of all time, that forms may take
_SECONDS = 0.8  # of a sitting
_RUNS = 24  # of the model that a sitting holds, at least
_LEAST_TIME = 1e-3  # seconds, of tuning that has none left


@dataclass(frozen=True)
class _Form:
    """How options differ: a choice that is made by prediction unless it is told, or what is left out."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    without: str = ""
    keeps_sums: bool = True

    def is_open(self, options: Options) -> bool:
        return (self.keeps_sums or options.tune_arithmetic) and self.without not in options.without and all(
            getattr(options, name) == "auto" for name in self.changes)  # fmt: skip

    def applied(self, options: Options) -> Options:
        without = (*options.without, self.without) if self.without else options.without
        return replace(options, without=without, **dict(self.changes))


_FORMS = {
    "alike computes stay apart": _Form({"merging": "off"}),
    "operands are read where they lie": _Form(without="staging"),
    "long sums stay whole": _Form(without="splits", keeps_sums=False),
    "windows are summed directly": _Form({"convolution": "direct"}, keeps_sums=False),
    "windows run by Winograd's algorithms": _Form({"convolution": "winograd"}, keeps_sums=False),
    "products are summed directly": _Form({"contraction": "direct"}, keeps_sums=False),
    "products run by Strassen's algorithm": _Form({"contraction": "strassen"}, keeps_sums=False),
}


def build_tuned(model: Graph, target: Target, options: Options) -> Artifact:
    """The model as it measured fastest: its form, then the plans of its kernels."""
    is_whole = options.memory is None and options.device_memory is None and options.effort == "full"
    is_edited = options.stop_after is not None or options.overrides
    if options.tune is None or not is_whole or is_edited or backend_for(target).untunable(target) is not None:
        return build_within(model, target, options, tune_plan)
    try:
        return build_within(model, target, options, _Forms(model, target, options).tuned)
    except _Another as found:
        made = build_within(model, target, found.options, tune_plan)
        if made.program is None:
            return made
        return replace(made, program=replace(made.program, remarks=(*made.program.remarks, *found.remarks)))


class _Another(Exception):
    """Another form than the planner's is faster: the model is compiled with these options."""

    def __init__(self, options: Options, remarks: tuple[str, ...]) -> None:
        super().__init__()
        self.options, self.remarks = options, remarks


@dataclass
class _State:
    """What measuring forms has come to."""

    seconds: float = 0.0
    tried: list[str] = field(default_factory=list)
    taken: dict[str, float] = field(default_factory=dict)  # how many times as fast as before


class _Forms:
    def __init__(self, model: Graph, target: Target, options: Options) -> None:
        assert isinstance(options.tune, float)
        self.model, self.target, self.options, self.whole = model, target, options, options.tune
        self.memo = Memo()
        self.cache = Cache(options.cache_dir)
        self.state, self.key = _State(), ""
        self.building = 0.0  # seconds of the form that is there, which any compilation makes

    def tuned(self, program: Program, plan: Plan, target: Target, options: Options) -> Plan:
        """The plan with its kernels tuned, where this form stays."""
        measuring = backend_for(target).measuring(target, options)
        self.key = content_key(
            "forms", _FORMAT, program_text(program), plan.to_json(), json.dumps(target.describe()),
            *backend_for(target).built_by(target, options), str(measuring.threads), str(options.tune_arithmetic),
            suffix=".json",
        )  # fmt: skip
        kept = self.cache.get(self.key)
        self.state = _State() if kept is None else _State(**json.loads(kept.read_text()))
        left = self.whole
        try:
            self._look(program, plan, target)
            left = max(_LEAST_TIME, self.whole - self.state.seconds)
        except KeyboardInterrupt:
            _LOG.warning("tuning was interrupted; what was found is kept, and the next time it goes on")
            left = _LEAST_TIME
        rest = replace(self.options, tune=left, tune_watch=self._watched)
        if self.state.taken:
            remarks = (f"tuned: {name}, {gain:.2f} times as fast" for name, gain in self.state.taken.items())
            raise _Another(self._with_taken(rest), tuple(remarks))
        return tune_plan(program, plan, target, replace(options, tune=left, tune_watch=self._watched))

    def _watched(self, now: Tuning) -> None:
        """What forms took of the time, and what they gain, counts."""
        if self.options.tune_watch is None:
            return
        taken = self.state.taken
        said = "; ".join((*(f"{name}, {gain:.2f} times as fast" for name, gain in taken.items()), now.said))
        self.options.tune_watch(replace(now, whole=self.whole, gain=now.gain * prod(taken.values()), said=said))

    def _with_taken(self, options: Options) -> Options:
        for name in self.state.taken:
            options = _FORMS[name].applied(options)
        return options

    def _look(self, program: Program, plan: Plan, target: Target) -> None:
        """At every form that was not looked at, as long as there is time."""
        state = self.state
        for name, form in _FORMS.items():
            if name in state.tried or not form.is_open(self._with_taken(self.options)):
                continue
            if state.seconds > _SHARE * self.whole:
                return
            begin, self.building = time.perf_counter(), 0.0
            self._say(f"the model where {name}")
            gain = None
            try:
                gain = self._gain(form, (program, plan), target)
            except TimeoutError:
                return
            except (InternalError, TilewrightError) as error:
                _LOG.warning("%s", printable(f"tune: the model where {name} is left out: {error}"))
            finally:
                state.seconds += time.perf_counter() - begin - self.building
                self._keep()
            state.tried.append(name)
            if gain is not None:
                state.taken[name] = gain
            self._keep()

    def _keep(self) -> None:
        self.cache.put(self.key, json.dumps(asdict(self.state)).encode())

    def _say(self, said: str) -> None:
        if self.options.progress is not None:
            self.options.progress(f"tune, {said}")
        self._watched(Tuning(max(0.0, self.whole - self.state.seconds), self.whole, 0, 1.0, said))

    def _gain(self, form: _Form, planned: tuple[Program, Plan], target: Target) -> float | None:
        """How many times as fast the form is as the fastest before; None where it is not, or is the same. A
        TimeoutError where it may take more than forms have of the time."""
        own = self._made(self._with_taken(self.options)) if self.state.taken else planned
        other = self._made(form.applied(self._with_taken(self.options)))
        if own is None or other is None or program_text(own[0]) == program_text(other[0]):
            return None
        if not self.options.tune_arithmetic and not sums_in_common(own[1], other[1]):
            return None
        builders = [TrialBuilder(program, target, self.options) for program, _ in (own, other)]
        begin = time.perf_counter()
        with builders[0].built(own[1]) as first:
            self.building = time.perf_counter() - begin
            seconds = max(_SECONDS, _RUNS * profiled(own[0], first, _SECONDS / 4)[1])
            left = _SHARE * self.whole - self.state.seconds
            if self.building + 2 * seconds > left:
                raise TimeoutError
            with builders[1].built(other[1]) as second:
                expected, found = answers(first.runner, own[0]), answers(second.runner, other[0])
                if not are_same(own[0], expected, found, exact=not self.options.tune_arithmetic):
                    return None
                if not _is_faster(sat(own[0], first, second, seconds).whole):
                    return None
                again = None
                with suppress(TimeoutError):
                    again = measured((own, other), target, self.options, seconds, left)
                    again = again or sat(own[0], first, second, seconds)  # where there is no process to be had
        return 1 / again.whole.ratio.middle if again is not None and _is_faster(again.whole) else None

    def _made(self, options: Options) -> tuple[Program, Plan] | None:
        """The model in another form, as it is planned."""
        untuned = replace(options, tune=None, tune_trials=None, tune_arithmetic=False, tune_records=None,
                          tune_watch=None, progress=None, dump=None, verify=False, stop_after="plan")  # fmt: skip
        made = build(self.model, self.target, untuned, memo=self.memo)
        return None if made.program is None or made.plan is None else (made.program, made.plan)


def _is_faster(found: Beside) -> bool:
    return not found.is_disturbed and found.ratio.high < 1 and found.ratio.middle < 1 - LEAST_GAIN
