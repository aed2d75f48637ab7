"""The judge of predictors: figures of made-up records, decisions that plans differ in, prices without hardware."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from bench.judge import outside
from bench.judge.decisions import LEAF, differences
from bench.judge.figures import fallen, noise, spearman, summed, task_figures
from bench.judge.judge import STORED, compare, main, report, side
from bench.judge.measure import filled, one_core
from bench.judge.plans import plans_of
from bench.judge.price import all_prices, read_all
from bench.judge.programs import Form, kind_of_program, outside_task
from bench.judge.timing import summed as sitting_of
from tilewright.ir.forms.compute import Program
from tilewright.ir.text.text import program_text
from tilewright.schedule.planner import make_plan, plan_seconds
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Leaf, Plan
from tilewright.tile_graph.plan.leaf_form import LEAF_FORMS, VectorForm
from tilewright.tune.parts import bare, cut_out
from tilewright.tune.records import Anchor, Machine, Measurement, RecordPair, Records, Writer, digest

TEXT = """program
input x: float32[64, 48]
constant w: float32[48, 32] "0"
h: float32[i: 64, j: 32] = sum[k: 48] (x[i, k] * w[k, j])
y: float32[i: 64, j: 32] = tanh(h[i, j])
m: float32[i: 64] = sum[j: 32] (y[i, j])
output m
end
"""


def measured(task: str, microseconds: float, pairs: tuple[RecordPair, ...] = (), aa: float = 1.01) -> Measurement:
    return Measurement("p", "t", {}, task, "product", "zoo", 1, "thread", "swept", microseconds, 0.01, 9,
                       Anchor(10.0, 10.0 * aa), pairs)  # fmt: skip


def program() -> Program:
    return filled(TEXT)


# --- figures


def test_ranks_are_those_of_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3], [5, 5, 5]) == 0.0
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)


def test_the_loss_is_that_of_the_plan_predicted_best() -> None:
    plans = [measured("a", us) for us in (10.0, 12.0, 20.0, 40.0)]
    assert task_figures(plans, [2.0, 1.0, 3.0, 4.0], 1.02).loss == pytest.approx(1.2)
    assert task_figures(plans, [1.0, 2.0, 3.0, 4.0], 1.02).loss == pytest.approx(1.0)
    # plans that are predicted alike: what one may expect of them
    assert task_figures(plans, [1.0, 5.0, 5.0, 1.0], 1.02).loss == pytest.approx(2.0)


def test_plans_without_a_price_are_left_out() -> None:
    plans = [measured("a", us) for us in (10.0, 12.0, 20.0, 40.0)]
    found = task_figures(plans, [None, 1.0, 3.0, None], 1.02)
    assert found.rank is None and found.loss == pytest.approx(1.0)


def test_pairs_within_noise_are_left_out_and_equal_prices_decide_nothing() -> None:
    pairs = [RecordPair(str(n), "joined") for n in range(4)]
    times = [(10.0, 20.0), (10.0, 20.0), (10.0, 20.0), (10.0, 10.1)]
    prices = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (2.0, 1.0)]
    plans = [measured("a", us, (pair,)) for pair, both in zip(pairs, times, strict=True) for us in both]
    found = task_figures(plans, [p for both in prices for p in both], 1.03)
    assert (found.right, found.wrong, found.untold) == (1, 2, 1)
    whole = summed([found], len(plans), 0)
    assert whole.pairs == pytest.approx(1 / 3) and whole.decided == 3


def test_noise_is_what_plans_differ_by_from_themselves() -> None:
    plans = [measured(str(n), 10.0, aa=1.0 + n / 100) for n in range(11)]
    assert noise(plans) == pytest.approx(1.09, abs=1e-3)
    assert noise([measured("a", 10.0, aa=1 / 1.02)]) == pytest.approx(1.02)


def test_a_worse_predictor_falls_and_an_equal_one_does_not() -> None:
    tasks = [[measured(f"t{n}", us) for us in (10.0, 12.0, 20.0, 40.0)] for n in range(12)]
    good = [task_figures(plans, [1.0, 2.0, 3.0, 4.0], 1.02) for plans in tasks]
    bad = [task_figures(plans, [4.0, 3.0, 2.0, 1.0], 1.02) for plans in tasks]
    assert fallen(good, good) == {}
    assert set(fallen(good, bad)) == {"rank", "loss", "near"}
    assert fallen(bad, good) == {}
    one_off = [*good[:-1], bad[-1]]
    assert fallen(good, one_off) == {}, "one task of twelve is within noise"


def test_a_table_of_rounds_is_summed_up_by_ratios_to_steady_anchors() -> None:
    # the machine is twice as slow in every second round; the last round changes in between
    slow = np.array([1.0, 2.0] * 5)
    table = np.stack([np.stack([slow * 10, slow * us, slow * 10], -1) for us in (10.0, 15.0)], 1)
    disturbed = np.array([[[10.0, 10.0, 20.0], [10.0, 90.0, 20.0]]])
    found = sitting_of(np.concatenate([table, disturbed]), [True, False], "thread", "swept")
    assert found is not None and found.rounds == 10
    first, second = found.timed
    assert second.microseconds / first.microseconds == pytest.approx(1.5)
    assert (first.agrees, second.agrees) == (True, False) and first.spread == pytest.approx(0.0)
    drifting = np.array([[[10.0, 11.0, 10.0]]]).repeat(9, 0)
    assert sitting_of(drifting, [True], "thread", "swept") is None, "a plan differs from itself by a tenth"


# --- programs, plans, decisions


@pytest.mark.parametrize("number", range(len(outside.FAMILIES)))
def test_every_family_is_a_model(number: int) -> None:
    name, model = outside.model(number)
    assert name == outside.model(number)[0] and model.graph.node


@pytest.mark.slow
def test_forms_of_a_task_differ_in_one_decision_each() -> None:
    target = machine("neoverse_n1")
    number = next(n for n, family in enumerate(outside.FAMILIES) if family == "norms")
    task = outside_task(number, target, None)
    assert task is not None and task.kind == "scan" and task.source == "outside"
    assert "rolled" in [form.decision for form in task.forms[1:]]


def test_plans_of_a_task_are_different_and_pairs_have_two_members() -> None:
    tried = plans_of([Form(program())], machine("neoverse_n1"), 10, np.random.default_rng(0), "a task")
    assert len({t.plan for t in tried}) == len(tried) > 4
    ids = [pair.id for t in tried for pair in t.pairs]
    assert ids and all(ids.count(each) == 2 for each in ids)
    assert all(k.estimate.seconds == 0 for t in tried for k in t.plan.kernels), "what was predicted is not told"


def test_decisions_that_plans_differ_in() -> None:
    target = machine("neoverse_n1")
    joined, apart = (bare(make_plan(program(), target, schedule)) for schedule in ("connected", "register"))
    assert differences(joined, joined) == frozenset()
    assert len(joined.kernels) < len(apart.kernels) and differences(joined, apart) == {"joined"}
    kernel = apart.kernels[0]
    leaf = kernel.leaves[0]
    ahead = leaf.options(VectorForm).ahead + 8
    narrower = kernel.with_leaves({leaf.tensor: leaf.with_options(VectorForm, ahead=ahead)})
    assert differences(apart, apart.with_kernels({kernel.name: narrower})) == {"prefetch"}
    cut = replace(kernel, sizes=tuple((axis, 1) for axis, _ in kernel.sizes))
    if cut != kernel:
        assert differences(apart, apart.with_kernels({kernel.name: cut})) == {"tile size"}


def test_every_field_of_a_leaf_that_can_differ_is_a_decision() -> None:
    given = {"tensor", "core", "part", "alternate", "idle", "form"}  # by what it computes, and where in a Scan
    named = [name for _, names in LEAF for name in names]
    every = {f.name for form in (Leaf, *LEAF_FORMS.values()) for f in fields(form)}
    assert sorted(named) == sorted(every - given)


def test_a_part_of_a_program_gives_what_others_read() -> None:
    target = machine("neoverse_n1")
    whole = program()
    plan = make_plan(whole, target, "register")
    part = cut_out(whole, plan.kernels[:1])
    assert [t.name for t in part.inputs] == ["x"] and len(part.outputs) == 1
    assert kind_of_program(part, target) == "product"
    assert make_plan(part, target).kernels


def test_one_core_has_the_caches_for_itself() -> None:
    target = machine("emerald_rapids")
    alone = one_core(target)
    assert alone.units == 1 and all(level.shared_by == 1 for level in alone.levels)


# --- prices


def records_of(name: str) -> Records:
    """Plans of a program for a machine that need not be here."""
    target = machine(name)
    here = Machine.of(target, name, target.architecture)
    plans = [bare(make_plan(program(), target, schedule)) for schedule in ("connected", "register", "none")]
    return Records({digest(TEXT): TEXT}, {here.digest: here}, [stored(plan, here) for plan in plans])


def stored(plan: Plan, here: Machine) -> Measurement:
    return replace(measured("a task", 10.0), program=digest(TEXT), target=here.digest, plan=json.loads(plan.to_json()))


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids", "h200"])
def test_stored_plans_are_priced_for_the_machine_they_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(name)
    whole = make_plan(program(), machine(name))

    def no_hardware(*_: object, **__: object) -> None:
        raise AssertionError("pricing looks at this machine")

    for module in ("tilewright.target.describe.this_cpu", "tilewright.target.system.cpu_flags"):
        monkeypatch.setattr(module, no_hardware)
    prices = all_prices(records)
    assert all(p is not None and p > 0 for each in prices for p in each.values())
    assert prices[0]["search"] == pytest.approx(1e6 * plan_seconds(whole, program()), rel=0.01)


def test_the_report_names_machines_classes_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, path = records_of("neoverse_n1"), tmp_path / "some.jsonl"
    here = next(iter(records.targets.values()))
    for m in records.measurements:
        Writer(path).append(m, TEXT, here)
    assert main([str(path)]) == 0
    told = capsys.readouterr().out
    assert "neoverse_n1, 4 cores" in told.replace(str(here.description["units"]), "4")
    assert "| product | 1 | 3 | 0 |" in told and "| fold |" in told
    prices = all_prices(records)
    same = side(records, prices)
    assert compare("HEAD", same, same) == 0 and report(records, same)


def test_a_fall_is_told_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    records = Records({}, records_of("neoverse_n1").targets)
    (target,) = records.targets
    prices = [1.0, 2.0, 3.0, 4.0]
    records.measurements = [replace(measured(f"t{n}", us), target=target) for n in range(8) for us in (10, 12, 20, 40)]
    good, bad = (side(records, [{"search": p, "fold": p} for p in some] * 8) for some in (prices, prices[::-1]))
    assert compare("main", good, bad) == 1 and "fell: neoverse_n1" in capsys.readouterr().out
    assert compare("main", bad, good) == 0 and "rose: neoverse_n1" in capsys.readouterr().out


def test_what_is_stored_is_read_and_priced() -> None:
    records = read_all(sorted(STORED.iterdir()))
    by_kind = {m.kind: m for m in records.measurements}
    assert len(records.measurements) > 800 and len(by_kind) > 6
    ids = [(m.target, pair.id) for m in records.measurements for pair in m.pairs]
    assert len(ids) == 2 * len(set(ids)), "every pair has two members"
    few = Records(records.programs, records.targets, [by_kind["reduction"], by_kind["map"]])
    assert all(price for prices in all_prices(few) for price in prices.values())


def test_text_of_a_program_survives() -> None:
    assert program_text(program()) == program_text(filled(program_text(program())))
