"""Sums along rows, shared by the threads that have the rows in the maps around them: no barrier but for the shares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.gpu_stages import graph, on_emulator, on_loops, random_inputs
from tests.plans import map_leaves, map_tiles
from tilewright.backend import backend_for
from tilewright.backend.gpu.kernel.together import share_launch
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import Barrier, statements
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import IN_REGISTERS, Plan, Tile
from tilewright.tile_graph.plan.leaf_form import ThreadForm

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def normed(shape: tuple[int, ...], kind: int = FLOAT) -> ModelProto:
    """A residual that is added before a LayerNorm; both are wanted."""
    columns = shape[-1]
    nodes = [("Add", ["x", "r"], "z", {}), ("LayerNormalization", ["z", "g", "b"], "y", {"axis": -1})]
    ports = [("x", shape), ("r", shape), ("g", (columns,)), ("b", (columns,))]
    return graph(nodes, ports, [("y", shape)], dict.fromkeys("xrzgby", kind))


def summed_norm(parts: int, rows: int, columns: int) -> ModelProto:
    """Parts of a sum, added up before a LayerNorm: what is normed comes from no memory."""
    nodes = [("ReduceSum", ["x"], "z", {"keepdims": 0}), ("LayerNormalization", ["z", "g", "b"], "y", {"axis": -1})]
    ports = [("x", (parts, rows, columns)), ("g", (columns,)), ("b", (columns,))]
    made = graph(nodes, ports, [("y", (rows, columns))], dict.fromkeys("xzgby", FLOAT))
    from onnx import numpy_helper

    made.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "axes"))
    made.graph.node[0].input.append("axes")
    return made


def softmax(rows: int, columns: int, kind: int = FLOAT) -> ModelProto:
    shape = (rows, columns)
    return graph([("Softmax", ["x"], "y", {"axis": -1})], [("x", shape)], [("y", shape)], dict.fromkeys("xy", kind))


def normed_product(rows: int, columns: int, wide: int) -> ModelProto:
    """A block of the product has more threads than its rows' sums: they are not for other sums that know these."""
    nodes = [("LayerNormalization", ["x", "g", "b"], "z", {"axis": -1}), ("MatMul", ["z", "w"], "y", {})]
    ports = [("x", (rows, columns)), ("g", (columns,)), ("b", (columns,)), ("w", (columns, wide))]
    return graph(nodes, ports, [("y", (rows, wide))], dict.fromkeys("xgbzwy", FLOAT))


# whole rows of a block, several in a block, in turns; ends of rows; what no warps share evenly
CASES: dict[str, ModelProto] = {
    **{f"norm {rows} x {columns}": normed((rows, columns))
       for rows, columns in ((17, 768), (40, 128), (9, 64), (5, 384), (3, 4096), (6, 96), (7, 50), (2, 1024))},
    "norm of halves": normed((3, 7, 512), HALF),
    "sum and norm": summed_norm(3, 19, 256),
    "norm and product": normed_product(154, 32, 96),
    "softmax": softmax(21, 256),
    "softmax of halves": softmax(10, 1024, HALF),
    "softmax of odd rows": softmax(10, 197),
}  # fmt: skip


def compiled(model: ModelProto, cache: Path, name: str = "cuda-emulated") -> Artifact:
    target = machine(name)
    if name == "cuda-emulated":
        target = replace(target, units=2)
    return build(load(model, {}), target, Options(cache_dir=cache, stop_after="source" if name == "h200" else None))


