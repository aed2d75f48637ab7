"""Tuning for a GPU without one: variants compute the same, equal kernels change together, and the clock is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import model_of
from tests.gpu_stages import MEANINGS, attention, graph
from tests.unit.tune.made_up import MadeUp
from tilewright.backend import backend_for
from tilewright.backend.gpu.backend import GpuBackend
from tilewright.backend.protocol import Measuring
from tilewright.compiler.pipeline import Artifact, build, machine_code
from tilewright.errors import OptionError, ToolError
from tilewright.frontend.onnx.model import load
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Estimate, Plan, Tile
from tilewright.tune import tuner
from tilewright.tune.groups import calls_of, find_groups, with_choices

H200, EMULATED = machine("h200"), machine("cuda-emulated")
RNG = np.random.default_rng(17)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / 8).astype(np.float32)


def two_layers() -> ModelProto:
    """Two equal products, each with something behind it that rows share."""
    steps = [
        ("MatMul", ["x", "a"], "p", {}), ("Relu", ["p"], "q", {}), ("Softmax", ["q"], "r", {"axis": 1}),
        ("MatMul", ["r", "b"], "s", {}), ("Relu", ["s"], "t", {}), ("Softmax", ["t"], "y", {"axis": 1}),
    ]  # fmt: skip
    return model_of(steps, {"x": (64, 64)}, {"y": (64, 64)}, {"a": weights(64, 64), "b": weights(64, 64)})


def chain() -> ModelProto:
    return graph([("Tanh", ["a"], "u", {}), ("Mul", ["u", "b"], "o", {})], [("a", (96, 512)), ("b", (96, 512))],
                 [("o", (96, 512))])  # fmt: skip


def joined() -> ModelProto:
    """Two products in one kernel: not every tile of the second leaves a way for the first with as many warps."""
    steps = [("MatMul", ["x", "a"], "p", {}), ("Relu", ["p"], "q", {}), ("MatMul", ["q", "b"], "y", {})]
    return model_of(steps, {"x": (196, 16)}, {"y": (196, 24)}, {"a": weights(16, 96), "b": weights(96, 24)})


# by name: a model, its precision, and the schedule
MODELS = {"products": (two_layers(), "float16", "register"), "float32": (two_layers(), None, "register"),
          "stream": (attention(48, 16, 2), "float16", "connected"), "map": (chain(), None, "connected"),
          "joined": (joined(), "float16", "connected")}  # fmt: skip


def planned(name: str, target: Any = H200) -> Artifact:
    model, precision, schedule = MODELS[name]
    options = Options(target=target.name, precision=precision, schedule=schedule, stop_after="plan")
    return build(load(model, {}), target, options)


def bare(kernel: Tile) -> Tile:
    return replace(kernel, estimate=Estimate())


def answers(made: Artifact, plan: Plan) -> list[np.ndarray]:
    """By the interpreter of Loops."""
    program = made.program
    assert program is not None
    check_plan(plan, program, H200)
    loops = lower_program(program, plan, backend_for(H200).lower_kernel)
    rng = np.random.default_rng(1)
    tensors = {t.name: np.asarray(a) for t, a in program.constants.items()}
    for tensor in program.inputs:
        tensors[tensor.name] = rng.standard_normal([int(e) for e in tensor.shape]).astype(tensor.dtype.numpy)
    run_loops(loops, tensors, instructions=MEANINGS)
    return [tensors[t.name].astype(np.float64) for t in program.outputs]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "joined" else ()) for n in MODELS])
def test_variants_are_other_ways_to_the_same(name: str) -> None:
    """The planner's own kernel is among them, they are ranked, and the model computes the same with any."""
    made = planned(name)
    assert made.program is not None and made.plan is not None
    groups = find_groups(made.program, made.plan, H200)
    assert any(len(g.members) > 1 for g in groups) or name in ("stream", "map", "joined")
    wanted = answers(made, made.plan)
    others = []
    for group in groups:
        variants: Any = group.variants[0]
        assert bare(group.own) in [bare(k) for k in variants.all()]
        best = group.alternatives(6)
        assert best and bare(group.own) not in [bare(k) for k in best]
        assert [k.estimate.seconds for k in best] == sorted(k.estimate.seconds for k in best)
        others.append(best)
    for turn in (0, max(len(best) for best in others) - 1):
        choices = [(g, best[min(turn, len(best) - 1)]) for g, best in zip(groups, others, strict=True)]
        plan = with_choices(made.program, made.plan, choices)
        assert [bare(k) for k in plan.kernels] != [bare(k) for k in made.plan.kernels]
        for found, reference in zip(answers(made, plan), wanted, strict=True):
            np.testing.assert_allclose(found, reference, rtol=2e-3, atol=2e-3)


