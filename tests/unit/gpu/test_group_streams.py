"""Streams whose products four warps run as one: kernels that mean what the Program means, and faults that are seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bench.gpu_attention import model_of
from tests.gpu_launch import grid_of, source_of
from tests.gpu_stages import graph
from tests.plans import map_tiles
from tests.unit.gpu.test_register_streams import (
    HALF,
    Made,
    assert_close,
    attention,
    contract_of,
    inputs_of,
    warps_of,
)
from tilewright.backend import backend_for
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.gpu import MEANINGS
from tilewright.ir.forms.loops import Kernel
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.lower.program import lower_program
from tilewright.ops import lower
from tilewright.render.cuda import launch_shape
from tilewright.runtime import nvrtc
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import EmulatedModule
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.plan.text import plan_text
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.clean.triangles import compare_indices
from tilewright.transform.precision.choose import set_precision
from tilewright.tune.groups import find_groups

BFLOAT16 = TensorProto.BFLOAT16


def shared_keys(heads: int, each: int, rows: int, keys: int, size: int) -> ModelProto:
    """Several heads of queries for one of keys and values."""
    shapes = {"q": (heads, each, rows, size), "k": (heads, 1, keys, size), "v": (heads, 1, keys, size)}
    nodes = [("Transpose", ["k"], "kt", {"perm": [0, 1, 3, 2]}), ("MatMul", ["q", "kt"], "s", {}),
             ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})]  # fmt: skip
    return graph(nodes, [*shapes.items()], [("o", (heads, each, rows, size))], dict.fromkeys("qkvo", HALF) | {
        n[2]: HALF for n in nodes})  # fmt: skip


def causal(rows: int, keys: int, size: int, past: int = 0, heads: int = 1, added: bool = False) -> ModelProto:
    """Row i sees keys up to i + past, by a table of truths or by one that is `added`."""
    seen = np.tri(rows, keys, past, dtype=np.bool_)
    low = np.array(-np.inf, np.float16)
    nodes = [helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
             helper.make_node("MatMul", ["q", "kt"], ["s"]),
             helper.make_node("Add", ["s", "mask"], ["t"]) if added
             else helper.make_node("Where", ["mask", "s", "low"], ["t"]),
             helper.make_node("Softmax", ["t"], ["p"], axis=-1),
             helper.make_node("MatMul", ["p", "v"], ["o"])]  # fmt: skip
    table = np.where(seen, np.float16(0), low).astype(np.float16) if added else seen
    given = [numpy_helper.from_array(table, "mask"), *([] if added else [numpy_helper.from_array(low, "low")])]
    lengths = {"q": rows, "k": keys, "v": keys, "o": rows}
    ports = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT16, [1, heads, length, size])
             for n, length in lengths.items()}  # fmt: skip
    made = helper.make_graph(nodes, "causal", [ports[n] for n in "qkv"], [ports["o"]], given)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# one block and several, whole ones and ends of rows, blocks, sums and columns; masks by key and by element
CASES: Mapping[str, ModelProto] = {
    "one_block": attention(64, 64, 64, 64),
    "several": attention(128, 256, 64, 64),
    "odd": attention(100, 150, 24, 40),
    "eighty": attention(70, 200, 80, 80),
    "masked": attention(64, 160, 16, 16, 2, mask=(1, 1, 1, 160)),
    "biased": attention(72, 136, 16, 24, 2, mask=(1, 2, 72, 136)),
    "bfloat16": attention(64, 200, 32, 16, kind=BFLOAT16),
    "scaled": attention(65, 130, 32, 16, scaled=True),
    "shared_keys": shared_keys(2, 2, 64, 130, 16),
    "factor": model_of((1, 130, 32), "float16"),
    "causal_factor": model_of((1, 140, 16), "float16", causal=True),
    "causal": causal(256, 256, 32, heads=2),
    "odd_causal": causal(150, 190, 16, past=40, added=True),
}


PRECISION = {"factor": "float16", "causal_factor": "float16"}
IN_TURN = ("several", "odd", "causal", "causal_factor")  # by two groups in a block


def grouped(registers: int = 1 << 15) -> Target:
    """An H200 on which single warps multiply so slowly that groups are always taken, some in a block at most."""
    target = machine("h200")
    rates = tuple((name, rate / 1000 if name.startswith("mma_") else rate) for name, rate in target.rates)
    return replace(target, rates=rates, units=1, register_file=registers)


def is_in_turn(plan: Plan) -> bool:
    """By two groups, over several blocks."""
    warps = warps_of(plan)
    assert warps.stream is not None
    sizes = warps.axes[0].extent, warps.stream.sizes[0][1]
    return sizes == (128, 64) and (warps.leaves[0].instruction or "").startswith("wgmma_")


@cache
def made(name: str) -> Made:
    target = grouped(1 << 16 if name in IN_TURN else 1 << 15)
    program = compare_indices(fold_constants(set_precision(lower(load(CASES[name], {})), target, PRECISION.get(name))))
    plan = make_plan(program, target, "connected", streaming="always")
    if name in IN_TURN:
        (group,) = find_groups(program, plan, target)
        others = (plan.with_kernels({k.name: k}) for k in (group.own, *group.alternatives(20)))
        plan = next(p for p in others if is_in_turn(p))
    check_plan(plan, program, target)
    assert {x.instruction for x in warps_of(plan).leaves} <= {"wgmma_float16", "wgmma_bfloat16", None}
    return Made(program, plan, lower_program(program, plan, backend_for(target).lower_kernel))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_loops_mean_the_program(name: str) -> None:
    done = made(name)
    inputs = inputs_of(done.program)
    found = run_loops(done.loops, dict(inputs), instructions=MEANINGS)
    (output,) = done.program.outputs
    assert_close(found[output.name], np.asarray(evaluate(done.program, inputs)[output.name]))


def test_rows_that_are_masked_whole_have_no_number() -> None:
    done = made("biased")
    inputs = inputs_of(done.program)
    inputs["m"][0, 0, 3] = -np.inf
    found = run_loops(done.loops, dict(inputs), instructions=MEANINGS)["o"].reshape(1, 2, 72, 24)
    expected = np.asarray(evaluate(done.program, inputs)["o"])
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), np.isnan(expected.astype(np.float32)))
    assert np.isnan(found[0, 0, 3].astype(np.float32)).all() and np.isfinite(found[0, 1].astype(np.float32)).all()


def test_what_rows_do_not_see_is_not_walked() -> None:
    stream = made("causal").plan.kernels[0].stream
    assert stream is not None and stream.until == 0 and "up to 0 behind each row" in plan_text(made("causal").plan)
    assert not made("causal").program.constants
    other = made("odd_causal").plan.kernels[0].stream
    assert other is not None and other.until == 40 and made("biased").plan.kernels[0].stream.until is None


def test_plans_that_leave_out_what_rows_see_are_refused() -> None:
    """By the grammar where it makes no sense, by the lowering where nothing in the kernel says it."""

    def seeing(until: int) -> Plan:
        return map_tiles(plan, lambda t: replace(t, until=until) if any(h.mode == "carry" for h in t.holds) else t)

    target, program, plan = grouped(), made("several").program, made("several").plan
    with pytest.raises(InternalError, match="rows that see up to -1 behind"):
        check_plan(seeing(-1), program, target)
    with pytest.raises(InternalError, match="its rows see more than 3 places behind them"):
        lower_program(program, seeing(3), backend_for(target).lower_kernel)


@pytest.mark.parametrize("name", ("causal", "odd_causal"))
def test_keys_that_no_row_of_a_block_sees_are_not_read(name: str) -> None:
    """What they are does not matter: with NaN in their place the first block's rows are as they were."""
    done = made(name)
    (kernel,) = done.plan.kernels
    stream = kernel.stream
    assert stream is not None and stream.until is not None
    rows, block = dict(kernel.cut)["o2"], stream.sizes[0][1]
    walked = -(-(rows + stream.until) // block) * block
    inputs = inputs_of(done.program)
    expected = np.asarray(evaluate(done.program, inputs)["o"])
    assert walked < inputs["k"].shape[2]
    inputs["k"][:, :, walked:] = inputs["v"][:, :, walked:] = np.nan
    found = run_loops(done.loops, dict(inputs), instructions=MEANINGS)["o"].reshape(expected.shape)
    assert_close(found[:, :, :rows], expected[:, :, :rows])


def arrays_of(name: str, kernel: Kernel) -> tuple[list[np.ndarray], np.ndarray]:
    """What a kernel is launched with, and what it should leave in the last array."""
    done = made(name)
    inputs = inputs_of(done.program)
    (call,) = done.loops.calls
    arrays = [np.ascontiguousarray(inputs[a]) if a in inputs
              else np.full([int(e) for e in p.shape], np.nan, p.dtype.numpy)
              for a, p in zip(call.arguments, kernel.params, strict=True)]  # fmt: skip
    return arrays, np.asarray(evaluate(done.program, inputs)[call.arguments[-1]])


def emulated(names: tuple[str, ...], cache_dir: Path) -> None:
    kernels = {name: replace(made(name).kernel, name=name) for name in names}
    module = EmulatedModule({n: source_of(k) for n, k in kernels.items()}, Cache(cache_dir), optimise=0)
    for name, kernel in kernels.items():
        arrays, expected = arrays_of(name, kernel)
        module.launch(name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes, arrays,
                      contract_of(kernel))  # fmt: skip
        assert_close(arrays[-1], expected)


def test_emulated_streams(tmp_path: Path) -> None:
    emulated(("odd", "odd_causal"), tmp_path)


@pytest.mark.slow
def test_emulated_streams_of_all_kinds(tmp_path: Path) -> None:
    emulated(tuple(n for n in CASES if not n.startswith("odd")), tmp_path)


# a fault in the text of a kernel: what is written, what is written instead
FAULTS: Mapping[str, tuple[str, str]] = {
    "no fence": (r"tw::async_fence\(\);", ""),
    "scores are not waited for": (r"tw::wgmma_wait<\d, \d+>\(scores.*\);", ""),
    "sums are not waited for": (r"tw::wgmma_wait<0, \d+>\(kept.*\);", ""),
    "scores are waited for a group short": (r"tw::wgmma_wait<1, (\d+)>\(scores", r"tw::wgmma_wait<2, \1>(scores"),
    "no wait for copies": (r"tw::wait<\d>\(\);", ""),
    "no barrier": (r"tw::barrier\(\);", ""),
    "groups do not meet": (r"tw::meet\(\);", ""),
    "a place less for what comes half a turn later": (r"(ring2\.\w+\(\(?[^,]*) % 3", r"\1 % 2"),
    "another line": (r"(tw::wgmma_kept_float16<.*)at\((.*), 0, 0, 0\)", r"\1at(\2, 8, 0, 0)"),
}


@pytest.mark.slow
def test_faults_are_reported(tmp_path: Path) -> None:
    name = "several"
    kernel = made(name).kernel
    texts = {}
    for number, (what, instead) in enumerate(FAULTS.values()):
        renamed = replace(kernel, name=f"fault_{number}")
        texts[renamed.name], count = re.subn(what, instead, source_of(renamed))
        assert count
    module = EmulatedModule(texts, Cache(tmp_path), optimise=0)
    for fault, text in zip(FAULTS, texts, strict=True):
        arrays, expected = arrays_of(name, kernel)
        found = module.inspect(text, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes,
                               arrays, contract_of(kernel))  # fmt: skip
        off = np.abs(arrays[-1].reshape(expected.shape).astype(np.float64) - expected.astype(np.float64))
        assert found or not np.all(off < 1e-2), fault


_LATER = pytest.mark.slow


COMPILED: Mapping[str, ModelProto] = {
    "64": attention(1024, 1000, 64, 64, 16),
    "80": attention(1024, 1000, 80, 80, 16),
    "128": model_of((16, 1024, 128), "float16"),
    "biased": attention(1024, 1000, 64, 64, 16, mask=(1, 16, 1024, 1000)),
    "bfloat16": attention(1024, 1000, 64, 64, 16, kind=BFLOAT16),
    "causal": model_of((4, 2048, 128), "float16", causal=True),
}


@pytest.mark.parametrize("name", ("64", *(pytest.param(n, marks=_LATER) for n in COMPILED if n != "64")))
def test_streams_compile_without_spills(name: str) -> None:
    """And no product waits for another because the assembler cannot tell that it need not."""
    target = machine("h200")
    own = "float16" if name in ("128", "causal") else None
    program = compare_indices(fold_constants(set_precision(lower(load(COMPILED[name], {})), target, own)))
    plan = make_plan(program, target, "connected", streaming="always")
    assert (warps_of(plan).leaves[0].instruction or "").startswith("wgmma_")
    (kernel,) = lower_program(program, plan, backend_for(target).lower_kernel).kernels
    made = nvrtc.compile_to_cubin(source_of(kernel), "sm_90a")
    found = made.resources[kernel.name]
    assert found.spill_bytes == found.stack_bytes == 0 and not made.remarks
