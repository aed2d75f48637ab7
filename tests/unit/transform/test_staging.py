"""Staged operands, grouped convolutions and panels of activations: same results by every form, and no checks left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import CPU, Step, error, evaluated, lowered, model_of, programs, random_inputs, read_back
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Map, Program, Reduce
from tilewright.ir.forms.expr import is_op, walk
from tilewright.ir.forms.loops import If, statements
from tilewright.ir.forms.tensor import Tensor
from tilewright.schedule.planner import predicted_seconds
from tilewright.target import machine
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import Predict, stage_operands

N1 = machine("neoverse_n1")


def convolution(
    image: tuple[int, ...], weight: tuple[int, ...], stride: int = 1, dilation: int = 1, groups: int = 1,
    pads: tuple[int, int, int, int] = (0, 0, 0, 0), bias: bool = False,
) -> ModelProto:  # fmt: skip
    rng = np.random.default_rng(3)
    constants = {"w": rng.standard_normal(weight).astype(np.float32)}
    if bias:
        constants["b"] = rng.standard_normal(weight[0]).astype(np.float32)
    spans = [dilation * (k - 1) + 1 for k in weight[2:]]
    sizes = [
        (n + before + after - span) // stride + 1
        for n, before, after, span in zip(image[2:], pads[:2], pads[2:], spans, strict=True)
    ]
    attributes: dict[str, object] = {
        "strides": [stride] * 2, "dilations": [dilation] * 2, "group": groups, "pads": list(pads),
    }  # fmt: skip
    steps: list[Step] = [("Conv", ["x", *constants], "s", attributes), ("Relu", ["s"], "y", {})]
    return model_of(steps, {"x": image}, {"y": (image[0], weight[0], *sizes)}, constants)


def product(left: tuple[int, ...], right: tuple[int, ...]) -> ModelProto:
    steps: list[Step] = [("MatMul", ["a", "b"], "y", {})]
    return model_of(steps, {"a": left, "b": right}, {"y": (*left[:-1], right[-1])})


CASES = {
    "same": convolution((1, 5, 9, 11), (7, 5, 3, 3), pads=(1, 1, 1, 1), bias=True),
    "large window": convolution((1, 9, 8, 13), (6, 9, 7, 7), pads=(3, 3, 3, 3)),
    "uneven pads": convolution((2, 3, 7, 10), (5, 3, 3, 5), pads=(2, 0, 1, 3)),
    "strides": convolution((1, 6, 13, 14), (9, 6, 5, 5), stride=3, pads=(2, 2, 2, 2)),
    "dilated": convolution((1, 8, 12, 15), (10, 8, 3, 3), dilation=2, pads=(2, 2, 2, 2)),
    "no window": convolution((1, 7, 9, 9), (5, 7, 1, 1), stride=2),
    "one channel": convolution((1, 1, 9, 12), (8, 1, 5, 5), pads=(2, 2, 2, 2)),
    "few channels": convolution((1, 3, 15, 17), (11, 3, 7, 7), stride=2, pads=(3, 3, 3, 3)),
    "two groups": convolution((1, 10, 8, 9), (26, 5, 3, 3), groups=2, pads=(1, 1, 1, 1), bias=True),
    "odd groups": convolution((2, 9, 7, 11), (21, 3, 3, 3), groups=3, pads=(1, 2, 1, 0)),
    "many groups": convolution((1, 32, 6, 7), (32, 4, 3, 3), groups=8, pads=(1, 1, 1, 1)),
    "groups of two": convolution((1, 24, 9, 17), (8, 6, 5, 5), groups=4, dilation=2, pads=(4, 4, 4, 4)),
    "grouped strides": convolution((1, 8, 10, 19), (12, 2, 5, 5), groups=4, stride=3, pads=(2, 2, 2, 2)),
    "grouped, no window": convolution((1, 14, 5, 9), (26, 7, 1, 1), groups=2),
    "depthwise": convolution((1, 9, 8, 10), (9, 1, 5, 5), groups=9, pads=(2, 2, 2, 2)),
    "depthwise, doubled": convolution((1, 5, 8, 10), (10, 1, 3, 3), groups=5, pads=(1, 1, 1, 1)),
    "product": product((13, 37), (37, 29)),
    "batches": product((3, 7, 33), (3, 33, 19)),
    "shared right side": product((3, 7, 16), (16, 24)),
}


def always(name: str) -> tuple[Program, Program]:
    """The Program before copies, and with every copy that can be written."""
    folded = programs(CASES[name])["fold"]
    staged = stage_operands(folded, CPU, always=True)
    verify_program(staged)
    return folded, staged


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_every_form_agrees(name: str, kernel_cache: Path) -> None:
    folded, staged = always(name)
    assert staged.staged
    inputs = random_inputs(folded)
    wanted = evaluated(folded, inputs, wide=True)["y"]
    assert error(evaluated(staged, inputs, wide=True)["y"], wanted) < 1e-12
    program = choose_layouts(staged, CPU)
    verify_program(program)
    assert error(lowered(program, "none").on_loops(inputs)["y"], wanted) < 1e-6
    made = lowered(program)
    assert error(made.on_loops(inputs)["y"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 1e-6


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [n for n, m in CASES.items() if "Conv" in str(m.graph.node[0].op_type)])
def test_without_copies_every_form_agrees(name: str, kernel_cache: Path) -> None:
    """Groups alone: blocks end with a group, and what they read of it is one element."""
    program = programs(CASES[name])["layout"]
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    made = lowered(program)
    assert error(made.on_loops(inputs)["y"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 1e-6


@pytest.mark.parametrize("name", ["same", "large window", "uneven pads", "strides", "two groups", "few channels"])
def test_padding_moves_into_the_copy(name: str) -> None:
    _, staged = always(name)
    sums = [c for c in staged.computes if isinstance(c, Reduce)]
    assert not any(is_op(n, "select") for c in sums for e in c.elements for n in walk(e))
    copies = [c for c in staged.computes if isinstance(c, Map) and c.output in staged.staged]
    assert any(is_op(n, "select") for c in copies for n in walk(c.value))
    loops = lowered(choose_layouts(staged, CPU), "none").loops
    body = next(k for k in loops.kernels if k.name == loops.calls[-1].kernel).body
    assert not any(isinstance(s, If) for s in statements(body))


def test_few_channels_and_a_row_of_the_window_are_one_sum() -> None:
    _, staged = always("few channels")
    (total,) = [c for c in staged.computes if isinstance(c, Reduce)]
    assert [a.extent for a in total.reduce_axes] == [7, 21]


def test_copies_survive_as_text() -> None:
    _, staged = always("two groups")
    assert [t.name for t in read_back(staged).staged] == [t.name for t in staged.staged]


def test_copies_are_nests_of_their_own() -> None:
    """A copy composed into its reader again would be no copy."""
    _, staged = always("same")
    plan = lowered(choose_layouts(staged, CPU)).plan
    assert staged.staged[0].name in {n.tensor for k in plan.kernels for n in k.leaves}


def test_the_model_decides() -> None:
    """A window over an image of another order pays for its copy; a small product or a plain layer does not."""
    window = programs(convolution((1, 32, 40, 40), (64, 32, 5, 5), pads=(2, 2, 2, 2)))["staging"]
    assert [t.shape for t in window.staged] == [(1, 32, 44, 44)]
    assert not programs(convolution((1, 32, 40, 40), (64, 32, 1, 1)))["staging"].staged
    assert not programs(product((16, 32), (32, 24)))["staging"].staged
    far = programs(product((512, 512), (512, 512)))["staging"]
    assert [t.name for t in far.staged] == ["b_staged"]
    assert not programs(product((1, 512), (512, 512)))["staging"].staged


def test_products_of_activations_are_read_in_panels() -> None:
    plan = lowered(programs(product((512, 512), (512, 512)))["layout"]).plan
    panel = dict(plan.layouts)["b_staged"]
    size = panel.order[-1].size
    assert panel.order[-1].axis == 1 and size is not None and size % CPU.lanes(4) == 0


def test_gpus_stage_for_themselves() -> None:
    folded = programs(CASES["large window"])["fold"]
    assert not stage_operands(folded, machine("cuda-emulated"), always=True).staged


def test_an_input_for_a_result_in_its_order_may_keep_it(kernel_cache: Path) -> None:
    """Two channels and many outputs: sums are short, and turning results costs more than rows that end unevenly."""
    weight = np.random.default_rng(4).standard_normal((194, 2, 3, 3)).astype(np.float32)
    steps: list[Step] = [("Conv", ["x", "w"], "y", {"group": 2, "dilations": [2, 2], "pads": [2] * 4})]
    model = model_of(steps, {"x": (1, 4, 33, 86)}, {"y": (1, 194, 33, 86)}, {"w": weight})
    folded = programs(model, N1)["fold"]

    def predict(program: Program) -> float:
        return predicted_seconds(choose_layouts(program, N1), N1, "connected")

    turned, kept = (choose_layouts(stage_operands(folded, N1, p), N1) for p in (None, predict))
    (copy,) = kept.staged
    assert kept.layouts[copy].is_natural and not turned.layouts[turned.staged[0]].is_natural
    assert predict(kept) < predict(turned)
    made = lowered(kept, target=N1)
    assert [n.vector for n in made.plan.kernels[-1].leaves] == ["o3"]
    inputs = random_inputs(folded)
    other = lowered(turned, target=N1).natively(inputs, kernel_cache)["y"]
    assert error(made.natively(inputs, kernel_cache)["y"], other) < 1e-6
    again = {t.name: layout for t, layout in read_back(kept).layouts.items()}
    assert again[copy.name].is_natural


def test_sums_over_many_channels_turn_their_copy() -> None:
    folded = programs(convolution((1, 64, 20, 20), (64, 64, 3, 3), pads=(1, 1, 1, 1)), N1)["fold"]
    staged = stage_operands(folded, N1, lambda p: predicted_seconds(choose_layouts(p, N1), N1, "connected"))
    assert all(not layout.is_natural for layout in choose_layouts(staged, N1).layouts.values())


def test_positions_that_leave_vectors_uneven_are_copied() -> None:
    """49 positions: lanes run along the weights, which multiply lanes of the copy; 60 positions fill vectors as is."""
    uneven = programs(convolution((1, 160, 7, 7), (960, 160, 1, 1)), N1)["staging"]
    even = programs(convolution((1, 160, 6, 10), (960, 160, 1, 1)), N1)["staging"]
    assert uneven.staged and not even.staged


def test_an_input_whose_windows_hang_over_by_one_is_read_in_place() -> None:
    """A single window at each end of a row knows what it may read; several are lanes that ask each for itself."""

    def staged(model: ModelProto, predict: Predict | None) -> tuple[Tensor, ...]:
        return stage_operands(programs(model, N1)["fold"], N1, predict).staged

    def predict(program: Program) -> float:
        return predicted_seconds(choose_layouts(program, N1), N1, "connected")

    def depthwise(size: int, pad: int) -> ModelProto:
        weight = np.ones((32, 1, size, size), np.float32)
        steps: list[Step] = [("Conv", ["x", "w"], "y", {"group": 32, "pads": [pad] * 4})]
        return model_of(steps, {"x": (1, 32, 60, 60)}, {"y": (1, 32, 60, 60)}, {"w": weight})

    assert staged(depthwise(3, 1), None) and not staged(depthwise(3, 1), predict)
    assert staged(depthwise(5, 2), predict)


@pytest.mark.parametrize("equation", ["ab,a->", "cab,bc->"])
def test_a_sum_of_everything_is_read_as_it_lies(equation: str, kernel_cache: Path) -> None:
    """There is no axis left that could follow a copy."""
    sizes = {"a": 19, "b": 17, "c": 11}
    left, right = ([sizes[axis] for axis in part] for part in equation.removesuffix("->").split(","))
    model = model_of([("Einsum", ["l", "r"], "y", {"equation": equation})], {"l": left, "r": right}, {"y": ()})
    program = programs(model)["layout"]
    inputs = random_inputs(program)
    assert not program.staged
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(lowered(program).natively(inputs, kernel_cache)["y"], wanted) < 1e-5
