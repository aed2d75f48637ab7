"""The search and the fold over the Plan's tree say the same of a leaf's arithmetic, and of a batch what they say of
each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tilewright import Options
from tilewright.backend.cpu.leaf.leaf_seconds import arithmetic_seconds
from tilewright.backend.cpu.leaf.strides import lines_of, squares_along
from tilewright.backend.traffic import runs_of
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.simplify import Linear
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.ir.forms.expr import Axis, var
from tilewright.schedule.price import plan_context
from tilewright.target import machine
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Range, extent_of, whole
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.tile_graph.traffic.traffic import LeafTrace, Repeat

Step = tuple[str, list[str], str, dict[str, Any]]
MACHINES = ("avx2_desktop", "emerald_rapids_avx512", "neoverse_n1")

CASES: dict[str, tuple[Step, tuple[int, ...], tuple[int, ...]]] = {
    "largest of rows": (("ReduceMax", ["x"], "y", {"axes": [1], "keepdims": 0}), (64, 640), (64,)),
    "pool": (("AveragePool", ["x"], "y", {"kernel_shape": [3, 3]}), (1, 32, 33, 33), (1, 32, 31, 31)),
    "windows that begin anywhere": (("MaxPool", ["x"], "y", {"kernel_shape": [1, 3]}), (1, 8, 32, 34), (1, 8, 32, 32)),
    "windows of whole vectors": (
        ("MaxPool", ["x"], "y", {"kernel_shape": [1, 3], "dilations": [1, 16]}), (1, 8, 32, 64), (1, 8, 32, 32)
    ),
    "every other element": (
        ("MaxPool", ["x"], "y", {"kernel_shape": [1, 3], "strides": [1, 2]}), (1, 8, 32, 65), (1, 8, 32, 32)
    ),
    "largest of columns": (("ReduceMax", ["x"], "y", {"axes": [0], "keepdims": 0}), (50, 96), (96,)),
    "a function of rows that fill no vector": (("Sigmoid", ["x"], "y", {}), (37, 21), (37, 21)),
    "a transpose": (("Transpose", ["x"], "y", {"perm": [1, 0]}), (64, 200), (200, 64)),
    "a transpose whose squares lack some": (("Transpose", ["x"], "y", {"perm": [0, 2, 1]}), (3, 37, 90), (3, 90, 37)),
    "rows with gaps": (("SpaceToDepth", ["x"], "y", {"blocksize": 2}), (1, 8, 24, 40), (1, 32, 12, 20)),
}  # fmt: skip


def in_one_tile(name: str, target: str) -> tuple[Program, Plan]:
    node, taken, given = CASES[name]
    made = build(load(model_of([node], {"x": taken}, {"y": given}, {})), machine(target), Options(stop_after="plan"))
    assert made.program is not None and made.plan is not None
    whole_tiles = {k.name: replace(k, sizes=(), axes=()) for k in made.plan.kernels if not nested(k)}
    return made.program, made.plan.with_kernels(whole_tiles)


def nested(kernel: Tile) -> bool:
    return any(isinstance(n, Tile) for n in kernel.body)


def leaf_of(tree: Repeat | LeafTrace) -> LeafTrace:
    while isinstance(tree, Repeat):
        (tree,) = tree.body
    return tree


def only_leaf(name: str, target: str) -> tuple[Program, Plan, Nest, Leaf]:
    program, plan = in_one_tile(name, target)
    (kernel,) = plan.kernels
    (nest,) = plan_nests(kernel, all_computes(program))
    return program, plan, nest, kernel.leaves[0]


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("name", CASES)
def test_the_search_and_the_fold_say_the_same_of_a_whole_tile(name: str, target: str) -> None:
    program, plan, nest, leaf = only_leaf(name, target)
    (run,) = runs_of(program, plan, machine(target), timed=True)
    box = tuple(whole(extent_of(a.extent)) for a in nest.axes)
    found = arithmetic_seconds(nest, leaf, box, plan_context(program, plan, machine(target)))
    assert float(found) == pytest.approx(float(leaf_of(run.tree).busy), rel=0.02)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_tiles_takes_what_each_of_them_does(name: str) -> None:
    target = machine("emerald_rapids_avx512")
    program, plan, nest, leaf = only_leaf(name, "emerald_rapids_avx512")
    context = plan_context(program, plan, target)
    extents = [extent_of(a.extent) for a in nest.axes]
    parts = [np.array([n, max(1, n // 2), max(1, n // 3), 1]) for n in extents]
    box = tuple(Range(whole(e).low, n, e) for n, e in zip(parts, extents, strict=True))
    together = np.broadcast_to(arithmetic_seconds(nest, leaf, box, context), (4,))
    for number in range(4):
        one = tuple(Range(r.low, int(n[number]), r.extent) for r, n in zip(box, parts, strict=True))
        assert float(together[number]) == pytest.approx(float(arithmetic_seconds(nest, leaf, one, context)), rel=1e-9)
    assert not parts or together[0] >= together[-1]


def busy_of(name: str) -> float:
    """Seconds of a core on the whole, by the fold."""
    target = machine("emerald_rapids_avx512")
    (run,) = runs_of(*in_one_tile(name, "emerald_rapids_avx512"), target, timed=True)
    return float(leaf_of(run.tree).busy)


def test_vectors_that_begin_anywhere_lie_on_two_lines() -> None:
    target, place, tap = machine("emerald_rapids_avx512"), Axis("x", 64), Axis("tap", 3)
    anywhere, whole_vectors = Linear({var(place): 1, var(tap): 1}, 0), Linear({var(place): 1, var(tap): 16}, 0)
    assert lines_of(anywhere, place, 4, target) == pytest.approx(1 + 60 / 64)
    assert lines_of(whole_vectors, place, 4, target) == 1.0
    assert busy_of("windows that begin anywhere") > busy_of("windows of whole vectors")


def test_every_other_element_is_two_reads_not_one_a_lane() -> None:
    assert busy_of("every other element") < 4 * busy_of("windows of whole vectors")


def test_results_are_transposed_along_rows_that_are_stored_side_by_side() -> None:
    node: Step = ("MatMul", ["x", "w"], "y", {})
    model = model_of([node], {"x": (64, 32)}, {"y": (64, 48)}, {"w": np.ones((32, 48), np.float32)})
    made = build(load(model), machine("emerald_rapids_avx512"), Options(stop_after="plan"))
    assert made.program is not None and made.plan is not None
    (nest,) = plan_nests(made.plan.kernels[0], all_computes(made.program))
    row, column = nest.axes
    by_rows, by_columns = Linear({var(row): 48, var(column): 1}, 0), Linear({var(row): 1, var(column): 64}, 0)
    assert squares_along(nest, column, [row, column], [by_columns]) is row
    assert squares_along(nest, column, [row, column], [by_rows]) is None
    assert squares_along(nest, column, [row, column], [by_columns, by_rows]) is None


@pytest.mark.parametrize("target", MACHINES)
def test_lanes_that_are_put_together_one_by_one_need_few_vectors_side_by_side(target: str) -> None:
    nodes: list[Step] = [
        ("Softmax", ["x"], "s", {"axis": -1}),
        ("MatMul", ["s", "w"], "y", {}),
    ]
    weights = {"w": np.arange(16, dtype=np.float32)[:, None]}
    made = build(load(model_of(nodes, {"x": (4, 2100, 16)}, {"y": (4, 2100, 1)}, weights)), machine(target),
                 Options(stop_after="plan"))  # fmt: skip
    assert made.plan is not None
    leaves = [leaf for kernel in made.plan.kernels for leaf in kernel.walk() if isinstance(leaf, Leaf)]
    across = [leaf for leaf in leaves if leaf.vector and leaf.vector.startswith("o") and "r0" in leaf.order]
    for leaf in across:
        assert dict(leaf.register)[leaf.vector] <= 2 * leaf.lanes, leaf.tensor