def kept(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [h.tensor for k in plan.kernels for t in k.walk() if isinstance(t, Tile) for h in t.holds
            if h.layout == IN_REGISTERS]  # fmt: skip


def barriers(artifact: Artifact) -> list[int]:
    assert artifact.loops is not None
    return [sum(isinstance(s, Barrier) for s in statements(k.body)) for k in artifact.loops.kernels]


@pytest.mark.parametrize("name", CASES)
def test_rows_mean_what_they_should(name: str, kernel_cache: Path) -> None:
    artifact = compiled(CASES[name], kernel_cache)
    assert artifact.program is not None
    inputs = random_inputs(artifact)
    inputs["x"] = inputs["x"] + inputs["x"].dtype.type(3)  # a mean far from zero
    expected = evaluate(artifact.program, inputs)
    for found in (on_loops(artifact, inputs), on_emulator(artifact, inputs)):
        for tensor, value in found.items():
            wanted = expected[tensor].astype(np.float64)
            tolerance = 2e-3 if value.dtype == np.float16 else 2e-5
            np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


def test_threads_wait_for_shares_alone(kernel_cache: Path) -> None:
    """Two barriers of a row that six warps share, none of rows that a warp has."""
    long, short = (compiled(normed(rows), kernel_cache, "h200") for rows in ((384, 768), (4000, 128)))
    assert (len(kept(long.plan)), barriers(long)) == (2, [2])
    assert (len(kept(short.plan)), barriers(short)) == (2, [0])


def test_a_row_is_fetched_once(kernel_cache: Path) -> None:
    for model, fetches in ((normed((384, 768)), 1), (summed_norm(3, 384, 768), 3)):
        (text,) = compiled(model, kernel_cache, "h200").sources.values()
        assert text.count("p0.at(") + text.count("p0.apart(") == fetches
        assert "s0" not in text  # and not passed through shared memory


def test_all_threads_know_what_they_read(kernel_cache: Path) -> None:
    """A sum that a warp of six shares is not in the registers of all."""
    artifact = compiled(normed((384, 768)), kernel_cache, "h200")
    assert artifact.plan is not None and artifact.program is not None
    narrow = map_leaves(artifact.plan, lambda leaf: leaf.with_options(ThreadForm, split=32) if leaf.vector == "r0"
                        else leaf)  # fmt: skip
    check_plan(narrow, artifact.program, machine("h200"))
    with pytest.raises(InternalError, match="not all threads that read 'y_mean' know it"):
        lower_program(artifact.program, narrow, backend_for(machine("h200")).lower_kernel)


def test_plans_with_registers_are_checked(kernel_cache: Path) -> None:
    artifact = compiled(normed((384, 768)), kernel_cache, "h200")
    assert artifact.plan is not None and artifact.program is not None
    assert Plan.from_json(json.loads(json.dumps(artifact.plan.to_json()))) == artifact.plan
    alone = map_leaves(artifact.plan, lambda leaf: leaf.with_options(ThreadForm, split=1) if leaf.vector == "r0"
                       else leaf)  # fmt: skip
    with pytest.raises(InternalError, match="only a sum that threads of a block share does"):
        check_plan(alone, artifact.program, machine("h200"))


def test_a_launch_with_more_threads_stores_its_sums(kernel_cache: Path) -> None:
    kernels = [k for columns in (384, 768) for k in compiled_plan((300, columns), kernel_cache).kernels]
    assert all(any(h.layout == IN_REGISTERS for h in k.holds) for k in kernels)
    shared = share_launch(kernels, machine("h200"))
    assert shared is not None
    assert [any(h.layout == IN_REGISTERS for h in k.holds) for k in shared] == [False, True]


def compiled_plan(shape: tuple[int, ...], cache: Path) -> Plan:
    plan = compiled(normed(shape), cache, "h200").plan
    assert plan is not None
    return plan


def test_sums_that_know_each_other_are_the_same_threads(kernel_cache: Path) -> None:
    """Where a block has more threads than its sums take, one that nobody waits for may take others; not where it reads
    what the first ones keep."""
    target = replace(machine("cuda-emulated"), units=16)
    artifact = build(load(normed_product(77, 32, 96), {}), target, Options(cache_dir=kernel_cache))
    assert artifact.plan is not None and artifact.program is not None and len(kept(artifact.plan)) == 2
    wide = map_tiles(artifact.plan, lambda t: replace(t, count=2 * t.count) if t.over == "lanes" else t)
    inputs = random_inputs(artifact)
    (expected,) = (evaluate(artifact.program, inputs)[t.name] for t in artifact.program.outputs)
    loops = lower_program(artifact.program, wide, backend_for(target).lower_kernel)
    found = run_loops(loops, dict(inputs))["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
