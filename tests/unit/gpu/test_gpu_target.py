"""GPUs as data: stored descriptions, figures of a probe in their place, plans that follow them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.cpu_stages import model_of
from tilewright.compiler.pipeline import build
from tilewright.errors import OptionError, ToolError
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.runtime.cuda_device import CudaDevice
from tilewright.target import Target, from_json, machine, stored_machines
from tilewright.target.gpu import described, with_figures
from tilewright.tile_graph.plan.form import Plan

FIGURES = {
    "clock": 2.0e9, "fma_float32": 8e13, "mma_float16": 8e14, "read_shared": 1e14, "latency_shared": 2e-8,
    "read_L2": 1e13, "latency_L2": 2e-7, "read_DRAM": 4e12, "write_DRAM": 3e12, "latency_DRAM": 4e-7,
    "launch": 1.234e-6, "grid_barrier": 9.5e-7,
}  # fmt: skip


def test_stored_gpus() -> None:
    found = {name: machine(name) for name in stored_machines("gpu")}
    assert set(found) >= {"h200", "a100", "l40s"} and not set(found) & set(stored_machines("cpu"))
    for name, target in found.items():
        assert target.name == name and target.kind == "gpu" and target.rate("mma_float16")
        assert [level.name for level in target.levels] == ["registers", "shared", "L2", "DRAM"]
        assert from_json(target.to_json()) == target


def test_without_a_gpu_code_is_planned_for_a_usual_one() -> None:
    assert machine("cuda-emulated") == replace(machine("h200"), name="cuda-emulated")
    assert machine("cuda") == replace(machine("h200"), name="cuda")


def test_figures_take_the_place_of_usual_ones() -> None:
    device = CudaDevice(0, "a GPU", "sm_89", 100, 99 << 10, 50 << 20, 16 << 30)
    here = described(machine("cuda"), device)
    assert (here.architecture, here.units, here.local.capacity) == ("sm_89", 100, 99 << 10)
    assert here.level("L2").capacity * here.level("L2").shared_by == 50 << 20
    found = with_figures(here, FIGURES)
    assert found.fma_rate == 8e11 and found.rates == (("fma_float32", 8e11), ("mma_float16", 8e12))
    assert found.kernel_cost == 1.2e-6 and found.barriers == (("grid", 9.5e-7),)
    assert (found.main.bandwidth, found.main.write, found.main.latency) == (4e10, 3e10, 4e-7)
    assert found.level("registers") == here.level("registers")


def planned(target: Target, columns: int = 384) -> Plan:
    steps = [("MatMul", ["x", "w"], "y", {})]
    model = model_of(steps, {"x": (384, 768)}, {"y": (384, columns)}, {"w": np.zeros((768, columns), np.float32)})
    plan = build(load(model, {}), target, Options(stop_after="plan", contraction="direct")).plan
    assert plan is not None
    return plan


def test_plans_follow_the_machine() -> None:
    """With an eighth of the multiprocessors a thread may take more outputs."""
    many, few = machine("h200"), replace(machine("h200"), units=16)
    sizes = [int(np.prod([n for _, n in planned(t).kernels[0].leaves[0].register])) for t in (many, few)]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("rows", [30522, 1000])
def test_a_table_costs_what_is_looked_up(rows: int) -> None:
    """An embedding reads as many rows as there are tokens, however long its table is."""
    table = np.zeros((rows, 768), np.float32)
    model = model_of([("Gather", ["t", "i"], "y", {})], {"i": (128,)}, {"y": (128, 768)}, {"t": table}, {"i": 7})
    plan = build(load(model, {}), machine("h200"), Options(stop_after="plan")).plan
    assert plan is not None and plan.kernels[0].estimate.seconds < 10e-6


def test_a_description_can_be_planned_for_but_not_run() -> None:
    model = model_of([("Relu", ["x"], "y", {})], {"x": (8,)}, {"y": (8,)})
    assert build(load(model, {}), machine("a100"), Options(stop_after="source")).sources
    with pytest.raises(ToolError, match="'a100' is a description to plan for; --target cuda runs on the GPU"):
        build(load(model, {}), machine("a100"), Options())


def test_a_gpu_without_latencies_is_refused() -> None:
    text = machine("h200").to_json().replace('"clock": 1980000000.0', '"clock": 0.0')
    with pytest.raises(OptionError, match="a gpu needs its 'clock' and the 'latency' of every level"):
        from_json(text)


def test_layers_of_a_recurrence_run_along_diagonals() -> None:
    """A step of every layer in one kernel: launches go with steps plus layers, not with steps times layers."""
    layers, steps, size = 4, 6, 32
    rng = np.random.default_rng(0)
    constants, nodes, before = {}, [], "x"
    for i in range(layers):
        for name in ("w", "r"):
            constants[f"{name}{i}"] = (rng.standard_normal((1, 4 * size, size)) / 8).astype(np.float32)
        nodes.append(helper.make_node("LSTM", [before, f"w{i}", f"r{i}"], [f"h{i}"], hidden_size=size))
        nodes.append(helper.make_node("Squeeze", [f"h{i}", "axis"], [f"y{i}"]))
        before = f"y{i}"
    constants["axis"] = np.array([1], np.int64)
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (steps, 1, size)) for n in ("x", before)]
    fixed = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "layers", ports[:1], ports[1:], fixed)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made = build(load(model, {}), machine("h200"), Options(stop_after="source"))
    assert len(made.calls) < layers * steps
