"""Kernels that do not wait for each other in one launch: chosen, said, refused, priced, and the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tests.gpu_stages import on_emulator, on_loops, random_inputs
from tilewright.backend import backend_for
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.backend.gpu.machine_code import load as load_model
from tilewright.backend.gpu.machine_code import render
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError, OptionError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import For, ForKind
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.traffic import count_traffic
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.report.explain import explain_text
from tilewright.report.facts import explain_json
from tilewright.runtime.emulator import EmulationFault
from tilewright.runtime.nvrtc import compile_to_cubin
from tilewright.schedule.planner import plan_seconds
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Hold, Plan, Tile, UnitBarrier
from tilewright.tile_graph.plan.text import plan_text
from tilewright.tune.groups import find_groups

RNG = np.random.default_rng(5)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / 4).astype(np.float32)


def three_of_their_own() -> ModelProto:
    """Rows with barriers inside, a few numbers, and a long sum, of odd sizes."""
    steps = [("Softmax", ["a"], "p", {"axis": 1}), ("Tanh", ["b"], "q", {}),
             ("ReduceMean", ["c"], "r", {"axes": [1], "keepdims": 0})]  # fmt: skip
    return model_of(steps, {"a": (37, 301), "b": (53,), "c": (3, 1027)}, {"p": (37, 301), "q": (53,), "r": (3,)})


def row_of_a_result(rows: int = 29, width: int = 71, columns: int = 33, row: int = 5) -> ModelProto:
    """All of a normalisation is a result, and a product reads one row of it."""
    steps = [
        ("Add", ["x", "z"], "s", {}), ("LayerNormalization", ["s", "g", "h"], "y", {"axis": -1}),
        ("Gather", ["y", "i"], "t", {"axis": 0}), ("MatMul", ["t", "w"], "u", {}), ("Tanh", ["u"], "v", {}),
    ]  # fmt: skip
    given = {"g": weights(width), "h": weights(width), "i": np.array([row]), "w": weights(width, columns)}
    return model_of(steps, {"x": (rows, width), "z": (rows, width)}, {"y": (rows, width), "v": (1, columns)}, given)


def chain() -> ModelProto:
    steps = [("Softmax", ["a"], "p", {"axis": 1}), ("Softmax", ["p"], "q", {"axis": 0})]
    return model_of(steps, {"a": (300, 301)}, {"p": (300, 301), "q": (300, 301)})


SHARING = {"apart": three_of_their_own(), "again": row_of_a_result(), "last row": row_of_a_result(7, 130, 5, 6)}


def made(model: ModelProto, target: str = "h200", **more: object) -> Artifact:
    options = Options(target=target, **{"stop_after": "loops", **more})  # type: ignore[arg-type]
    return build(load(model, {}), machine(target), options)


def launches(plan: Plan) -> list[Tile]:
    return [tile for tile, _ in plan.calls() if tile.is_launch]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SHARING)
def test_one_launch_and_the_same_answers(name: str, kernel_cache: Path) -> None:
    artifact = made(SHARING[name], "cuda-emulated", stop_after=None, cache_dir=kernel_cache)
    assert artifact.program is not None and artifact.plan is not None and artifact.loops is not None
    (launch,) = launches(artifact.plan)
    assert len(artifact.loops.calls) == 1 and len(launch.body) == len(artifact.plan.kernels)
    inputs = random_inputs(artifact)
    means = evaluate(artifact.program, inputs)
    loops, emulated = on_loops(artifact, inputs), on_emulator(artifact, inputs)
    for tensor, port in zip(artifact.program.outputs, artifact.outputs, strict=True):
        np.testing.assert_allclose(loops[port.name], means[tensor.name], rtol=3e-5, atol=3e-6)
        np.testing.assert_allclose(emulated[port.name], means[tensor.name], rtol=3e-5, atol=3e-6)


def test_what_is_read_of_a_result_is_computed_again() -> None:
    plan = made(row_of_a_result()).plan
    assert plan is not None
    (launch,) = launches(plan)
    second, first = (k for k in launch.body if isinstance(k, Tile))
    assert second.estimate.seconds > first.estimate.seconds, "the longest starts first"
    assert "y" in {leaf.tensor for leaf in first.leaves} - first.held
    assert "y" in second.held and "computes y again instead of waiting for it" in second.estimate.reason
    assert plan_seconds(plan, made(row_of_a_result()).program) == launch.estimate.seconds  # type: ignore[arg-type]
    assert launch.estimate.seconds < sum(k.estimate.seconds for k in (first, second))


def test_what_waits_and_what_is_asked_apart_stays_apart() -> None:
    for artifact in (made(chain()), made(three_of_their_own(), schedule="register"),
                     made(three_of_their_own(), "neoverse_n1")):  # fmt: skip
        assert artifact.plan is not None and artifact.loops is not None
        assert not launches(artifact.plan) and len(artifact.loops.calls) == len(artifact.plan.kernels) > 1


def test_many_blocks_have_a_launch_of_their_own() -> None:
    """They would not all be there at once, and the threads of one would be the other's."""
    steps = [("Softmax", ["a"], "p", {"axis": 1}), ("Tanh", ["b"], "q", {})]
    plan = made(model_of(steps, {"a": (90000, 301), "b": (53,)}, {"p": (90000, 301), "q": (53,)})).plan
    assert plan is not None and not launches(plan)


