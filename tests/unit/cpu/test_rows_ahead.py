"""Maps that read rows which are no one run of memory ask for the next ones, where hardware would lose them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import HINTS, PREFETCH, PREFETCH_TILE, Instruction, statements
from tilewright.options import Options
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.leaf_form import VectorForm

N1 = machine("neoverse_n1")


def halves(rows: int, columns: int) -> ModelProto:
    """Both halves of each row multiplied: two rows of half the length, neither of which goes on where it ended."""
    ends = {"a": np.array([0]), "b": np.array([columns // 2]), "c": np.array([columns]), "last": np.array([1])}
    nodes = [("Relu", ["x"], "r", {}), ("Slice", ["r", "a", "b", "last"], "p", {}),
             ("Slice", ["r", "b", "c", "last"], "q", {}), ("Mul", ["p", "q"], "y", {})]  # fmt: skip
    return model_of(nodes, {"x": (rows, columns)}, {"y": (rows, columns // 2)}, ends)


def made(
    model: ModelProto, target: Target, schedule: Literal["register", "connected"] = "connected",
    convolution: str = "auto",
) -> Artifact:  # fmt: skip
    return build(load(model, {}), target, Options(stop_after="loops", schedule=schedule, convolution=convolution))


def hints(artifact: Artifact) -> list[Instruction]:
    assert artifact.loops is not None
    found = [s for k in artifact.loops.kernels for s in statements(k.body) if isinstance(s, Instruction)]
    return [s for s in found if s.name == PREFETCH]


def ahead(artifact: Artifact) -> list[int]:
    assert artifact.plan is not None
    return [leaf.options(VectorForm).ahead for kernel in artifact.plan.kernels for leaf in kernel.leaves]


def test_two_rows_that_take_turns_are_asked_for() -> None:
    artifact = made(halves(2048, 512), N1)
    assert ahead(artifact) == [1] and len(hints(artifact)) == 2


def test_asking_changes_nothing() -> None:
    small = replace(N1, levels=tuple(replace(x, capacity=16384) if x.name == "L2" else x for x in N1.levels))
    artifact = build(load(halves(67, 134), {}), small, Options(stop_after="loops", verify=True))
    assert ahead(artifact) == [1] and hints(artifact)


@pytest.mark.parametrize(
    ("rows", "target"),
    [(64, N1), (2048, replace(N1, stream_cost=0.0)), (2048, machine("emerald_rapids"))],
    ids=["stays near", "hardware follows them", "x86"],
)
def test_no_hints(rows: int, target: Target) -> None:
    artifact = made(halves(rows, 512), target)
    assert ahead(artifact) == [0] and not hints(artifact)


def test_a_line_is_asked_for_once_a_step() -> None:
    """A step reads four vectors, and four that begin four elements later: two lines."""
    ends = {"a": np.array([0]), "b": np.array([508]), "c": np.array([4]), "d": np.array([512]), "last": np.array([1])}
    nodes = [("Relu", ["x"], "r", {}), ("Slice", ["r", "a", "b", "last"], "p", {}),
             ("Slice", ["r", "c", "d", "last"], "q", {}), ("Mul", ["p", "q"], "y", {})]  # fmt: skip
    artifact = made(model_of(nodes, {"x": (2048, 512)}, {"y": (2048, 508)}, ends), N1)
    assert ahead(artifact) == [1] and len(hints(artifact)) == 2


def test_places_that_data_decides_are_not_guessed() -> None:
    """The index of the next row may not be there to be read."""
    nodes = [("Gather", ["x", "i"], "g", {}), ("Relu", ["g"], "y", {})]
    model = model_of(nodes, {"x": (4096, 512)}, {"y": (1024, 512)}, {"i": np.arange(1024)[::-1].copy()})
    assert not hints(made(model, N1))


def test_steps_that_read_the_same_lines_share_what_they_ask_for() -> None:
    """A transform of tiles of 6 x 6 reads 36 lines in four steps, a vector of each in every step: nine are asked for in
    one. Of the windows that tiles are made of, six columns of six rows, the next one has two columns that are here."""
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((64, 64, 3, 3)).astype(np.float32) for n in ("w", "v")}
    shape = (8, 64, 64, 64)
    nodes = [("Relu", ["x"], "r", {}), ("Conv", ["r", "w"], "c", {"pads": [1, 1, 1, 1]}),
             ("Conv", ["c", "v"], "y", {"pads": [1, 1, 1, 1]})]  # fmt: skip
    model = model_of(nodes, {"x": shape}, {"y": shape}, weights)
    artifact = made(model, N1, "register", "winograd")  # a transform a kernel
    assert artifact.loops is not None and artifact.plan is not None
    found: dict[str, set[tuple[str, int]]] = {}
    for kernel, name in ((k, k.name) for k in artifact.loops.kernels):
        asked = [s.name for s in statements(kernel.body) if isinstance(s, Instruction) and s.name in HINTS]
        found[name] = {(each, asked.count(each)) for each in asked}
    transforms = [k for k in artifact.plan.kernels if any(len(leaf.register) == 3 for leaf in k.leaves)]
    asked_for = [found[k.name] for k in transforms if k.name in found]
    assert {(PREFETCH_TILE, 6)} in asked_for and {(PREFETCH_TILE, 9)} in asked_for


def sums_of_rows(rows: int) -> ModelProto:
    steps = [("ReduceMean", ["x"], "y", {"axes": [1], "keepdims": 0})]
    return model_of(steps, {"x": (2, rows, 256)}, {"y": (2, 256)})


def test_sums_of_rows_ask_for_later_ones() -> None:
    artifact = made(sums_of_rows(4096), N1)
    found = [s for k in artifact.loops.kernels for s in statements(k.body) if isinstance(s, Instruction)]  # type: ignore[union-attr]
    assert set(ahead(artifact)) == {4} and found and all(s.name == PREFETCH_TILE for s in found)


@pytest.mark.parametrize(("rows", "target"), [(64, N1), (4096, machine("emerald_rapids"))], ids=["stays near", "x86"])
def test_sums_of_rows_without_hints(rows: int, target: Target) -> None:
    assert set(ahead(made(sums_of_rows(rows), target))) == {0}


def test_asking_for_rows_of_a_sum_changes_nothing() -> None:
    small = replace(N1, levels=tuple(replace(x, capacity=16384) if x.name == "L2" else x for x in N1.levels))
    artifact = build(load(sums_of_rows(67), {}), small, Options(stop_after="loops", verify=True))
    assert 4 in ahead(artifact)


def windows(batch: int, channels: int, size: int, step: int = 1) -> ModelProto:
    """A window of 3 x 3 over every channel by itself, of rows that a map leaves with channels side by side."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((channels, 1, 3, 3)).astype(np.float32),
               "v": rng.standard_normal((channels, 8, 1, 1)).astype(np.float32)}  # fmt: skip
    sliding = {"group": channels, "pads": [1, 1, 1, 1], "strides": [step, step]}
    nodes = [("Conv", ["x", "v"], "c", {}), ("Conv", ["c", "w"], "y", sliding)]
    end = (size - 1) // step + 1
    return model_of(nodes, {"x": (batch, 8, size, size)}, {"y": (batch, channels, end, end)}, weights)


