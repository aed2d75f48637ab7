"""Few plans of a kernel by orders of objectives: what each counts, conflicts, the table, and that they are plans."""

from __future__ import annotations

from functools import cache

import pytest

from bench.policies.nests import policies
from bench.policies.polybench import program
from bench.policies.table import Seen, chosen
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import build
from tilewright.ir.forms.compute import Program
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.schedule import policies as module
from tilewright.schedule.constants import POLICY_PLANS
from tilewright.schedule.policies import COUNTS, Policy, PolicyKernels, alike, dependences, policy_plans
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.groups import KernelGroup, find_groups, with_choices

SMALL = {"syrk": {"M": 32, "N": 48}, "gesummv": {"N": 64}, "jacobi-2d": {"T": 2, "N": 40}}


@cache
def planned(name: str) -> tuple[Program, Plan, KernelGroup, PolicyKernels]:
    target = machine("neoverse_n1")
    made = build(program(name, SMALL[name]), target, Options(target="neoverse_n1", stop_after="plan"))
    assert made.program is not None and made.plan is not None
    group = max(find_groups(made.program, made.plan, target), key=lambda g: g.own.estimate.seconds)
    own = group.variants[0]
    plans = [group.own, *own.pool(lambda leaves: True, 24)]
    return made.program, made.plan, group, PolicyKernels(plans, own.nests, own.context)


@pytest.mark.parametrize("objective", COUNTS)
def test_an_objective_alone_has_its_least(objective: str) -> None:
    *_, kernels = planned("syrk")
    found = kernels.plans.index(kernels.preferred(Policy((objective,), 0.0)))
    assert kernels.counts(objective)[found] == min(kernels.counts(objective))


def test_objectives_count_what_they_say() -> None:
    """Vectors along the sum read rows of both operands; along the result's last axis they gather one of them."""
    *_, kernels = planned("syrk")
    for plan, scattered in zip(kernels.plans, kernels.counts("stride"), strict=True):
        vector = plan.leaves[-1].vector
        assert scattered == 0 if vector == "r0" else scattered > 0
    larger = [max(1, size) for plan in kernels.plans for name, size in plan.leaves[-1].register if name == "o0"]
    assert max(larger) > 1 and min(kernels.counts("reuse")) < max(kernels.counts("reuse"))


def test_an_objective_in_conflict_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, kernels = planned("syrk")
    counts = {"latency": [3.0, 1.0, 2.0, 4.0], "reuse": [1.0, 4.0, 4.0, 1.9], "compile": [5.0, 5.0, 4.0, 3.0]}
    four = PolicyKernels(kernels.plans[:4], kernels.nests, kernels.context)
    monkeypatch.setattr(four, "counts", counts.__getitem__)
    # of what is fastest, or soonest compiled, none is within twice the best reuse: it does not count then
    assert four.preferred(Policy(("latency", "reuse"), 0.0)) is four.plans[1]
    assert four.preferred(Policy(("compile", "reuse"), 0.0)) is four.plans[3]
    assert four.preferred(Policy(("latency", "compile"), 1.0)) is four.plans[2]
    assert four.preferred(Policy(("latency", "reuse"), 2.0)) is four.plans[0]


@pytest.mark.parametrize("name", SMALL)
def test_policies_lead_to_few_plans_that_are_some(name: str) -> None:
    made, plan, group, kernels = planned(name)
    found = policy_plans(kernels)
    assert 1 <= len(found) < POLICY_PLANS and len(set(found)) == len(found)
    target = machine("neoverse_n1")
    for tile in found:
        other = with_choices(made, plan, [(group, tile)])
        check_plan(other, made, target)
        lower_program(made, other, backend_for(target).lower_kernel)


def test_dependences_tell_kernels_apart() -> None:
    found = {name: dependences(planned(name)[3].nests).split() for name in SMALL}
    assert found["syrk"][:2] == ["sum", "shared-2"] and found["gesummv"][:2] == ["sum", "shared-1"]
    assert found["jacobi-2d"][0] == "nothing"


def test_the_table_has_a_row_for_all() -> None:
    table = module._table()
    assert all(1 <= len(row) < POLICY_PLANS and set(p.order) <= set(COUNTS) for row in table.values() for p in row)
    assert module.policies_for("reduction shared-9 nowhere at-all")
    assert alike("sum a b c", "sum x y z") > alike("sum a b c", "nothing a b c")


def test_rows_are_of_policies_that_better_each_other() -> None:
    """One is best for the first kernel and another for the second: both are taken, and nothing that adds nothing."""
    count = len(policies())
    losses = [[2.0] * count, [2.0] * count]
    losses[0][5], losses[1][9] = 1.0, 1.0
    seen = [Seen(f"p{i} kernel k0", "sum a b c", 9, tuple(some), 1.5) for i, some in enumerate(losses)]
    assert chosen(seen) == [policies()[5], policies()[9]]
