"""What a Plan says of copies, stages, prefetches, passes and instructions is what its Loops have, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright import Options
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.cpu import DOTS, WINDOW_DOTS
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.loops import HINTS, Alloc, Buffer, For, Instruction, Kernel, Memory, statements
from tilewright.target import machine
from tilewright.tile_graph.plan.form import ASYNC, COPIED, COPIES, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm, InstructionForm, ThreadForm, VectorForm


def layers() -> ModelProto:
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in {"w1": (768, 1536), "w2": (1536, 96)}.items()}
    return model_of(
        [("MatMul", ["x", "w1"], "h", {}), ("Relu", ["h"], "r", {}), ("MatMul", ["r", "w2"], "y", {}),
         ("Softmax", ["y"], "z", {"axis": -1})],
        {"x": (50, 768)}, {"z": (50, 96)}, weights,
    )  # fmt: skip


def windows() -> ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"k": (32, 16, 3, 3), "d": (32, 1, 3, 3)}
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    return model_of(
        [("Conv", ["x", "k"], "a", {"pads": [1, 1, 1, 1]}), ("Relu", ["a"], "b", {}),
         ("Conv", ["b", "d"], "y", {"group": 32, "pads": [1, 1, 1, 1]})],
        {"x": (1, 16, 28, 28)}, {"y": (1, 32, 28, 28)}, weights,
    )  # fmt: skip


def attention() -> ModelProto:
    return model_of(
        [("MatMul", ["q", "k"], "s", {}), ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})],
        {"q": (2, 77, 40), "k": (2, 40, 77), "v": (2, 77, 40)}, {"o": (2, 77, 40)},
    )  # fmt: skip


def rows() -> ModelProto:
    return model_of(
        [("Add", ["x", "x"], "t", {}), ("ReduceSum", ["t"], "s", {"keepdims": 1}), ("Exp", ["t"], "y", {})],
        {"x": (300, 1000)}, {"s": (1, 1), "y": (300, 1000)},
    )  # fmt: skip


def square() -> ModelProto:
    """Large enough for sums in passes."""
    weights = {"w": np.zeros((2048, 2048), np.float32)}
    return model_of([("MatMul", ["x", "w"], "y", {})], {"x": (2048, 2048)}, {"y": (2048, 2048)}, weights)


MODELS = {"square": square, "layers": layers, "windows": windows, "attention": attention, "rows": rows}
CASES = [(model, target, precision) for model in MODELS for target, precision in (
    ("neoverse_n1", "float32"), ("emerald_rapids", "float32"), ("emerald_rapids", "bfloat16"), ("h200", "float32"),
    ("h200", "float16"))]  # fmt: skip


@cache
def made(model: str, target: str, precision: str) -> Artifact:
    options = Options(target=target, precision=precision, stop_after="loops")
    return build(load(MODELS[model](), {}), machine(target), options)


def kernels(case: tuple[str, str, str]) -> Iterator[tuple[Tile, Kernel]]:
    """Every kernel of the Plan, or kernels that share a launch, with its Loops, which equal kernels share."""
    artifact = made(*case)
    assert artifact.plan is not None and artifact.loops is not None
    for (tile, _), call in zip(artifact.plan.calls(), artifact.loops.calls, strict=True):
        yield tile, artifact.loops.kernel(call.kernel)


def instructions(kernel: Kernel) -> set[str]:
    return {s.name for s in statements(kernel.body) if isinstance(s, Instruction)}


def buffers(kernel: Kernel) -> list[Buffer]:
    return [s.buffer for s in statements(kernel.body) if isinstance(s, Alloc)]


cases = pytest.mark.parametrize("case", CASES, ids=" ".join)


@pytest.mark.sample(3)
@cases
def test_instructions_are_those_of_the_leaves(case: tuple[str, str, str]) -> None:
    every = {**DOTS, **WINDOW_DOTS}
    dots = {n: {row for _, row in d.instructions} | {row for _, row, *_ in d.moved} for n, d in every.items()}
    known = set(FORMS).union(*dots.values())
    for tile, kernel in kernels(case):
        forms = [leaf.form for leaf in tile.leaves if isinstance(leaf.form, InstructionForm)]
        found = instructions(kernel) & known
        assert all(found & dots.get(form.instruction, {form.instruction}) for form in forms)
        assert found <= set().union(*(dots.get(form.instruction, {form.instruction}) for form in forms))


@cases
def test_copies_that_nobody_waits_for_are_those_of_stages(case: tuple[str, str, str]) -> None:
    for tile, kernel in kernels(case):
        held = [h for t in tile.walk() if isinstance(t, Tile) for h in t.holds if h.fill in COPIES]
        asked = sorted(h.stages for h in held if h.fill == ASYNC)
        forms = [leaf.options(ThreadForm) for leaf in tile.leaves]
        staged = any(form.step and form.at_once > 1 for form in forms)
        copied = {s.operands[0].buffer for s in statements(kernel.body)
                  if isinstance(s, Instruction) and s.name.startswith("copy_async")}  # fmt: skip
        assert bool(copied) == bool(asked or staged)
        assert staged or sorted(int(b.shape[0]) for b in copied) == asked
        rings = [int(b.shape[0]) for b in buffers(kernel) if b.name.startswith("ring") and b.memory is Memory.SHARED]
        products = any(isinstance(leaf.form, FragmentForm) for leaf in tile.leaves)
        if products and tile.stream is None:
            assert sorted(rings) == sorted(h.stages for h in held)
        assert products or not rings


@cases
def test_hints_and_passes_are_those_of_the_leaves(case: tuple[str, str, str]) -> None:
    for tile, kernel in kernels(case):
        if tile.over != "cores" or any(isinstance(leaf.form, InstructionForm) for leaf in tile.leaves):
            continue
        forms = [leaf.options(VectorForm) for leaf in tile.leaves]
        has_hints = bool(instructions(kernel) & HINTS)
        assert has_hints <= (any(form.ahead or form.soon for form in forms) or bool(tile.prefetched))
        # rows that are walked as one run have none that comes later, whatever is said of them
        assert has_hints >= any(form.soon for form in forms)
        passes = [s for s in statements(kernel.body) if isinstance(s, For) and s.axis.name == "pass"]
        assert bool(passes) == any(form.cut for form in forms)


def test_the_cases_have_what_is_asked() -> None:
    forms = [leaf.form for case in CASES for tile, _ in kernels(case) for leaf in tile.leaves]
    assert any(isinstance(form, VectorForm) and (form.ahead or form.soon) for form in forms)
    assert any(isinstance(form, VectorForm) and form.cut for form in forms)
    assert any(isinstance(form, ThreadForm) and form.step and form.at_once > 1 for form in forms)
    fills = {h.fill for case in CASES for tile, _ in kernels(case) for t in tile.walk() if isinstance(t, Tile)
             for h in t.holds if isinstance(t.body[0], Tile) and t.body[0].over == "warps"}  # fmt: skip
    assert fills == {ASYNC, COPIED}
    assert len({form.instruction for form in forms if isinstance(form, InstructionForm)}) > 1
