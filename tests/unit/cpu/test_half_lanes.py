"""A float16 that all lanes of a vector read: as an operand it would be a float on x86 without AVX512-FP16."""

from __future__ import annotations

import re

import numpy as np
import pytest
from onnx import TensorProto, helper

import tilewright
from tilewright import Options
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.target import machine


def spread(rows: int, columns: int):  # type: ignore[no-untyped-def]
    node = helper.make_node("Expand", ["x", "shape"], ["y"])
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [rows, columns])
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [rows, 1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, [rows, columns])
    graph = helper.make_graph([node], "spread", [given], [result], [shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("columns", [2, 3, 8, 37, 64])
def test_lanes_of_one_half(columns: int) -> None:
    given = np.array([[1.5], [-65504.0], [6e-8], [np.inf], [-0.0]], np.float16)
    (found,) = tilewright.compile(spread(5, columns), options=Options(denormals="keep"))(given)
    expected = np.broadcast_to(given, (5, columns))
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("name", ["avx2_desktop", "emerald_rapids_avx512", "neoverse_n1"])
def test_no_half_is_an_operand(name: str) -> None:
    sources = build(load(spread(5, 64)), machine(name), Options(stop_after="source")).sources
    text = "".join(sources.values())
    assert re.search(r"v\d+f16", text) and not re.search(r"- \(v\d+f16\)\{\}", text)
