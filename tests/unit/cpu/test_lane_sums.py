"""Sums along the vector: what vectors side by side leave over goes vector by vector, then into halves of one."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import model_of
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.loops import For, ForKind, statements
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.algebra.propagate import extent_of

MACHINES = ("emerald_rapids_avx512", "avx2_desktop", "neoverse_n1")


def extreme(length: int, rows: int = 5) -> ModelProto:
    return model_of([("ReduceMax", ["x"], "y", {"axes": [1], "keepdims": 0})], {"x": (rows, length)}, {"y": (rows,)})


def softmax(length: int) -> ModelProto:
    return model_of([("Softmax", ["x"], "y", {"axis": -1})], {"x": (4, length)}, {"y": (4, length)})


def mean(rows: int, columns: int) -> ModelProto:
    """Over two axes, the inner one the vector's."""
    return model_of([("GlobalAveragePool", ["x"], "y", {})], {"x": (1, 6, rows, columns)}, {"y": (1, 6, 1, 1)})


def place(length: int) -> ModelProto:
    """Two states, one of them of eight bytes."""
    return model_of([("ArgMax", ["x"], "y", {"axis": 1, "keepdims": 0})], {"x": (3, length)}, {"y": (3,)},
                    types={"y": TensorProto.INT64})  # fmt: skip


def wide(length: int) -> ModelProto:
    """Sums of eight bytes: the narrowest vector has two lanes."""
    node = ("ReduceSum", ["x", "axes"], "y", {"keepdims": 0})
    return model_of([node], {"x": (5, length)}, {"y": (5,)}, {"axes": np.array([1], np.int64)},
                    {"x": TensorProto.DOUBLE, "y": TensorProto.DOUBLE})  # fmt: skip


def product(rows: int, length: int) -> ModelProto:
    """Dot products of rows with rows."""
    steps = [("Transpose", ["b"], "t", {"perm": [1, 0]}), ("MatMul", ["a", "t"], "y", {})]
    return model_of(steps, {"a": (rows, length), "b": (3, length)}, {"y": (rows, 3)})


CASES = {
    **{f"largest of {n}": extreme(n) for n in (3, 7, 17, 31, 49, 81, 100, 127)},
    **{f"softmax of {n}": softmax(n) for n in (5, 49, 63, 81)},
    "mean of 7 by 7": mean(7, 7),
    "mean of 9 by 29": mean(9, 29),
    "place of 45": place(45),
    "place of 99": place(99),
    "doubles, 29": wide(29),
    "doubles, 47": wide(47),
    "products of 61": product(2, 61),
}


def made(model: ModelProto, name: str) -> Artifact:
    return build(load(model, {}), machine(name), Options(stop_after="loops", verify=True))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_out_or_taken_twice(case: str, name: str) -> None:
    """`verify` runs the Loops on random numbers, integers among them, beside the interpreter of the Program."""
    made(CASES[case], name)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("length", [49, 63, 81, 96, 100, 160, 197])
def test_few_elements_of_a_row_are_taken_one_by_one(length: int, name: str) -> None:
    artifact = made(extreme(length, 3), name)
    assert artifact.plan is not None and artifact.loops is not None
    (leaf,) = artifact.plan.kernels[0].leaves
    assert leaf.vector == "r0"
    (kernel,) = artifact.loops.kernels
    single = [static(s.axis.extent) for s in statements(kernel.body)
              if isinstance(s, For) and s.kind is ForKind.SERIAL and s.axis.name == "r0_tail"]  # fmt: skip
    assert single == ([length % 4] if length % 4 else [])
    # and vectors, whole ones or halves, take the others
    lanes = [extent_of(s.axis.extent) for s in statements(kernel.body) if isinstance(s, For)
             and s.kind is ForKind.VECTOR]  # fmt: skip
    assert max(lanes) == leaf.lanes and min(lanes) >= 4


def test_parts_of_a_vector_are_priced() -> None:
    """A row of 81 takes little longer than one of 80, and one of 95 less than half as long again."""
    target = machine("emerald_rapids_avx512")

    def seconds(length: int) -> float:
        plan = build(load(extreme(length, 64), {}), target, Options(stop_after="plan")).plan
        assert plan is not None
        return plan.kernels[0].estimate.seconds

    assert seconds(80) <= seconds(81) < 1.2 * seconds(80)
    assert seconds(80) < seconds(95) < 1.5 * seconds(80)
