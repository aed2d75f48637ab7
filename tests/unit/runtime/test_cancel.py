"""A run ends on Ctrl-C and by `cancel` from another thread, and the model can be called again."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import tilewright
from tests.cpu_stages import model_of
from tilewright import CancelledError, Options

pytestmark = pytest.mark.host

SOON = 5.0  # seconds; a run below takes as long uncancelled on the fastest cores
FLOAT, WHOLE, FLAG = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
port = helper.make_tensor_value_info


def long_model(layers: int = 200, size: int = 1024) -> ModelProto:
    """Products one after the other: long enough to be interrupted."""
    steps = [("MatMul", [f"v{k}", "w"], f"v{k + 1}", {}) for k in range(layers)]
    weight = np.eye(size, dtype=np.float32)
    return model_of(steps, {"v0": (size, size)}, {f"v{layers}": (size, size)}, {"w": weight})


def loop_by_data() -> ModelProto:
    """A loop that only its data ends, which runs step by step."""
    nodes = [helper.make_node("Less", ["s", "most"], ["co"]), helper.make_node("Add", ["s", "x"], ["so"])]
    body = helper.make_graph(nodes, "body",
                             [port("i", WHOLE, []), port("c", FLAG, []), port("s", FLOAT, [])],
                             [port("co", FLAG, []), port("so", FLOAT, [])])  # fmt: skip
    most = numpy_helper.from_array(np.array(1e30, np.float32), "most")
    graph = helper.make_graph([helper.make_node("Loop", ["", "", "x"], ["y"], body=body)], "graph",
                              [port("x", FLOAT, [])], [port("y", FLOAT, [])], [most])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@contextmanager
def soon(action: object) -> Iterator[None]:
    timer = threading.Timer(0.3, action)  # type: ignore[arg-type]
    timer.start()
    start = time.monotonic()
    yield
    timer.join()
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_is_cancelled_from_another_thread(threads: int, kernel_cache: Path) -> None:
    model = tilewright.compile(long_model(), options=Options(cache_dir=kernel_cache, threads=threads))
    x = np.ones((1024, 1024), np.float32)
    for _ in range(2):
        with soon(model.cancel), pytest.raises(CancelledError, match="the run was cancelled"):
            model(x)


def test_ctrl_c_ends_a_run(kernel_cache: Path) -> None:
    model = tilewright.compile(long_model(), options=Options(cache_dir=kernel_cache, threads=2))
    x = np.ones((1024, 1024), np.float32)
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs of a shell ignore
    try:
        with soon(lambda: signal.pthread_kill(main, signal.SIGINT)), pytest.raises(KeyboardInterrupt):
            model(x)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_cancelled_model_is_as_before(kernel_cache: Path) -> None:
    """A cancellation between runs is none, and the next run is whole."""
    model = tilewright.compile(long_model(3, 64), options=Options(cache_dir=kernel_cache, threads=2))
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.cancel()
    np.testing.assert_array_equal(model(x)[0], x)


def test_a_loop_that_runs_step_by_step_is_cancelled(kernel_cache: Path) -> None:
    model = tilewright.compile(loop_by_data(), options=Options(cache_dir=kernel_cache, threads=1))
    with soon(model.cancel), pytest.raises(CancelledError):
        model(np.array(1.0, np.float32))
    assert model(np.array(1e29, np.float32))[0] > 1e30
