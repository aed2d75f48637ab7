"""Reductions over an input and new rows behind it: part by part, with the same results."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, Reduce
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops import lower
from tilewright.target import machine
from tilewright.transform.reductions.joined import split_joined

PAST, NEW, WIDTH = 500, 3, 64
TARGET = machine("neoverse_n1")


def attention(past: int, *, keeps: bool = False) -> ModelProto:
    """Queries of two heads for each of one head of keys, and sums of values by the scores; `keeps` gives the joined
    keys too."""

    def port(name: str, *shape: int) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))

    shape = helper.make_tensor("wide", TensorProto.INT64, [4], [1, 2, past + NEW, WIDTH])
    nodes = [
        helper.make_node("Concat", ["past_keys", "keys"], ["all_keys"], axis=2),
        helper.make_node("Concat", ["past_values", "values"], ["all_values"], axis=2),
        helper.make_node("Expand", ["all_keys", "wide"], ["each_keys"]),
        helper.make_node("Expand", ["all_values", "wide"], ["each_values"]),
        helper.make_node("Transpose", ["each_keys"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["queries", "turned"], ["scores"]),
        helper.make_node("MatMul", ["scores", "each_values"], ["sums"]),
    ]
    given = [port("queries", 1, 2, NEW, WIDTH)]
    for kind in ("keys", "values"):
        given += [port(f"past_{kind}", 1, 1, past, WIDTH), port(kind, 1, 1, NEW, WIDTH)]
    outputs = [port("sums", 1, 2, NEW, WIDTH), *([port("all_keys", 1, 1, past + NEW, WIDTH)] if keeps else [])]
    graph = helper.make_graph(nodes, "attention", given, outputs, [shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def program_of(model: ModelProto) -> Program:
    return lower(load(model.SerializeToString()))


def extents(program: Program) -> list[tuple[int, int]]:
    """Of each sum, its last axis and what it is over."""
    sums = [c for c in program.computes if isinstance(c, Reduce)]
    return [(int(c.axes[-1].extent), int(c.reduce_axes[0].extent)) for c in sums]  # type: ignore[call-overload]


def test_products_with_keys_and_values_of_a_cache_are_in_two_parts() -> None:
    program = program_of(attention(PAST))
    split = split_joined(program, TARGET)
    assert extents(program) == [(PAST + NEW, WIDTH), (WIDTH, PAST + NEW)]
    assert extents(split) == [(PAST, WIDTH), (NEW, WIDTH), (WIDTH, PAST), (WIDTH, NEW)]
    assert len(split.remarks) == 2 and f"{PAST} of {PAST + NEW} elements" in split.remarks[0]


@pytest.mark.parametrize("past", [300, PAST])
def test_results_are_the_same(past: int) -> None:
    program = program_of(attention(past))
    split = split_joined(program, TARGET)
    assert split is not program
    rng = np.random.default_rng(past)
    inputs = {t.name: rng.standard_normal([int(n) for n in t.shape]).astype(np.float32) for t in program.inputs}  # type: ignore[call-overload]
    (expected,) = evaluate(program, inputs).values()
    (found,) = evaluate(split, inputs).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_what_is_small_or_stored_anyhow_stays_joined() -> None:
    small = program_of(attention(20))
    assert split_joined(small, TARGET) is small
    kept = split_joined(program_of(attention(PAST, keeps=True)), TARGET)
    assert extents(kept) == [(PAST + NEW, WIDTH), (WIDTH, PAST), (WIDTH, NEW)]
