"""What plans for wide vectors must avoid: gathered lanes, spilled windows, checked lanes; and the loops read back."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench.assembly import Loop, Reading, innermost
from tests.cpu_stages import Step, model_of
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.runtime.toolchain import Compiler, NativeMachine, default_flags
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm

WIDE = machine("emerald_rapids")
TEXT = """\
k0:
\txorl\t%eax, %eax
.L2:
\tmovq\t%rcx, %rdx
.L3:
\tvbroadcastss\t(%rdx), %zmm2
\tvmovaps\t64(%rsp), %zmm3
\tvfmadd231ps\t(%rsi), %zmm2, %zmm0
\tvfmadd231ps\t4(%rdx){1to16}, %zmm3, %zmm1
\tvinsertps\t$16, 8(%rdx), %xmm4, %xmm4
\tvmovaps\t%zmm3, 64(%rsp)
\taddq\t$4, %rdx
\tcmpq\t%rdx, %rdi
\tjne\t.L3
\tincq\t%rax
\tjne\t.L2
\tret
"""


def test_innermost_loops_are_read() -> None:
    (loop,) = innermost(TEXT)
    assert loop.line == 5 and loop.body[0].startswith("vbroadcastss") and loop.body[-1].startswith("jne")
    assert (loop.fmas, loop.reads, loop.spills, loop.inserts, loop.lanes) == (2, 5, 2, 1, 16)
    assert Reading("k0", 1, loop, 2.0).share(16) == 0.5


def test_text_without_loops() -> None:
    assert innermost("k0:\n\tjmp\t.L1\n.L1:\n\tret\n") == []
    assert Loop(1, ("ret",)).lanes == 1


def test_gcc_does_not_carry_windows_between_turns() -> None:
    """Its predictive commoning spilled 160 vectors in the loop of a depthwise window."""
    there = NativeMachine("x86_64", "", frozenset({"avx512f"}))
    assert "-fno-predictive-commoning" in default_flags(Compiler(("gcc",), "gcc", "12"), there)
    assert "-fno-predictive-commoning" not in default_flags(Compiler(("clang",), "clang", "17"), there)


def planned(model: object, target: Target) -> Artifact:
    return build(load(model, {}), target, Options(stop_after="plan"))  # type: ignore[arg-type]


def nests(artifact: Artifact) -> dict[str, Leaf]:
    assert artifact.plan is not None
    return {n.core: n for kernel in artifact.plan.kernels for n in kernel.leaves}


def test_a_transpose_stays_beside_the_sum() -> None:
    """softmax(QKᵀ): keys are transposed once into a tile, and scores run along the keys with full vectors."""
    steps = [("MatMul", ["x", "p"], "q", {}), ("Transpose", ["k"], "kt", {"perm": [0, 2, 1]}),
             ("MatMul", ["q", "kt"], "s", {}), ("Softmax", ["s"], "o", {"axis": -1})]  # fmt: skip
    shape = (12, 128, 64)
    model = model_of(steps, {"x": shape, "p": (12, 64, 64), "k": shape}, {"o": (12, 128, 128)})
    made = planned(model, WIDE)
    found = nests(made)
    assert "kt" in found and found["s"].vector == "o2"


def test_a_transpose_for_few_rows_is_composed() -> None:
    """One query: the transposed tile would cost more than it saves."""
    steps = [("Transpose", ["k"], "kt", {"perm": [0, 2, 1]}), ("MatMul", ["q", "kt"], "s", {})]
    model = model_of(steps, {"q": (12, 1, 64), "k": (12, 128, 64)}, {"s": (12, 1, 128)})
    assert "kt" not in nests(planned(model, WIDE))


def window_model(channels: int, outputs: int, groups: int, kernel: int, stride: int, size: int) -> object:
    weight = np.ones((outputs, channels // groups, kernel, kernel), np.float32)
    pad = kernel // 2
    node = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[kernel, kernel], strides=[stride, stride],
                            pads=[pad] * 4, group=groups)  # fmt: skip
    out = (size + 2 * pad - kernel) // stride + 1
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, channels, size, size))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, outputs, out, out))
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_rows_are_padded_before_they_are_read(kernel: int) -> None:
    """Vectors along rows of an image given by rows: with the padding copied in, no lane checks for itself."""
    made = planned(window_model(67, 67, 67, kernel, 1, 57), WIDE)
    assert any("staged" in name for name in nests(made))


def test_a_window_leaves_registers_for_shared_taps() -> None:
    """3x3, stride 2: a pixel broadcast for one position is its neighbour's last tap, and waits in a register."""
    made = planned(window_model(3, 32, 1, 3, 2, 224), WIDE)
    plan = nests(made)["y_sum"] if "y_sum" in nests(made) else nests(made)["y"]
    sizes = dict(plan.register)
    vectors = sizes[plan.vector or ""] // plan.lanes
    rows = next(n for a, n in sizes.items() if a != plan.vector)
    options = plan.options(VectorForm)
    if options.unroll and options.row_lanes == 1:
        assert rows * vectors + vectors + rows < WIDE.vector_registers
    assert rows * vectors >= 16