def test_text_and_json_say_it() -> None:
    plan = made(three_of_their_own()).plan
    assert plan is not None and Plan.from_json(plan.to_json()) == plan
    text = plan_text(plan)
    assert "in order, together" in text and "because one launch: the prediction is" in text


def test_blocks_are_numbered_through() -> None:
    loops = made(three_of_their_own()).loops
    assert loops is not None
    (kernel,) = loops.kernels
    grids = [s for s in kernel.body if isinstance(s, For) and s.kind is ForKind.BLOCK]
    assert len(grids) == len(kernel.body) == 3
    (source,) = render(loops, machine("h200")).values()
    count = sum(int(g.axis.extent) for g in grids)  # type: ignore[arg-type]
    assert f"// grid {count} x 1 x 1" in source and f"- {grids[0].axis.extent};" in source
    assert len({p.name for p in kernel.params}) == len(kernel.params) == 6
    for architecture in ("sm_80", "sm_90a"):
        (used,) = compile_to_cubin(source, architecture).resources.values()
        assert used.spill_bytes == used.stack_bytes == 0
    counted = count_traffic(loops)
    assert counted.distinct["output"] == 4 * (37 * 301 + 53 + 3)


def test_shared_memory_is_that_of_the_larger() -> None:
    loops = made(row_of_a_result()).loops
    assert loops is not None
    (kernel,) = loops.kernels
    alone = [place_shared(replace(kernel, body=(part,))).bytes for part in kernel.body]
    assert place_shared(kernel).bytes == max(alone) > 0


def edited(plan: Plan, change: Callable[[Tile], Tile]) -> Plan:
    def below(tile: Tile) -> Tile:
        if tile.is_launch:
            return change(tile)
        return replace(tile, body=tuple(below(n) if isinstance(n, Tile) and not n.is_kernel else n for n in tile.body))

    return replace(plan, body=below(plan.body))


def at_kernel(number: int, change: Callable[[Tile], Tile]) -> Callable[[Tile], Tile]:
    def changed(launch: Tile) -> Tile:
        body = tuple(change(n) if i == number and isinstance(n, Tile) else n for i, n in enumerate(launch.body))
        return replace(launch, body=body)

    return changed


def fewer_threads(kernel: Tile) -> Tile:
    (lanes,) = kernel.body
    assert isinstance(lanes, Tile)
    return replace(kernel, body=(replace(lanes, count=32),))


def waiting(kernel: Tile) -> Tile:
    (lanes,) = kernel.body
    assert isinstance(lanes, Tile)
    return replace(kernel, body=(replace(lanes, body=(*lanes.body, UnitBarrier("blocks"))),))