def apart(model: ModelProto, target: Target, **options: object) -> Artifact:
    chosen = Options(stop_after="loops", schedule="register", **options)  # type: ignore[arg-type]
    return build(load(model, {}), target, chosen)


@pytest.mark.parametrize(("step", "rows"), [(1, 1), (2, 2)])
def test_windows_ask_for_what_the_next_row_reads_anew(step: int, rows: int) -> None:
    artifact = apart(windows(8, 576, 28, step), N1)
    assert artifact.plan is not None and artifact.loops is not None
    (leaf,) = (each for kernel in artifact.plan.kernels for each in kernel.leaves if len(each.order) == 6)
    register = dict(leaf.register)
    lines = -(-register["o1"] * 4 // 64)
    first = [s for k in artifact.loops.kernels for s in statements(k.body) if isinstance(s, Instruction)]
    asked = [s for s in first if s.name == PREFETCH]
    blocks = [register["o3"], *([leftover] if (leftover := -(-28 // step) % register["o3"]) else [])]
    assert leaf.options(VectorForm).ahead == 1 and len(asked) == sum(each * step * rows * lines for each in blocks)


@pytest.mark.parametrize(
    ("model", "target"), [(windows(1, 64, 28), N1), (windows(8, 576, 28), machine("avx2_desktop"))],
    ids=["stays near", "x86"],
)  # fmt: skip
def test_windows_without_hints(model: ModelProto, target: Target) -> None:
    assert set(ahead(apart(model, target))) == {0}


def test_asking_for_rows_of_windows_changes_nothing() -> None:
    small = replace(N1, levels=tuple(replace(x, capacity=16384) if x.name == "L2" else x for x in N1.levels))
    artifact = apart(windows(2, 24, 15), small, verify=True)
    assert 1 in ahead(artifact) and hints(artifact)


def test_dot_products_of_rows_are_no_windows() -> None:
    """All they read moves along the vector too, which is the axis they sum over."""
    weights = {"w": np.ones((1, 64, 1, 1), np.float32), "v": np.ones((64, 8, 1, 1), np.float32)}
    nodes = [("Conv", ["x", "v"], "c", {}), ("Conv", ["c", "w"], "y", {})]
    artifact = apart(model_of(nodes, {"x": (8, 8, 128, 128)}, {"y": (8, 1, 128, 128)}, weights), N1)
    assert artifact.plan is not None
    along = [leaf for kernel in artifact.plan.kernels for leaf in kernel.leaves if (leaf.vector or "o")[0] == "r"]
    assert [len(leaf.register) for leaf in along] == [2] and not any(leaf.options(VectorForm).ahead for leaf in along)