def test_forms_are_compared_with_what_they_bring_from_memory() -> None:
    """2048 squared: in passes the weights come from main memory evenly, and the prediction says so."""
    weight = numpy_helper.from_array(np.zeros((2048, 2048), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (2048, 2048))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (2048, 2048))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    made = planned(model, WIDE)
    assert made.plan is not None
    (kernel,) = made.plan.kernels
    ideal = 2048**3 / WIDE.fma_rate / WIDE.units
    assert kernel.leaves[0].options(VectorForm).cut and ideal / kernel.estimate.seconds > 0.84


@pytest.mark.parametrize(("rows", "sums"), [(128, 3072), (384, 3072), (128, 768)])
def test_rows_that_outgrow_the_second_cache_are_taken_in_passes(rows: int, sums: int) -> None:
    """Otherwise all of them come from the outer cache again with every panel. What fits it needs no passes."""
    figures = ((2048, 400, 0, 0), (1 << 15, 350, 350, 180), (1 << 20, 120, 130, 46), (18 << 20, 21, 25, 7.6),
               (1 << 40, 12, 13, 7.6))  # fmt: skip
    levels = tuple(
        replace(level, capacity=size, bandwidth=1e9 * read, alone=1e9 * alone, write=1e9 * write)
        for level, (size, read, alone, write) in zip(WIDE.levels, figures, strict=True)
    )
    server = replace(WIDE, features=("avx2", "fma", "avx512f"), levels=levels, fma_rate=77e9, fma_alone=77e9,
                     rates=(("fma_float32", 77e9),), fma_chains=7, near_ways=8, clock=3.2e9)  # fmt: skip
    names = [f"w{n}" for n in range(8)]  # so many that they come from memory, as in a model
    weights = {name: np.zeros((sums, 768), np.float32) for name in names}
    steps: list[Step] = [("MatMul", [f"x{n}", name], f"y{n}", {}) for n, name in enumerate(names)]
    inputs, outputs = ({f"{a}{n}": (1, rows, size) for n in range(8)} for a, size in (("x", sums), ("y", 768)))
    made = planned(model_of(steps, inputs, outputs, weights), server)
    assert made.plan is not None
    second = server.levels[2].capacity
    for kernel in made.plan.kernels:
        (leaf,) = kernel.leaves
        cut = leaf.options(VectorForm).cut
        length = dict(cut).get("r0", sums)
        assert bool(cut) == (sums > 768) and 4 * length * (rows // 2 + 48) < second


def test_lanes_cost_more_where_they_are_inserted() -> None:
    arm = Target("cpu", "cpu", "aarch64", 1, 16, 32, 1e10, WIDE.levels, 1e-6)
    assert WIDE.gathered_reads > arm.gathered_reads


def test_wide_sums_fold_by_halves() -> None:
    """A row's sum in several chains of 16 lanes: whole vectors, then halves are added, and four lanes at the end."""
    steps = [("ReduceSum", ["x", "axes"], "y", {"keepdims": 0})]
    model = model_of(steps, {"x": (64, 384)}, {"y": (64,)}, {"axes": np.array([1], np.int64)})
    made = build(load(model, {}), WIDE, Options(stop_after="source"))
    (plan,) = nests(made).values()
    (text,) = made.sources.values()
    assert plan.lanes == 16 and dict(plan.register)["r0"] > 16
    assert re.search(r"high\w* = tw_lanes_8_15_v16f32\(acc\w*\)", text)
    (last,) = re.findall(r"total = \((.*)\);", text)
    assert len(set(re.findall(r"low\w*\[\d\]", last))) == 4
