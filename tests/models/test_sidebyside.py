"""The side-by-side harness: a fair measurement, and the ways a runtime can fail without failing it."""

import json
import os
import re
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tilewright.report import sidebyside
from tilewright.report.peers import as_arrays, call_spec, find_peer, measure
from tilewright.report.sidebyside import Comparison, RuntimeResult, compare, random_inputs

QUICK = {"rounds": 2, "seconds_per_round": 0.02}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = relu(x), and the index unchanged, with a symbolic batch."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3]),
        helper.make_tensor_value_info("index", TensorProto.INT64, [2]),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3]),
        helper.make_tensor_value_info("same", TensorProto.INT64, [2]),
    ]
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Identity", ["index"], ["same"])]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs)
    path = tmp_path / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def test_measures_onnxruntime(model: Path) -> None:
    pytest.importorskip("onnxruntime")
    inputs = {"x": np.array([[-1.0, 2.0, -3.0]], np.float32), "index": np.array([0, 1])}
    reference = {"y": np.array([[0.0, 2.0, 0.0]]), "same": np.array([0.0, 1.0])}
    messages: list[str] = []
    told: list[str] = []
    result = compare(
        model,
        ["onnxruntime", "torch"],
        1,
        inputs=inputs,
        reference=reference,
        report=told.append,
        progress=lambda message, _fraction: messages.append(message),
        **QUICK,
    )
    document = json.loads(json.dumps(result.to_json()))
    measured, skipped = document["runtimes"]
    assert measured["name"] == "onnxruntime" and measured["error"] is None
    assert 0 < measured["min_ms"] <= measured["median_ms"] < 1000
    assert measured["relative_error"] == 0.0
    assert skipped["skipped"] and skipped["median_ms"] is None and skipped["error"]
    assert document["threads"] == 1 and document["ratio_to_best_peer"] is None
    assert "round 2 of 2: onnxruntime" in messages
    assert len(told) == 1 and re.fullmatch(r"onnxruntime: \d+\.\d{3} ms in a first round, ready after .* s", told[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("os:abort", "ended by SIGABRT"),
        ("signal:pause", "no answer within"),
        ("json:loads:{", "JSONDecodeError: "),
    ],
)
def test_a_failing_runtime_is_recorded(model: Path, spec: str, error: str) -> None:
    pytest.importorskip("torch")
    # long enough to import torch on a busy machine; what gives no answer gives none either way
    limit = 6.0 if error == "no answer within" else 60.0
    told: list[str] = []
    result = compare(model, ["torch:eager"], 1, torch_spec=spec, timeout_s=limit, report=told.append, **QUICK)
    (runtime,) = result.runtimes
    assert told == [f"torch:eager: {runtime.error}"]
    assert runtime.error is not None and runtime.error.startswith(error)
    assert runtime.median_ms is None and not runtime.skipped


def test_algorithms_are_options_of_ours(model: Path) -> None:
    (runtime,) = compare(model, ["tilewright"], 1, algorithms={"contraction": "fast"}, **QUICK).runtimes
    assert runtime.error == "OptionError: contraction cannot be 'fast': it is one of auto, direct, strassen"


def test_a_missing_runtime_is_skipped(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    (runtime,) = compare(model, ["openvino"], 1, **QUICK).runtimes
    assert runtime == RuntimeResult("openvino", None, error="openvino is not installed", skipped=True)


def test_bad_arguments_are_refused(model: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model file at"):
        compare(model.with_name("absent.onnx"), ["onnxruntime"], 1)
    with pytest.raises(ValueError, match="unknown runtime 'caffe'; there are tilewright, onnxruntime"):
        compare(model, ["caffe"], 1)
    with pytest.raises(ValueError, match="tilewright has tilewright:unmerged, tilewright:register, tilewright:none"):
        find_peer("tilewright:best")
    with pytest.raises(ValueError, match="named twice"):
        compare(model, ["openvino", "openvino"], 1)
    with pytest.raises(ValueError, match="must be positive"):
        compare(model, ["openvino"], 0)
    with pytest.raises(ValueError, match="not of the form module:function"):
        call_spec("bench.zoo")


@pytest.mark.parametrize("given", ["dict", "tuple", "one"])
def test_a_function_gives_example_inputs_by_name_or_in_order(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """import numpy as np
class Double:
    def forward(self, x, scale=None): return x * 2
def made(kind):
    x = np.ones((2, 3), np.float32)
    return Double(), {"dict": {"x": x}, "tuple": (x,), "one": x}[kind]
"""
    (tmp_path / "doubles_what_it_is_given.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    _, inputs = call_spec(f"doubles_what_it_is_given:made:{given}")
    assert list(inputs) == ["x"] and inputs["x"].shape == (2, 3)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")
def test_a_worker_is_stopped_between_requests(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    inputs_path = tmp_path / "inputs.npz"
    np.savez(inputs_path, x=np.ones((1, 3), np.float32), index=np.array([0, 1]))
    job = sidebyside.Job("onnxruntime", "", str(model), str(inputs_path), ("y", "same"), 1, None)
    worker = sidebyside.Worker((tmp_path / "log").open("w+b"))
    try:
        worker.request({"command": "load", "job": job.to_json()}, 60.0)
        _, status = os.waitpid(worker.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        reply = worker.request({"command": "measure", "seconds": 10.0, "iterations": 5}, 60.0)
        assert len(reply["times"]) == 5
    finally:
        worker.close()


def test_random_inputs_follow_types_and_dimensions(model: Path) -> None:
    values = sidebyside.read_interface(model).inputs
    arrays = random_inputs(values, {"batch": 4}, seed=3)
    assert arrays["x"].shape == (4, 3) and arrays["x"].dtype == np.float32
    assert arrays["index"].dtype == np.int64 and set(arrays["index"].tolist()) <= {0, 1}
    assert random_inputs(values, {}, seed=3)["x"].shape == (1, 3)


def test_ratio_is_to_the_best_peer() -> None:
    runtimes = (
        RuntimeResult("tilewright", None, median_ms=3.0),
        RuntimeResult("tilewright:none", None, median_ms=0.5),
        RuntimeResult("onnxruntime", None, median_ms=6.0),
        RuntimeResult("openvino", None, median_ms=2.0),
        RuntimeResult("torch", None, error="ended"),
    )
    assert Comparison("m", 1, {}, runtimes).ratio_to_best_peer == 1.5


def test_results_of_any_form_become_arrays() -> None:
    one = np.ones(2)
    for result in (one, [one], (one,), {"y": one}):
        assert list(as_arrays(result, ["y"])) == ["y"]
    with pytest.raises(ValueError):
        as_arrays([one, one], ["y"])


def test_measure_stops_at_the_iteration_limit() -> None:
    calls: list[int] = []
    assert len(measure(lambda: calls.append(1), 1e-6, 1)) == 1
    assert len(calls) >= 2


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads processor times from /proc")
def test_machine_cpu_seconds_counts_busy_time() -> None:
    before = sidebyside.machine_cpu_seconds()
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    after = sidebyside.machine_cpu_seconds()
    assert before is not None and after is not None
    assert after - before > 0.05
