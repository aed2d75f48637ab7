"""The zoo's small models build deterministically, export through both exporters and agree with PyTorch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("torch", reason="the zoo needs torch, a development extra")
onnxruntime = pytest.importorskip("onnxruntime", reason="exports are checked in ONNX Runtime")

from bench import zoo  # noqa: E402

NAMES = tuple(zoo.MODELS)
# The newer exporter takes some ten seconds a model: a few here, those with an operator of their own in
# tests/ops/test_zoo_models.py, where our own answers are compared, and all with --all.
QUICK_DYNAMO = ("mobilenet_v2", "lstm", "mmoe")
EXPORTS = [
    pytest.param(n, e, marks=() if e != "dynamo" or n in QUICK_DYNAMO else pytest.mark.slow)
    for e in zoo.EXPORTERS
    for n in NAMES
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "exporter"), EXPORTS)
def test_export_agrees_with_torch(name: str, exporter: str, zoo_file: Callable[..., Path]) -> None:
    path = zoo_file(name, exporter)
    module, inputs = zoo.build(name, "small")

    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == list(inputs)
    expected = zoo.float32_outputs(module, inputs)
    assert [value.name for value in session.get_outputs()] == list(expected)
    for output, (key, array) in zip(session.run(None, inputs), expected.items(), strict=True):
        np.testing.assert_allclose(output, array, rtol=1e-4, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_healthy(name: str) -> None:
    module, inputs = zoo.build(name, "small")
    assert not module.training
    reference = zoo.reference(module, inputs)
    assert all(array.dtype == np.float64 for array in reference.values())
    # A well-conditioned model keeps PyTorch's own float32 error near the unit roundoff of 6e-8.
    assert zoo.relative_error(zoo.float32_outputs(module, inputs), reference) < 3e-6
    for array in reference.values():
        assert 1e-2 < np.abs(array).mean() < 10.0
        assert np.abs(array[array != 0]).min() > 1e-30


@pytest.mark.parametrize("name", NAMES)
def test_build_is_deterministic(name: str) -> None:
    first, first_inputs = zoo.build(name, "small")
    second, second_inputs = zoo.build(name, "small")
    for key, array in first_inputs.items():
        np.testing.assert_array_equal(array, second_inputs[key])
    second_state = second.state_dict()
    for key, tensor in first.state_dict().items():
        assert tensor.equal(second_state[key]), key


def test_outputs_depend_on_inputs() -> None:
    module, inputs = zoo.build("mobilenet_v2", "small")
    other = {"image": np.random.default_rng(99).standard_normal(inputs["image"].shape, dtype=np.float32)}
    logits = zoo.float32_outputs(module, inputs)["logits"]
    assert np.abs(logits - zoo.float32_outputs(module, other)["logits"]).max() > 0.05 * logits.std()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no model named 'resnet' in the zoo; there are mobilenet_v2, "):
        zoo.build("resnet", "small")
    with pytest.raises(ValueError, match="no size 'huge'; there are small, full"):
        zoo.build("lstm", "huge")
    with pytest.raises(ValueError, match="no exporter 'jit'"):
        zoo.export("mmoe", "small", "unused.onnx", exporter="jit")
