"""Whole small networks of the zoo, exported both ways, lowered and compared with their float64 references."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.ops.running import RunModel

pytest.importorskip("torch")
from bench import zoo

# The newer exporter takes some ten seconds a model: those with an operator of their own here, and all with --all.
QUICK_DYNAMO = ("bert_base", "lstm")
EXPORTS = [
    pytest.param(n, e, marks=() if e != "dynamo" or n in QUICK_DYNAMO else pytest.mark.slow)
    for e in zoo.EXPORTERS
    for n in sorted(zoo.MODELS)
]


@pytest.mark.sample(6)
@pytest.mark.filterwarnings("ignore")  # exporters warn about themselves
@pytest.mark.parametrize(("name", "exporter"), EXPORTS)
def test_small_model(name: str, exporter: str, run_model: RunModel, zoo_file) -> None:
    module, inputs = zoo.build(name, "small")
    found = run_model(onnx.load(zoo_file(name, exporter)), inputs)
    for output, want in zoo.reference(module, inputs).items():
        np.testing.assert_allclose(found[output], want, rtol=1e-4, atol=2e-6, err_msg=output)
