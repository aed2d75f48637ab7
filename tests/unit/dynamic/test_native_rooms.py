"""Kernels whose loops end where a run tells give what the Program for that number alone gives, whatever lies behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from onnx.helper import make_node as N

from tests.unit.dynamic.test_extents import CASES, open_graph
from tilewright import Options
from tilewright.api import compile_open
from tilewright.backend import backend_for
from tilewright.intrinsics.cpu import MEANINGS as CPU_MEANINGS
from tilewright.ir.forms.expr import Expr
from tilewright.ir.forms.graph import Graph, Room
from tilewright.ir.forms.loops import For, statements
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.lower.program import lower_program
from tilewright.ops.extents import settled
from tilewright.ops.lower import lower
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Tile
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts

QUICK = ("attention",)
WIDE = Room(5, 40)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES if n != "all in order"]
)
def test_one_model_for_all_numbers(name: str, kernel_cache: Path) -> None:
    nodes, inputs, constants = CASES[name]
    is_wide = name not in ("gather by run-time places", "split", "the largest")
    room = WIDE if is_wide else Room(5, 8)
    rooms = (room, Room(9, 16)) if any("m" in shape for _, shape in inputs.values()) else (room,)
    graph = open_graph(nodes, inputs, rooms, **constants)
    model = compile_open(graph, Options(cache_dir=kernel_cache, threads=2))
    for number in (room.low, room.low + 1, room.high - 3, room.high - 1, room.high):
        check(model, graph, (number, *(9 + number % 8 for _ in rooms[1:])))


def check(model: Any, graph: Graph, numbers: tuple[int, ...]) -> None:
    exact = lower(settled(graph, numbers))
    rng = np.random.default_rng(sum(numbers))
    given = [rng.standard_normal(t.shape).astype(t.dtype.numpy) * (0 if t.dtype.is_int else 1) for t in exact.inputs]
    wanted = evaluate(exact, {t.name: a for t, a in zip(exact.inputs, given, strict=True)})
    found = model.at(numbers, given)
    for got, want in zip(found, wanted.values(), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("machine_name", ["emerald_rapids", "neoverse_n1"])
def test_a_stream_walks_what_there_is_of_it(machine_name: str) -> None:
    """Attention in a room, keys in blocks: no more blocks than a run has keys for, and of those no lane is asked for
    itself but in the last vectors of the last one."""
    nodes = [N("Transpose", ["x"], ["k"]), N("MatMul", ["x", "k"], ["s"]), N("Softmax", ["s"], ["p"]),
             N("MatMul", ["p", "x"], ["y"])]  # fmt: skip
    graph = open_graph(nodes, {"x": (TensorProto.FLOAT, ["n", 16])}, (Room(30, 230),))
    target = machine(machine_name)
    program = choose_layouts(fold_constants(lower(graph)), target)
    plan = make_plan(program, target, streaming="always")
    loops = lower_program(program, plan, backend_for(target).lower_kernel)
    walks = [s for k in loops.kernels for s in statements(k.body) if isinstance(s, For) and s.axis.name == "block"]
    assert walks and all(isinstance(s.axis.extent, Expr) for s in walks)
    for number in (30, 63, 64, 65, 200, 230):
        exact = lower(settled(graph, (number,)))
        x = np.random.default_rng(number).standard_normal((number, 16)).astype(np.float32)
        (want,) = evaluate(exact, {exact.inputs[0].name: x}).values()
        roomy = np.full((230, 16), np.nan, np.float32)
        roomy[:number] = x
        names = [t.name for t in program.inputs]
        tensors: dict[str, np.ndarray] = dict(zip(names, (roomy, np.array([number])), strict=True))
        # what lies behind may be read, along with what does not, wherever nothing comes of it
        run_loops(loops, tensors, instructions=CPU_MEANINGS, check=False)
        np.testing.assert_allclose(tensors[program.outputs[0].name][:number], want, rtol=1e-4, atol=1e-5)


def test_reductions_along_a_stream_fill_its_blocks() -> None:
    """Register tiles that suit all of a reduction may leave over much of every block."""
    nodes = [N("Transpose", ["x"], ["k"]), N("MatMul", ["x", "k"], ["s"]), N("Softmax", ["s"], ["p"]),
             N("MatMul", ["p", "x"], ["y"])]  # fmt: skip
    for number in (1500, 1000, 430):
        target = machine("emerald_rapids")
        graph = settled(open_graph(nodes, {"x": (TensorProto.FLOAT, ["n", 64])}, (Room(30, 2000),)), (number,))
        plan = make_plan(choose_layouts(fold_constants(lower(graph)), target), target, streaming="always")
        blocks = [(tile, size) for tile in plan.body.walk() if isinstance(tile, Tile) for axis, size in tile.sizes
                  if axis == "s"]  # fmt: skip
        along = [(block, size) for tile, block in blocks for leaf in tile.leaves if leaf.part == "step"
                 for axis, size in leaf.register if axis == leaf.vector and axis[0] == "r"]  # fmt: skip
        assert along and all(block % size == 0 for block, size in along)
