"""Tunes a plan: in every round each kernel takes its next best predicted variant, the whole model is built and timed
kernel by kernel beside the planner's own, and what was fastest in the end is kept in the cache.

Kernels are measured inside the model, so that weights, buffers and caches are what they will be.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.backend import backend_for
from tilewright.compiler.pipeline import machine_code
from tilewright.errors import InternalError, OptionError, ToolError, printable
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.text.text import program_text
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.runtime import Cache, CacheError, ToolchainError, content_key
from tilewright.target import Target
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune.groups import Group, calls_of, find_groups, with_choices

Array = np.ndarray[Any, np.dtype[Any]]
_LOG = logging.getLogger("tilewright")

_FORMAT = "2"  # of what is kept in the cache
_PLANS_IN_TIME = 12  # variants a kernel at most, where only a time is given
_LEAST_SHARE = 0.002  # of the model's time: kernels below it are left alone
_LEAST_GAIN = 0.03  # smaller differences are within the noise of a measurement
_SECONDS_A_ROUND = 0.6  # of runs, for each of the two models compared
_ROUNDED, _ROUNDED_16 = 1e-2, 5e-2  # of the answers' norm, which other orders of sums may change
_FEWEST_RUNS, _MOST_RUNS = 4, 40
_SECONDS_A_KERNEL = 0.15  # to compile one, until a round has shown more


def tune_plan(program: Program, plan: Plan, target: Target, options: Options) -> Plan:
    """The plan with kernels that measured faster, from the cache where this model was tuned as well before."""
    unable = backend_for(target).untunable(target)
    if unable is not None:
        raise OptionError(f"tuning measures, and target '{target.name}' cannot: {unable}; or leave out tune")
    try:
        cache = Cache(options.cache_dir)
        key = _key(program, plan, target, options)
        pinned = _pinned(cache, key, options)
        if pinned is not None:
            return pinned
        tuned, is_whole = _Tuner(program, plan, target, options).tuned()
        effort = {"plans": options.tune, "seconds": options.tune_seconds, "whole": is_whole}
        cache.put(key, json.dumps({"effort": effort, "plan": tuned.to_json()}).encode())
    except (CacheError, ToolchainError) as error:
        raise ToolError(str(error)) from error
    return tuned


def _key(program: Program, plan: Plan, target: Target, options: Options) -> str:
    """Everything a measured choice depends on: the model, what is predicted of it, and what compiles and runs it."""
    return content_key(
        "tuned plan", _FORMAT, program_text(program), plan.to_json(), json.dumps(target.describe()),
        *backend_for(target).built_by(target, options), str(options.threads), suffix=".json",
    )  # fmt: skip


def _pinned(cache: Cache, key: str, options: Options) -> Plan | None:
    """An earlier result, if at least as much was measured for it as is asked for now."""
    found = cache.get(key)
    if found is None:
        return None
    kept = json.loads(found.read_text())
    effort = kept["effort"]
    plans, seconds = effort["plans"] or _PLANS_IN_TIME, effort["seconds"]
    enough = plans >= (options.tune or _PLANS_IN_TIME)
    had_time = effort["whole"] or (options.tune_seconds is not None and seconds >= options.tune_seconds)
    return Plan.from_json(kept["plan"]) if enough and had_time else None


@dataclass
class _Built:
    """A model ready to be timed."""

    plan: Plan
    loops: LoopProgram
    runner: Any
    folder: tempfile.TemporaryDirectory[str]

    def close(self) -> None:
        self.runner.close()
        self.folder.cleanup()


@dataclass
class _Tuned:
    """A group, its variants still to be measured, and the best so far against the planner's."""

    group: Group
    waiting: list[Tile]
    share: float  # of the model's time
    calls: list[int]
    best: Tile | None = None
    seconds: float = 0.0
    default_seconds: float = 0.0
    measured: int = 1

    @property
    def ratio(self) -> float:
        return self.seconds / self.default_seconds if self.best is not None else 1.0


