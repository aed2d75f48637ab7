"""ONNX's Backend interface, and the command that runs its official suite."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.cpu_stages import model_of
from tilewright import Options, UnsupportedError
from tilewright.cli.main import main
from tilewright.integrations import onnx_backend, onnx_suite
from tilewright.integrations.onnx_suite import CaseResult, Report, _Backend, _Cases, _is_left_out, _run_all, general

X = np.array([[-1.0, 2.0]], np.float32)
DENSE = model_of([("Relu", ["x"], "y", {}), ("Neg", ["y"], "z", {})], {"x": (1, 2)}, {"y": (1, 2), "z": (1, 2)})


@pytest.fixture
def options(kernel_cache: Path) -> Options:
    return Options(cache_dir=kernel_cache, threads=1)


def test_models_run_by_the_interface(options: Options) -> None:
    prepared = onnx_backend.prepare(DENSE, options=options)
    for inputs in ([X], (X,), {"x": X}, X):
        outputs = prepared.run(inputs)
        assert isinstance(outputs, tuple) and len(outputs) == 2
        np.testing.assert_array_equal(outputs[0], np.maximum(X, 0))
        np.testing.assert_array_equal(outputs["z"], -np.maximum(X, 0))  # type: ignore[call-overload]
    (doubled,) = onnx_backend.run_model(
        model_of([("Add", ["x", "x"], "y", {})], {"x": (1, 2)}, {"y": (1, 2)}), [X], "CPU", options=options
    )
    np.testing.assert_array_equal(doubled, 2 * X)


def test_nodes_run_by_the_interface(options: Options) -> None:
    node = helper.make_node("Transpose", ["a"], ["b"], perm=[1, 0])
    np.testing.assert_array_equal(onnx_backend.run_node(node, [X], options=options)[0], X.T)
    old = helper.make_node("Squeeze", ["a"], ["b"], axes=[0])
    np.testing.assert_array_equal(onnx_backend.run_node(old, {"a": X}, opset_version=11, options=options)[0], X[0])
    # what decides shapes is an input here
    reshape = helper.make_node("Reshape", ["a", "s"], ["b"])
    found = onnx_backend.run_node(reshape, [X, np.array([2, 1])], options=options)
    np.testing.assert_array_equal(found[0], X.reshape(2, 1))
    with pytest.raises(UnsupportedError, match="operator Frobnicate"):
        onnx_backend.run_node(helper.make_node("Frobnicate", ["a"], ["b"]), [X], options=options)


def test_devices() -> None:
    assert onnx_backend.supports_device("CPU")
    assert not onnx_backend.supports_device("NPU")
    assert not onnx_backend.supports_device("CUDA:99")
    assert issubclass(onnx_backend.TilewrightBackend, onnx.backend.base.Backend)


def test_other_domains_and_strings_are_left_out() -> None:
    assert not _is_left_out(DENSE)
    assert _is_left_out(None)
    text = model_of([("Identity", ["x"], "y", {})], {"x": (1,)}, {"y": (1,)}, types={"x": TensorProto.STRING})
    assert _is_left_out(text)
    gradient = helper.make_node("Gradient", ["x"], ["y"], domain="ai.onnx.preview.training")
    trained = onnx.ModelProto()
    trained.CopyFrom(DENSE)
    trained.graph.node.append(gradient)
    assert _is_left_out(trained)


class Suite:
    """Stands for ONNX's test functions."""

    def test_good_cpu(self) -> None:
        with pytest.raises(ImportError):
            import onnx.reference  # noqa: F401

    def test_wrong_cpu(self) -> None:
        np.testing.assert_allclose(np.ones(2), np.zeros(2), err_msg="Output 0")

    def test_unsupported_cpu(self) -> None:
        raise UnsupportedError("Foo node 'x': not supported")

    def test_crash_cpu(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def test_hang_cpu(self) -> None:
        time.sleep(60)


def test_a_crash_or_a_hang_ends_that_case_alone(options: Options) -> None:
    names = [n.removesuffix("_cpu") for n in dir(Suite) if n.startswith("test_")]
    cases = _Cases(_Backend(options), dict.fromkeys([*names], Suite()))  # type: ignore[arg-type]
    told: list[float] = []
    results = _run_all(cases, names, 2, 1.0, lambda _, done: told.append(done))
    assert told[-1] == 1.0 and len(told) == len(names)
    assert results["test_good"] == CaseResult("test_good", "native")
    assert results["test_wrong"].reason.startswith("wrong: Output 0; Mismatched elements: 2 / 2 (100%); Max")
    assert results["test_unsupported"].reason == "Foo node 'x': not supported"
    assert results["test_crash"].reason == "the process died: SIGKILL"
    assert results["test_hang"].reason == "took more than 1 seconds"
    report = Report("1", tuple(results[n] for n in names), 7)
    assert (report.passed, report.native, len(report.others)) == (1, 1, 4)


def test_reasons_are_counted_by_kind() -> None:
    assert general("Foo node 'a': axis -3 of [2, 4] at 1.5e-3") == general("Foo node 'b': axis 1 of [7, 9] at 2")


@pytest.mark.slow
def test_the_command_prints_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suite", "--cases", "^test_(abs|sequence_model1|Linear)$", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cases"] == found["passed"] == found["native"] == len(found["results"]) == 3
    assert main(["suite", "--cases", "^test_abs$"]) == 0
    assert "passed      1  100.0%" in capsys.readouterr().out
    assert main(["suite", "--cases", "nothing is called this"]) == 2
    assert onnx_suite.case_names("^test_abs$")[0] == ["test_abs"]
