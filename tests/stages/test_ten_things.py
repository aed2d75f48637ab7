"""What the tree of tiles can say, nine things and cases of extents: each is checked, printed, predicted, interpreted
and lowered where there is a runtime for it; all give the Program's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import CPU, lowered, model_of, programs, random_inputs
from tests.gpu_launch import grid_of, source_of
from tests.plans import map_tiles
from tests.ten_trees import (
    EXPONENTS,
    H200,
    HOST,
    N1,
    PRODUCT,
    TWO_READERS,
    X86,
    case,
    copy_of,
    persistent,
    recomputed,
    rows_of,
    staged_twice,
    streamed_model,
    warps,
    with_cases,
)
from tests.trees import by_hand, close, kernels, loops_agree, program_of, tree_agrees
from tests.unit.tile_graph.test_rolling import chain, rolled
from tests.unit.transform.test_wavefront import folded, rewritten, stacked
from tilewright import Options
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.backend.seconds import price
from tilewright.backend.traffic import traffic_of
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, Reduce, all_computes
from tilewright.ir.forms.loops import Alloc, For, If, Kernel, LoopProgram, Memory, Scope, Stmt, statements
from tilewright.ir.forms.loops import Barrier as LoopBarrier
from tilewright.ir.forms.tensor import Layout
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.traffic import count_traffic
from tilewright.render.cuda import launch_shape
from tilewright.report.explain import explain_text
from tilewright.report.facts import explain_json
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import EmulatedModule, EmulationFault
from tilewright.schedule.planner import make_plan
from tilewright.target import Cluster, Target, machine
from tilewright.tile_graph.algebra.occurrences import unique_names
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.meaning.interpret_tree import interpret_tree
from tilewright.tile_graph.plan.form import Bind, Hold, Leaf, Plan, Tile, TileAxis, UnitBarrier
from tilewright.tile_graph.plan.text import plan_text
from tilewright.tile_graph.traffic.held import held_bytes, plan_nests
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.reductions.split import Split


def allocated(kernel: Kernel) -> list[tuple[int, ...]]:
    """Shapes of what a kernel keeps in scratch or shared memory."""
    return [tuple(int(e) for e in s.buffer.shape) for s in statements(kernel.body)  # type: ignore[arg-type]
            if isinstance(s, Alloc) and s.buffer.memory is not Memory.REGISTER]  # fmt: skip


def bytes_held(plan: Plan, program: Program) -> int:
    (kernel,) = map(unique_names, plan.kernels)
    return held_bytes(kernel, plan_nests(kernel, all_computes(program)))


def counted_as_predicted(program: Program, plan: Plan, target: Target, kernel: Kernel) -> None:
    """Bytes by memory of the Loops, within 2%."""
    predicted = traffic_of(program, plan, target)[plan.kernels[0].name].memories
    counted = count_traffic(kernel)
    for memory in (Memory.SHARED, Memory.GLOBAL):
        found = (counted.loaded_by.get(memory, 0.0), counted.stored_by.get(memory, 0.0))
        assert predicted.get(memory, (0.0, 0.0)) == pytest.approx(found, rel=0.02)


# --- 1: copies double-buffered at two levels


@pytest.mark.parametrize("target", [N1, X86], ids=lambda t: t.name)
def test_1_copies_double_buffered_at_two_levels(target: Target) -> None:
    program = program_of(PRODUCT)
    plan = staged_twice(program, target, 2)
    assert plan_text(plan).count("holds x by copy in 2 stages") == 2
    tree_agrees(program, plan, target)
    (kernel,) = loops_agree(program, plan, target).kernels
    assert {(2, 8, 40), (2, 8, 16), (2, 16, 8)} <= set(allocated(kernel))  # two places each
    once = staged_twice(program, target, 1)
    (plain,) = lowered(program, plan=once, target=target).loops.kernels
    assert {(8, 40), (8, 16), (16, 8)} <= set(allocated(plain))
    assert bytes_held(plan, program) - bytes_held(once, program) == 4 * (8 * 40 + 8 * 16 + 16 * 8)


def test_1_copies_double_buffered_at_two_levels_of_a_device_and_its_host() -> None:
    """Columns of w come from the host part by part, and each kernel brings rows of them to shared memory."""
    program = program_of(PRODUCT)
    y = Leaf("y", "y", part="step", vector="o1", order=("o0", "o1", "r0"))
    shared, main = H200.nearest.name, H200.main.name
    copies = replace(copy_of("w"), lanes=1, register=())
    found = {}
    for stages in (1, 2):
        walked = Tile(shared, (("s", 16),), "order", (copies, y),
                      (Hold("w", fill="copy", stages=stages), Hold("y", "carry", "s")),
                      (TileAxis("s", 40, (Bind("y", "r0"),)),))  # fmt: skip
        lanes = Tile(shared, over="lanes", count=64, body=(replace(y, part="start"), walked, replace(y, part="finish")))
        kernel = Tile(
            shared, (("rows", 10),), "blocks", (lanes,), (), (TileAxis("rows", 20, (Bind("y", "o0"),)),), "k0"
        )
        parts = Tile(main, (("columns", 2),), "order", (kernel,), (Hold("w", fill="copy", stages=stages),),
                     (TileAxis("columns", 8, (Bind("y", "o1"),)),))  # fmt: skip
        around = Tile(main, holds=(Hold("x", fill="copy"), Hold("y", fill="copy")), body=(parts,))
        cluster = Cluster(H200, HOST)
        plan = by_hand(Tile("host", body=(around,)), cluster)
        counted, predicted = tree_agrees(program, plan, cluster)
        assert counted.most == {main: 4 * (20 * 40 + 20 * 8 + stages * 40 * 2)}
        assert counted.moved == {("host", main): 4 * (20 * 40 + 40 * 8), (main, "host"): 4 * 20 * 8}
        found[stages] = predicted.seconds
    assert found[2] < found[1]  # a copy while the part before is used


# --- 2: producer and consumer warps


def test_2_producer_and_consumer_warps() -> None:
    program = program_of(EXPONENTS)
    plan = warps(program)
    assert "in order, together" in plan_text(plan) and "holds p in 2 stages" in plan_text(plan)
    tree_agrees(program, plan, H200)
    (kernel,) = loops_agree(program, plan, H200).kernels
    # one condition parts the warps, and no barrier is inside it
    (sides,) = (s for s in statements(kernel.body) if isinstance(s, If) and s.otherwise)
    assert not any(isinstance(s, LoopBarrier) for s in statements((sides,)))
    counted_as_predicted(program, plan, H200, kernel)
    assert (2, 16, 16) in allocated(kernel)


def emulated(program: Program, plan: Plan, loops: LoopProgram, cache: Path) -> dict[str, np.ndarray]:
    """The outputs as the emulator computes them: no race, nothing read that was not written."""
    module = EmulatedModule({k.name: source_of(k) for k in loops.kernels}, Cache(cache), optimise=0)
    layouts = dict(plan.layouts)
    packed = {t.name: (layouts.get(t.name) or Layout.natural(t.rank)).pack(a) for t, a in program.constants.items()}
    given = {**random_inputs(program), **packed}
    tensors = {s.name: given[s.name] if s.name in given else np.full(s.shape, np.nan, s.dtype.numpy)
               for s in loops.tensors}  # fmt: skip
    for call in loops.calls:
        kernel = loops.kernel(call.kernel)
        module.launch(kernel.name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes,
                      [tensors[name] for name in call.arguments])  # fmt: skip
    return {t.name: tensors[t.name] for t in program.outputs}


@pytest.mark.slow
def test_2_the_warps_on_the_emulator(tmp_path: Path) -> None:
    program = program_of(EXPONENTS)
    plan = warps(program)
    loops = loops_agree(program, plan, H200)
    close(emulated(program, plan, loops, tmp_path), evaluate(program, random_inputs(program)))


def test_2_a_warp_that_copies_for_the_others() -> None:
    program = program_of(PRODUCT)
    shared = H200.nearest.name
    y = Leaf("y", "y", part="step", vector="o1", order=("o0", "o1", "r0"))
    sides = (Tile(shared, over="lanes", count=32, body=(replace(copy_of("w"), lanes=1, register=()),)),
             Tile(shared, over="lanes", count=64, body=(y,)))  # fmt: skip
    walked = Tile(shared, (("s", 16),), "order", sides, (Hold("w", fill="copy", stages=3), Hold("y", "carry", "s")),
                  (TileAxis("s", 40, (Bind("y", "r0"),)),), runs="together")  # fmt: skip
    lanes = Tile(shared, over="lanes", count=96, body=(replace(y, part="start"), walked, replace(y, part="finish")))
    kernel = Tile(shared, (("rows", 8),), "blocks", (lanes,), (), (TileAxis("rows", 20, (Bind("y", "o0"),)),), "k0")
    plan = by_hand(Tile(H200.main.name, body=(kernel,)), H200)
    tree_agrees(program, plan, H200)
    (lowered_kernel,) = loops_agree(program, plan, H200).kernels
    assert (3, 16, 8) in allocated(lowered_kernel)
    counted_as_predicted(program, plan, H200, lowered_kernel)


@pytest.mark.parametrize("target", [N1, H200], ids=lambda t: t.name)
def test_2_independent_kernels_share_a_stage(target: Target) -> None:
    program = program_of("x[24, 40]\na[i0:24] = sum[r0:40] x[i0, r0]\nb[i0:40] = sum[r0:24] x[r0, i0]")
    seconds = {}
    for runs in ("order", "together"):
        stage = Tile(target.main.name, body=tuple(kernels(program, target).values()), runs=runs)
        plan = by_hand(stage, target)
        seconds[runs] = tree_agrees(program, plan, target)[1].seconds
        loops_agree(program, plan, target)
    assert seconds["together"] < 0.75 * seconds["order"]


# --- 3: a sum split over blocks and combined in another kernel


@pytest.mark.parametrize("target", [N1, H200], ids=lambda t: t.name)
def test_3_a_sum_split_over_units_and_combined_in_another_kernel(target: Target) -> None:
    program = program_of("x[37, 64]\ny[i0:64] = sum[r0:37] x[r0, i0]")
    (compute,) = program.computes
    assert isinstance(compute, Reduce)
    split = program.with_computes(Split(compute, compute.reduce_axes[0], 5).computes({"x", "y"}))
    plan = make_plan(split, target, "register")
    parts, combined = plan.kernels
    assert parts.leaves[0].tensor != "y" and combined.leaves[-1].tensor == "y"
    cut = TileAxis("parts", 8, (Bind(parts.leaves[0].tensor, "o1"),))
    plan = plan.with_kernels({parts.name: replace(parts, axes=(cut,), sizes=(("parts", 1),))})  # a part of the sum each
    assert plan.kernels[0].tiles == 8
    tree_agrees(split, plan, target)
    loops_agree(split, plan, target)


# --- 4: a rolling window over rows with its halo


def test_4_a_rolling_window_over_rows_with_its_halo() -> None:
    program = choose_layouts(chain(3, 12, 9, 3, 1, 1), N1)
    plan = rolled(make_plan(program, N1, "register"), program, 6, 2)
    assert "rolling along rows" in plan_text(plan)
    tree_agrees(program, plan, N1)
    loops_agree(program, plan, N1)


# --- 5: a persistent LSTM, wavefront over layers, state in device memory between barriers


@pytest.mark.parametrize("target", [N1, H200], ids=lambda t: t.name)
def test_5_a_persistent_lstm_along_the_wavefront_of_its_layers(target: Target) -> None:
    program = choose_layouts(rewritten(folded(stacked("LSTM", 2, hidden=8, steps=3, inputs=5))), target)
    before = make_plan(program, target)
    plan = map_tiles(before, persistent)
    assert f"barrier of all {'blocks' if target is H200 else 'cores'}" in plan_text(plan)
    counted, predicted = tree_agrees(program, plan, target)
    assert counted.barriers == 4  # steps along the diagonals
    if target is H200:
        later = replace(target, barriers=tuple({**dict(target.barriers), "grid": 1.0}.items()))
        more = float(price(program, plan, later).seconds - predicted.seconds)
        assert more == pytest.approx(4 * (1.0 - dict(target.barriers)["grid"]))
    loops = loops_agree(program, plan, target)
    stepped = loops_agree(program, before, target)
    if target is N1:  # each barrier ends a stage of the team
        assert len(loops.calls) == len(stepped.calls)
        return
    assert len(loops.calls) == len(stepped.calls) - 3  # one launch for all steps
    (kernel,) = (k for k in loops.kernels if any(_waits_for_all(s) for s in statements(k.body)))
    assert [p.shape[0] for p in kernel.params].count(2) >= 2  # states, two places in turn


def test_5_weights_stay_in_shared_memory_from_step_to_step() -> None:
    """Each block copies its part of the recurrence's weights before the steps, and reads no more of them after."""
    program = choose_layouts(rewritten(folded(stacked("LSTM", 2, hidden=8, steps=3, inputs=5))), H200)
    (weights,) = (t for t in program.constants if t.rank == 4)
    order = tuple(f"o{i}" for i in range(4))

    def kept(tile: Tile) -> Tile:
        if not (tile.is_kernel and any(isinstance(n, Tile) and n.over == "steps" for n in tile.walk())):
            return tile
        (lanes,) = (n for n in tile.body if isinstance(n, Tile))
        copy = Leaf(weights.name, weights.name, part="copy", vector="o3", order=order)
        holds = (*tile.holds, Hold(weights.name, fill="copy"))
        return replace(tile, holds=holds, body=(replace(lanes, body=(copy, *lanes.body)),))

    far = map_tiles(make_plan(program, H200), persistent)
    near = map_tiles(far, kept)
    tree_agrees(program, near, H200)
    loops_agree(program, near, H200)
    before, after = (traffic_of(program, p, H200)["k1"].memories[Memory.GLOBAL][0] for p in (far, near))
    assert before - after == 3 * 4 * 2 * 4 * 8 * 8  # in the first of four steps alone


