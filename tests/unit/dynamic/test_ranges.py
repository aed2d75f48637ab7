"""Models for ranges of sizes: what a caller may say, which rooms cover it, and one artifact that is right for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tilewright import InputError, OptionError
from tilewright.dynamic.spans import Span, covering, read_spans
from tilewright.errors import ModelError, TilewrightError
from tilewright.ir.forms.graph import Room

N = helper.make_node
INPUTS: dict[str, Any] = {"x": ("n", 3, "m"), "y": ("n", None)}


def test_rooms_cover_every_number_once() -> None:
    for low, high, step in ((1, 64, 1), (0, 9, 1), (2, 2, 1), (320, 1280, 32), (1, 1, 1), (3, 1000, 1)):
        span = Span("n", low, high, step)
        rooms = covering(span, 8)
        numbers = [n for room in rooms for n in range(room.low, room.high + 1)]
        assert [span.size(n) for n in numbers] == list(range(low, high + 1, step))
        assert all(span.size(room.high) > 1 or room.low == room.high for room in rooms)
    assert covering(Span("n", 1, 512), 16) == [Room(1, 1), Room(2, 32), Room(33, 512)]
    assert covering(Span("n", 1, 64), 8) == [Room(1, 1), Room(2, 11), Room(12, 64)]


@pytest.mark.parametrize(
    ("dynamic", "spans", "places"),
    [
        ({"n": (1, 64)}, [Span("n", 1, 64)], {"x": {0: 0}, "y": {0: 0}}),
        ({"x": {2: (4, 8)}}, [Span("m", 4, 8)], {"x": {2: 0}}),
        ({"x": {1: ("c", 1, 3)}, "y": {1: ("c", 1, 3)}}, [Span("c", 1, 3)], {"x": {1: 0}, "y": {1: 0}}),
        ({"y": {1: range(32, 129, 32)}}, [Span("y[1]", 32, 128, 32)], {"y": {1: 0}}),
        ({"y": {1: torch.export.Dim("k", min=2, max=9)}}, [Span("k", 2, 9)], {"y": {1: 0}}),
    ],
    ids=["by name", "by axis", "one name", "steps", "Dim"],
)
def test_ranges_as_they_may_be_given(dynamic: Any, spans: list[Span], places: Any) -> None:
    assert read_spans(dynamic, INPUTS) == (tuple(spans), places)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"batch": (1, 2)}, "there is no input or open dimension 'batch'"),
        ({"n": (3, 2)}, "'n' cannot be from 3 to 2"),
        ({"n": "many"}, "the range of 'n' is"),
        ({"x": {5: (1, 2)}}, "input 'x' has no axis 5"),
        ({"x": {0: (1, 2)}, "y": {0: (1, 3)}}, "'n' has two ranges"),
        ({}, "names no dimension"),
        ([("n", 1)], "must be a dict"),
    ],
)
def test_what_makes_no_ranges_is_told(dynamic: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("[", r"\[")):
        read_spans(dynamic, INPUTS)


def attention() -> tuple[onnx.ModelProto, np.ndarray]:
    """Products, a softmax and a normalisation over the dimension that varies."""
    weight = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    nodes = [
        N("MatMul", ["x", "w"], ["q"]),
        N("Transpose", ["x"], ["k"], perm=[1, 0]),
        N("MatMul", ["q", "k"], ["s"]),
        N("Softmax", ["s"], ["p"]),
        N("MatMul", ["p", "x"], ["a"]),
        N("ReduceMean", ["a"], ["mean"], axes=[0], keepdims=1),
        N("Sub", ["a", "mean"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), weight


def expected(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    scores = wide @ weight @ wide.T
    scores = np.exp(scores - scores.max(1, keepdims=True))
    found = scores / scores.sum(1, keepdims=True) @ wide
    return np.asarray(found - found.mean(0, keepdims=True))


def test_one_artifact_for_all_sizes(tmp_path: Path, kernel_cache: Path) -> None:
    model, weight = attention()
    options = tilewright.Options(cache_dir=kernel_cache, threads=2)
    made: Any = tilewright.compile(model, dynamic={"n": (1, 20)}, options=options)
    assert [str(v) for v in made.variants] == ["n 1", "n 2 to 20"] and made.compilations == 2
    assert made.inputs[0].shape == ("n", 8)
    made.save(tmp_path / "saved")
    loaded: Any = tilewright.load(tmp_path / "saved")
    for size in range(1, 21):
        x = np.random.default_rng(size).standard_normal((size, 8)).astype(np.float32)
        for each in (made, loaded):
            np.testing.assert_allclose(each(x)[0], expected(x, weight), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="axis 0 of input 'x' is 21, and the model is compiled for n from 1 to 20"):
        loaded(np.zeros((21, 8), np.float32))
    assert "n 2 to 20" in made.explain() and loaded.compilations == 2


def test_forms_read_weights_packed_alike() -> None:
    """By itself one row would have wider panels than many."""
    shapes, rng = {"w": (64, 384), "v": (384, 64)}, np.random.default_rng(0)
    given = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [N("MatMul", ["x", "w"], ["h"]), N("Tanh", ["h"], ["t"]), N("MatMul", ["t", "v"], ["u"]),
             N("Softmax", ["u"], ["y"], axis=0)]  # fmt: skip
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = tilewright.Options(target="emerald_rapids_avx512", threads=1, stop_after="plan")
    made: Any = tilewright.compile(model, dynamic={"n": (1, 200)}, options=options)
    packed = [dict(ranged.model.packed) for ranged in made.kept]
    assert len(packed) == 3 and packed[0].keys() >= {"w", "v"} and all(each == packed[0] for each in packed)
    alone: Any = tilewright.compile(model, shapes={"n": 1}, options=options)
    assert dict(alone.packed) != packed[0]


def test_a_dimension_that_stays_open_is_named() -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "m"]) for name in ("x", "y")]
    model = helper.make_model(helper.make_graph([N("Neg", ["x"], ["y"])], "g", ports[:1], ports[1:]))
    with pytest.raises(TilewrightError, match=r"input 'x': axis 1 \(m\) stays open; settle it with shapes="):
        tilewright.compile(model, dynamic={"n": (1, 4)})


def test_sizes_that_operators_treat_in_many_ways_are_refused_before_anything_is_compiled(monkeypatch: Any) -> None:
    """Odd and even lengths leave windows of another number, until they come in steps."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, "n"]) for name in ("x", "y")]
    pool = N("MaxPool", ["x"], ["y"], kernel_shape=[3], strides=[2], pads=[1, 1])
    graph = helper.make_graph([pool], "g", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    monkeypatch.setattr("tilewright.api.compile_at_call", lambda *args, **options: pytest.fail("compiled"))
    with pytest.raises(ModelError, match=r"need more than 64 compiled forms, .* as range\(40, 401, 2\), or leave out"):
        tilewright.compile(model, dynamic={"n": (40, 400)})
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        tilewright.compile(model, dynamic={"n": range(40, 401, 2)})


class Reshaped(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        rows = torch.arange(x.shape[0]).to(x.dtype)
        return (x.view(-1, 2, 2) * scale).softmax(0).sum(2) + rows[:, None]


@pytest.mark.slow
def test_modules_of_pytorch(kernel_cache: Path) -> None:
    module, options = Reshaped().eval(), tilewright.Options(cache_dir=kernel_cache, threads=2)
    x = torch.randn(3, 4)
    fast: Any = tilewright.compile(module, (x, 0.5), dynamic={"x": {0: ("rows", 1, 9)}}, options=options)
    assert [str(v) for v in fast.variants] == ["rows 1", "rows 2 to 9"]
    for rows in range(1, 10):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x, 0.5), module(x, 0.5), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="is 10, and the model is compiled for rows from 1 to 9"):
        fast(torch.randn(10, 4), 0.5)
    with pytest.raises(InputError, match="arguments like the example's"):
        fast(x, 0.25)
