"""Tables that say where one index is beyond another become comparisons; others stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops import lower
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.clean.triangles import compare_indices

ROWS, COLUMNS = 70, 90


def model(nodes: list[tuple[str, list[str], str]], given: dict[str, np.ndarray]) -> ModelProto:
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [ROWS, COLUMNS]) for n in "xy"]
    made = [helper.make_node(kind, inputs, [output]) for kind, inputs, output in nodes]
    constants = [numpy_helper.from_array(array, name) for name, array in given.items()]
    graph = helper.make_graph(made, "triangle", ports[:1], ports[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


LOW = np.array(-np.inf, np.float32)
WHERE = [("Where", ["m", "x", "low"], "y")]
TABLES = {
    "below": np.tri(ROWS, COLUMNS, dtype=np.bool_),
    "above": ~np.tri(ROWS, COLUMNS, 5, dtype=np.bool_),
    "late": np.tri(ROWS, COLUMNS, -9, dtype=np.bool_),
}


def folded(given: ModelProto) -> Program:
    return fold_constants(lower(load(given, {})))


def same(first: Program, second: Program) -> None:
    x = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    np.testing.assert_array_equal(evaluate(first, {"x": x})["y"], evaluate(second, {"x": x})["y"])


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_truths_is_compared(name: str) -> None:
    before = folded(model(WHERE, {"m": TABLES[name], "low": LOW}))
    after = compare_indices(before)
    assert before.constants and not after.constants
    same(before, after)


def test_a_table_that_is_added_is_compared() -> None:
    table = np.where(TABLES["below"], np.float32(0), LOW)
    before = folded(model([("Add", ["x", "m"], "y")], {"m": table}))
    after = compare_indices(before)
    assert not after.constants
    same(before, after)


def test_numbers_that_follow_each_other_are_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folding what compares them would make a constant that is too large."""
    for limit in ("FOLDED_BYTES", "FOLDED_GROWTH"):
        monkeypatch.setattr(f"tilewright.ops.builder.{limit}", 0)
    nodes = [("LessOrEqual", ["j", "i"], "m"), ("Where", ["m", "x", "low"], "y")]
    places = {"j": np.arange(COLUMNS), "i": np.arange(ROWS).reshape(-1, 1) + 7, "low": LOW}
    before = lower(load(model(nodes, places), {}))
    after = compare_indices(before)
    assert len(before.computes) == 2 and len(after.computes) == 1 and not after.constants
    same(before, after)


@pytest.mark.parametrize("change", ((3, 80), (60, 2)))
def test_a_table_with_a_hole_stays(change: tuple[int, int]) -> None:
    table = TABLES["below"].copy()
    table[change] = ~table[change]
    before = folded(model(WHERE, {"m": table, "low": LOW}))
    assert compare_indices(before).constants == before.constants
