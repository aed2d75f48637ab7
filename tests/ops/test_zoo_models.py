"""Whole small networks of the zoo, exported both ways, lowered and compared with their float64 references."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.ops.running import RunModel

pytest.importorskip("torch")
from bench import zoo


@pytest.mark.filterwarnings("ignore")  # exporters warn about themselves
@pytest.mark.parametrize("exporter", zoo.EXPORTERS)
@pytest.mark.parametrize("name", sorted(zoo.MODELS))
def test_small_model(name: str, exporter: str, run_model: RunModel, tmp_path) -> None:
    if exporter == "dynamo":
        pytest.importorskip("onnxscript")
    module, inputs = zoo.build(name, "small")
    path = tmp_path / "model.onnx"
    zoo.export_module(module, inputs, path, exporter=exporter)
    found = run_model(onnx.load(path), inputs)
    for output, want in zoo.reference(module, inputs).items():
        np.testing.assert_allclose(found[output], want, rtol=1e-4, atol=2e-6, err_msg=output)
