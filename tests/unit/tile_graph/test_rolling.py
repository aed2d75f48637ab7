"""Windows that move over rows: what neighbouring steps share is kept, and the answer stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import CPU, error, evaluated, lowered, model_of, random_inputs
from tilewright import ops
from tilewright.backend import backend_for
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.rolling import find_overlaps
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Bind, Hold, Plan, Tile, TileAxis
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.staging import stage_operands


def chain(channels: int, height: int, width: int, kernel: int, stride: int, pad: int) -> Program:
    """A product over channels at every point, then a window over every channel by itself."""
    rng = np.random.default_rng(0)
    rows = (height + 2 * pad - kernel) // stride + 1
    columns = (width + 2 * pad - kernel) // stride + 1
    steps = [
        ("Conv", ["x", "w0"], "wide", {}), ("Relu", ["wide"], "active", {}),
        ("Conv", ["active", "w1"], "y", {"pads": [pad] * 4, "strides": [stride] * 2, "group": 2 * channels}),
    ]  # fmt: skip
    weights = {"w0": rng.standard_normal((2 * channels, channels, 1, 1)).astype(np.float32),
               "w1": rng.standard_normal((2 * channels, 1, kernel, kernel)).astype(np.float32)}  # fmt: skip
    model = model_of(steps, {"x": (1, channels, height, width)}, {"y": (1, 2 * channels, rows, columns)}, weights)
    return fold_constants(ops.lower(load(model, {})))


def convolutions(
    channels: int, inner: int, height: int, width: int, taps: Sequence[tuple[int, int, int]], activation: str = "Relu"
) -> Program:
    """Convolutions one after the other: of each the size of its window, its stride and its padding."""
    rng = np.random.default_rng(0)
    steps, weights, x = [], {}, "x"
    size = [height, width]
    for number, (kernel, stride, pad) in enumerate(taps):
        size = [(n + 2 * pad - kernel) // stride + 1 for n in size]
        shape = (inner, channels if x == "x" else inner, kernel, kernel)
        weights[f"w{number}"] = (rng.standard_normal(shape) / kernel).astype(np.float32)
        steps.append(("Conv", [x, f"w{number}"], f"c{number}", {"pads": [pad] * 4, "strides": [stride] * 2}))
        steps.append((activation, [f"c{number}"], x := f"r{number}", {}))
    return fold_constants(ops.lower(load(
        model_of(steps, {"x": (1, channels, height, width)}, {x: (1, inner, *size)}, weights), {})))  # fmt: skip


def rolled(plan: Plan, program: Program, part: int, step: int) -> Plan:
    """All kernels as one: parts of the rows of the last result to cores, each walked in steps with a window."""
    leaves = tuple(leaf for kernel in plan.kernels for leaf in kernel.leaves)
    last = leaves[-1].tensor
    rows = extent_of(all_computes(program)[last].outputs[0].shape[2])
    axis = TileAxis("rows", rows, (Bind(last, "o2"),))
    holds = (*(Hold(leaf.tensor) for leaf in leaves[:-2]), Hold(leaves[-2].tensor, "rolling", "rows"))
    level = plan.kernels[0].level
    walked = Tile(level, (("rows", step),), "order", leaves, holds)
    kernel = Tile(level, (("rows", part),), "cores", (walked,), (), (axis,), name="k0")
    return replace(plan, body=replace(plan.body, body=(kernel,), holds=()))


CASES = [
    (3, 12, 9, 3, 1, 1, 6, 2), (4, 13, 8, 3, 1, 1, 8, 4), (2, 17, 21, 5, 1, 2, 8, 4), (4, 16, 16, 3, 2, 1, 4, 2),
    (3, 15, 11, 3, 1, 0, 13, 3), (2, 20, 7, 5, 2, 2, 4, 4), (8, 11, 19, 3, 1, 1, 10, 5), (5, 9, 30, 3, 1, 1, 4, 2),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(("channels", "height", "width", "kernel", "stride", "pad", "part", "step"), CASES)
def test_a_window_gives_the_same_answer(
    channels: int, height: int, width: int, kernel: int, stride: int, pad: int, part: int, step: int, kernel_cache: Path
) -> None:
    program = chain(channels, height, width, kernel, stride, pad)
    plan = rolled(make_plan(program, CPU, "register"), program, part, step)
    made = lowered(program, plan=plan)
    inputs = random_inputs(program, 5)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(made.on_loops(inputs)["y"], wanted) < 1e-6
    if (height, stride) in ((13, 1), (16, 2)):  # the others would show the same, and take as long again
        assert error(made.natively(inputs, kernel_cache, 3)["y"], wanted) < 1e-6


def test_the_window_that_overlaps_is_found() -> None:
    program = chain(4, 12, 12, 3, 1, 1)
    plan = make_plan(program, machine("neoverse_n1"), "register")
    nests = [n for kernel in plan.kernels for n in plan_nests(kernel, all_computes(program))]
    (found,) = find_overlaps(nests)
    assert found.nest is nests[-2]
    assert (found.axis, found.scale, found.rows) == (2, 1, 2)


def test_a_window_moves_over_each_of_several_convolutions() -> None:
    program = convolutions(3, 3, 20, 14, [(3, 1, 1), (5, 1, 2), (3, 2, 1)])
    plan = make_plan(program, machine("neoverse_n1"), "register")
    nests = [n for kernel in plan.kernels for n in plan_nests(kernel, all_computes(program))]
    found = find_overlaps(nests)
    assert [o.nest for o in found] == [n for n in reversed(nests[:-1]) if n.reduce_axes]
    assert [(o.scale, o.rows) for o in found] == [(2, 1), (2, 4)]


def test_copies_made_for_padding_stay_in_a_tile_with_what_reads_them() -> None:
    target = machine("emerald_rapids")
    program = stage_operands(convolutions(8, 8, 256, 256, [(3, 1, 1), (3, 1, 1)]), target, always=True)
    assert len(program.staged) == 2
    (kernel,) = make_plan(program, target).kernels
    rolling = {h.tensor for t in kernel.walk() if isinstance(t, Tile) for h in t.holds if h.mode == "rolling"}
    assert rolling == {t.name for t in program.staged}


def tokens(height: int, width: int, channels: int, wide: int) -> Program:
    """A product at every token, then a window over rows and columns of the image that the tokens are: two axes of its
    result reach one of the product's."""
    rng = np.random.default_rng(0)
    steps = [
        ("MatMul", ["x", "w0"], "wide", {}), ("Transpose", ["wide"], "turned", {"perm": [0, 2, 1]}),
        ("Reshape", ["turned", "shape"], "pixels", {}),
        ("Conv", ["pixels", "w1"], "y", {"pads": [1] * 4, "group": wide}),
    ]  # fmt: skip
    weights = {"w0": (rng.standard_normal((channels, wide)) / channels).astype(np.float32),
               "w1": rng.standard_normal((wide, 1, 3, 3)).astype(np.float32),
               "shape": np.array([1, wide, height, width])}  # fmt: skip
    model = model_of(steps, {"x": (1, height * width, channels)}, {"y": (1, wide, height, width)}, weights)
    return fold_constants(ops.lower(load(model, {})))


