"""Models with very long chains and operators of very many inputs: bounded expressions, and no recursion."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from tilewright.backend.cpu.kernel import chains
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Map
from tilewright.ir.forms.dtypes import float32
from tilewright.ir.forms.expr import Axis, op, var, walk
from tilewright.ir.forms.expr import load as load_value
from tilewright.ir.forms.loops import Buffer, Memory
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops import lower
from tilewright.ops.builder import MOST_OPERANDS
from tilewright.options import Options
from tilewright.schedule.connect import Connector, Group
from tilewright.schedule.fuse import fuse_registers
from tilewright.target import machine
from tilewright.tile_graph.algebra.nest import Nest

N1 = machine("neoverse_n1")


def model(nodes: list[object], inputs: int, output: str) -> ModelProto:
    ports = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [2, 3]) for i in range(inputs)]
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "deep", ports, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def many(operator: str, count: int, **attributes: int) -> ModelProto:
    return model([helper.make_node(operator, [f"x{i}" for i in range(count)], ["y"], **attributes)], count, "y")


@pytest.mark.parametrize(
    ("operator", "count", "attributes"),
    [("Sum", 1000, {}), ("Mean", 130, {}), ("Max", 300, {}), ("Concat", 600, {"axis": 0})],
)
def test_an_operator_of_very_many_tensors(operator: str, count: int, attributes: dict[str, int]) -> None:
    program = lower(load(many(operator, count, **attributes), {}))
    sizes = [sum(1 for _ in walk(c.value)) for c in program.computes if isinstance(c, Map)]
    assert max(sizes) < 20 * MOST_OPERANDS
    rng = np.random.default_rng(0)
    given = {f"x{i}": rng.standard_normal((2, 3)).astype(np.float32) for i in range(count)}
    (found,) = evaluate(program, given).values()
    arrays = list(given.values())
    wanted = {
        "Sum": lambda: np.sum(arrays, 0), "Mean": lambda: np.mean(arrays, 0), "Max": lambda: np.max(arrays, 0),
        "Concat": lambda: np.concatenate(arrays),
    }[operator]()  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_long_chain_of_maps_is_several_bounded_expressions() -> None:
    nodes = []
    for i in range(400):
        nodes.append(helper.make_node(("Neg", "Abs", "Relu")[i % 3], [f"t{i - 1}" if i else "x0"], [f"t{i}"]))
    graph = load(model(nodes, 1, "t399"), {})
    artifact = build(graph, N1, Options(stop_after="plan"))
    assert artifact.program is not None and artifact.plan is not None
    computes = artifact.program.computes
    inlined = fuse_registers(computes, frozenset(artifact.program.outputs), N1).inlined
    longest = run = 0
    for compute in computes:
        run = run + 1 if compute.outputs[0] in inlined else 0
        longest = max(longest, run)
    assert 0 < longest < 200


def test_calls_of_a_very_deep_value_are_found_without_recursion() -> None:
    lane = Axis("lane", 4)
    first = op("exp", load_value(Buffer("x", (4,), float32, Memory.GLOBAL), (var(lane),)))
    value = first
    for _ in range(5000):
        value = op("neg", op("abs", value))
    assert list(chains._calls(value, lane)) == [first]


def test_a_join_looks_for_a_cycle_among_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(list[Group]):
        looked_up = 0

        def __getitem__(self, place: int) -> Group:  # type: ignore[override]
            self.looked_up += 1
            return super().__getitem__(place)

    cyclic = Connector._cyclic
    counts: list[int] = []

    def counted(own: Connector, merged: list[Nest], groups: list[Group]) -> bool:
        counting = Counting(groups)
        result = cyclic(own, merged, counting)
        counts.append(counting.looked_up)
        return result

    monkeypatch.setattr(Connector, "_cyclic", counted)
    most = []
    for layers in (20, 40):
        nodes = []
        for i in range(layers):
            before = f"t{i - 1}" if i else "x0"
            nodes.append(helper.make_node("Softmax", [before], [f"s{i}"], axis=i % 2))
            nodes.append(helper.make_node("Add", [f"s{i}", before], [f"t{i}"]))
        build(load(model(nodes, 1, f"t{layers - 1}"), {}), N1, Options(stop_after="plan"))
        most.append(max(counts))
        counts.clear()
    assert most[1] <= 1.2 * most[0] + 4, most
