"""Softmax of a matmul, softmax(QKᵀ)V and reductions nobody named as one kernel, all of it resident or streamed.

Streaming follows from the algebra of the reductions: an element that splits into a product (or, under a maximum, a
sum) can follow a moving result, whatever the model calls its operators; one that does not split is never streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import CPU, Step, evaluated, lowered, model_of, programs, random_inputs
from tests.plans import map_tiles
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.plan.text import plan_text

N1 = machine("neoverse_n1")  # all of it is one kernel there; with a larger cache it may pay to compute scores first
AVX2 = machine("avx2_desktop")  # all of it is one kernel there under a mask too, which the N1 would rather cut in two
HEADS = 2
SIZES = [(77, 40), (128, 64), (1000, 40), (1000, 64)]
LAST = {"axes": [2], "keepdims": 1}
SCORES: list[Step] = [("Transpose", ["k"], "kt", {"perm": [0, 2, 1]}), ("MatMul", ["q", "kt"], "s", {})]
MAX: list[Step] = [("ReduceMax", ["s"], "m", LAST), ("Sub", ["s", "m"], "d", {})]

# name -> (what follows the scores, does v take part, last extent of the result: the head, the sequence or nothing)
KINDS: dict[str, tuple[list[Step], bool, str]] = {
    # softmax of a matmul: all of the sequence is the result, so there is nothing to stream
    "rows": ([("Softmax", ["s"], "o", {"axis": -1})], False, "sequence"),
    "softmax": ([("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})], True, "head"),
    "logsumexp": ([("ReduceLogSumExp", ["s"], "o", {"axes": [2], "keepdims": 0})], False, ""),
    # Σ (s / max |s|)² v
    "squares": ([("Abs", ["s"], "a", {}), ("ReduceMax", ["a"], "m", LAST), ("Div", ["s", "m"], "x", {}),
                 ("Mul", ["x", "x"], "y", {}), ("MatMul", ["y", "v"], "o", {})], True, "head"),
    # Σ |s| / sqrt(Σ s²) v: a sum under another sum's scale
    "root": ([("ReduceSumSquare", ["s"], "n", LAST), ("Sqrt", ["n"], "r", {}), ("Abs", ["s"], "a", {}),
              ("Div", ["a", "r"], "x", {}), ("MatMul", ["x", "v"], "o", {})], True, "head"),
    # max (s - min s): sums follow under maxima as products do under sums
    "spread": ([("ReduceMin", ["s"], "m", LAST), ("Sub", ["s", "m"], "d", {}),
                ("ReduceMax", ["d"], "o", {"axes": [2], "keepdims": 0})], False, ""),
    # min (2 s - max s)
    "lowest": ([("ReduceMax", ["s"], "m", LAST), ("Add", ["s", "s"], "t", {}), ("Sub", ["t", "m"], "d", {}),
                ("ReduceMin", ["d"], "o", {"axes": [2], "keepdims": 0})], False, ""),
}  # fmt: skip
STREAMED = [k for k in KINDS if k != "rows"]


def make(kind: str, length: int, head: int, before: Sequence[Step] = (), mask: bool = False) -> ModelProto:
    steps, uses_v, last = KINDS[kind]
    shape = (HEADS, length, head)
    inputs: dict[str, Sequence[int]] = {"q": shape, "k": shape}
    scores: list[Step] = list(SCORES)
    if uses_v:
        inputs["v"] = shape
    if mask:
        inputs["mask"] = (length, length)
        scores = [SCORES[0], ("MatMul", ["q", "kt"], "raw", {}), ("Add", ["raw", "mask"], "s", {})]
    extent = {"head": (head,), "sequence": (length,), "": ()}[last]
    return model_of([*scores, *before, *steps], inputs, {"o": (HEADS, length, *extent)})


def inputs_of(length: int, head: int, kind: str = "softmax", seed: int = 0) -> dict[str, np.ndarray]:
    """Scores of some ten units, so that the maximum matters."""
    rng = np.random.default_rng(seed)
    names = ("q", "k", "v") if KINDS[kind][1] else ("q", "k")
    made = {n: rng.standard_normal((HEADS, length, head)).astype(np.float32) for n in names}
    made["q"] *= 2
    return made


# --- tests


def one_kernel(plan: Plan) -> Tile:
    """The kernel of all sums; keys that every tile of rows reads may be transposed before it, once for all."""
    *copies, kernel = plan.kernels
    assert all([n.tensor for n in copy.leaves] == ["kt"] for copy in copies), plan_text(plan)
    return kernel


@pytest.mark.sample(3)
@pytest.mark.parametrize(("length", "head"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel(kind: str, length: int, head: int) -> None:
    plan = lowered(programs(make(kind, length, head), N1)["layout"], target=N1).plan
    kernel = one_kernel(plan)
    assert sum(n.tensor not in kernel.held for n in kernel.leaves) == 1  # nothing but the result reaches main memory


def sampled() -> list[object]:
    """Every kind at every size; in the quick run the short one for all, the others for some."""
    quick = {(77, 40): STREAMED, (128, 64): ["softmax"], (1000, 40): ["softmax"], (1000, 64): ["logsumexp", "squares"]}
    return [
        pytest.param(kind, *size, marks=() if kind in quick[size] else pytest.mark.slow)
        for size in SIZES
        for kind in STREAMED
    ]


def with_block(plan: Plan, block: int) -> Plan:
    """The plan of one streamed kernel with another block."""
    stream = one_kernel(plan).stream
    assert stream is not None
    walked = replace(stream, sizes=((stream.sizes[0][0], block),))
    return map_tiles(plan, lambda tile: walked if tile == stream else tile)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("kind", "length", "head"), sampled())
def test_streamed_and_resident_agree(kind: str, length: int, head: int, kernel_cache: Path) -> None:
    program = programs(make(kind, length, head), N1)["layout"]
    inputs = inputs_of(length, head, kind)
    wanted = evaluated(program, inputs, wide=True)["o"]
    for streaming in ("never", "always"):
        low = lowered(program, "connected", streaming, target=N1)
        if streaming == "never":  # whether all sums are one kernel then is for the prediction to say
            assert all(kernel.stream is None for kernel in low.plan.kernels)
        else:
            stream = one_kernel(low.plan).stream
            assert stream is not None and -(-length // stream.sizes[0][1]) >= 2  # several blocks, the last one cut
        found = low.natively(inputs, kernel_cache)["o"]
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=5e-5, err_msg=streaming)


@pytest.mark.parametrize("kind", KINDS)
def test_loops(kind: str) -> None:
    """The interpreter of Loops sees every access of the streamed and of the resident form."""
    program = programs(make(kind, 37, 5))["layout"]
    inputs = inputs_of(37, 5, kind)
    wanted = evaluated(program, inputs, wide=True)["o"]
    for streaming in ("never", "always"):
        found = lowered(program, "connected", streaming).on_loops(inputs)["o"]
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=5e-5, err_msg=streaming)


@pytest.mark.parametrize("kind", ["rows", *(pytest.param(k, marks=pytest.mark.slow) for k in ("softmax", "logsumexp"))])
def test_masked(kind: str, kernel_cache: Path) -> None:
    """-inf over a whole leading block, over all but one place, and over a whole row (no number, as the model says)."""
    length, head = 300, 40
    mask = np.zeros((length, length), np.float32)
    mask[:, :140] = -np.inf  # longer than a block
    mask[7, :] = -np.inf
    mask[9, :] = -np.inf
    mask[9, 299] = 0
    mask[11, :] = 0
    mask[11, 150:] = -np.inf
    inputs = {**inputs_of(length, head, kind), "mask": mask}
    with np.errstate(invalid="ignore"):
        wanted = evaluated(programs(make(kind, length, head, mask=True))["layout"], inputs, wide=True)["o"]
    assert np.isfinite(wanted[:, 9]).all() and not np.isfinite(wanted[:, 7]).any()
    for target, streaming in product((CPU, AVX2), ("never", "always")):
        program = programs(make(kind, length, head, mask=True), target)["layout"]
        low = lowered(program, "connected", streaming, target=target)
        if target is AVX2:
            stream = one_kernel(low.plan).stream
            assert (stream is not None) is (streaming == "always")
        if streaming == "always" and kind != "rows":
            low = lowered(program, plan=with_block(low.plan, 64), target=target)
        found = low.natively(inputs, kernel_cache)["o"]
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=5e-5, err_msg=f"{target.name} {streaming}")


# Divisors that are 0 for a while: Σ s / max(relu(s)) v where all is negative at first, Σ s / Σ s v where s cancels
PASSING_ZERO: dict[str, list[Step]] = {
    "maximum": [("Relu", ["s"], "p", {}), ("ReduceMax", ["p"], "m", LAST), ("Div", ["s", "m"], "x", {})],
    "sum": [("ReduceSum", ["s", "axes"], "m", {"keepdims": 1}), ("Div", ["s", "m"], "x", {})],
    "logarithm": [("Relu", ["s"], "p", {}), ("Log", ["p"], "l", {}), ("ReduceMax", ["l"], "m", LAST),
                  ("Sub", ["s", "m"], "d", {}), ("Exp", ["d"], "x", {})],
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", PASSING_ZERO)
def test_a_scale_may_come_late(kind: str) -> None:
    """What was summed before there was a scale counts all the same."""
    shape = (4, 130, 64)
    steps = [*SCORES, *PASSING_ZERO[kind], ("MatMul", ["x", "v"], "o", {})]
    model = model_of(steps, {"q": shape, "k": shape, "v": shape}, {"o": shape}, {"axes": np.array([2])})
    program = programs(model)["layout"]
    rng = np.random.default_rng(3)
    q = np.full(shape, 0.25, np.float32)
    k = np.ones(shape, np.float32) if kind == "sum" else np.abs(rng.standard_normal(shape)).astype(np.float32) / 4
    if kind == "sum":
        k[:, :64:2] *= -1
    else:
        k[:, :70] *= -1
    inputs = {"q": q, "k": k, "v": rng.standard_normal(shape).astype(np.float32)}
    wanted = evaluated(program, inputs, wide=True)["o"]
    assert np.isfinite(wanted).all()
    plan = lowered(program, "connected", "always").plan
    found = lowered(program, plan=with_block(plan, 32)).on_loops(inputs)["o"]
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


# Σ sin(s - m) v and its like have no split
UNSPLITTABLE: dict[str, list[Step]] = {
    "sine": [*MAX, ("Sin", ["d"], "x", {}), ("MatMul", ["x", "v"], "o", {})],
    "square": [*MAX, ("Mul", ["d", "d"], "x", {}), ("MatMul", ["x", "v"], "o", {})],
    "sigmoid": [*MAX, ("Sigmoid", ["d"], "x", {}), ("MatMul", ["x", "v"], "o", {})],
}


@pytest.mark.parametrize("kind", UNSPLITTABLE)
def test_what_does_not_split_is_not_streamed(kind: str, kernel_cache: Path) -> None:
    length, head = 130, 16
    shape = (HEADS, length, head)
    model = model_of([*SCORES, *UNSPLITTABLE[kind]], {"q": shape, "k": shape, "v": shape}, {"o": shape})
    program = programs(model)["layout"]
    low = lowered(program, "connected", "always")
    assert all(k.stream is None for k in low.plan.kernels)
    inputs = inputs_of(length, head)
    inputs["q"] /= 2
    wanted = evaluated(program, inputs, wide=True)["o"]
    np.testing.assert_allclose(low.natively(inputs, kernel_cache)["o"], wanted, rtol=1e-3, atol=1e-3)


def test_maximum_of_products_is_not_streamed(kernel_cache: Path) -> None:
    """max (s · m): multiplying by another m may turn the order around, so old maxima cannot follow."""
    steps: list[Step] = [*SCORES, ("ReduceMin", ["s"], "m", LAST), ("Mul", ["s", "m"], "x", {}),
                         ("ReduceMax", ["x"], "o", {"axes": [2], "keepdims": 0})]  # fmt: skip
    shape = (HEADS, 130, 16)
    program = programs(model_of(steps, {"q": shape, "k": shape}, {"o": shape[:2]}))["layout"]
    low = lowered(program, "connected", "always")
    assert all(k.stream is None for k in low.plan.kernels)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["o"]
    np.testing.assert_allclose(low.natively(inputs, kernel_cache)["o"], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", STREAMED)
def test_edited_blocks(kind: str) -> None:
    """A person may choose another block in the plan: one that divides nothing, and one larger than the sequence."""
    program = programs(make(kind, 77, 8))["layout"]
    inputs = inputs_of(77, 8, kind)
    wanted = evaluated(program, inputs, wide=True)["o"]
    plan = lowered(program, "connected", "always").plan
    for block in (7, 80):
        found = lowered(program, plan=with_block(plan, block)).on_loops(inputs)["o"]
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5, err_msg=str(block))