@dataclass
class _Tuner:
    program: Program
    plan: Plan
    target: Target
    options: Options
    started: float = field(default_factory=time.perf_counter)

    def tuned(self) -> tuple[Plan, bool]:
        """The tuned plan, and whether every variant that was asked for was measured."""
        default = self._built(self.plan)
        try:
            groups = self._groups(default)
            number = 0
            while chosen := self._next(groups):
                number += 1
                self._tell(f"tune, round {number}: {len(chosen)} kernels")
                self._round(default, chosen)
            is_whole = not any(g.waiting for g in groups)
            return self._checked(default, groups), is_whole
        finally:
            default.close()

    def _built(self, plan: Plan) -> _Built:
        # packed weights of a plan that is only tried are not worth a place in the cache
        folder = tempfile.TemporaryDirectory(prefix="tilewright-tune-")
        try:
            loops, runner = machine_code(self.program, plan, self.target, self.options, Path(folder.name))
        except BaseException:
            folder.cleanup()
            raise
        return _Built(plan, loops, runner, folder)

    def _groups(self, default: _Built) -> list[_Tuned]:
        times = _profiles(self.program, [default], _SECONDS_A_ROUND)[0]
        total = float(times.sum())
        count = self.options.tune or _PLANS_IN_TIME
        found = []
        for group in find_groups(self.program, self.plan, self.target):
            calls = calls_of(group, self.program, self.plan, default.loops)
            seconds = float(times[calls].sum())
            if calls and seconds >= _LEAST_SHARE * total:
                found.append(_Tuned(group, group.alternatives(count - 1), seconds / total, calls))
        return sorted(found, key=lambda g: -g.share)

    def _next(self, groups: Sequence[_Tuned]) -> list[_Tuned]:
        """Groups of the next round: all that wait, or, as time runs out, those that weigh most for what they had."""
        waiting = [g for g in groups if g.waiting]
        if self.options.tune_seconds is None or not waiting:
            return waiting
        left = self.options.tune_seconds - (time.perf_counter() - self.started)
        # the last part of the time is for the round's runs, and for the check at the end
        affordable = int((left - 4 * _SECONDS_A_ROUND) / self._kernel_seconds(groups))
        ranked = sorted(waiting, key=lambda g: -g.share / g.measured)
        return ranked[: max(0, affordable)]

    def _kernel_seconds(self, groups: Sequence[_Tuned]) -> float:
        measured = sum(g.measured - 1 for g in groups)
        spent = time.perf_counter() - self.started
        return max(_SECONDS_A_KERNEL, spent / measured) if measured else _SECONDS_A_KERNEL

    def _round(self, default: _Built, chosen: Sequence[_Tuned]) -> None:
        choices = [(g, g.waiting.pop(0)) for g in chosen]
        tried, choices = self._tried(choices)
        if tried is None:
            return
        try:
            own, other = _profiles(self.program, [default, tried], _SECONDS_A_ROUND)
            agree = _agree(self.program, default, tried)
        finally:
            tried.close()
        if not agree:
            self._tell("tune: answers of this round differ, none of its kernels is taken")
        for each, kernel in choices:
            each.measured += 1
            if not agree:
                continue
            before, after = float(own[each.calls].sum()), float(other[each.calls].sum())
            if after < (1 - _LEAST_GAIN) * min(1.0, each.ratio) * before:
                each.best, each.seconds, each.default_seconds = kernel, after, before

    def _tried(self, choices: list[tuple[_Tuned, Tile]]) -> tuple[_Built | None, list[tuple[_Tuned, Tile]]]:
        """The model with these kernels, but for those that turn out to be no plan: they are told and left out."""
        try:
            return self._built(self._plan(choices)), choices
        except InternalError as error:
            sound = [(each, kernel) for each, kernel in choices if self._is_sound(each, kernel)]
            if len(sound) == len(choices):
                _LOG.warning("%s", printable(f"tune: a round is left out, its kernels do not go together: {error}"))
                return None, []
        return self._tried(sound) if sound else (None, [])

    def _is_sound(self, each: _Tuned, kernel: Tile) -> bool:
        """Whether a kernel alone, beside the planner's, is a plan that can be lowered."""
        plan = self._plan([(each, kernel)])
        try:
            check_plan(plan, self.program, self.target)
            lower_program(self.program, plan, backend_for(self.target).lower_kernel)
        except InternalError as error:
            each.measured += 1  # what it cost counts
            _LOG.warning("%s", printable(f"tune: a variant of kernel '{each.group.own.name}' is left out: {error}"))
            return False
        return True

    def _plan(self, choices: Sequence[tuple[_Tuned, Tile]]) -> Plan:
        return with_choices(self.program, self.plan, [(g.group, kernel) for g, kernel in choices])

    def _checked(self, default: _Built, groups: Sequence[_Tuned]) -> Plan:
        """All choices together, measured once more beside the planner's: what does not hold is taken back."""
        chosen = [g for g in groups if g.best is not None]
        if chosen:
            self._tell("tune, check of the choices together")
            tried, kept = self._tried([(g, g.best) for g in chosen if g.best is not None])
            if tried is None:
                return self._told(self.plan, groups, [])
            chosen = [g for g, _ in kept]
            try:
                own, other = _profiles(self.program, [default, tried], 2 * _SECONDS_A_ROUND)
                agree = _agree(self.program, default, tried)
            finally:
                tried.close()
            for each in chosen:
                each.default_seconds, each.seconds = float(own[each.calls].sum()), float(other[each.calls].sum())
            chosen = [g for g in chosen if g.ratio < 1.0]
            saved = sum(g.default_seconds - g.seconds for g in chosen)
            others = [i for i in range(len(own)) if not any(i in g.calls for g in chosen)]
            # neighbours may suffer from what a kernel leaves in the caches
            if not agree or float(other[others].sum() - own[others].sum()) > saved:
                chosen = []
        return self._told(self._with(chosen), groups, chosen)

    def _with(self, chosen: Sequence[_Tuned]) -> Plan:
        return self._plan([(g, g.best) for g in chosen if g.best is not None])

    def _told(self, plan: Plan, groups: Sequence[_Tuned], chosen: Sequence[_Tuned]) -> Plan:
        """The reasons, for people: what was measured and gained."""
        kernels = list(plan.kernels)
        told: dict[str, Tile] = {}
        for each in groups:
            calls = len(each.calls)
            if each in chosen:
                before, after = (1e6 * s / calls for s in (each.default_seconds, each.seconds))
                said = f"tuned: {after:.1f} us measured against {before:.1f} us of the best predicted"
            else:
                said = "tuned: the best predicted stays"
            said += f", {each.measured} plans measured"
            for position in each.group.members:
                kernel, about = kernels[position], kernels[position].estimate
                reason = f"{about.reason}; {said}" if about.reason else said
                told[kernel.name] = replace(kernel, estimate=replace(about, reason=reason))
        return plan.with_kernels(told)

    def _tell(self, message: str) -> None:
        if self.options.progress is not None:
            self.options.progress(message)