def test_equal_kernels_take_a_choice_together() -> None:
    made = planned("products")
    assert made.program is not None and made.plan is not None
    group = next(g for g in find_groups(made.program, made.plan, H200) if len(g.members) == 2)
    chosen = group.alternatives(1)[0]
    plan = with_choices(made.program, made.plan, [(group, chosen)])
    first, second = (plan.kernels[i] for i in group.members)
    assert first.sizes == second.sizes == chosen.sizes
    assert first.leaves[-1].tensor != second.leaves[-1].tensor
    assert second.name == made.plan.kernels[group.members[1]].name
    loops = lower_program(made.program, plan, backend_for(H200).lower_kernel)
    assert len(calls_of([plan.kernels[i] for i in group.members], made.program, loops)) == 2


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", MODELS)
def test_tuning_for_a_gpu_keeps_the_fastest_by_a_made_up_clock(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(name, EMULATED)
    assert made.program is not None and made.plan is not None
    monkeypatch.setattr(GpuBackend, "untunable", lambda *_: None)
    monkeypatch.setattr(GpuBackend, "built_by", lambda *_: ("nothing",))
    monkeypatch.setattr(GpuBackend, "measuring", lambda *_: Measuring("none", "none", 1, "device"))
    own = {leaves(k): bare(k) for k in made.plan.kernels}
    clock = MadeUp(lambda kernel: 1e-5 if own.get(leaves(kernel)) == bare(kernel) else 0.5e-5)
    clock.put_in_place(monkeypatch)
    options = Options(target="cuda-emulated", tune=60.0, tune_trials=3, cache_dir=tmp_path)
    tuned = tuner.tune_plan(made.program, made.plan, EMULATED, options)
    changed = [k for k in tuned.kernels if "stays" not in k.estimate.reason]
    # a kernel that several were joined to takes as long as one that only changed
    before = {leaves(k): sum(set(one) <= set(leaves(k)) for one in own) for k in changed}
    assert changed and all(f" {2 * before[leaves(k)]:.2f} times as fast" in k.estimate.reason for k in changed)
    assert all(own.get(leaves(k)) != bare(k) for k in changed)
    assert all(leaves(k) in own for k in tuned.kernels if k not in changed)
    check_plan(tuned, made.program, EMULATED)
    clock.refuse(monkeypatch)
    assert tuner.tune_plan(made.program, made.plan, EMULATED, options) == tuned


def leaves(kernel: Tile) -> tuple[str, ...]:
    return tuple(leaf.tensor for leaf in kernel.leaves)


@pytest.mark.parametrize(("target", "reason"), [("h200", "it is a description to plan for"), ("cuda", "driver|GPU")])
def test_without_a_device_tuning_says_so(target: str, reason: str) -> None:
    if target == "cuda" and backend_for(machine("cuda")).why_not_here(machine("cuda")) is None:
        pytest.skip("there is a GPU")
    with pytest.raises((OptionError, ToolError), match=f"target '{target}' cannot.*: .*({reason})"):
        tilewright.compile(chain(), target=target, tune="2s")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_variants_break_no_rule_of_the_machine(name: str, tmp_path: Path) -> None:
    """Under the emulator, which reports races, packets that are not aligned, and what nobody wrote."""
    made = planned(name, EMULATED)
    assert made.program is not None and made.plan is not None
    groups = find_groups(made.program, made.plan, EMULATED)
    others = [group.alternatives(4) for group in groups]
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal([int(e) for e in t.shape]).astype(t.dtype.numpy) for t in made.program.inputs]
    found = []
    for turn in range(4):
        choices = [(g, best[min(turn, len(best) - 1)]) for g, best in zip(groups, others, strict=True)]
        plan = with_choices(made.program, made.plan, choices) if turn else made.plan
        _, runner = machine_code(made.program, plan, EMULATED, Options(target="cuda-emulated", cache_dir=tmp_path))
        outputs = [np.empty([int(e) for e in t.shape], t.dtype.numpy) for t in made.program.outputs]
        runner.run(inputs, outputs)
        found.append(outputs)
    for outputs in found[1:]:
        for output, wanted in zip(outputs, found[0], strict=True):
            np.testing.assert_allclose(output.astype(np.float64), wanted.astype(np.float64), rtol=2e-3, atol=2e-3)
