"""Output axes that are one run of all a contraction touches are walked as one: shapes that no register tile divides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import CPU, Lowered, error, evaluated, lowered, model_of, programs, random_inputs
from tests.plans import resized, with_kernels
from tilewright.backend.cpu.leaf.vectorise import candidate_plans, facts_of
from tilewright.ir.forms.loops import Alloc, For, ForKind, statements
from tilewright.ir.forms.tensor import Layout
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import build_nest
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def convolution(x: tuple[int, ...], weight: tuple[int, ...], stride: int = 1, group: int = 1) -> ModelProto:
    spatial = [-(-n // stride) for n in x[2:]]
    more: dict[str, object] = {"kernel_shape": weight[2:], "strides": [stride] * len(spatial), "group": group}
    ports = {"x": x}, {"y": (x[0], weight[0], *spatial)}
    return model_of([("Conv", ("x", "w"), "y", more)], *ports, {"w": weights(*weight)})


CASES = {
    "image": convolution((1, 9, 7, 5), (13, 9, 1, 1)),
    "image of many channels": convolution((1, 64, 7, 7), (96, 64, 1, 1)),
    "batch of images": convolution((2, 6, 5, 7), (11, 6, 1, 1)),
    "volume": convolution((1, 5, 3, 5, 3), (10, 5, 1, 1, 1)),
    "groups": convolution((1, 8, 3, 7), (10, 4, 1, 1), group=2),
    "stride": convolution((1, 8, 9, 9), (12, 8, 1, 1), stride=2),
    "rows of several matrices": model_of(
        [("MatMul", ("x", "w"), "s", {}), ("Add", ("s", "b"), "t", {}), ("Relu", ("t",), "y", {})],
        {"x": (3, 5, 7)}, {"y": (3, 5, 9)}, {"w": weights(7, 9), "b": weights(9)},
    ),
    "added to another image": model_of(
        [("Conv", ("x", "w"), "s", {"kernel_shape": [1, 1]}), ("Add", ("s", "z"), "y", {})],
        {"x": (1, 12, 5, 7), "z": (1, 8, 5, 7)}, {"y": (1, 8, 5, 7)}, {"w": weights(8, 12, 1, 1)},
    ),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_runs_mean_the_same(name: str, kernel_cache: Path) -> None:
    made = programs(CASES[name])
    inputs = random_inputs(made["program"])
    wanted = evaluated(made["program"], inputs, wide=True)["y"]
    found = lowered(made["layout"])
    assert error(found.on_loops(inputs)["y"], wanted) < 1e-6
    assert error(found.natively(inputs, kernel_cache)["y"], wanted) < 1e-6


def test_rows_are_not_cut_short() -> None:
    """Seven columns are no whole register tile; seven rows of them are some, and one element."""
    target = machine("neoverse_n1")
    found = lowered(programs(CASES["image of many channels"], target)["fold"], target=target)
    assert _longest(found) > 7


def _longest(found: Lowered) -> int:
    """How many positions of the image blocks of one size cover, one after the other."""
    most = 0
    for loop in statements(found.loops.kernels[-1].body):
        if isinstance(loop, For) and loop.kind is ForKind.SERIAL and loop.axis.name == "i3_block":
            inner = {s.axis.name: s.axis.extent for s in statements(loop.body) if isinstance(s, For)}
            most = max(most, int(loop.axis.extent) * inner.get("i3_u", 1) * inner.get("i3_lane", 1))  # type: ignore
    return most


def planned_for_x86(size: int, channels: tuple[int, int]) -> Leaf:
    target = machine("emerald_rapids")
    program = programs(convolution((1, channels[0], size, size), (channels[1], channels[0], 1, 1)), target)["fold"]
    nest = build_nest(program.computes[-1], [], {})
    context = NestContext(target, lambda t: Layout.natural(t.rank), program.constants)
    return candidate_plans(nest, context)[0]


@pytest.mark.parametrize("channels", [(96, 576), (32, 192), (29, 131)])
def test_vectors_run_along_what_is_stored(channels: tuple[int, int]) -> None:
    """Fourteen columns do not fill a vector of sixteen; rows of them do."""
    plan = planned_for_x86(14, channels)
    assert (plan.vector, plan.lanes) == ("o3", 16)


@pytest.mark.parametrize("channels", [(32, 192), (29, 131)])
def test_pixels_read_lines_apart_stay_near(channels: tuple[int, int]) -> None:
    plan = planned_for_x86(29, channels)
    assert plan.order.index("o3") < plan.order.index("o1")


@pytest.mark.parametrize(("size", "channels"), [(301, 32), (301, 17)])
def test_one_row_follows_its_streams_far(size: int, channels: int) -> None:
    """With one output channel no two rows of the image share what they read: vectors stand in one row, side by side."""
    plan = planned_for_x86(size, (channels, 1))
    assert dict(plan.register) == {"o3": 16 * 16}


@pytest.mark.parametrize(("stride", "axes"), [(1, 1), (2, 0)])
def test_a_stride_ends_the_run(stride: int, axes: int) -> None:
    """Every other column of every other row is no run."""
    program = programs(convolution((1, 8, 9, 9), (12, 8, 1, 1), stride))["fold"]
    nest = build_nest(program.computes[-1], [], {})
    context = NestContext(CPU, lambda t: Layout.natural(t.rank), program.constants)
    runs = [facts_of(nest, plan, context).runs for plan in candidate_plans(nest, context)]
    assert max(len(along) for found in runs for along in (*found.values(), ())) == axes


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [4, 7, 8, 11])
def test_results_are_turned_in_registers(rows: int, kernel_cache: Path) -> None:
    """Lanes that lie apart where rows lie side by side: squares are stored as vectors, other rows lane by lane."""
    program = programs(convolution((1, 6, 13, 25), (21, 6, 1, 1), stride=2))["fold"]
    plan = make_plan(program, CPU, "connected")
    (kernel,) = plan.kernels
    lanes = CPU.lanes(4)
    order = ("o0", "o2", "o3", "o1", "r0")
    nest = replace(
        kernel.leaves[0], vector="o1", lanes=lanes, register=(("o3", rows), ("o1", 2 * lanes)), order=order,
        form=VectorForm(),
    )  # fmt: skip
    edited = resized(kernel.with_leaves({nest.tensor: nest}), program, {})
    found = lowered(program, plan=replace(with_kernels(plan, [edited]), layouts=()))
    squares = [s for s in statements(found.loops.kernels[0].body) if isinstance(s, Alloc) and "square" in s.buffer.name]
    assert bool(squares) == (rows >= lanes)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(found.on_loops(inputs)["y"], wanted) < 1e-6
    assert error(found.natively(inputs, kernel_cache)["y"], wanted) < 1e-6
