"""Tuning: the same answers, the choice kept and found again without measuring, and never a slower kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import CPU, model_of, programs
from tests.unit.tune.made_up import MadeUp
from tilewright.backend.cpu import backend
from tilewright.backend.cpu.kernel.candidates import feasible_plans, predict
from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program
from tilewright.options import Options, Tuning
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Estimate, Plan, Tile
from tilewright.tune import timing, tuner
from tilewright.tune.arithmetic import order_of_sums, sums_of_plan
from tilewright.tune.choices import TunedChoice
from tilewright.tune.fresh import measured
from tilewright.tune.groups import calls_of, find_groups, with_choices
from tilewright.tune.log import stored
from tilewright.tune.models import TrialBuilder
from tilewright.tune.records import RecordError, read
from tilewright.tune.subjects import TunedModel, find_subjects

N1 = machine("neoverse_n1")
RNG = np.random.default_rng(11)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / 8).astype(np.float32)


@pytest.fixture(scope="module")
def model() -> ModelProto:
    """Two equal products and another, with something between them."""
    steps = [
        ("MatMul", ["x", "a"], "p", {}),
        ("Relu", ["p"], "q", {}),
        ("MatMul", ["q", "b"], "r", {}),
        ("Softmax", ["r"], "s", {"axis": 1}),
        ("MatMul", ["s", "c"], "y", {}),
    ]
    constants = {"a": weights(64, 64), "b": weights(64, 64), "c": weights(64, 40)}
    return model_of(steps, {"x": [48, 64]}, {"y": [48, 40]}, constants)


def options(cache: Path, **more: Any) -> Options:
    return Options(**{"cache_dir": cache, "threads": 2, **more})


def planned(model: ModelProto) -> tuple[Program, Plan]:
    program = programs(model, N1)["layout"]
    return program, make_plan(program, N1, "register")


def own_seconds(plan: Plan, other: float = 2e-5) -> Callable[[Tile], float]:
    """Kernels as they are planned take 10 microseconds."""
    own = {leaves(k): bare_kernel(k) for k in plan.kernels}
    return lambda kernel: 1e-5 if own.get(leaves(kernel)) == bare_kernel(kernel) else other


def leaves(kernel: Tile) -> tuple[str, ...]:
    return tuple(leaf.tensor for leaf in kernel.leaves)


def bare_kernel(kernel: Tile) -> Tile:
    return replace(kernel, estimate=Estimate(), name="")


def tuned(given: tuple[Program, Plan], cache: Path, **more: Any) -> Plan:
    program, plan = given
    return tuner.tune_plan(program, plan, N1, options(cache, **{"tune": 60.0, **more}))


def known(cache: Path) -> list[str]:
    """Tasks and plans that the records in the cache have, in order."""
    (path,) = stored(cache)
    return [f"{m.task} {json.dumps(m.plan, sort_keys=True)}" for m in read(path).measurements]


def ratios_of(cache: Path, key: str) -> list[float]:
    (path,) = stored(cache)
    return [round(m.microseconds / m.anchor.around, 3) for m in read(path).measurements
            if f"{m.task} {json.dumps(m.plan, sort_keys=True)}" == key]  # fmt: skip


def test_same_answers_and_kept(model: ModelProto, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": RNG.standard_normal((48, 64)).astype(np.float32)}
    plain = tilewright.compile(model, options=options(kernel_cache))
    chosen = options(kernel_cache, tune="1m", tune_trials=2)
    told: list[Tuning] = []
    tuned = tilewright.compile(model, options=chosen.override(tune_watch=told.append))
    np.testing.assert_array_equal(tuned.run(inputs)["y"], plain.run(inputs)["y"])
    assert any("plans measured" in k.estimate.reason for k in tuned.artifact.plan.kernels)
    assert "tune" in tuned.artifact.stage_seconds and "tune" not in plain.artifact.stage_seconds
    assert told and all(0 <= now.left <= now.whole == 60 for now in told)
    monkeypatch.setattr(TrialBuilder, "built", lambda *_: pytest.fail("measured again"))
    again = tilewright.compile(model, options=chosen)
    assert again.artifact.plan == tuned.artifact.plan
    untuned = tilewright.compile(model, options=options(kernel_cache))
    assert untuned.artifact.plan == plain.artifact.plan, "what is in the cache must not change a plain compilation"


def test_what_is_faster_is_kept_and_found_again(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With times that are made up: kernels with other register tiles take half as long, all others longer."""
    program, plan = planned(model)
    own = {leaves(k): k for k in plan.kernels}
    seconds = own_seconds(plan)

    def faster(kernel: Tile) -> float:
        registers = [leaf.register for leaf in kernel.leaves]
        mine = own.get(leaves(kernel))
        is_other = mine is not None and registers != [leaf.register for leaf in mine.leaves]
        return 0.5e-5 if is_other else seconds(kernel)

    clock = MadeUp(faster)
    clock.put_in_place(monkeypatch)
    found = tuned((program, plan), tmp_path, tune_trials=12)
    assert clock.again == 1, "choices are measured once more, in another process"
    changed = [k for k in found.kernels if "2.00 times as fast" in k.estimate.reason]
    assert changed
    for kernel in found.kernels:
        if kernel not in changed:
            assert bare_kernel(kernel) == bare_kernel(own[leaves(kernel)])
        assert order_of_sums(kernel) == order_of_sums(own[leaves(kernel)])
    clock.refuse(monkeypatch)
    assert tuned((program, plan), tmp_path, tune_trials=12) == found
    assert tuned((program, plan), tmp_path, tune=20.0, tune_trials=4) == found, "more was measured than is asked for"
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        tuned((program, plan), tmp_path, tune=600.0)


