"""Choices that data decides: every lane is right, and truth values of the caller are read as vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import tilewright
from tilewright import Options
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.target import machine

F, TRUTH = TensorProto.FLOAT, TensorProto.BOOL


def chosen_of(shape: tuple[int, ...], kind: int = F) -> ModelProto:
    """The input where the truth values given say so, elsewhere 3."""
    nodes = [helper.make_node("Where", ["c", "x", "other"], ["y"])]
    ports = [helper.make_tensor_value_info(n, k, shape) for n, k in (("c", TRUTH), ("x", kind), ("y", kind))]
    other = numpy_helper.from_array(np.array(3, helper.tensor_dtype_to_np_dtype(kind)), "other")
    return helper.make_model(helper.make_graph(nodes, "g", ports[:2], ports[2:], initializer=[other]))


def below_of(shape: tuple[int, ...]) -> ModelProto:
    """The input where it is below a quarter, elsewhere 3."""
    nodes = [helper.make_node("Less", ["x", "q"], ["c"]), helper.make_node("Where", ["c", "x", "other"], ["y"])]
    ports = [helper.make_tensor_value_info(n, F, shape) for n in "xy"]
    constants = [numpy_helper.from_array(np.float32(v), n) for n, v in (("q", 0.25), ("other", 3))]
    return helper.make_model(helper.make_graph(nodes, "g", ports[:1], ports[1:], initializer=constants))


@pytest.mark.host
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_rows_that_fill_no_vector_are_whole(rows: int, kernel_cache: Path) -> None:
    """gcc made reads behind the choice conditional vectors of its own, and lost lanes of them."""
    model = tilewright.compile(below_of((13, 4, rows, 1)), options=Options(cache_dir=kernel_cache, schedule="none"))
    x = np.random.default_rng(0).standard_normal((13, 4, rows, 1)).astype(np.float32)
    np.testing.assert_array_equal(model(x)[0], np.where(x < 0.25, x, np.float32(3)))


@pytest.mark.host
@pytest.mark.parametrize("kind", [F, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.DOUBLE])
def test_truth_values_of_the_caller(kind: int, kernel_cache: Path) -> None:
    model = tilewright.compile(chosen_of((5, 37), kind), options=Options(cache_dir=kernel_cache))
    rng = np.random.default_rng(1)
    c = rng.random((5, 37)) < 0.5
    x = rng.integers(0, 100, (5, 37)).astype(helper.tensor_dtype_to_np_dtype(kind))
    np.testing.assert_array_equal(model(c, x)[0], np.where(c, x, np.array(3).astype(x.dtype)))


@pytest.mark.parametrize("name", ["emerald_rapids", "avx2_desktop", "neoverse_n1"])
def test_truth_values_are_read_as_vectors(name: str) -> None:
    """A lane at a time took thirteen times as long."""
    made = build(load(chosen_of((64, 128)), {}), machine(name), Options(stop_after="source"))
    (text,) = (t for n, t in made.sources.items() if n.startswith("k"))
    assert "__builtin_convertvector((*(const v" in text and "] ? " not in text
