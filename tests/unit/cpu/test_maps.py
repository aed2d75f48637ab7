"""How maps are planned: which axis fills vectors, and how many of them a turn of the loop takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import CPU, Step, evaluated, lowered, model_of, programs, random_inputs
from tilewright.backend.cpu.leaf.vectorise import candidate_plans
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map
from tilewright.ir.forms.expr import Axis, Expr, load, lt, maximum, minimum, select, var
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.tile_graph.algebra.context import NestContext, stride
from tilewright.tile_graph.algebra.nest import build_nest

CONTEXT = NestContext(CPU, lambda t: Layout.natural(t.rank), frozenset())
ALONG, OTHER = Axis("i", 640), Axis("j", 10)
i, j = var(ALONG), var(OTHER)


@pytest.mark.parametrize(
    ("index", "step"),
    [
        (minimum(i, 255), 1),
        (maximum(i - 384, 0) * 2, 2),
        (i % 64, 1),
        (i % 2 * 8, None),
        (i % 64 + i // 64 * 100, 1),
        (minimum(i, j), None),
    ],
)
def test_what_is_contiguous(index: Expr, step: int | None) -> None:
    assert stride(load(Tensor("x", (2048,), dtypes.float32), (index,)), ALONG, CONTEXT) == step


def test_interleaved_parts_are_copied_along_what_is_stored() -> None:
    """Phases of a transposed convolution beside another image, channels last: columns come from two phases in turn."""
    rows, columns, channels = Axis("y", 20), Axis("x", 30), Axis("c", 96)
    y, x, c = var(rows), var(columns), var(channels)
    phases = Tensor("phases", (10, 15, 4 * 40), dtypes.float32)
    image = Tensor("image", (20, 30, 56), dtypes.float32)
    phase = y % 2 * 80 + x % 2 * 40 + minimum(c, 39)
    value = select(lt(c, 40), load(phases, (y // 2, x // 2, phase)), load(image, (y, x, maximum(c - 40, 0))))
    joined = Map(Tensor("joined", (20, 30, 96), dtypes.float32), (rows, columns, channels), value)
    assert candidate_plans(build_nest(joined, [], {}), CONTEXT)[0].vector == "o2"


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_what_is_done_before_a_loop_does_not_make_it_heavy(operator: str) -> None:
    """The last step of a softmax is one multiplication: lines are walked whole."""
    steps: list[Step] = [(operator, ("x",), "y", {"axis": -1})]
    made = lowered(programs(model_of(steps, {"x": (64, 1003)}, {"y": (64, 1003)}))["layout"])
    last = made.plan.kernels[-1].leaves[-1]
    assert dict(last.register)[last.vector or ""] == 4 * last.lanes


@pytest.mark.parametrize("step", [("Conv", ("x", "w"), "y", {"group": 6}), ("ReduceMean", ("x",), "y", {"axes": [0]})])
def test_a_reduction_of_one_element_is_a_map(step: Step, kernel_cache: Path) -> None:
    scale = np.linspace(-1, 2, 6, dtype=np.float32).reshape(6, 1, 1, 1)
    made = programs(model_of([step], {"x": (1, 6, 5, 7)}, {"y": (1, 6, 5, 7)}, {"w": scale}))
    assert all(isinstance(c, Map) for c in made["layout"].computes)
    inputs = random_inputs(made["program"])
    wanted = evaluated(made["program"], inputs)["y"]
    np.testing.assert_array_equal(lowered(made["layout"]).natively(inputs, kernel_cache)["y"], wanted)
