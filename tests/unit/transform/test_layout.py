"""Layouts say the same thing three ways (pack, indices, shape); memory by liveness never lets two things meet."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.cpu_stages import CPU, evaluated, lowered, model_of, programs, random_inputs
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.simplify import join_divisions, linear
from tilewright.ir.forms.expr import Axis, const, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, Memory, Store, statements
from tilewright.ir.forms.tensor import Layout, StorageAxis, elements
from tilewright.ir.meaning.traffic import count_traffic
from tilewright.ir.meaning.values import evaluate_exprs
from tilewright.lower.memory import Lifetime, arena, place, scratch
from tilewright.options import Options
from tilewright.target import machine
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.transform.layout.choose import choose_layouts, split_constants


def random_layout(rng: np.random.Generator, rank: int) -> Layout:
    """Axes in any order, each whole or split into blocks, some of those split again."""
    parts: list[StorageAxis] = []
    for axis in range(rank):
        splits = int(rng.integers(0, 3))
        step = 1
        for _ in range(splits):
            size = int(rng.integers(2, 6))
            parts.append(StorageAxis(axis, step, size))
            step *= size
        parts.append(StorageAxis(axis, step, None))
    order = rng.permutation(len(parts))
    return Layout(tuple(parts[i] for i in order), fill=float(rng.choice([0.0, -7.0])))


@pytest.mark.parametrize("seed", range(40))
def test_packing_agrees_with_indices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 8, size=int(rng.integers(1, 4))))
    layout = random_layout(rng, len(shape))
    array = rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)
    packed = layout.pack(array)
    assert packed.shape == layout.storage_shape(shape)
    used = np.zeros(packed.shape, bool)
    for place_ in product(*map(range, shape)):
        indices = layout.storage_indices(tuple(map(const, place_)))
        where = tuple(int(i) for i in evaluate_exprs(indices, None, None))  # type: ignore[arg-type]
        assert packed[where] == array[place_]
        assert not used[where], "two elements in one place"
        used[where] = True
    assert (packed[~used] == layout.fill).all()


def test_natural_and_permuted() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    assert Layout.natural(3).is_natural
    assert Layout.natural(3).pack(array) is array or np.shares_memory(Layout.natural(3).pack(array), array)
    np.testing.assert_array_equal(Layout.permuted((2, 0, 1)).pack(array), array.transpose(2, 0, 1))
    assert not Layout.permuted((1, 0)).is_natural
    assert Layout((StorageAxis(0, 4), StorageAxis(0, 1, 4))).storage_shape((10,)) == (3, 4)


def test_rows_with_a_gap() -> None:
    array = np.arange(6.0).reshape(2, 3)
    apart = replace(Layout.natural(2), gap=2)
    assert not apart.is_natural and apart.storage_shape((2, 3)) == (2, 5)
    np.testing.assert_array_equal(apart.pack(array), [[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]])


@pytest.mark.parametrize(
    ("name", "width", "gap"),
    [("avx2_desktop", 1024, 16), ("avx2_desktop", 3072, 16), ("avx2_desktop", 768, 0), ("neoverse_n1", 1024, 0)],
)
def test_rows_do_not_share_sets(name: str, width: int, gap: int) -> None:
    """Between two products; what is the user's stays as it is."""
    weights = {"w": np.ones((64, width), np.float32), "u": np.ones((width, 64), np.float32)}
    steps = [("MatMul", ["x", "w"], "h", {}), ("MatMul", ["h", "u"], "y", {})]
    model = model_of(steps, {"x": (32, 64)}, {"y": (32, 64)}, weights)
    program = programs(model, machine(name))["layout"]
    assert {t.name: layout.gap for t, layout in program.layouts.items() if layout.gap} == ({"h": gap} if gap else {})


def test_a_gap_changes_nothing() -> None:
    weights = {"w": np.ones((24, 1024), np.float32), "u": np.ones((1024, 24), np.float32)}
    steps = [("MatMul", ["x", "w"], "h", {}), ("Relu", ["h"], "r", {}), ("MatMul", ["r", "u"], "y", {})]
    model = model_of(steps, {"x": (11, 24)}, {"y": (11, 24)}, weights)
    artifact = build(load(model, {}), machine("avx2_desktop"), Options(stop_after="loops", verify=True))
    assert artifact.program is not None and any(layout.gap for layout in artifact.program.layouts.values())


def test_an_axis_needs_one_outermost_part() -> None:
    with pytest.raises(ValueError, match="exactly one outermost part"):
        Layout((StorageAxis(0, 1, 4),)).pack(np.zeros(8))


def test_convolutions_store_channels_innermost() -> None:
    """The axis that the weights own is contiguous in every tensor between two convolutions."""
    weights = {"w": np.ones((8, 3, 3, 3), np.float32), "u": np.ones((5, 8, 1, 1), np.float32)}
    model = model_of([("Conv", ["x", "w"], "y", {"pads": [1, 1, 1, 1]}), ("Relu", ["y"], "r", {}),
                      ("Conv", ["r", "u"], "o", {})], {"x": (1, 3, 6, 6)}, {"o": (1, 5, 6, 6)}, weights)  # fmt: skip
    program = choose_layouts(programs(model)["fold"], CPU)
    between = {t.name: layout for t, layout in program.layouts.items()}
    assert between["y"].order[-1].axis == 1 and between["r"].order[-1].axis == 1
    assert "x" not in between and "o" not in between  # the user's arrays stay as they are