@pytest.mark.slow
def test_5_the_persistent_lstm_on_the_emulator(tmp_path: Path) -> None:
    """Blocks are alive together and wait for each other at every step; without the barrier they race."""
    program = choose_layouts(rewritten(folded(stacked("LSTM", 2, hidden=8, steps=3, inputs=5))), H200)
    plan = map_tiles(make_plan(program, H200), persistent)
    loops = loops_agree(program, plan, H200)
    close(emulated(program, plan, loops, tmp_path), evaluate(program, random_inputs(program)))
    kernels = tuple(replace(k, body=without_grid_barriers(k.body)) for k in loops.kernels)
    with pytest.raises(EmulationFault, match="race"):
        emulated(program, plan, replace(loops, kernels=kernels), tmp_path)


def without_grid_barriers(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    kept = [s for s in body if not _waits_for_all(s)]
    return tuple(replace(s, body=without_grid_barriers(s.body)) if isinstance(s, For | Alloc) else s for s in kept)


def _waits_for_all(stmt: object) -> bool:
    return isinstance(stmt, LoopBarrier) and stmt.scope is Scope.GRID


@pytest.mark.parametrize("target", [N1, H200], ids=lambda t: t.name)
def test_5_two_bodies_of_one_kernel_meet_at_a_barrier(target: Target) -> None:
    """The second reads what all units of the first left in memory."""
    program = program_of("x[24, 40]\na[i0:24] = sum[r0:40] x[i0, r0]\ny[i0:24, i1:40] = x[i0, i1] - a[23 - i0]")
    first, second = kernels(program, target).values()
    rows = TileAxis("rows", 24, (Bind("a", "o0"), Bind("y", "o0")))
    meet = UnitBarrier(first.over)
    body = (*first.body, meet, *second.body)
    if target is H200:
        (one,), (other,) = first.body, second.body
        assert isinstance(one, Tile) and isinstance(other, Tile)
        body = (replace(one, body=(*one.body, meet, *other.body)),)
    kernel = replace(first, name="k0", axes=(rows,), sizes=(("rows", 5),), body=body)
    plan = by_hand(Tile(target.main.name, body=(kernel,), holds=(Hold("a"),)), target)
    counted, _ = tree_agrees(program, plan, target)
    assert counted.barriers == 1
    loops = loops_agree(program, plan, target)
    assert len(loops.calls) == (2 if target is N1 else 1)
    if target is H200:
        counted_as_predicted(program, plan, target, loops.kernels[0])


# --- 6: two roots of different shapes


@pytest.mark.parametrize("target", [N1, H200], ids=lambda t: t.name)
def test_6_two_roots_of_different_shapes(target: Target) -> None:
    """A kernel ends in the largest of each row and in pairs of neighbours, for parts of 6 rows and of 3."""
    program = program_of("""
        x[30, 16]
        w[16, 20]
        p[i0:30, i1:20] = sum[r0:16] x[i0, r0] * w[r0, i1]
        a[i0:30] = largest[r0:20] p[i0, r0]
        b[i0:15, i1:20] = p[i0 * 2, i1] + p[i0 * 2 + 1, i1]
    """)
    made = kernels(program, target)
    leaves = tuple(n for k in made.values() for n in k.walk() if isinstance(n, Leaf))
    pairs = TileAxis("pairs", 15, (Bind("b", "o0"), Bind("a", "o0", 2)))
    kernel = replace(made["b"], name="k0", axes=(pairs,), sizes=(("pairs", 3),), holds=(Hold("p"),))
    body = leaves if target is N1 else tuple(replace(n, body=leaves) for n in kernel.body if isinstance(n, Tile))
    plan = by_hand(Tile(target.main.name, body=(replace(kernel, body=body),)), target)
    assert "axis pairs: b.o0, a.o0 * 2" in plan_text(plan)
    tree_agrees(program, plan, target)
    loops_agree(program, plan, target)


# --- 7: streamed attention with states and corrections


@pytest.mark.parametrize("target", [N1, H200], ids=lambda t: t.name)
def test_7_streamed_attention_with_states_and_corrections(target: Target) -> None:
    program = program_of("""
        q[12, 8]
        k[8, 40]
        v[40, 8]
        s[i0:12, i1:40] = sum[r0:8] q[i0, r0] * k[r0, i1]
        m[i0:12] = largest[r0:40] s[i0, r0]
        e[i0:12, i1:40] = exp(s[i0, i1] - m[i0])
        n[i0:12] = sum[r0:40] e[i0, r0]
        p[i0:12, i1:40] = e[i0, i1] / n[i0]
        o[i0:12, i1:8] = sum[r0:40] p[i0, r0] * v[r0, i1]
    """)
    plan = make_plan(program, target, streaming="always")
    (kernel,) = plan.kernels
    assert kernel.stream is not None
    stream = replace(kernel.stream, sizes=(("s", 16),))
    plan = map_tiles(plan, lambda t: stream if t is kernel.stream or t == kernel.stream else t)
    assert [h.tensor for h in stream.holds if h.mode == "carry"] == ["m", "n", "o"]
    tree_agrees(program, plan, target)
    loops_agree(program, plan, target)


# --- 8: one producer recomputed at two levels for two readers


@pytest.mark.parametrize("target", [N1, X86], ids=lambda t: t.name)
def test_8_one_producer_recomputed_at_two_levels_for_two_readers(target: Target) -> None:
    program = program_of(TWO_READERS)
    plan = recomputed(program, target)
    assert plan_text(plan).count("leaf p: core p") == 2
    tree_agrees(program, plan, target)
    (kernel,) = loops_agree(program, plan, target).kernels
    assert {(16, 24), (4, 24)} <= set(allocated(kernel))
    assert bytes_held(plan, program) == 4 * 16 * 24  # the first is not needed any more when the second comes
    # x is read for each of them
    moved = traffic_of(program, plan, target)["k0"].memories[Memory.GLOBAL]
    assert moved == (2 * 4 * 40 * 24, 4 * (40 + 40 * 24))


# --- 9: a model streamed through a device from host memory


def test_9_a_model_streamed_through_a_device_from_host_memory() -> None:
    main, seconds = H200.main.name, {}
    for early in (False, True):
        program, plan, cluster = streamed_model(4, early)
        counted, predicted = tree_agrees(program, plan, cluster)
        assert counted.moved == {("host", main): 4 * (10 * 16 + 4 * 16 * 16), (main, "host"): 4 * 10 * 16}
        # all activations, and the weights of one layer or of two: not of all four
        assert counted.most == {main: 4 * (10 * 16 * 5 + (1 + early) * 16 * 16)}
        seconds[early] = predicted.seconds
    assert seconds[True] < seconds[False]
    assert "holds w1 by copy in k_x1" in plan_text(plan)


# --- by way of the compiler


def compiled(model: ModelProto, change: Callable[[Program, Plan], Plan], folder: Path, **options: object) -> Artifact:
    """A model with another plan than the planner's."""
    plan = folder / "plan.json"
    target = machine(str(options.get("target", "cpu")))
    first = {**options, "stop_after": "plan"}
    build(load(model, {}), target, Options(cache_dir=folder, dump=folder, **first))  # type: ignore[arg-type]
    (made,) = folder.glob("*-plan.json")
    program = programs(model, target)["layout"]
    plan.write_text(change(program, Plan.from_json(made.read_text())).to_json())
    given = Options(cache_dir=folder, overrides=(("plan", plan),), **options)  # type: ignore[arg-type]
    return build(load(model, {}), target, given)


def test_plans_by_hand_are_explained(tmp_path: Path) -> None:
    matmul = model_of([("MatMul", ["x", "w"], "y", {})], {"x": (20, 40), "w": (40, 8)}, {"y": (20, 8)})
    artifact = compiled(matmul, lambda program, _: staged_twice(program, CPU, 2), tmp_path, stop_after="loops")
    text = explain_text(artifact)
    assert "y in blocks of 16 of 40" in text
    (kernel,) = explain_json(artifact)["kernels"]
    assert [h["bytes"] for h in kernel["tree"]["body"][0]["holds"]] == [2 * 4 * 8 * 40]  # in two stages


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "cuda-emulated"])
def test_a_persistent_recurrence_runs_as_a_model(target: str, tmp_path: Path) -> None:
    model = stacked("LSTM", 1, hidden=8, steps=3, inputs=5)
    artifact = compiled(model, lambda _, plan: map_tiles(plan, persistent), tmp_path, target=target)
    plain = build(load(model, {}), machine(target), Options(target=target, cache_dir=tmp_path))
    inputs = [np.random.default_rng(0).standard_normal(p.shape).astype(np.float32) for p in artifact.inputs]
    found, wanted = ([np.empty(p.shape, np.float32) for p in artifact.outputs] for _ in range(2))
    artifact.runner.run(inputs, found)
    plain.runner.run(inputs, wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert "LSTM" in explain_text(artifact)


# --- cases of a symbolic extent


def test_cases_of_a_symbolic_extent_have_a_tree_each() -> None:
    program = rows_of(1, 64)
    plan = with_cases(case(1, 16, 16), case(17, 64, 8))
    assert "case n from 1 to 16" in plan_text(plan) and "case n from 17 to 64" in plan_text(plan)
    check_plan(plan, program, N1)
    for rows, parts in ((1, 1), (16, 1), (17, 8), (50, 8), (64, 8)):
        x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
        found, _ = interpret_tree(program, plan, {"x": x})
        close(found, evaluate(program, {"x": x}))
        assert plan.at({"n": rows}).kernels[0].tiles == parts


def test_what_a_case_holds_is_counted_at_its_upper_end() -> None:
    """All rows of a case in one part: 48 bytes more than fit are refused for the case that has so many."""
    small = replace(N1, levels=tuple(replace(x, capacity=32 * 40) if x.name == "L2" else x for x in N1.levels))
    program = rows_of(1, 64)
    check_plan(with_cases(case(1, 40, 40), case(41, 64, 8)), program, small)
    with pytest.raises(
        Exception, match="case n from 1 to 41: plan of kernel 'k0': it holds 1312 bytes at L2, which has 1280"
    ):
        check_plan(with_cases(case(1, 41, 41), case(42, 64, 8)), program, small)
