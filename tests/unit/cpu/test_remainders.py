"""What a vector axis leaves over runs in whole vectors: padded lanes of panels, or a last block that begins earlier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import CPU, Lowered, Step, error, evaluated, lowered, model_of, programs, random_inputs
from tests.plans import map_leaves, resized, with_kernels
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.expr import Axis, const, loads, substitute, var
from tilewright.ir.forms.loops import For, ForKind, Memory, Store, statements
from tilewright.lower.blocks import Remainder, overlapping, pieces
from tilewright.target import machine
from tilewright.tile_graph.algebra.propagate import Range, whole
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands

LANES = CPU.lanes(4)
WIDE = 7 * LANES + LANES - 1  # columns that leave all lanes of a vector but one


def layer(rows: int, inner: int, columns: int) -> ModelProto:
    rng = np.random.default_rng(5)
    constants = {"w": rng.standard_normal((inner, columns)).astype(np.float32)}
    constants["b"] = rng.standard_normal(columns).astype(np.float32)
    steps: list[Step] = [("MatMul", ["x", "w"], "s", {}), ("Add", ["s", "b"], "y", {})]
    return model_of(steps, {"x": (rows, inner)}, {"y": (rows, columns)}, constants)


def grouped(outputs: int, size: tuple[int, int]) -> ModelProto:
    weight = np.random.default_rng(6).standard_normal((2 * outputs, 3, 3, 3)).astype(np.float32)
    steps: list[Step] = [("Conv", ["x", "w"], "y", {"group": 2, "pads": [1, 1, 1, 1]})]
    return model_of(steps, {"x": (1, 6, *size)}, {"y": (1, 2 * outputs, *size)}, {"w": weight})


def pool(channels: int, width: int) -> ModelProto:
    steps: list[Step] = [("AveragePool", ["x"], "y", {"kernel_shape": [3, 3]})]
    return model_of(steps, {"x": (1, channels, 9, width + 2)}, {"y": (1, channels, 7, width)})


def product(batch: int, rows: int, inner: int, columns: int) -> ModelProto:
    steps: list[Step] = [("MatMul", ["a", "b"], "y", {})]
    shapes = {"a": (batch, rows, inner), "b": (batch, inner, columns)}
    return model_of(steps, shapes, {"y": (batch, rows, columns)})


CASES = {
    "layer": layer(13, 20, WIDE),
    "one lane left": layer(11, 17, 5 * LANES + 1),
    "less than a vector": layer(9, 12, LANES - 1),
    "groups": grouped(3 * LANES + 1, (5, 7)),
    "pool": pool(3, 5 * LANES + 3),
    "pool in tiles": pool(1, 6 * LANES - 1),
    "activations": product(2, 9, 21, WIDE),
}


def staged(model: ModelProto) -> Program:
    """The Program with every copy that can be written: panels of activations too."""
    return choose_layouts(stage_operands(programs(model)["fold"], CPU, always=True), CPU)


def sums(made: Lowered) -> list[int]:
    """How many lanes the loops have that add to accumulators."""
    found = []
    for kernel in made.loops.kernels:
        for loop in statements(kernel.body):
            if isinstance(loop, For) and loop.kind is ForKind.VECTOR:
                stores = [s for s in loop.body if isinstance(s, Store) and s.buffer.memory is Memory.REGISTER]
                if any(n.source is s.buffer for s in stores for n in loads(s.value)):
                    found.append(static(loop.axis.extent) or 0)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_every_form_agrees(name: str, kernel_cache: Path) -> None:
    for program in (programs(CASES[name])["layout"], staged(CASES[name])):
        inputs = random_inputs(program)
        wanted = evaluated(program, inputs, wide=True)["y"]
        for schedule in ("none", "connected"):
            made = lowered(program, schedule)
            assert error(made.on_loops(inputs)["y"], wanted) < 1e-6
            assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 1e-6


@pytest.mark.parametrize("name", ["layer", "one lane left", "groups", "pool", "activations"])
def test_sums_run_in_whole_vectors(name: str) -> None:
    found = sums(lowered(programs(CASES[name])["layout"]))
    assert found and set(found) == {LANES}


@pytest.mark.parametrize("name", ["groups", "activations"])
def test_sums_over_copies_run_in_whole_vectors(name: str) -> None:
    found = sums(lowered(staged(CASES[name])))
    assert found and set(found) == {LANES}


def test_partial_sums_wait_between_passes(kernel_cache: Path) -> None:
    """Lanes beyond the end begin anew in every pass: nothing of theirs was kept."""
    program = programs(layer(7, 64, WIDE))["layout"]
    plan = lowered(program).plan
    in_passes = map_leaves(plan, lambda n: n.with_options(VectorForm, cut=(("r0", 32),)) if n.order[-1] == "r0" else n)
    made = lowered(program, plan=in_passes)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert set(sums(made)) == {LANES}
    assert error(made.on_loops(inputs)["y"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 1e-6


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", [2, 4, 5])
@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids"])
def test_maps_over_uneven_tiles_run_in_whole_vectors(name: str, rows: int, kernel_cache: Path) -> None:
    """Tiles of some rows of 67 end anywhere in a vector: the last one begins earlier, no element is alone."""
    there = machine(name)
    program = programs(model_of([("Exp", ["x"], "e", {}), ("Add", ["e", "x"], "y", {})],
                                {"x": (9, 67)}, {"y": (9, 67)}), there)["layout"]  # fmt: skip
    plan = lowered(program, target=there).plan
    made = lowered(
        program, plan=with_kernels(plan, [resized(k, program, {"o0": rows}) for k in plan.kernels]), target=there
    )
    loops = [s for s in statements(made.loops.kernels[0].body) if isinstance(s, For) and s.kind is ForKind.VECTOR]
    assert {static(s.axis.extent) for s in loops} == {there.vector_bytes // 4}
    stores = [s for s in statements(made.loops.kernels[0].body) if isinstance(s, Store)]
    assert len(stores) == sum(isinstance(i, Store) for s in loops for i in s.body), "elements by themselves"
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(made.on_loops(inputs)["y"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 1e-6


def test_pieces_of_uneven_tiles_cover_them() -> None:
    """Whatever is left over, whichever tile it is; where a tile may be shorter than a vector it is not done."""
    tile = Axis("tile", 9)
    for size, extent, block, lanes in ((201, 335, 64, 16), (10, 36, 16, 4), (7, 33, 4, 4), (24, 44, 8, 4)):
        found = overlapping(Range(var(tile) * size, size, extent), block, lanes)
        assert found is not None
        for number in range(-(-extent // size)):
            count = min(size, extent - number * size)
            placed = []
            for piece in found:
                base, trips = (
                    static(simplify(substitute(e, {tile: const(number)}))) for e in (piece.base, piece.trips)
                )
                assert base is not None and trips is not None and piece.lanes == lanes
                placed += [base + trip * piece.size + i for trip in range(trips) for i in range(piece.size)]
            assert sorted(set(placed)) == list(range(count)) and len(placed) < count + lanes
    assert overlapping(Range(var(tile) * 10, 10, 33), 16, 4) is None
    assert overlapping(whole(33), 16, 4) is None


def test_pieces_end_in_whole_vectors() -> None:
    padded = pieces(whole(31), 16, 4, Remainder.PADDED)
    assert [(static(p.base), p.size, p.kept) for p in padded] == [(0, 16, None), (16, 16, 15)]
    earlier = pieces(whole(31), 16, 4, Remainder.EARLIER)
    assert [(static(p.base), p.size, p.kept) for p in earlier] == [(0, 16, None), (15, 16, None)]
    by_lanes = pieces(whole(31), 16, 4)
    assert [(static(p.base), p.size, p.lanes) for p in by_lanes] == [(0, 16, 4), (16, 12, 4), (28, 3, 3)]


def test_a_last_tile_that_is_too_short_begins_in_the_tile_before() -> None:
    tiles = Range(var(Axis("tile", 2)) * 12, 12, 23)
    assert [p.lanes for p in pieces(tiles, 12, 4, Remainder.EARLIER)] == [4, 4, 3]
    whole_blocks, last = pieces(tiles, 12, 4, Remainder.BEFORE)
    assert (whole_blocks.size, last.size, last.kept) == (12, 12, None)
    tile = next(iter(last.base.axes))
    assert static(simplify(substitute(tiles.low + last.base, {tile: const(1)}))) == 23 - 12


def test_pieces_that_fill_vectors_or_have_nothing_before_them_stay() -> None:
    assert pieces(whole(24), 16, 4, Remainder.EARLIER) == pieces(whole(24), 16, 4)
    assert pieces(whole(3), 16, 4, Remainder.EARLIER) == pieces(whole(3), 16, 4)
    assert pieces(Range(const(0), 3, 3), 16, 4, Remainder.PADDED)[0].kept == 3


@pytest.mark.parametrize("name", ["neoverse_n1", "avx2_desktop", "emerald_rapids"])
def test_a_window_may_reach_into_a_group(name: str, kernel_cache: Path) -> None:
    """Pixels are read in pairs of neighbours (axis // 2, axis % 2), and tiles reach a column over their ends: a range
    that begins inside a pair is no whole number of pairs from its beginning."""
    there = machine(name)
    steps: list[Step] = [
        ("DepthToSpace", ["x"], "d", {"blocksize": 2}),
        ("ReduceMean", ["d"], "m", {"axes": [1], "keepdims": 1}),
        ("AveragePool", ["m"], "y", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ]
    program = programs(model_of(steps, {"x": (1, 32, 8, 8)}, {"y": (1, 1, 16, 16)}), there)["layout"]
    plan = lowered(program, target=there).plan
    assert [len(k.leaves) for k in plan.kernels] == [2]
    tiled = [resized(k, program, {"o2": 4, "o3": 8}) for k in plan.kernels]
    made = lowered(program, plan=with_kernels(plan, tiled), target=there)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(made.on_loops(inputs)["y"], wanted) < 1e-6
    assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 1e-6
