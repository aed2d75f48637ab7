"""Steps of a Scan: what is new is asked for early, weights are walked to and fro, and results stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from tests.cpu_stages import CPU, error, evaluated, lowered, model_of, programs, random_inputs
from tests.plans import map_leaves, map_tiles, step_kernels, with_kernels
from tilewright import Options
from tilewright.backend import renderable
from tilewright.backend.cpu import machine_code
from tilewright.compiler.pipeline import build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, axes_of, loads, substitute
from tilewright.ir.forms.loops import (
    PREFETCH,
    PREFETCH_BESIDE,
    Alloc,
    Buffer,
    For,
    Instruction,
    Memory,
    Stmt,
    Store,
    statements,
)
from tilewright.lower.persistent import steps_inside
from tilewright.target import MemoryLevel, Target, machine
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Hold, Plan, UnitBarrier

N1 = machine("neoverse_n1")
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS = 5
LINE = 16  # elements of float32 in a cache line
SIZES = {"LSTM": 84, "GRU": 100, "RNN": 170}  # weights of one direction just beyond a 64 KB cache


def recurrence(
    kind: str, *, hidden: int, batch: int = 1, direction: str = "forward", steps: int = STEPS, inputs: int = 7
) -> ModelProto:
    rng = np.random.default_rng(3)
    gates, ways = GATES[kind], 2 if direction == "bidirectional" else 1
    constants = {
        "w": (0.3 * rng.standard_normal((ways, gates * hidden, inputs))).astype(np.float32),
        "r": (0.1 * rng.standard_normal((ways, gates * hidden, hidden))).astype(np.float32),
        "b": (0.2 * rng.standard_normal((ways, 2 * gates * hidden))).astype(np.float32),
    }
    attributes: dict[str, object] = {"hidden_size": hidden, "direction": direction}
    return model_of(
        [(kind, ["x", "w", "r", "b"], "h", attributes)],
        {"x": (steps, batch, inputs)}, {"h": (steps, ways, batch, hidden)}, constants,
    )  # fmt: skip


# both ways at once walk either way; of one way alone two here, the others with --all
ONE_WAY = {("LSTM", 1, "forward"), ("GRU", 3, "reverse")}
TURNING = [
    pytest.param(*case, marks=() if case[2] == "bidirectional" or case in ONE_WAY else pytest.mark.slow)
    for case in product(GATES, (1, 3), ("forward", "reverse", "bidirectional"))
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("kind", "batch", "direction"), TURNING)
def test_steps_that_turn_round_give_the_same(kind: str, batch: int, direction: str, kernel_cache: Path) -> None:
    model = recurrence(kind, hidden=SIZES[kind], batch=batch, direction=direction)
    program = programs(model, N1)["layout"]
    made = lowered(program, target=N1)
    repeated = step_kernels(made.plan)
    assert any(n.alternate for k in repeated for n in k.leaves)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["h"]
    assert error(made.on_loops(inputs)["h"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["h"], wanted) < 1e-6


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "hidden"), [("LSTM", 96), ("LSTM", 112), ("GRU", 112), ("RNN", 256)])
def test_where_a_walk_turns_round_the_sum_does_too(kind: str, hidden: int, kernel_cache: Path) -> None:
    """What a step reads last, the next one reads first: the same quarter of the same block of the weights."""
    program = programs(recurrence(kind, hidden=hidden), N1)["layout"]
    made = lowered(program, target=N1)
    kernel = next(k for k in made.loops.kernels if k.step is not None)
    (blocks,) = [s for s in statements(kernel.body) if isinstance(s, For) and s.axis.name.endswith("_block")][:1]
    (quarters,) = [s for s in statements(blocks.body) if isinstance(s, For) and s.axis.name.endswith("_quarter")][:1]
    sums = next(s for s in statements(quarters.body) if isinstance(s, For))
    weights = max(
        (n for s in statements(sums.body) if isinstance(s, Store) for n in loads(s.value) if n.source in kernel.params),
        key=lambda n: prod(extent_of(e) for e in n.source.shape),
    )
    inside = [a for a in axes_of(*weights.indices) if a not in (blocks.axis, quarters.axis, kernel.step)]

    def read(step: int, block: int, quarter: int) -> list[int]:
        at = dict.fromkeys(inside, 0) | {kernel.step: step, blocks.axis: block, quarters.axis: quarter}
        return [int(simplify(substitute(i, at)).value) for i in weights.indices]  # type: ignore[arg-type, attr-defined]

    last = extent_of(blocks.axis.extent) - 1
    for step in range(1, 4):
        assert read(step, 0, 0) == read(step - 1, last, 3) != read(step - 1, last, 0)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["h"]
    assert error(made.on_loops(inputs)["h"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["h"], wanted) < 1e-6


def test_small_weights_are_walked_one_way() -> None:
    plan = lowered(programs(recurrence("LSTM", hidden=12), N1)["layout"], target=N1).plan
    assert not any(n.alternate for k in plan.kernels for n in k.leaves)


def test_state_and_projection_of_a_step_are_asked_for_before_the_weights() -> None:
    """The state first, since other tiles wrote most of it; where one tile does everything, it is near already. The
    cell is its own, but so many weights push it out."""
    made = lowered(programs(recurrence("LSTM", hidden=84), N1)["layout"], target=N1)
    step = next(k for k in step_kernels(made.plan) if len(k.leaves) > 1)
    assert step.tiles > 1 and step.prefetched == ("h_forward_h", "h_forward_c", "h_forward_input")
    alone = lowered(programs(recurrence("LSTM", hidden=20), N1)["layout"], target=N1).plan
    assert [k.prefetched for k in step_kernels(alone) if k.tiles == 1] == [("h_forward_input",)]
    kernel = next(k for k in made.loops.kernels if k.step is not None)
    hints = [s for s in statements(kernel.body) if isinstance(s, Instruction) and s.name == PREFETCH]
    assert hints and all(o.buffer in kernel.params for s in hints for o in s.operands)
    text = machine_code.render(renderable(made.loops, N1), N1)[kernel.name]
    assert 0 < text.index("__builtin_prefetch") < text.index("acc_0")


def hints(body: Sequence[Stmt], at: dict[Axis, int]) -> Iterator[tuple[Buffer, int]]:
    """What is asked for, element by element, when the loops around are where they are."""
    for stmt in body:
        if isinstance(stmt, Alloc):
            yield from hints(stmt.body, at)
        if isinstance(stmt, For):
            for value in range(extent_of(stmt.axis.extent)):
                yield from hints(stmt.body, at | {stmt.axis: value})
        if isinstance(stmt, Instruction) and stmt.name == PREFETCH:
            (operand,) = stmt.operands
            where = [int(simplify(substitute(i, at)).value) for i in operand.origin]  # type: ignore[attr-defined]
            yield operand.buffer, int(np.ravel_multi_index(where, operand.buffer.shape))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "hidden", "asks"), [("LSTM", 96, 3), ("LSTM", 84, 3), ("LSTM", 256, 3), ("GRU", 112, 1)]
)
def test_hints_cover_the_lines_of_a_step(kind: str, hidden: int, asks: int) -> None:
    """A few in each turn of the first nest's loop, whether their number is a multiple of its turns or not."""
    made = lowered(programs(recurrence(kind, hidden=hidden), N1)["layout"], target=N1)
    kernel = next(k for k in made.loops.kernels if k.step is not None)
    asked: dict[Buffer, set[int]] = {}
    for buffer, place in hints(kernel.body, {kernel.step: 0}):  # type: ignore[dict-item]
        asked.setdefault(buffer, set()).add(place // LINE)
    assert len(asked) >= asks
    for buffer, lines in asked.items():
        read = prod(extent_of(e) for e in (buffer.shape[1:] if buffer.shape[0] == STEPS else buffer.shape))
        assert lines == set(range(-(-read // LINE))), buffer.name


def test_every_step_gives_a_worker_the_same_tiles() -> None:
    made = lowered(programs(recurrence("GRU", hidden=100))["layout"])
    loops = renderable(made.loops, CPU)
    image = machine_code.model_image(machine_code.render(loops, CPU), loops, made.program, made.plan)
    steps = {k.name for k in made.loops.kernels if k.step is not None}
    assert {s.balance for s in image.stages if s.kernel in steps} == {"static"}
    assert {s.balance for s in image.stages if s.kernel not in steps} == {"auto"}


def test_what_is_stored_twice_is_computed_once() -> None:
    """The hidden state goes to the next step and to the output; its value waits in a register."""
    made = lowered(programs(recurrence("LSTM", hidden=8), N1)["layout"], target=N1)
    kernel = next(k for k in made.loops.kernels if k.step is not None)
    held = [s.buffer for s in statements(kernel.body) if isinstance(s, Alloc) and s.buffer.name.startswith("value")]
    assert held and all(b.memory is Memory.REGISTER for b in held)
    text = machine_code.render(renderable(made.loops, N1), N1)[kernel.name]
    body = text[text.index(f"void {kernel.name}(") :]
    assert body.count("tw_tanh_") == 2  # the two vectors of a call are a pair


def test_only_steps_turn_round() -> None:
    program = programs(model_of([("MatMul", ["x", "w"], "y", {})], {"x": (3, 5)}, {"y": (3, 4)},
                                {"w": np.ones((5, 4), np.float32)}))["layout"]  # fmt: skip
    plan = lowered(program).plan
    turned = map_leaves(plan, lambda leaf: replace(leaf, alternate=True))
    with pytest.raises(InternalError, match="only the steps of a Scan"):
        check_plan(turned, program)


def test_a_light_step_meets_nobody() -> None:
    """A step reads one row of its input, and each column its own state: meeting would cost more than the row."""
    axis = {"axis": np.array(0, np.int64)}
    model = model_of([("CumSum", ["x", "axis"], "y", {})], {"x": (1000, 64)}, {"y": (1000, 64)}, axis)
    plan = lowered(programs(model, N1)["layout"], target=N1).plan
    (kernel,) = plan.kernels
    assert not step_kernels(plan) and steps_inside(kernel) is not None
    assert not any(isinstance(n, UnitBarrier) for n in kernel.walk())


@pytest.mark.parametrize("hidden", [128, 256, 384])
def test_a_step_over_large_weights_is_one_kernel(hidden: int) -> None:
    """A second kernel would make the workers meet twice at every step."""
    plan = lowered(programs(recurrence("LSTM", hidden=hidden, steps=50), N1)["layout"], target=N1).plan
    stepped = step_kernels(plan)
    assert len(stepped) == 1 and stepped[0].tiles > 1


def keeping(plan: Plan, hold: Hold) -> Plan:
    """The plan with something held near through all steps."""
    return map_tiles(plan, lambda t: replace(t, holds=(*t.holds, hold)) if t.over == "steps" else t)


def two_units(l2: int = 1 << 20) -> Target:
    levels = (
        MemoryLevel("registers", 512, 16, 4e11), MemoryLevel("L1", 65536, 64, 8e10), MemoryLevel("L2", l2, 64, 4.3e10),
        MemoryLevel("DRAM", 1 << 40, 64, 2e10),
    )  # fmt: skip
    return Target("by hand", "cpu", "aarch64", 2, 16, 32, 2e10, levels, 4e-7, lane_multiply=True, fma_chains=4)


@pytest.mark.parametrize("l2, warmed", [(1 << 20, True), (1 << 19, False)])
def test_the_projection_brings_weights_near_that_stay_there(l2: int, warmed: bool) -> None:
    """Half a megabyte a unit, used by a hundred steps: worth bringing only where it stays."""
    model = recurrence("LSTM", hidden=256, steps=100, inputs=256)
    made = build(load(model, {}), two_units(l2), Options(stop_after="plan"))
    assert made.plan is not None
    before, step, _ = made.plan.kernels
    assert step_kernels(made.plan) == [step] and step.tiles == 2
    weights = ("h_forward_recurrence_as_4x256x256",) if warmed else ()
    assert made.plan.issued_in(before.name) == weights
    (steps,) = [steps for kernel, steps in made.plan.launches() if kernel is step]
    assert steps is not None and tuple(h.tensor for h in steps.holds) == weights
    assert steps.level == ("L2" if warmed else "DRAM")


def test_bringing_weights_near_changes_no_result(kernel_cache: Path) -> None:
    program = programs(recurrence("LSTM", hidden=84, inputs=40))["layout"]
    plan = lowered(program).plan
    weights = next(t.name for t in program.constants if "recurrence" in t.name)
    warming = keeping(plan, Hold(weights, fill="prefetch", issue=plan.kernels[0].name))
    check_plan(warming, program)
    made = lowered(program, plan=Plan.from_json(warming.to_json()))
    first = made.loops.kernels[0]
    hints = [s for s in statements(first.body) if isinstance(s, Instruction) and s.name == PREFETCH_BESIDE]
    assert hints and hints[0].operands[0].buffer in first.params
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["h"]
    assert error(made.on_loops(inputs)["h"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["h"], wanted) < 1e-6
    with pytest.raises(InternalError, match="is brought near in 'k1', no kernel before the steps"):
        check_plan(keeping(plan, Hold(weights, fill="prefetch", issue=step_kernels(plan)[0].name)), program)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_a_step_that_begins_with_zeros_sums_nothing_up(direction: str, kernel_cache: Path) -> None:
    """Weights that are no number would make themselves felt there, and a state that is given need not be zero."""
    model = recurrence("LSTM", hidden=24, direction=direction)
    program = programs(model)["layout"]
    made = lowered(program)
    idle = [n.idle for k in step_kernels(made.plan) for n in k.leaves if n.idle is not None]
    assert idle == {"forward": [0], "reverse": [STEPS - 1], "bidirectional": [0, STEPS - 1]}[direction]
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["h"]
    assert error(made.on_loops(inputs)["h"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["h"], wanted) < 1e-6


@pytest.mark.parametrize("what", ["infinite weights", "a state that is not zero"])
def test_a_first_step_that_may_matter_is_summed_up(what: str, kernel_cache: Path) -> None:
    model = recurrence("LSTM", hidden=24)
    constants = {c.name: c for c in model.graph.initializer}
    if what == "infinite weights":
        weights = numpy_helper.to_array(constants["r"]).copy()
        weights[0, 3, 5] = np.inf
        constants["r"].CopyFrom(numpy_helper.from_array(weights, "r"))
    else:
        state = np.full((1, 1, 24), 0.5, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(state, "h0"))
        model.graph.node[0].input.extend(["", "h0"])
    program = programs(model)["layout"]
    made = lowered(program)
    assert all(n.idle is None for k in made.plan.kernels for n in k.leaves)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs)["h"]
    np.testing.assert_allclose(made.natively(inputs, kernel_cache)["h"], wanted, rtol=1e-5, atol=1e-6)


def test_a_plan_that_counts_on_zeros_is_refused_where_there_are_none() -> None:
    """Plans are kept, and may be replayed for a model of the same shapes with other values."""
    plan = lowered(programs(recurrence("LSTM", hidden=24))["layout"]).plan
    assert any(n.idle == 0 for k in plan.kernels for n in k.leaves)
    infinite = recurrence("LSTM", hidden=24)
    weights = next(c for c in infinite.graph.initializer if c.name == "r")
    weights.CopyFrom(numpy_helper.from_array(np.full((1, 96, 24), np.inf, np.float32), "r"))
    with pytest.raises(InternalError, match=r"has something to sum up at step 0; plan the model anew$"):
        lowered(programs(infinite)["layout"], plan=plan)


def test_a_plan_names_weights_that_there_are() -> None:
    program = programs(recurrence("LSTM", hidden=24))["layout"]
    plan = lowered(program).plan
    for hold in (Hold("nothing", fill="prefetch", issue=plan.kernels[0].name), Hold("nothing", fill="read")):
        with pytest.raises(InternalError, match="it brings near or keeps 'nothing', which is no weight"):
            check_plan(keeping(plan, hold), program)


def test_weights_that_stay_near_get_a_place_of_their_own() -> None:
    """The whole of them as they are packed, with what fills up their panels."""
    program = programs(recurrence("LSTM", hidden=84, inputs=40), N1)["layout"]
    plan = lowered(program, target=N1).plan
    weights = next(name for name, _ in plan.layouts if "recurrence" in name)
    kept_near = keeping(plan, Hold(weights, fill="read"))
    made = lowered(program, plan=Plan.from_json(kept_near.to_json()), target=N1)
    loops = renderable(made.loops, N1)
    image = machine_code.model_image(machine_code.render(loops, N1), loops, made.program, made.plan)
    (kept,) = image.kept
    shape = dict(plan.layouts)[weights].storage_shape((4, 84, 84))
    assert (kept.bytes, kept.parts) == (prod(extent_of(e) for e in shape) * 4, 2)
    assert {r.value for s in image.stages for r in s.buffers if r.space == "weight"} >= {kept.offset}
    first = plan.kernels[0]
    with pytest.raises(InternalError, match="only the steps of a Scan keep weights near"):
        check_plan(with_kernels(plan, [replace(first, holds=(*first.holds, Hold(weights, fill="read")))]), program)


def test_a_projection_is_cut_as_the_steps_that_read_it() -> None:
    """Cut along the steps instead, it would be fetched from the other unit's cache at every second step."""
    model = recurrence("LSTM", hidden=256, steps=100, inputs=256)
    made = build(load(model, {}), two_units(), Options(stop_after="plan"))
    assert made.plan is not None
    projection, step = made.plan.kernels[0], made.plan.kernels[1]
    assert step_kernels(made.plan) == [step] and (projection.cut, step.cut) == ((("o3", 128),), (("o1", 128),))


def test_packed_weights_are_one_stream_whatever_their_rows() -> None:
    """The gates of a unit side by side: the weights of a tile are one piece, which steps walk to and fro."""
    model = recurrence("LSTM", hidden=256, steps=100, inputs=256)
    made = build(load(model, {}), two_units(), Options(stop_after="plan"))
    assert made.plan is not None
    (step,) = step_kernels(made.plan)
    assert dict(step.leaves[0].register) == {"o1": 4, "o2": 16}
