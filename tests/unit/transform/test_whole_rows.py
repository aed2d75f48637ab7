"""Rows of operands as long as whole packets need: the same results, what is made longer, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.gpu_stages import on_emulator, on_loops, random_inputs
from tilewright import ops
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Map, Program, Reduce
from tilewright.ir.forms.expr import loads
from tilewright.ir.meaning.interpret import evaluate
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.plan.form import ASYNC, Tile
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout import whole_rows as transform
from tilewright.transform.layout.whole_rows import whole_rows
from tilewright.transform.precision.choose import set_precision

Steps = Sequence[tuple[str, Sequence[str], str]]


def model(steps: Steps, inputs: Mapping[str, tuple[int, ...]], weights: Mapping[str, tuple[int, ...]]) -> ModelProto:
    rng = np.random.default_rng(0)
    constants = [numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
                 for name, shape in weights.items()]  # fmt: skip
    nodes = [helper.make_node(operator, list(read), [made], **({"perm": [1, 0]} if operator == "Transpose" else {}))
             for operator, read, made in steps]  # fmt: skip
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    result = helper.make_tensor_value_info(steps[-1][2], TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", ports, [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def product(m: int, k: int, n: int, weight: bool = False) -> ModelProto:
    shapes = {"a": (m, k), "b": (k, n)}
    return model([("MatMul", ["a", "b"], "y")], {"a": (m, k)} if weight else shapes, {"b": (k, n)} if weight else {})


TURNED = model([("Transpose", ["b"], "t"), ("MatMul", ["a", "t"], "y")], {"a": (19, 37), "b": (21, 37)}, {})
ITSELF = model([("Transpose", ["a"], "t"), ("MatMul", ["a", "t"], "y")], {"a": (29, 37)}, {})
BATCHED = model([("MatMul", ["a", "b"], "y")], {"a": (3, 16, 37), "b": (3, 37, 21)}, {})
CASES = {
    "product": product(19, 37, 21), "sum": product(16, 37, 24), "columns": product(16, 40, 21), "turned": TURNED,
    "weight": product(19, 37, 21, weight=True), "itself": ITSELF, "batched": BATCHED,
}  # fmt: skip


def narrow(source: ModelProto) -> Program:
    return fold_constants(set_precision(ops.lower(load(source, {})), machine("h200"), "float16"))


def rows(program: Program) -> float:
    """A prediction that prefers longer rows, whatever they cost."""
    return 0.0 if any("_rows" in t.name for t in program.tensors()) else 1.0


@pytest.mark.parametrize("name", CASES)
def test_longer_rows_give_the_same_results(name: str) -> None:
    """Whatever numbers there are: infinity times a zero of nobody would be NaN."""
    program = narrow(CASES[name])
    longer = whole_rows(program, machine("h200"), rows)
    verify_program(longer)
    (reduced,) = [c for c in longer.computes if isinstance(c, Reduce)]
    assert all(int(n.source.shape[-1]) % 8 == 0 for n in loads(*reduced.elements))
    rng = np.random.default_rng(1)
    inputs = {t.name: rng.standard_normal([int(e) for e in t.shape]).astype(np.float32) for t in program.inputs}
    for spoiled in (False, True):
        if spoiled:
            next(iter(inputs.values()))[..., -1] = np.inf
        wanted, found = (evaluate(p, inputs)["y"] for p in (program, longer))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_what_changes_the_type_makes_the_copy() -> None:
    longer = whole_rows(narrow(product(19, 37, 21)), machine("h200"), rows)
    assert [c.output.name for c in longer.computes if isinstance(c, Map)] == ["a_float16_rows", "b_float16_rows"]


def test_weights_alone_are_made_longer_without_asking() -> None:
    def never(_: Program) -> float:
        raise AssertionError("nothing is copied")

    longer = whole_rows(narrow(product(16, 40, 21, weight=True)), machine("h200"), never)
    assert [array.shape for array in longer.constants.values()] == [(40, 24)]


def test_whole_rows_and_what_follows_a_sum_stay() -> None:
    twice = model([("MatMul", ["a", "b"], "h"), ("MatMul", ["h", "c"], "y")],
                  {"a": (16, 40), "b": (40, 37), "c": (37, 24)}, {})  # fmt: skip
    for source in (product(19, 40, 24), twice):
        program = narrow(source)
        longer = whole_rows(program, machine("h200"), rows)
        assert all(t.name != "c_float16_rows" for t in longer.tensors())
        assert source is twice or longer is program


def fills(artifact: Artifact) -> list[str | None]:
    assert artifact.plan is not None

    def below(tile: Tile) -> list[str | None]:
        inner = [f for node in tile.body if isinstance(node, Tile) for f in below(node)]
        return [h.fill for h in tile.holds if h.fill is not None] + inner

    return [fill for kernel in artifact.plan.kernels for fill in below(kernel)]


def compiled(name: str, monkeypatch: pytest.MonkeyPatch, precision: str, stop: str | None) -> Artifact:
    monkeypatch.setattr(transform, "_GAIN", 1e9)
    options = Options(target="cuda-emulated", stop_after=stop, precision=precision, schedule="none")
    return build(load(CASES[name], {}), machine("cuda-emulated"), options)


@pytest.mark.parametrize(("name", "precision"), [("product", "float16"), ("turned", "float16"), ("batched", "tf32"),
                                                 ("weight", "bfloat16")])  # fmt: skip
def test_kernels_bring_longer_rows_in_packets(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = compiled(name, monkeypatch, precision, "loops")
    assert fills(artifact) == [ASYNC, ASYNC]
    inputs = random_inputs(artifact)
    assert artifact.program is not None
    (wanted,) = evaluate(artifact.program, inputs).values()
    (found,) = on_loops(artifact, inputs).values()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * float(np.abs(wanted).max()))


@pytest.mark.slow
def test_emulated_kernels_read_nothing_behind_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = compiled("product", monkeypatch, "float16", None)
    inputs = random_inputs(artifact)
    assert artifact.program is not None
    (wanted,) = evaluate(artifact.program, inputs).values()
    (found,) = on_emulator(artifact, inputs).values()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * float(np.abs(wanted).max()))
