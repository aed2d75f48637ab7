"""What `bench.shipped` says of files: right, refused by name, wrong; which inputs it tries them with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("onnxruntime")

from bench import shipped
from bench.shipped import cases, distance, files, in_float64, run_here, session_of

N = helper.make_node


def written(path: Path, nodes: list[onnx.NodeProto], shape: list[Any], **constants: Any) -> Path:
    given = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name in ("x", "y")]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", *ports, given), opset_imports=opsets, ir_version=9), path)
    return path


def test_a_right_file_at_two_shapes(tmp_path: Path, kernel_cache: Path) -> None:
    file = written(tmp_path / "m.onnx", [N("Exp", ["x"], ["e"]), N("Neg", ["e"], ["y"])], ["n", 3, "h", "w"])
    result = run_here(file, kernel_cache)
    assert result.verdict.startswith("right to") and result.error < 1e-6
    assert result.nodes == 2 and set(result.operators) == {"Exp", "Neg"}
    assert result.cases == ("noise 1x3x64x96", "scene 1x3x64x96", "noise 2x3x96x64", "scene 2x3x96x64")


def test_a_refused_file_is_named(tmp_path: Path, kernel_cache: Path) -> None:
    nodes = [N("Normalizer", ["x"], ["y"], domain="ai.onnx.ml", norm="MAX")]
    result = run_here(written(tmp_path / "m.onnx", nodes, [2, 3]), kernel_cache)
    assert result.verdict.startswith("refused: ai.onnx.ml.Normalizer node") and result.is_good


def test_a_wrong_answer_is_told(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "m.onnx", [N("Exp", ["x"], ["y"])], [2, 3])
    off = SimpleNamespace(run=lambda inputs: {"y": 1.01 * np.exp(inputs["x"])})
    monkeypatch.setattr(shipped.tilewright, "compile", lambda *_, **__: off)
    result = run_here(file, kernel_cache)
    assert result.verdict.startswith("wrong: y 1.0e-02 apart, from float64 1.0e-02, theirs") and not result.is_good


def test_distances() -> None:
    want = np.array([1.0, -4.0, np.nan], np.float32)
    assert distance(want, want) == 0
    assert distance(want + np.float32(0.5), want) == 0.125
    assert distance(np.array([1.0, np.nan, np.nan]), want) == np.inf
    assert distance(want[:2], want) == np.inf
    assert distance(np.array([1, 2]), np.array([1, 3])) == np.inf
    assert distance([want], [want, want]) == np.inf


def test_in_float64(tmp_path: Path) -> None:
    file = written(tmp_path / "m.onnx", [N("Add", ["x", "c"], ["y"])], [1], c=np.array([1e-9], np.float32))
    wide = in_float64(onnx.load(file))
    onnx.save(wide, file)
    (result,) = session_of(file).run(None, {"x": np.ones(1)})
    assert result[0] - 1 == pytest.approx(1e-9)


def test_equal_files_once_and_inputs_of_fixed_shape(tmp_path: Path) -> None:
    small = written(tmp_path / "a.onnx", [N("Exp", ["x"], ["y"])], [2, 3])
    written(tmp_path / "b.onnx", [N("Exp", ["x"], ["y"])], [2, 3])
    large = written(tmp_path / "c.onnx", [N("Add", ["x", "c"], ["y"])], [2, 3], c=np.ones((2, 3), np.float32))
    assert files([tmp_path]) == [small, large]
    assert [case.inputs["x"].shape for case in cases(session_of(small))] == [(2, 3), (2, 3)]
