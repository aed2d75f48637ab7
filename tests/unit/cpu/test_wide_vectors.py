"""Wide vectors on short rows: moved in part under a mask, turned, run along channels; weights asked for early."""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import model_of
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm

RNG = np.random.default_rng(7)


def made(model: ModelProto, name: str, **options: Any) -> Artifact:
    return build(load(model, {}), machine(name), Options(stop_after="source", **options))


def window(channels: int, kernel: int, stride: int, rows: int, columns: int) -> ModelProto:
    """A window over every channel by itself, in the order of images."""
    pad = kernel // 2
    out = [(n + 2 * pad - kernel) // stride + 1 for n in (rows, columns)]
    more = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "group": channels}
    weights = RNG.standard_normal((channels, 1, kernel, kernel)).astype(np.float32)
    steps = [("Conv", ["x", "w"], "y", more)]
    return model_of(steps, {"x": (1, channels, rows, columns)}, {"y": (1, channels, *out)}, {"w": weights})


def pool(channels: int, kernel: int, stride: int, rows: int, columns: int) -> ModelProto:
    pad = kernel // 2
    out = [(n + 2 * pad - kernel) // stride + 1 for n in (rows, columns)]
    more = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    return model_of([("MaxPool", ["x"], "y", more)], {"x": (1, channels, rows, columns)}, {"y": (1, channels, *out)})


def extreme(kind: str, shape: tuple[int, ...], axis: int) -> ModelProto:
    kept = tuple(n for d, n in enumerate(shape) if d != axis)
    return model_of([(kind, ["x"], "y", {"axes": [axis], "keepdims": 0})], {"x": shape}, {"y": kept})


def layers(rows: int, width: int, count: int) -> ModelProto:
    names = ["x", *(f"h{i}" for i in range(1, count)), "y"]
    weights = {f"w{i}": np.full((width, width), (1 + i) / width, np.float32) for i in range(count)}  # equal: steps
    steps = [("MatMul", [names[i], f"w{i}"], names[i + 1], {}) for i in range(count)]
    return model_of(steps, {"x": (rows, width)}, {"y": (rows, width)}, weights)


CASES = {
    "stride 2, 5x5": window(33, 5, 2, 14, 14),
    "stride 2, 3x3, uneven": window(17, 3, 2, 11, 29),
    "7x7 image": window(48, 5, 1, 7, 7),
    "7x7 window": window(16, 7, 1, 13, 15),
    "pool 5x5": pool(3, 5, 1, 14, 14),
    "pool /2": pool(5, 3, 2, 13, 27),
    "short rows": extreme("ReduceMax", (3, 9, 33), 2),
    "short columns": extreme("ReduceMin", (3, 9, 13), 1),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["emerald_rapids", "avx2_desktop", "neoverse_n1"])
@pytest.mark.parametrize("case", CASES)
def test_every_form_agrees(name: str, case: str) -> None:
    made(CASES[case], name, verify=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["emerald_rapids", "avx2_desktop"])
@pytest.mark.parametrize("case", ["stride 2, 5x5", "7x7 image", "pool 5x5", "short rows"])
def test_the_text_runs_here(name: str, case: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Vectors of another machine's width, of which any compiler makes what it can."""
    wide = replace(machine(name), name="wide", architecture=platform.machine(), features=(), rates=())
    (tmp_path / "wide.json").write_text(wide.to_json())
    options = Options(target=str(tmp_path / "wide.json"), cache_dir=kernel_cache)
    model = tilewright.compile(CASES[case], options=options)
    plain = tilewright.compile(CASES[case], options=Options(cache_dir=kernel_cache))
    x = RNG.standard_normal(model.inputs[0].shape).astype(np.float32)
    np.testing.assert_allclose(model(x)[0], plain(x)[0], rtol=1e-5, atol=1e-5)


def test_parts_of_vectors_move_at_once() -> None:
    text = "".join(made(CASES["pool 5x5"], "emerald_rapids").sources.values())
    assert "tw_first_v16f32(" in text and "tw_keep_v16f32(" in text and "lanes[0]" not in text
    assert "tw_first" not in "".join(made(CASES["pool 5x5"], "neoverse_n1").sources.values())


def test_every_other_element_of_a_short_row() -> None:
    text = "".join(made(window(16, 3, 2, 57, 27), "emerald_rapids").sources.values())
    assert "tw_even_v16f32(" in text


def test_short_rows_run_along_channels() -> None:
    """Seven outputs a row: vectors along channels are full, and the result is brought into the order of images."""
    program = made(window(672, 5, 2, 14, 14), "emerald_rapids").program
    assert program is not None
    assert {"x_staged", "y_turned"} <= {c.outputs[0].name for c in program.computes}


@pytest.mark.parametrize("name", ["emerald_rapids", "neoverse_n1"])
def test_rows_of_a_large_window_share_what_they_read(name: str) -> None:
    """A vector is read once for all the rows of a register tile whose windows have it, not once for each."""
    artifact = made(window(32, 7, 1, 56, 56), name)
    assert artifact.plan is not None
    leaf = artifact.plan.kernels[-1].leaves[-1]
    rows = dict(leaf.register)["o2"]
    text = artifact.sources[artifact.plan.kernels[-1].name]
    vector = f"v{machine(name).lanes(4)}f32"
    block = text[text.index("for (int64_t r") :]
    block = block[: block.index(f"*({vector}u *)")]  # up to the first store
    sums = len(re.findall(r"(acc\w*) = \(\1 \+", block))
    assert sums == 7 * rows
    read = set(re.findall(rf"\(const {vector}u \*\)\(([^)]*)\)", block))  # the compiler reads each once
    assert len(read) == rows + 6


def test_long_rows_stay() -> None:
    program = made(window(32, 3, 1, 112, 112), "emerald_rapids").program
    assert program is not None and all("turned" not in c.outputs[0].name for c in program.computes)


def test_weights_of_few_rows_are_asked_for_early() -> None:
    artifact = made(layers(50, 768, 4), "emerald_rapids")
    assert artifact.plan is not None
    plans = [k.leaves[-1] for k in artifact.plan.kernels]
    asked = [p.options(VectorForm).ahead for p in plans]
    assert all(n > 0 for n in asked) and all("__builtin_prefetch" in s for s in artifact.sources.values())
    # all blocks of rows together ask for all of the next panel
    tiles = [dict(p.register) for p in plans]
    assert all(n * (50 // tile["o0"]) >= tile["o1"] for n, tile in zip(asked, tiles, strict=True))


def softmax_between(rows: int, width: int) -> ModelProto:
    weights = {"w": RNG.standard_normal((width, width)).astype(np.float32)}
    steps = [("MatMul", ["x", "w"], "a", {}), ("Softmax", ["a"], "b", {}), ("MatMul", ["b", "w"], "y", {})]
    return model_of(steps, {"x": (rows, width)}, {"y": (rows, width)}, weights)  # type: ignore[arg-type]


def asked_inside(artifact: Artifact) -> set[str]:
    """Kernels with a product that asks for weights and is not their last."""
    assert artifact.plan is not None
    return {k.name for k in artifact.plan.kernels if any(leaf.options(VectorForm).ahead for leaf in k.leaves[:-1])}


def test_weights_of_products_inside_a_kernel_are_asked_for_too() -> None:
    """A product with a softmax behind it is not the last of its kernel, and its weights come as late."""
    artifact = made(softmax_between(96, 768), "emerald_rapids")
    asked = asked_inside(artifact)
    assert asked and all("__builtin_prefetch" in artifact.sources[name] for name in asked)


@pytest.mark.parametrize(("rows", "width", "count"), [(50, 256, 2), (4096, 768, 4), (1, 768, 4)])
def test_weights_that_stay_or_pass_once_are_not(rows: int, width: int, count: int) -> None:
    artifact = made(layers(rows, width, count), "emerald_rapids")
    assert not any(form.ahead for form in options(artifact))


@pytest.mark.parametrize("name", ["emerald_rapids", "neoverse_n1"])
def test_asking_changes_nothing(name: str) -> None:
    small = replace(machine(name), levels=tuple(
        replace(level, capacity=16384) if level.name == "L2" else level for level in machine(name).levels))  # fmt: skip
    artifact = build(load(layers(37, 67, 2), {}), small, Options(stop_after="loops", verify=True))
    assert any(form.ahead for form in options(artifact))


def test_asking_inside_a_kernel_changes_nothing() -> None:
    levels = machine("emerald_rapids").levels
    small = replace(machine("emerald_rapids"), levels=tuple(
        replace(level, capacity=65536) if level.name == "L2" else level for level in levels))  # fmt: skip
    artifact = build(load(softmax_between(25, 131), {}), small, Options(stop_after="loops", verify=True))
    assert asked_inside(artifact)


def leaves(artifact: Artifact) -> list[Leaf]:
    assert artifact.plan is not None
    return [leaf for kernel in artifact.plan.kernels for leaf in kernel.leaves]


def options(artifact: Artifact) -> list[VectorForm]:
    return [leaf.options(VectorForm) for leaf in leaves(artifact)]


@pytest.mark.parametrize(("width", "together"), [(768, 2), (769, 1)])
def test_vectors_of_a_panel_are_asked_for_some_steps_early(width: int, together: int) -> None:
    """Each is a line, and the panel more than the first cache holds; a turn has two steps where they come out even."""
    artifact = made(layers(50, width, 4), "emerald_rapids")
    found = leaves(artifact)
    assert found and all((p.soon, p.together) == (8, together) for p in options(artifact))
    for text in artifact.sources.values():
        loop = text[text.index("for (int64_t r0") :]
        loop = loop[: loop.index("}\n")]
        near = loop.count("__builtin_prefetch") - loop.count(", 0, 2)")
        assert near == together * dict(found[0].register)["o1"] // 16


@pytest.mark.parametrize(
    ("name", "rows", "width"),
    [("emerald_rapids", 50, 96), ("emerald_rapids", 8, 768), ("avx2_desktop", 50, 768), ("neoverse_n1", 50, 768)],
)
def test_what_stays_comes_once_or_has_several_vectors_a_line_is_not(name: str, rows: int, width: int) -> None:
    assert not any(p.soon or p.together > 1 for p in options(made(layers(rows, width, 4), name)))


@pytest.mark.parametrize("width", [66, 67])
def test_asking_soon_changes_nothing(width: int) -> None:
    small = replace(machine("emerald_rapids"), levels=tuple(
        replace(level, capacity={"L1": 4096, "L2": 16384}.get(level.name, level.capacity))
        for level in machine("emerald_rapids").levels))  # fmt: skip
    artifact = build(load(layers(37, width, 2), {}), small, Options(stop_after="loops", verify=True))
    assert any(p.soon for p in options(artifact)) and any(p.together == 2 - width % 2 for p in options(artifact))


def test_steps_together_are_of_a_register_tile() -> None:
    artifact = made(extreme("ReduceMax", (3, 9, 33), 2), "emerald_rapids")
    assert artifact.plan is not None and artifact.program is not None
    tilted = artifact.plan.kernels[0].map_leaves(lambda leaf: leaf.with_options(VectorForm, together=2))
    with pytest.raises(InternalError, match="a sum on a register tile of rows and vectors"):
        check_plan(artifact.plan.with_kernels({tilted.name: tilted}), artifact.program)