REFUSED = {
    "threads": (at_kernel(1, fewer_threads), "kernels that share a launch have as many threads a block: 'k0' has "),
    "barriers": (at_kernel(1, waiting), "blocks of 'k1' wait for each other: it has a launch of its own"),
    "one": (lambda t: replace(t, body=t.body[:1]), "what runs together are several tiles"),
    "more": (
        lambda t: replace(t, holds=(Hold("p"),)),
        "kernels that share a launch stand in a tile that does nothing else",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_share_is_refused(name: str) -> None:
    artifact = made(three_of_their_own())
    assert artifact.plan is not None and artifact.program is not None
    change, message = REFUSED[name]
    with pytest.raises(InternalError, match=message):
        check_plan(edited(artifact.plan, change), artifact.program, machine("h200"))


def test_kernels_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    """Put together by hand, and given in place of the plan."""
    artifact = made(chain())
    plan, program = artifact.plan, artifact.program
    assert plan is not None and program is not None
    threads = {k.name: next(n.count for n in k.body if isinstance(n, Tile)) for k in plan.kernels}
    assert len(set(threads.values())) == 1
    body = replace(plan.body, body=(Tile("DRAM", body=plan.kernels, runs="together"),),
                   holds=tuple(h for t in plan.body.walk() if isinstance(t, Tile) and not t.is_kernel for h in t.holds
                               if t.level in ("DRAM", "L2")))  # fmt: skip
    file = tmp_path / "plan.json"
    file.write_text(replace(plan, body=body).to_json())
    with pytest.raises(OptionError, match="'k1' reads or writes 'p', which 'k0' of the same launch stores"):
        made(chain(), overrides=(("plan", str(file)),))


def test_the_emulator_reports_what_the_grammar_refuses(kernel_cache: Path) -> None:
    """Two kernels in one launch, of which one reads what the other writes, lowered all the same."""
    target = machine("cuda-emulated")
    steps = [("Softmax", ["a"], "p", {"axis": 1}), ("Softmax", ["p"], "q", {"axis": 0})]
    artifact = made(model_of(steps, {"a": (6, 7)}, {"p": (6, 7), "q": (6, 7)}), target.name, schedule="register")
    plan, program = artifact.plan, artifact.program
    assert plan is not None and program is not None
    *before, first, second = plan.kernels
    launch = Tile(plan.body.level, body=(first, second), runs="together")
    together = replace(plan, body=replace(plan.body, body=(*before, launch)))
    loops = lower_program(program, together, backend_for(target).lower_kernel)
    options = Options(target=target.name, cache_dir=kernel_cache)
    runner = load_model(render(loops, target), loops, program, together, target, options)
    with pytest.raises(EmulationFault, match="aliased"):
        runner.run([np.ones((6, 7), np.float32)], [np.empty((6, 7), np.float32) for _ in range(2)])


def test_a_plan_is_taken_apart_and_put_together_by_hand(tmp_path: Path) -> None:
    """An edited plan is priced anew: kernels one by one take longer than in one launch."""
    artifact = made(three_of_their_own())
    plan, program = artifact.plan, artifact.program
    assert plan is not None and program is not None
    file = tmp_path / "plan.json"
    seconds = []
    for body in ((launches(plan)[0],), plan.kernels):
        file.write_text(replace(plan, body=replace(plan.body, body=body)).to_json())
        again = made(three_of_their_own(), overrides=(("plan", str(file)),))
        assert again.plan is not None and again.loops is not None
        assert len(again.loops.calls) == len(body)
        seconds.append(plan_seconds(again.plan, program))
    assert seconds[0] == pytest.approx(plan_seconds(plan, program)) and seconds[0] < 0.8 * seconds[1]


def test_tuning_leaves_them_alone() -> None:
    artifact = made(three_of_their_own())
    assert artifact.plan is not None and artifact.program is not None
    assert find_groups(artifact.program, artifact.plan, machine("h200")) == []


def test_explain_shows_the_launch() -> None:
    artifact = made(three_of_their_own())
    facts = explain_json(artifact)
    assert facts["calls"] == 1 and [k["name"] for k in facts["kernels"]] == ["k0", "k0.1", "k0.2"]
    assert [k["launch"] for k in facts["kernels"]] == [None, "k0", "k0"]
    assert facts["totals"]["predicted_us"] == pytest.approx(sum(k["predicted_us"] for k in facts["kernels"]))
    assert facts["order"] == ["k0"] and json.dumps(facts)
    assert "that of k0, beside its blocks" in explain_text(artifact, 100)