TOKENS = [(64, 64, 32, 128), (48, 40, 32, 96), (64, 64, 32, 64)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", TOKENS)
@pytest.mark.parametrize("name", ["emerald_rapids", "emerald_rapids_avx512", "neoverse_n1", "apple_arm"])
def test_windows_over_tokens_move_in_the_tiles_that_are_chosen(name: str, shape: tuple[int, int, int, int]) -> None:
    """What steps share is more the more columns a tile has: too much for the smallest steps."""
    program, target = tokens(*shape), machine(name)
    plan = make_plan(program, target)
    check_plan(plan, program, target)
    lower_program(program, plan, backend_for(target).lower_kernel)


def window_in_steps(kernel: Tile, step: int) -> Tile:
    return replace(kernel, body=tuple(
        replace(n, sizes=((n.sizes[0][0], step),)) if isinstance(n, Tile) else n for n in kernel.body
    ))  # fmt: skip


def test_a_window_that_cannot_move_is_no_plan() -> None:
    program, target = tokens(64, 64, 32, 64), machine("emerald_rapids")
    plan = make_plan(program, target)
    (kernel,) = plan.kernels
    assert any(h.mode == "rolling" for t in kernel.walk() if isinstance(t, Tile) for h in t.holds)
    worse = plan.with_kernels({kernel.name: window_in_steps(kernel, 2)})
    with pytest.raises(InternalError, match=r"no window moves over 'wide' in parts of \[t2:2\]"):
        check_plan(worse, program, target)


def test_windows_over_tokens_give_the_same_answer(kernel_cache: Path) -> None:
    program = tokens(16, 12, 5, 8)
    plan = rolled(make_plan(program, CPU, "register"), program, 8, 4)
    made = lowered(program, plan=plan)
    inputs = random_inputs(program, 5)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(made.on_loops(inputs)["y"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache, 3)["y"], wanted) < 1e-6
