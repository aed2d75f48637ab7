"""Vectors of several widths in one kernel: each name has one width in C, and a C compiler takes the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import tilewright
from tests.cpu_stages import model_of
from tests.fuzz.widths import loops_of, refused, sources_of
from tests.plans import map_leaves
from tests.unit.cpu.test_memory_contents import layers
from tilewright import Options, ops
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load as load_model
from tilewright.intrinsics.cpu import CPU as INSTRUCTIONS
from tilewright.intrinsics.table import check_registers
from tilewright.ir.analysis.verify import verify_kernel
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, const, load, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, Instruction, Kernel, Memory, Operand, Store
from tilewright.render.c import render_kernel
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts

F = dtypes.float32


def test_what_all_lanes_read_is_a_vector_of_each_width(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="compiles for any machine")
    given, wide = Buffer("p0", (4,), F, Memory.GLOBAL), Buffer("wide", (16,), F, Memory.REGISTER)
    result, narrow = Buffer("p1", (24,), F, Memory.GLOBAL), Buffer("narrow", (8,), F, Memory.REGISTER)
    body: list[object] = []
    for buffer, lanes in ((narrow, 8), (wide, 16)):
        fill = Axis("lane", lanes)
        body.append(For(fill, ForKind.VECTOR, (Store(buffer, (var(fill),), load(given, (const(2),))),)))
    for buffer, lanes, place in ((narrow, 8, 0), (wide, 16, 8)):
        lane = Axis("lane", lanes)
        stored = Store(result, (var(lane) + place,), load(buffer, (var(lane),)))
        body.append(For(lane, ForKind.VECTOR, (stored,)))
    tiles = For(Axis("tile", 1), ForKind.PARALLEL, (Alloc(wide, (Alloc(narrow, tuple(body)),)),))  # type: ignore[arg-type]
    kernel = Kernel("k", (given, result), (tiles,))
    verify_kernel(kernel)
    text = render_kernel(kernel, {})
    assert not refused({"k": text}, machine("emerald_rapids"), tmp_path)


@pytest.mark.parametrize("columns", [33, 37, 47])  # one lane, some and all but one beyond whole vectors
@pytest.mark.parametrize("name", ["emerald_rapids", "avx2_desktop", "neoverse_n1"])
def test_partial_sums_come_back_as_whole_registers(columns: int, name: str, tmp_path: Path) -> None:
    """Sums in passes whose last vector is partly filled: what waits of it is not a shorter vector."""
    pytest.importorskip("ziglang", reason="compiles for any machine")
    target = machine(name)
    program = fold_constants(ops.lower(load_model(layers((1, 301), (301, columns)), {})))
    program = choose_layouts(program, target)
    plan = make_plan(program, target, "register")
    cut = (("r0", 100),)
    in_passes = map_leaves(plan, lambda leaf: leaf.with_options(VectorForm, cut=cut) if leaf.register else leaf)
    sources = sources_of(loops_of(program, in_passes, target), target)
    assert any("pass_0" in text for text in sources.values())
    assert not refused(sources, target, tmp_path)


def test_an_instruction_takes_whole_registers() -> None:
    name, row = next((n, r) for n, r in INSTRUCTIONS.items() if r.operands and r.operands[0].span == 16)
    short = Buffer("acc", (8,), dtypes.int32, Memory.REGISTER)
    others = [Operand(Buffer("m", (64,), dtypes.int8, Memory.GLOBAL), (const(0),)) for _ in row.operands[1:]]
    with pytest.raises(InternalError, match="takes 16 lanes, acc has 8"):
        check_registers(row, Instruction(name, (Operand(short, (const(0),)), *others)))


def test_a_small_integer_that_is_computed_fills_the_lanes(kernel_cache: Path) -> None:
    """In C the smaller of two 16-bit numbers is an int; a vector takes none of that."""
    rng = np.random.default_rng(0)
    c, x, y = (rng.integers(-9, 9, shape).astype(np.int16) for shape in ((3, 7, 1), (7, 1), (7, 2)))
    steps = [
        ("Add", ["c", "k"], "s", {}),
        ("Min", ["x", "s"], "m", {}),
        ("Tile", ["k", "two"], "t", {}),
        ("Max", ["t", "m"], "n", {}),
        ("Add", ["n", "y"], "z", {}),
    ]
    constants = {"c": c, "k": np.array([7], np.int16), "two": np.array([2])}
    types = dict.fromkeys("xyz", TensorProto.INT16)
    model = model_of(steps, {"x": x.shape, "y": y.shape}, {"z": (3, 7, 2)}, constants, types)
    (z,) = tilewright.compile(model, options=Options(cache_dir=kernel_cache, threads=1))(x, y)
    np.testing.assert_array_equal(z, np.maximum(np.int16(7), np.minimum(x, c + np.int16(7))) + y)