@pytest.mark.slow
def test_the_next_run_goes_on_and_repeats_nothing(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C ends the first, and what it has found counts."""
    program, plan = planned(model)
    clock = MadeUp(own_seconds(plan, other=0.5e-5), interrupted_after=1)
    clock.put_in_place(monkeypatch)
    first = tuned((program, plan), tmp_path)
    assert any("tuning was interrupted" in r.getMessage() for r in caplog.records)
    assert any("2.00 times as fast" in k.estimate.reason for k in first.kernels)
    before = known(tmp_path)
    clock.interrupted_after = None
    tuned((program, plan), tmp_path, tune_trials=8)
    after = known(tmp_path)
    assert after[: len(before)] == before and len(set(after)) >= len(set(before)) + 4
    repeated = [m for m in after if after.count(m) > 1]
    assert all(ratio < 1 for m in repeated for ratio in ratios_of(tmp_path, m)), "only choices are, in the end"


def test_a_record_that_was_cut_off_is_no_record(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed while writing leaves the beginning of a line: the next run goes on after the one before."""
    program, plan = planned(model)
    MadeUp(own_seconds(plan)).put_in_place(monkeypatch)
    tuned((program, plan), tmp_path, tune_trials=4)
    (path,) = stored(tmp_path)
    before = known(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    assert known(tmp_path) == before[:-1]
    tuned((program, plan), tmp_path, tune_trials=8)
    after = known(tmp_path)
    assert after[: len(before) - 1] == before[:-1] and len(after) > len(before)


def test_a_wrong_answer_never_wins(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever takes the first product otherwise is fast and wrong by a thousandth; the others' trials count."""
    program, plan = planned(model)
    first = plan.kernels[0]

    def is_wrong(kernel: Tile) -> bool:
        return leaves(kernel) == leaves(first) and bare_kernel(kernel) != bare_kernel(first)

    clock = MadeUp(own_seconds(plan, other=0.5e-5), lambda p: 1.001 if any(map(is_wrong, p.kernels)) else 1.0)
    clock.put_in_place(monkeypatch)
    found = tuned((program, plan), tmp_path, tune_trials=8, tune_arithmetic=True)
    assert not any(map(is_wrong, found.kernels))
    assert any("2.00 times as fast" in k.estimate.reason for k in found.kernels)
    refused = [r.getMessage() for r in caplog.records if "its answers differ" in r.getMessage()]
    assert refused and all(f"'{first.name}'" in text for text in refused)


def test_a_process_of_its_own_measures_two_plans(model: ModelProto, kernel_cache: Path) -> None:
    program = programs(model)["layout"]
    plans = make_plan(program, CPU, "register"), make_plan(program, CPU, "none")
    times = measured(((program, plans[0]), (program, plans[1])), CPU, options(kernel_cache, tune=1.0, threads=1), 0.1)
    assert times is not None and len(times.anchors) == len(times.taken) + 1
    assert times.anchors.shape[1] == len(plans[0].kernels) < len(plans[1].kernels) == times.taken.shape[1]


@pytest.mark.slow
def test_noise_changes_nothing(model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All plans take as long, but for what a busy machine adds."""
    program, plan = planned(model)
    clock = MadeUp(lambda kernel: 1e-5 * len(kernel.leaves), noise=0.02)
    clock.put_in_place(monkeypatch)
    found = tuned((program, plan), tmp_path, tune_trials=16)
    assert len(known(tmp_path)) >= 16
    assert [bare_kernel(k) for k in found.kernels] == [bare_kernel(k) for k in plan.kernels]


def test_a_model_with_nothing_to_gain_is_told_so(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan = planned(model)
    MadeUp(own_seconds(plan)).put_in_place(monkeypatch)
    monkeypatch.setattr(tuner, "_IN_VAIN", 6)
    told: list[Tuning] = []
    tuned((program, plan), tmp_path, tune=600.0, tune_watch=told.append)
    assert told[-2].said.startswith("nothing to gain: ") and told[-1].said == "nothing is faster"
    assert told[-1].left > 500 and len(known(tmp_path)) < 40


@pytest.mark.slow
def test_what_is_disturbed_is_measured_once_more_and_not_recorded(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan = planned(model)
    clock = MadeUp(own_seconds(plan), noise=0.5, interrupted_after=6)
    clock.put_in_place(monkeypatch)
    monkeypatch.setattr(timing, "DRIFT", 1.0)
    tuned((program, plan), tmp_path)
    assert not stored(tmp_path)
    first, *later = [{bare_kernel(k) for k in p.kernels} - set(map(bare_kernel, plan.kernels)) for p in clock.plans[1:]]
    assert any(first & kernels for kernels in later), "what was tried first has a second turn"


def test_choices_that_no_time_is_left_for_are_not_taken(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are recorded: with more time they are measured once more, and nothing else is again."""
    program, plan = planned(model)
    clock = MadeUp(own_seconds(plan, other=0.5e-5))
    clock.put_in_place(monkeypatch)
    once_more = tuner.measured
    given: list[float] = []

    def too_long(*arguments: Any) -> Any:
        given.append(arguments[-1])
        raise TimeoutError

    monkeypatch.setattr(tuner, "measured", too_long)
    found = tuned((program, plan), tmp_path, tune=60.0, tune_trials=2)
    assert 0 < given[0] <= 63.0, "within a twentieth of the time"
    assert [bare_kernel(k) for k in found.kernels] == [bare_kernel(k) for k in plan.kernels]
    assert any("no time was left to measure" in r.getMessage() for r in caplog.records)
    monkeypatch.setattr(tuner, "measured", once_more)
    before = known(tmp_path)
    again = tuned((program, plan), tmp_path, tune=120.0, tune_trials=2)
    assert any("2.00 times as fast" in k.estimate.reason for k in again.kernels)
    assert set(known(tmp_path)) == set(before)


def test_the_first_trials_are_found_while_compilers_work(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan = planned(model)
    clock = MadeUp(own_seconds(plan))
    clock.put_in_place(monkeypatch)
    looked: list[tuple[int, int]] = []
    look = tuner._Tuner._look

    def noted(self: tuner._Tuner, count: int) -> None:
        look(self, count)
        looked.append((len(clock.plans), self._waiting))

    monkeypatch.setattr(tuner._Tuner, "_look", noted)
    tuned((program, plan), tmp_path, tune_trials=2)
    (built, waiting), *_ = looked
    assert built == 1 and waiting, "the planner's own is being built"


def test_a_time_is_kept_to(model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time too short for one round measures the planner's kernels alone."""
    program, plan = planned(model)
    clock = MadeUp(own_seconds(plan, other=1e-6))
    clock.put_in_place(monkeypatch)
    found = tuned((program, plan), tmp_path, tune=0.5)
    assert len(clock.plans) == 1
    assert [bare_kernel(k) for k in found.kernels] == [bare_kernel(k) for k in plan.kernels]


def test_sums_keep_their_order_unless_asked(model: ModelProto) -> None:
    program, plan = planned(model)
    orders: dict[bool, set[bool]] = {}
    for arithmetic in (False, True):
        for subject in find_subjects(TunedModel(program, plan, N1, arithmetic)):
            own = sums_of_plan(subject.part.own)
            for _ in range(6):
                trial = subject.following(lambda _: False)
                if trial is not None:
                    is_same = sums_of_plan(trial.plan) == own
                    orders.setdefault(arithmetic, set()).add(is_same)
                    assert ("sums in another order" in TunedChoice(subject, trial, 0.5).said) != is_same
    assert orders == {False: {True}, True: {True, False}}


def test_records_choose_without_measuring(model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned(model)
    clock = MadeUp(own_seconds(plan, other=0.5e-5))
    clock.put_in_place(monkeypatch)
    file = tmp_path / "some.twr"
    found = tuned((program, plan), tmp_path / "one", tune_records=file, tune_trials=6)
    clock.refuse(monkeypatch)
    again = tuned((program, plan), tmp_path / "two", tune=None, tune_records=file)
    assert [bare_kernel(k) for k in again.kernels] == [bare_kernel(k) for k in found.kernels]
    assert any("as some.twr has it: 2.00 times" in k.estimate.reason for k in again.kernels)
    with pytest.raises(RecordError, match=r"there is no file .*none\.twr of records; with tune='2m' it is written"):
        tuned((program, plan), tmp_path / "two", tune=None, tune_records=tmp_path / "none.twr")


def test_records_of_another_machine_are_refused_in_one_line(
    model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan = planned(model)
    MadeUp(own_seconds(plan)).put_in_place(monkeypatch)
    file = tmp_path / "some.twr"
    tuned((program, plan), tmp_path, tune_records=file, tune_trials=2)
    with pytest.raises(RecordError) as caught:
        tuned((program, plan), tmp_path, tune_records=file, threads=1)
    assert "some.twr was measured on" in str(caught.value) and "threads=2, and this is" in str(caught.value)
    monkeypatch.setattr(backend, "microarchitecture", lambda: "another")
    with pytest.raises(RecordError, match="give a file of this machine") as caught:
        tuned((program, plan), tmp_path, tune=None, tune_records=file)
    assert len(str(caught.value).splitlines()) == 1


def test_records_are_checked_as_plans_are(model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned(model)
    MadeUp(own_seconds(plan, other=0.5e-5)).put_in_place(monkeypatch)
    file = tmp_path / "some.twr"
    tuned((program, plan), tmp_path, tune_records=file, tune_trials=2)
    file.write_text(file.read_text().replace('"lanes":4', '"lanes":3'))
    with pytest.raises(RecordError, match=r"some\.twr: a plan of task \w+: "):
        tuned((program, plan), tmp_path, tune=None, tune_records=file)


def test_equal_kernels_are_one_group(model: ModelProto) -> None:
    steps = [("MatMul", ["x", "a"], "p", {}), ("MatMul", ["p", "b"], "q", {}), ("MatMul", ["q", "c"], "y", {})]
    constants = {"a": weights(32, 32), "b": weights(32, 32), "c": weights(32, 16)}
    chain = model_of(steps, {"x": [24, 32]}, {"y": [24, 16]}, constants)
    program = programs(chain, N1)["layout"]
    plan = make_plan(program, N1, "register")
    groups = find_groups(program, plan, N1)
    assert sorted(len(g.members) for g in groups) == [1, 2]
    both = next(g for g in groups if len(g.members) == 2)
    width = dict(both.own.leaves[0].register)["o1"]
    variants = both.variants[0]
    wide = next(c for c in variants.choices() if c[0].vector == "o1" and dict(c[0].register)["o1"] not in (width, 32))
    other = variants.tiled(wide)[0]
    changed = with_choices(program, plan, [(both, other)])
    first, second = (changed.kernels[i] for i in both.members)
    assert first.leaves[0].register == second.leaves[0].register == other.leaves[0].register
    assert first.leaves[0].tensor != second.leaves[0].tensor
    packed = dict(changed.layouts)
    assert packed["a"] == packed["b"] != dict(plan.layouts).get("a"), "weights are packed for the register tile"
    assert packed.get("c") == dict(plan.layouts).get("c")


def test_every_call_belongs_to_one_group(model: ModelProto) -> None:
    from tests.cpu_stages import lowered

    program = programs(model)["layout"]
    plan = make_plan(program, CPU, "register")
    loops = lowered(program, plan=plan).loops
    groups = find_groups(program, plan, CPU)
    found = [n for g in groups for n in calls_of([plan.kernels[i] for i in g.members], program, loops)]
    assert sorted(found) == list(range(len(loops.calls)))


def test_kernels_that_stay_are_written_once(model: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned(model)
    builder = TrialBuilder(program, N1, options(tmp_path))
    written: list[str] = []
    render = backend.CpuBackend.render

    def counted(self: Any, loops: Any, target: Any, **more: Any) -> dict[str, str]:
        written.extend(kernel.name for kernel in loops.kernels)
        return render(self, loops, target, **more)

    monkeypatch.setattr(backend.CpuBackend, "render", counted)
    monkeypatch.setattr(backend.CpuBackend, "load", lambda *_, **__: BytesIO())
    with builder.built(plan):
        assert len(written) == len(set(written)) > 1
    group, *_ = find_groups(program, plan, N1)
    written.clear()
    with builder.built(with_choices(program, plan, [(group, group.alternatives(1)[0])])):
        assert len(written) == 1, "the one that changed"


def test_the_default_is_a_candidate(model: ModelProto) -> None:
    program = programs(model)["layout"]
    plan = make_plan(program, CPU, "register")
    for group in find_groups(program, plan, CPU):
        (nest,) = group.variants[0].nests
        (own,) = group.own.leaves
        context = group.variants[0].context
        assert own in feasible_plans(nest, context)
        seconds = predict([nest], [own], context, group.variants[0].stored, [group.own.cut, ()])
        assert seconds.shape == (2,) and np.all(seconds > 0)


def test_best_differ_and_are_ranked(model: ModelProto) -> None:
    program = programs(model)["layout"]
    plan = make_plan(program, CPU, "register")
    for group in find_groups(program, plan, CPU):
        best = group.alternatives(5)
        seen = {(k.leaves, k.cut) for k in (group.own, *best)}
        assert len(seen) == len(best) + 1
        times = [k.estimate.seconds for k in best]
        assert times == sorted(times)


@pytest.mark.parametrize(("given", "seconds"), [(90, 90.0), ("90s", 90.0), ("2m", 120.0), ("1h30m", 5400.0),
                                                ("1.5", 1.5)])  # fmt: skip
def test_durations_are_understood(given: Any, seconds: float) -> None:
    assert Options(tune=given).tune == seconds


@pytest.mark.parametrize("given", [{"tune": -1}, {"tune": True}, {"tune": ""}, {"tune": "long"}, {"tune": "2m1h"},
                                   {"tune": "2m", "tune_trials": 0}, {"tune_trials": 3}])  # fmt: skip
def test_options_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(given))):
        Options(**given)


def test_an_emulator_is_not_tuned(add_model: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'cuda-emulated' cannot: the emulator's times say nothing about a GPU"):
        tilewright.compile(add_model(), target="cuda-emulated", tune="2s", options=options(tmp_path))


def test_a_shared_constant_keeps_its_layout() -> None:
    steps = [("MatMul", ["x", "a"], "p", {}), ("Tanh", ["p"], "q", {}), ("MatMul", ["q", "a"], "y", {})]
    tied = model_of(steps, {"x": [24, 32]}, {"y": [24, 32]}, {"a": weights(32, 32)})
    program = programs(tied)["layout"]
    plan = make_plan(program, CPU, "register")
    groups = find_groups(program, plan, CPU)
    choices = [(g, g.variants[0].random(1, np.random.default_rng(i))[0]) for i, g in enumerate(groups)]
    assert with_choices(program, plan, choices).layouts == plan.layouts