def _ports(program: Program) -> tuple[list[Array], list[Array]]:
    """Random inputs, and places for outputs."""
    rng = np.random.default_rng(0)
    inputs = [_random(rng, t.shape, t.dtype) for t in program.inputs]
    return inputs, [np.empty([extent_of(e) for e in t.shape], t.dtype.numpy) for t in program.outputs]


def _agree(program: Program, one: _Built, other: _Built) -> bool:
    """Whether two models give the same but for rounding: sums are taken in other orders."""
    found = []
    for model in (one, other):
        inputs, outputs = _ports(program)
        model.runner.run(inputs, outputs)
        found.append(outputs)
    return all(_alike(a, b) for a, b in zip(*found, strict=True))


def _alike(one: Array, other: Array) -> bool:
    if not np.issubdtype(one.dtype, np.floating) and one.dtype.kind != "V":
        return True  # an index or a choice may change with the last bit of what it is made from
    a, b = one.astype(np.float64), other.astype(np.float64)
    whole = np.isfinite(a)
    if not np.array_equal(whole, np.isfinite(b)):
        return False
    apart, size = np.linalg.norm((a - b)[whole]), np.linalg.norm(a[whole])
    return bool(apart <= (_ROUNDED if one.dtype.itemsize > 2 else _ROUNDED_16) * size)


def _profiles(program: Program, models: Sequence[_Built], seconds: float) -> list[Array]:
    """Least seconds of every call of each model, run in turn, so that both meet the same disturbances."""
    inputs, outputs = _ports(program)
    rows: list[list[Array]] = [[] for _ in models]
    for model in models:
        model.runner.run(inputs, outputs)
    end = time.perf_counter() + seconds * len(models)
    while len(rows[0]) < _FEWEST_RUNS or (len(rows[0]) < _MOST_RUNS and time.perf_counter() < end):
        for row, model in zip(rows, models, strict=True):
            row.append(np.asarray(model.runner.profile(inputs, outputs)) * 1e-9)
    if len({len(row[0]) for row in rows}) != 1:
        raise InternalError("variants of a plan differ in their calls")
    return [np.min(row, axis=0) for row in rows]


def _random(rng: np.random.Generator, shape: tuple[Any, ...], dtype: Any) -> Array:
    """Normal floats, and integers 0 or 1, in range for indices and masks alike."""
    values = rng.standard_normal(shape) if dtype.is_float else rng.integers(0, 2, shape)
    return np.ascontiguousarray(np.asarray(values).astype(dtype.numpy))
