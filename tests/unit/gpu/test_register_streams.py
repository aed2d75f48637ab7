"""Streams that warps keep in registers: what plans say of them, and kernels that mean what the Program means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.faults import inject, sites
from tests.gpu_launch import grid_of, source_of
from tests.gpu_stages import graph
from tests.plans import map_leaves, map_tiles
from tilewright.backend import backend_for
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.gpu import MEANINGS
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.expr import is_op, loads, walk
from tilewright.ir.forms.loops import Instruction, Kernel, LoopProgram, Memory, Store, statements, stmt_exprs
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.lower.program import lower_program
from tilewright.ops import lower
from tilewright.render.cuda import launch_shape, written_params
from tilewright.runtime import nvrtc
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import Contract, EmulatedModule
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import ASYNC, Plan, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm, ThreadForm
from tilewright.tile_graph.plan.text import plan_text
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.precision.choose import set_precision

HALF, BFLOAT16 = TensorProto.FLOAT16, TensorProto.BFLOAT16
TARGET = "cuda-emulated"


def attention(
    rows: int, keys: int, head: int, columns: int, heads: int = 1, kind: int = HALF, mask: tuple[int, ...] = (),
    scaled: bool = False, rounded: bool = False,
) -> ModelProto:  # fmt: skip
    """`mask`: of what shape something is added to the scores; `scaled`: the queries are multiplied first; `rounded`:
    the result is stored in bytes."""
    shapes = {"q": (1, heads, rows, head), "k": (1, heads, keys, head), "v": (1, heads, keys, columns)}
    nodes = [("Transpose", ["k"], "kt", {"perm": [0, 1, 3, 2]}),
             *([("Mul", ["q", "q"], "qs", {})] if scaled else []),
             ("MatMul", ["qs" if scaled else "q", "kt"], "s", {}),
             *([("Add", ["s", "m"], "t", {})] if mask else []),
             ("Softmax", ["t" if mask else "s"], "p", {"axis": -1}),
             ("MatMul", ["p", "v"], "u" if rounded else "o", {}),
             *([("Mul", ["u", "f"], "w", {}), ("Cast", ["w"], "o", {"to": TensorProto.INT8})] if rounded else []),
             ]  # fmt: skip
    inputs = [*shapes.items(), *([("m", mask)] if mask else []), *([("f", (1,))] if rounded else [])]
    names = [n for n, _ in inputs] + [n[2] for n in nodes]
    kinds = dict.fromkeys(names, kind) | ({"o": TensorProto.INT8} if rounded else {})
    return graph(nodes, inputs, [("o", (1, heads, rows, columns))], kinds)


def two_products(rows: int, summed: int, wide: int, columns: int, between: str = "Relu") -> ModelProto:
    """Two layers, the result of which is added to something else."""
    nodes = [("MatMul", ["x", "w"], "s", {}), ("Add", ["s", "b"], "t", {}), (between, ["t"], "p", {}),
             ("MatMul", ["p", "v"], "u", {}), ("Add", ["u", "r"], "o", {})]  # fmt: skip
    inputs = [("x", (rows, summed)), ("w", (summed, wide)), ("b", (wide,)), ("v", (wide, columns)),
              ("r", (rows, columns))]  # fmt: skip
    names = [n for n, _ in inputs] + [n[2] for n in nodes]
    return graph(nodes, inputs, [("o", (rows, columns))], dict.fromkeys(names, HALF))


# whole fragments and ends of rows, blocks, sums and columns; masks by key and by element; one block and several
CASES: Mapping[str, ModelProto] = {
    "whole": attention(32, 256, 16, 16),
    "odd": attention(20, 150, 24, 40),
    "masked": attention(32, 96, 16, 16, 2, mask=(1, 1, 1, 96)),
    "biased": attention(24, 40, 16, 24, 2, mask=(1, 2, 24, 40)),
    "bfloat16": attention(20, 70, 32, 16, kind=BFLOAT16),
    "scaled": attention(33, 49, 32, 16, scaled=True),
    "bytes": attention(20, 70, 16, 24, 2, rounded=True),
    "two_products": two_products(20, 32, 512, 24),
}


@dataclass(frozen=True)
class Made:
    program: Program
    plan: Plan
    loops: LoopProgram

    @property
    def kernel(self) -> Kernel:
        (found,) = [k for k in self.loops.kernels if matrices(k)]
        return found


def matrices(kernel: Kernel) -> bool:
    return any(isinstance(s, Instruction) and s.name in FORMS for s in statements(kernel.body))


def program_of(model: ModelProto, precision: str | None = None) -> Program:
    return fold_constants(set_precision(lower(load(model, {})), machine(TARGET), precision))


@cache
def made(name: str) -> Made:
    target = machine(TARGET)
    program = program_of(CASES[name])
    plan = make_plan(program, target, "connected", streaming="always")
    check_plan(plan, program, target)
    return Made(program, plan, lower_program(program, plan, backend_for(target).lower_kernel))


def warps_of(plan: Plan) -> Tile:
    (found,) = [t for t in plan.body.walk() if isinstance(t, Tile) and t.over == "warps" and t.stream is not None]
    return found


def inputs_of(program: Program) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    made = {t.name: rng.standard_normal([int(e) for e in t.shape]).astype(t.dtype.numpy) for t in program.inputs}
    return made | ({"f": np.array([40], np.float16)} if "f" in made else {})


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    allowed = 2e-2 if expected.dtype.name == "bfloat16" else 3e-3
    wide = expected.astype(np.float64)
    np.testing.assert_allclose(found.reshape(wide.shape).astype(np.float64), wide, rtol=0,
                               atol=max(allowed * max(1.0, float(np.abs(wide).max())),
                                        float(expected.dtype.kind == "i")))  # fmt: skip


# --- meaning


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_loops_mean_the_program(name: str) -> None:
    done = made(name)
    assert warps_of(done.plan).level == "registers"
    inputs = inputs_of(done.program)
    found = run_loops(done.loops, dict(inputs), instructions=MEANINGS)
    (output,) = done.program.outputs
    assert_close(found[output.name], np.asarray(evaluate(done.program, inputs)[output.name]))


def test_rows_that_are_masked_whole_have_no_number() -> None:
    """As without a stream: the softmax of -inf alone is NaN; other rows are as they are."""
    done = made("biased")
    inputs = inputs_of(done.program)
    inputs["m"][0, 0, 3] = -np.inf
    found = run_loops(done.loops, dict(inputs), instructions=MEANINGS)["o"].reshape(1, 2, 24, 24)
    expected = np.asarray(evaluate(done.program, inputs)["o"])
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), np.isnan(expected.astype(np.float32)))
    assert np.isnan(found[0, 0, 3].astype(np.float32)).all() and np.isfinite(found[0, 1].astype(np.float32)).all()


def contract_of(kernel: Kernel) -> Contract:
    written = written_params(kernel)
    read = tuple(p.name for p in kernel.params if p not in written)
    return Contract(writes_all=tuple(p.name for p in written), reads_all=read)


def emulated(names: tuple[str, ...], cache_dir: Path) -> None:
    on_emulator({name: made(name) for name in names}, cache_dir)


def on_emulator(found: Mapping[str, Made], cache_dir: Path) -> None:
    kernels = {name: replace(done.kernel, name=name) for name, done in found.items()}
    module = EmulatedModule({n: source_of(k) for n, k in kernels.items()}, Cache(cache_dir), optimise=0)
    for name, kernel in kernels.items():
        done = found[name]
        inputs = inputs_of(done.program)
        (call,) = done.loops.calls
        arrays = [np.ascontiguousarray(inputs[a]) if a in inputs
                  else np.full([int(e) for e in p.shape], np.nan if p.dtype.is_float else 99, p.dtype.numpy)
                  for a, p in zip(call.arguments, kernel.params, strict=True)]  # fmt: skip
        contract = contract_of(kernel)
        module.launch(name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes, arrays,
                      contract)  # fmt: skip
        assert_close(arrays[-1], np.asarray(evaluate(done.program, inputs)[call.arguments[-1]]))
        assert module.bank_conflicts == 0, name


def test_emulated_streams_without_bank_conflicts(tmp_path: Path) -> None:
    emulated(("odd",), tmp_path)


@pytest.mark.slow
def test_emulated_streams_of_all_kinds(tmp_path: Path) -> None:
    emulated(tuple(n for n in CASES if n != "odd"), tmp_path)


@pytest.mark.slow
def test_faults_in_streams_are_reported(tmp_path: Path) -> None:
    """Barriers and waits left out, and a sample of shifted indices."""
    kernel = made("whole").kernel
    found = [s for s in sites(kernel) if s.kind != "bound"]
    first = [s for s in found if s.kind in ("barrier", "wait")]
    rest = [s for s in found if s not in first]
    chosen = [*first, *rest[:: max(1, len(rest) // 24)]]
    mutants = [inject(kernel, s, f"fault_{i}") for i, s in enumerate(chosen)]
    module = EmulatedModule({k.name: source_of(k) for k in mutants}, Cache(tmp_path), optimise=0)
    done = made("whole")
    inputs = inputs_of(done.program)
    (call,) = done.loops.calls
    expected = np.asarray(evaluate(done.program, inputs)[call.arguments[-1]]).astype(np.float64)
    unseen = []
    for site, mutant in zip(chosen, mutants, strict=True):
        arrays = [np.ascontiguousarray(inputs[a]) if a in inputs
                  else np.full([int(e) for e in p.shape], np.nan, p.dtype.numpy)
                  for a, p in zip(call.arguments, mutant.params, strict=True)]  # fmt: skip
        contract = contract_of(mutant)
        faults = module.inspect(mutant.name, grid_of(mutant, ()), launch_shape(mutant).threads,
                                place_shared(mutant).bytes, arrays, contract)  # fmt: skip
        off = np.abs(arrays[-1].reshape(expected.shape).astype(np.float64) - expected)
        if not faults and not np.all(off < 1e-2) and site.kind in ("barrier", "wait"):
            unseen.append(site.describe())
    assert not unseen


def with_shared_rows(done: Made, warps: int) -> Made:
    """The same with so many warps that have the same rows, each a part of every block."""
    plan = map_tiles(done.plan, lambda t: replace(t, count=t.count * warps) if t.over == "lanes" else t)
    plan = map_leaves(plan, lambda x: x.with_options(FragmentForm, split=warps) if x.instruction and x.part == "step"
                      else x)  # fmt: skip
    check_plan(plan, done.program, machine(TARGET))
    return Made(done.program, plan, lower_program(done.program, plan, backend_for(machine(TARGET)).lower_kernel))


@pytest.mark.parametrize(("name", "warps"), [("whole", 2), ("whole", 4), ("odd", 2), ("odd", 4), ("two_products", 4)])
def test_warps_that_share_rows_join_what_they_have(name: str, warps: int, tmp_path: Path) -> None:
    """Largest numbers, sums and products of parts, of one block and of several, the last cut."""
    done = with_shared_rows(made(name), warps)
    inputs = inputs_of(done.program)
    expected = np.asarray(evaluate(done.program, inputs)["o"])
    assert_close(run_loops(done.loops, dict(inputs), instructions=MEANINGS)["o"], expected)
    on_emulator({name: done}, tmp_path)


def test_rows_whose_part_is_masked_are_those_of_the_others() -> None:
    done = made("masked")
    sums = [x for x in warps_of(done.plan).leaves if x.part == "step" and x.instruction]
    assert [x.options(FragmentForm).split for x in sums] == [2]
    inputs = inputs_of(done.program)
    inputs["m"][..., 48:] = -np.inf  # all that the second warp has
    found = run_loops(done.loops, dict(inputs), instructions=MEANINGS)["o"]
    assert_close(found, np.asarray(evaluate(done.program, inputs)["o"]))


def test_short_streams_are_shared_by_more_warps() -> None:
    """Of one block: 128 places of 12 heads have too few rows for the multiprocessors, 4096 of 32 have not."""
    target = machine("h200")
    shared = []
    for heads, rows in ((12, 128), (32, 4096)):
        plan = make_plan(program_of(attention(rows, rows, 64, 64, heads)), target, "connected", streaming="always")
        shared.append(max(x.options(FragmentForm).split for x in warps_of(plan).leaves if x.instruction))
    assert shared == [2, 1]


# --- plans


def test_a_plan_says_what_warps_keep() -> None:
    plan = made("whole").plan
    warps = warps_of(plan)
    stream = warps.stream
    assert stream is not None and stream.level == "registers" and Plan.from_json(plan.to_json()) == plan
    assert [h.tensor for h in stream.holds if h.fill == ASYNC] == ["k", "v"]
    assert [h.tensor for h in warps.holds if h.fill == ASYNC] == ["q"]
    assert {h.tensor for h in stream.holds if h.mode == "carry"} == {"p_max", "p_sum", "o"}
    assert "k by async copy in 2 stages swizzled" in plan_text(plan) and dict(stream.sizes)["s"] < 256


def refused(change: Callable[[Plan], Plan]) -> str:
    done = made("whole")
    with pytest.raises(InternalError) as caught:
        check_plan(change(done.plan), done.program, machine(TARGET))
    return str(caught.value)


def tiles(change: Callable[[Tile], Tile], over: str) -> Callable[[Plan], Plan]:
    return lambda plan: map_tiles(plan, lambda t: change(t) if t.over == over else t)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (tiles(lambda t: replace(t, sizes=(("m", 8), t.sizes[1])), "warps"), "of a warp are not whole fragments"),
        (tiles(lambda t: replace(t, count=2 * t.count), "lanes"), "warps of 32 are not"),
        (lambda plan: map_leaves(plan, lambda x: x.with_options(FragmentForm, split=3) if x.instruction else x),
         "3 warps with the same rows do not share blocks of 128"),
        (lambda plan: map_leaves(plan, lambda x: x.with_options(FragmentForm, step=24) if x.instruction else x),
         "takes steps of 16, not 24"),
        (lambda plan: map_leaves(plan, lambda x: replace(x, form=ThreadForm())), "share the rows of its products"),
        (tiles(lambda t: replace(t, holds=tuple(replace(h, tensor="o") if h.fill else h for h in t.holds)), "warps"),
         "which no leaf of the stream reads"),
    ],
    ids=range(6),
)  # fmt: skip
def test_what_the_grammar_refuses(change: Callable[[Plan], Plan], expected: str) -> None:
    assert expected in refused(change)


def test_a_factor_of_rows_is_applied_to_the_sum() -> None:
    """1 / sum leaves the narrow operand of the second product, where what is left never exceeds 1."""
    names = {t.name for c in program_of(CASES["whole"]).computes for t in c.outputs}
    assert {"p_bare", "o_sum_bare"} <= names and "p" not in names


def test_a_factor_stays_where_the_rest_may_be_large() -> None:
    """x * rsqrt(mean of squares), rounded, may not become x, rounded: float16 ends at 65504."""
    nodes = [("ReduceL2", ["x"], "n", {"axes": [1], "keepdims": 1}), ("Div", ["x", "n"], "y", {}),
             ("MatMul", ["y", "w"], "o", {})]  # fmt: skip
    model = graph(nodes, [("x", (32, 64)), ("w", (64, 32))], [("o", (32, 32))])
    assert not any(t.name.endswith("_bare") for c in program_of(model, "float16").computes for t in c.outputs)


# --- what warps wait for


def test_what_is_read_beside_products_stands_behind_no_branch() -> None:
    """Biases and residuals of rows behind the end are read at the last row: each branch would wait for memory."""
    made_of = (e for s in statements(made("two_products").kernel.body) for e in stmt_exprs(s))
    chosen = [n for n in walk(*made_of) if is_op(n, "select")]
    assert not [x for n in chosen for x in loads(*n.args[1:]) if x.source.memory is Memory.GLOBAL]


def test_all_operands_of_a_stream_are_copied_while_others_are_used() -> None:
    """Blocks that lie beside each other in lines of the operand, too, begin with a packet."""
    kernel = made("two_products").kernel
    stored = [s for s in statements(kernel.body) if isinstance(s, Store) and s.buffer.memory is Memory.SHARED]
    assert warps_of(made("two_products").plan).stream is not None and not stored


def test_long_functions_between_products_count() -> None:
    """A warp has little else to do while it computes erf; nothing of that is hidden behind products."""
    taken = []
    for between in ("Relu", "Erf"):
        program = program_of(two_products(8192, 32, 128, 32, between))
        plan = make_plan(program, machine("h200"), "connected", streaming="always")
        warps_of(plan)
        taken.append(sum(k.estimate.seconds for k in plan.kernels))
    assert taken[1] > 1.2 * taken[0]


# --- machine code


@pytest.mark.parametrize("architecture", (pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"))
def test_streams_compile_without_spills(architecture: str) -> None:
    target = machine({"sm_80": "a100", "sm_90a": "h200"}[architecture])
    program = fold_constants(set_precision(lower(load(attention(128, 384, 64, 64), {})), target, None))
    plan = make_plan(program, target, "connected", streaming="always")
    warps_of(plan)
    loops = lower_program(program, plan, backend_for(target).lower_kernel)
    (kernel,) = loops.kernels
    found = nvrtc.compile_to_cubin(source_of(kernel), architecture).resources[kernel.name]
    assert found.spill_bytes == found.stack_bytes == 0