def test_split_constants_keep_their_values() -> None:
    model = model_of([("MatMul", ["x", "w"], "y", {}), ("Reshape", ["y", "s"], "z", {}),
                      ("Transpose", ["z"], "o", {"perm": [1, 0, 2]})], {"x": (5, 6)}, {"o": (3, 5, 4)},
                     {"w": np.random.default_rng(0).standard_normal((6, 12)).astype(np.float32),
                      "s": np.array([5, 3, 4])})  # fmt: skip
    program = programs(model)["fold"]
    inputs = random_inputs(program)
    split = split_constants(program)
    np.testing.assert_array_equal(evaluated(split, inputs)["o"], evaluated(program, inputs)["o"])


@pytest.mark.parametrize("seed", range(20))
def test_joined_divisions(seed: int) -> None:
    """c·d·(x // d) + c·(x % d) becomes c·x, and nothing else changes value."""
    rng = np.random.default_rng(seed)
    axis, other = Axis("x", 60), Axis("y", 5)
    divisor, weight = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    x = var(axis)
    offset = (x // divisor) * (weight * divisor) + (x % divisor) * weight + var(other) * int(rng.integers(1, 9))
    joined = join_divisions(linear(offset)).expr()
    for node_at in ({axis: a, other: b} for a in range(0, 60, 7) for b in range(5)):
        first, second = evaluate_exprs((offset, joined), lambda v, at=node_at: np.asarray(at[v.axis]), None)  # type: ignore[arg-type]
        assert first == second
    assert "%" not in repr(joined)


# --- memory


@pytest.mark.parametrize("seed", range(60))
def test_what_lives_at_once_never_overlaps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = []
    for number in range(int(rng.integers(1, 40))):
        first = int(rng.integers(0, 30))
        items.append(Lifetime(f"t{number}", int(rng.integers(1, 5000)), first, first + int(rng.integers(0, 8))))
    offsets, total = place(items)
    check_places(items, offsets, total)
    peak = max(sum(i.bytes for i in items if i.first <= moment <= i.last) for moment in range(40))
    assert total >= peak
    assert total <= sum(-(-i.bytes // LINE_BYTES) * LINE_BYTES for i in items)


def check_places(items, offsets, total: int) -> None:
    assert all(offsets[i.key] % LINE_BYTES == 0 and offsets[i.key] + i.bytes <= total for i in items)
    for a in items:
        for b in items:
            if a is not b and a.first <= b.last and b.first <= a.last:
                start, stop = offsets[a.key], offsets[a.key] + a.bytes
                assert offsets[b.key] >= stop or offsets[b.key] + b.bytes <= start, (a, b)


def test_things_that_follow_each_other_share_a_place() -> None:
    _, total = place([Lifetime("a", 640, 0, 1), Lifetime("b", 640, 2, 3), Lifetime("c", 640, 4, 5)])
    assert total == 640


def test_the_arena_of_a_chain_is_two_tensors() -> None:
    steps = [("Softmax", [f"t{i}"], f"t{i + 1}", {"axis": i % 2}) for i in range(4)]
    model = model_of(steps, {"t0": (64, 64)}, {"t4": (64, 64)})  # type: ignore[arg-type]
    loops = lowered(programs(model)["layout"], "none").loops
    offsets, total = arena(loops)
    temporaries = [t for t in loops.tensors if t.role == "temporary"]
    assert len(offsets) == len(temporaries) > 6
    largest = max(elements(t.shape) * t.dtype.bytes for t in temporaries)
    assert total <= 3 * largest
    assert count_traffic(loops).intermediate > 0


def test_scratch_of_a_connected_kernel() -> None:
    """Buffers of one kernel that are used together do not overlap, those inside a loop live through all of it."""
    model = model_of([("MatMul", ["a", "b"], "s", {}), ("Softmax", ["s"], "p", {"axis": -1}),
                      ("MatMul", ["p", "v"], "o", {})], {"a": (4, 30, 20), "b": (4, 20, 50), "v": (4, 50, 10)},
                     {"o": (4, 30, 10)})  # fmt: skip
    program = programs(model)["layout"]
    for streaming in ("never", "always"):
        loops = lowered(program, "connected", streaming).loops
        for kernel in loops.kernels:
            offsets, total = scratch(kernel)
            allocated = {s.buffer for s in statements(kernel.body) if isinstance(s, Alloc)}
            assert set(offsets) == {b for b in allocated if b.memory is Memory.SCRATCH}
            blocks = [s for s in statements(kernel.body) if isinstance(s, For) and s.axis.name == "block"]
            for block in blocks:
                inside = _touched(block, set(offsets))
                for first in inside:
                    for second in inside - {first}:
                        assert _apart(first, second, offsets), (first, second)
            assert total % LINE_BYTES == 0


def _touched(block: For, known: set[Buffer]) -> set[Buffer]:
    return {s.buffer for s in statements(block.body) if isinstance(s, Store)} & known


def _apart(first: Buffer, second: Buffer, offsets: dict[Buffer, int]) -> bool:
    start = {b: offsets[b] for b in (first, second)}
    stop = {b: offsets[b] + elements(b.shape) * b.dtype.bytes for b in (first, second)}
    return stop[first] <= start[second] or stop[second] <= start[first]
