"""What a kernel keeps for itself lies in the memory of its result, where nothing else can be there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import Lowered, Step, evaluated, model_of, random_inputs
from tilewright.backend import backend_for
from tilewright.backend.cpu.kernel.variants import variants_of
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError, OptionError
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify_loops import verify_loops
from tilewright.ir.forms.compute import all_computes
from tilewright.ir.forms.loops import Memory, Store, statements
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.traffic.held import plan_nests

MACHINES = ("emerald_rapids", "avx2_desktop", "neoverse_n1")


def softmax(rows: int, columns: int) -> ModelProto:
    return model_of([("Softmax", ["x"], "y", {"axis": -1})], {"x": (rows, columns)}, {"y": (rows, columns)})


def across(rows: int, middle: int, columns: int) -> ModelProto:
    """Along an axis that is not the last."""
    shape = (rows, middle, columns)
    return model_of([("Softmax", ["x"], "y", {"axis": 1})], {"x": shape}, {"y": shape})


def shared(last: list[Step], out: tuple[int, ...] = (9, 130)) -> ModelProto:
    """Exponentials, their sums, and something of both."""
    steps: list[Step] = [("Exp", ["x"], "e", {}), ("ReduceSum", ["e", "axes"], "s", {}), *last]
    return model_of(steps, {"x": (9, 130)}, {"y": out}, {"axes": np.array([1], np.int64)})


def made(model: ModelProto, name: str, **more: object) -> Artifact:
    return build(load(model, {}), machine(name), Options(stop_after="loops", **more))  # type: ignore[arg-type]


def within(artifact: Artifact) -> dict[str, str]:
    assert artifact.plan is not None
    return {h.tensor: h.within for k in artifact.plan.kernels for h in k.holds if h.within is not None}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("model", "count"), [(softmax(37, 200), 1), (softmax(301, 81), 1), (across(3, 41, 70), 1)])
def test_exponentials_lie_where_their_parts_of_the_sum_will(model: ModelProto, count: int, name: str) -> None:
    artifact = made(model, name, verify=True)
    assert len(within(artifact)) == count
    assert artifact.loops is not None
    (kernel,) = artifact.loops.kernels
    stored = {s.buffer for s in statements(kernel.body) if isinstance(s, Store)}
    results = [b for b in stored if b.memory is Memory.GLOBAL]
    (kept,) = within(artifact)
    assert len(results) == 1 and kept not in {b.name for b in stored}
    # the exponentials and their parts are two leaves, both of which store there
    times = sum(s.buffer is results[0] for s in statements(kernel.body) if isinstance(s, Store))
    assert times >= 2


def transposed() -> ModelProto:
    return shared([("Div", ["e", "s"], "d", {}), ("Transpose", ["d"], "y", {"perm": [1, 0]})], out=(130, 9))


def read_again() -> ModelProto:
    """The exponentials themselves are a result too."""
    model = shared([("Div", ["e", "s"], "y", {})])
    model.graph.output.append(model.graph.output[0])
    model.graph.output[1].name = "e"
    return model


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("case", ["transposed", "read again"])
def test_nothing_does_that_something_else_needs(case: str, name: str) -> None:
    artifact = made({"transposed": transposed, "read again": read_again}[case](), name, verify=True)
    assert within(artifact) == {}


def test_a_plan_that_says_so_where_it_cannot_be_is_refused(tmp_path: Path) -> None:
    """Sums have another shape than the result."""
    model, target = softmax(37, 200), machine("emerald_rapids")
    artifact = build(load(model, {}), target, Options(stop_after="plan"))
    assert artifact.plan is not None
    kernel = artifact.plan.kernels[0]
    (kept,), result = within(artifact), kernel.leaves[-1].tensor
    sums = next(h.tensor for h in kernel.holds if h.within is None)

    def changed(**places: str | None) -> Plan:
        assert artifact.plan is not None
        holds = tuple(replace(h, within=places.get(h.tensor)) for h in kernel.holds)
        return artifact.plan.with_kernels({kernel.name: replace(kernel, holds=holds)})

    def lowered(plan: Plan) -> None:
        file = tmp_path / "plan.json"
        file.write_text(plan.to_json())
        build(load(model, {}), target, Options(stop_after="loops", overrides=(("plan", file),)))

    lowered(changed(**{kept: result}))
    lowered(changed())
    with pytest.raises(InternalError, match=f"'{sums}' cannot lie within '{result}'"):
        lowered(changed(**{sums: result}))
    with pytest.raises(OptionError, match="which no leaf beside it stores"):
        lowered(changed(**{kept: "nothing"}))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("shape", [(3, 13, 130), (5, 49, 9), (49, 9, 33), (17, 81, 49)])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_element_is_what_it_is(axis: int, shape: tuple[int, ...], name: str) -> None:
    """All of them, which `verify` looks at in samples: where a tile ends in the middle of a vector the last one begins
    earlier, but not over elements that are results already."""
    model = model_of([("Softmax", ["x"], "y", {"axis": axis})], {"x": shape}, {"y": shape})
    artifact = made(model, name)
    assert artifact.program is not None and artifact.plan is not None and artifact.loops is not None
    lowered = Lowered(artifact.program, artifact.plan, artifact.loops, machine(name))
    inputs = random_inputs(artifact.program)
    found, right = lowered.on_loops(inputs), evaluated(artifact.program, inputs)
    np.testing.assert_allclose(found["y"], right["y"], rtol=1e-5)


@pytest.mark.parametrize("name", MACHINES)
def test_other_ways_to_run_a_kernel_say_it_where_they_may(name: str) -> None:
    """A tile of some columns has not all that their sum needs."""
    artifact = build(load(softmax(64, 256), {}), machine(name), Options(stop_after="plan"))
    assert artifact.plan is not None and artifact.program is not None
    plan, program = artifact.plan, artifact.program
    (kernel,) = plan.kernels
    nests = tuple(plan_nests(kernel, all_computes(program)))
    found = variants_of(kernel, nests, program, plan, machine(name)).random(24, np.random.default_rng(0))
    ways = {("o1" in dict(v.cut), any(h.within for h in v.holds)) for v in found}
    assert (False, True) in ways and (False, False) not in ways and (True, True) not in ways
    for other in found:
        changed = plan.with_kernels({kernel.name: other})
        verify_loops(lower_program(program, changed, backend_for(machine(name)).lower_kernel))


def test_equal_kernels_of_other_names_say_theirs() -> None:
    steps: list[Step] = [("Softmax", ["x"], "a", {"axis": -1}), ("Transpose", ["a"], "t", {"perm": [1, 0]}),
                         ("MatMul", ["t", "w"], "m", {}), ("Softmax", ["m"], "y", {"axis": -1})]  # fmt: skip
    model = model_of(steps, {"x": (300, 200)}, {"y": (200, 200)}, {"w": np.ones((300, 200), np.float32)})
    artifact = build(load(model, {}), machine("emerald_rapids"), Options(stop_after="plan", schedule="connected"))
    assert artifact.plan is not None
    names = {leaf.tensor for k in artifact.plan.kernels for leaf in k.leaves}
    said = within(artifact)
    assert said and set(said) | set(said.values()) <= names
    for kernel in artifact.plan.kernels:
        own = {leaf.tensor for leaf in kernel.leaves}
        assert all(h.within in own for h in kernel.holds if h.within is not None)


def test_many_threads_agree_with_the_definition(kernel_cache: Path) -> None:
    rng = np.random.default_rng(3)
    model = tilewright.compile(softmax(2311, 81), options=Options(cache_dir=kernel_cache, threads=2))
    for seed in range(20):
        x = rng.standard_normal((2311, 81)).astype(np.float32) * (1 + seed)
        (found,) = model(x)
        e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
        np.testing.assert_allclose(found, e / e.sum(1, keepdims=True), rtol=3e-6, atol=1e-30)
