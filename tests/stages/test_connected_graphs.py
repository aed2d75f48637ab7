"""Graphs whose best plan is known: how many kernels they become, what reaches main memory, and that answers stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import CPU, error, evaluated, lowered, model_of, random_inputs
from tilewright import Options, ops
from tilewright.backend import backend_for
from tilewright.backend.gpu import machine_code
from tilewright.backend.traffic import traffic_of
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan, predicted_seconds
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Plan
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.reductions.split import split_reductions

RNG = np.random.default_rng(0)
MACHINES = ("neoverse_n1", "emerald_rapids", "h200")


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def normalised(layers: int, rows: int, columns: int, axis: int = -1) -> ModelProto:
    """LayerNorm and ReLU, written out as exporters do."""
    steps, x = [], "x"
    for n in range(layers):
        steps += [
            ("ReduceMean", [x], f"mean{n}", {"axes": [axis]}), ("Sub", [x, f"mean{n}"], f"centred{n}", {}),
            ("Mul", [f"centred{n}", f"centred{n}"], f"square{n}", {}),
            ("ReduceMean", [f"square{n}"], f"variance{n}", {"axes": [axis]}),
            ("Add", [f"variance{n}", "epsilon"], f"more{n}", {}), ("Sqrt", [f"more{n}"], f"root{n}", {}),
            ("Div", [f"centred{n}", f"root{n}"], f"normal{n}", {}), ("Mul", [f"normal{n}", "scale"], f"scaled{n}", {}),
            ("Relu", [f"scaled{n}"], f"y{n}", {}),
        ]  # fmt: skip
        x = f"y{n}"
    width = columns if axis == -1 else rows
    scale = (1 + 0.1 * RNG.standard_normal(width)).astype(np.float32).reshape((1, -1) if axis == -1 else (-1, 1))
    constants = {"scale": scale, "epsilon": np.float32(1e-5)}
    return model_of(steps, {"x": (rows, columns)}, {x: (rows, columns)}, constants)


def two_results(rows: int, depth: int, columns: int) -> ModelProto:
    steps = [("MatMul", ["x", "w"], "p", {}), ("ReduceMax", ["p"], "a", {"axes": [1], "keepdims": 0}),
             ("ReduceMean", ["p"], "b", {"axes": [1], "keepdims": 0})]  # fmt: skip
    return model_of(steps, {"x": (rows, depth)}, {"a": (rows,), "b": (rows,)}, {"w": weights(depth, columns)})


def largest(rows: int, depth: int, columns: int) -> ModelProto:
    steps = [("MatMul", ["x", "w"], "p", {}), ("ArgMax", ["p"], "y", {"axis": 1, "keepdims": 0})]
    return model_of(steps, {"x": (rows, depth)}, {"y": (rows,)}, {"w": weights(depth, columns)},
                    types={"y": TensorProto.INT64})  # fmt: skip


def program_of(model: ModelProto, name: str) -> Program:
    target = machine(name)
    program = fold_constants(ops.lower(load(model, {})))
    program = split_reductions(program, target, lambda p: predicted_seconds(p, target, "connected"))
    return choose_layouts(program, target)


def traffic(program: Program, plan: Plan, name: str) -> float:
    """Bytes from and to main memory."""
    return sum(kernel.by_level[-1].total for kernel in traffic_of(program, plan, machine(name)).values())


def stored(plan: Plan) -> set[str]:
    return {leaf.tensor for kernel in plan.kernels for leaf in kernel.leaves if leaf.tensor not in kernel.held}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 64), (3001, 80)])
def test_nine_normalisations_are_one_kernel(name: str, rows: int, columns: int) -> None:
    program = program_of(normalised(9, rows, columns), name)
    plan = make_plan(program, machine(name))
    assert len(plan.kernels) == 1
    assert traffic(program, plan, name) <= 4e6 * rows * columns / (4096 * 64)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(512, 128, 256), (333, 64, 190)])
def test_two_results_of_one_product_share_its_kernel(name: str, rows: int, depth: int, columns: int) -> None:
    plan = make_plan(program_of(two_results(rows, depth, columns), name), machine(name))
    assert len(plan.kernels) == 1 and stored(plan) == {"a", "b"}
    (axis,) = plan.kernels[0].axes
    assert {bind.tensor for bind in axis.binds} == {"a", "b"}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("rows", "columns"), [(512, 20000), (300, 30011)])
def test_the_largest_of_a_product_never_stores_the_product(name: str, rows: int, columns: int) -> None:
    plan = make_plan(program_of(largest(rows, 64, columns), name), machine(name))
    assert "p" not in stored(plan)


CASES = {
    "normalised": normalised(3, 37, 29), "normalised along the other axis": normalised(2, 23, 50, 0),
    "two results": two_results(45, 17, 39), "one row": two_results(1, 9, 33), "largest": largest(19, 12, 157),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("streaming", ["auto", "always"])
@pytest.mark.parametrize("case", CASES)
def test_answers_stay(case: str, streaming: str, kernel_cache: Path) -> None:
    program = choose_layouts(fold_constants(ops.lower(load(CASES[case], {}))), CPU)
    inputs = random_inputs(program, 7)
    wanted = evaluated(program, inputs, wide=True)
    found = lowered(program, streaming=streaming).natively(inputs, kernel_cache)
    for name, value in wanted.items():
        if value.dtype.kind == "i":
            assert np.array_equal(found[name], value)
        else:
            assert error(found[name], value) < 1e-5


@pytest.mark.sample(3)
@pytest.mark.parametrize("streaming", ["auto", "always"])
@pytest.mark.parametrize("case", CASES)
def test_answers_stay_on_a_gpu(case: str, streaming: str, kernel_cache: Path) -> None:
    target = machine("cuda-emulated")
    program = choose_layouts(fold_constants(ops.lower(load(CASES[case], {}))), target)
    plan = make_plan(program, target, streaming=streaming)
    loops = lower_program(program, plan, backend_for(target).lower_kernel)
    options = Options(target=target.name, cache_dir=kernel_cache)
    runner = machine_code.load(machine_code.render(loops, target), loops, program, plan, target, options)
    inputs = random_inputs(program, 7)
    outputs = [np.empty([int(e) for e in t.shape], t.dtype.numpy) for t in program.outputs]
    runner.run([inputs[n] for n in inputs], outputs)
    for value, found in zip(evaluated(program, inputs, wide=True).values(), outputs, strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)
