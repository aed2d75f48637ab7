"""How much is put into a compilation: code at once, the best code, or one after the other while calls go on."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from threading import Event, Thread

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tilewright
from tilewright import Options
from tilewright.calls.background import Background
from tilewright.compiler.pipeline import build
from tilewright.compiler.pipeline import hurried as hurried_options
from tilewright.errors import OptionError
from tilewright.frontend.onnx.model import load
from tilewright.runtime.toolchain import Compiler, NativeMachine, default_flags, for_kernels
from tilewright.target import machine
from tilewright.tile_graph.plan.leaf_form import VectorForm


def network(width: int | str = 20) -> onnx.ModelProto:
    """Two convolutions, a pool and a softmax: what the full effort connects and transforms."""
    rng = np.random.default_rng(0)
    weights = {
        "w0": rng.standard_normal((16, 3, 3, 3)),
        "b0": rng.standard_normal(16),
        "w1": rng.standard_normal((16, 16, 3, 3)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w1"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["c"], ["d"]),
        helper.make_node("MaxPool", ["d"], ["e"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Softmax", ["e"], ["y"], axis=1),
    ]
    shape = [1, 3, 12, width]
    graph = helper.make_graph(
        nodes, "network", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor(n, TensorProto.FLOAT, a.shape, a.astype(np.float32).ravel()) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def image(width: int = 20) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((1, 3, 12, width)).astype(np.float32)


def wanted(x: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(network(x.shape[-1]).SerializeToString())
    (result,) = session.run(None, {"x": x})
    return np.asarray(result)


def test_an_effort_is_one_of_three() -> None:
    with pytest.raises(OptionError, match="effort cannot be 'fst': it is one of full, fast, adaptive; did you mean"):
        Options(effort="fst")


def test_fast_code_is_right_and_explained(kernel_cache: Path) -> None:
    x = image()
    model = tilewright.compile(network(), options=Options(cache_dir=kernel_cache), effort="fast")
    np.testing.assert_allclose(model(x)[0], wanted(x), rtol=1e-4, atol=1e-6)
    assert model.effort == "fast"
    assert ", effort fast" in model.explain().splitlines()[0]
    assert model.artifact.plan.schedule == "register"


def test_full_code_takes_the_place_of_fast_code(kernel_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tilewright")
    x, given = image(), Options(cache_dir=kernel_cache)
    fast, full = (tilewright.compile(network(), options=given, effort=effort) for effort in ("fast", "full"))
    assert len(fast.calls) > len(full.calls)  # each has a place of its own in the cache
    assert "effort" not in full.explain().splitlines()[0]
    wanted_then = full(x)[0]
    told: list[Callable[[bool], None]] = []
    fast.replace_when(lambda finished: (told.append(finished), Waiting())[1], lambda: full._artifact)
    by_address = fast.address_caller()
    told[0](False)
    assert fast.effort == "fast" and "the fast code stays" in caplog.text
    told[0](True)
    assert fast.effort == "full" and "results may differ in their last bits" in caplog.text
    assert np.array_equal(fast(x)[0], wanted_then) and np.array_equal(fast.run({"x": x})["y"], wanted_then)
    y = np.empty_like(wanted_then)
    by_address([x.ctypes.data], [y.ctypes.data])
    assert np.array_equal(y, wanted_then)
    assert len(fast.profile(x, repeat=1).calls) == len(full.calls)


class Waiting:
    """Work that is not over."""

    def wait(self, seconds: float | None = None) -> bool:
        return False


def test_whatever_passes_are_chosen_numbers_keep_their_meaning() -> None:
    for kind, architecture in product(("gcc", "clang", "zig"), ("x86_64", "aarch64")):
        compiler, machine = Compiler((kind,), kind, "1"), NativeMachine(architecture, "", frozenset())  # type: ignore[arg-type]
        flags = default_flags(compiler, machine)
        for hurried in (False, True):
            told = for_kernels(compiler, machine, hurried)
            assert set(flags) - {"-O3"} <= set(told) and not (hurried and "-O3" in told)
            assert not [flag for flag in told if "fast-math" in flag]


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids", "avx2_desktop"])
def test_fast_plans_connect_nothing(name: str) -> None:
    options = Options(effort="fast", stop_after="source")
    artifact = build(load(network(), {}), machine(name), options)
    assert artifact.effort == "fast" and artifact.sources
    assert all(len(kernel.leaves) == 1 for kernel in artifact.plan.kernels)


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids"])
def test_fast_code_is_less_text(name: str) -> None:
    """Smaller register tiles, no hints: what a compiler reads is what it takes time for."""
    graph, target = load(network(64), {}), machine(name)
    fast = build(graph, target, Options(effort="fast", stop_after="source"))
    sizes = {"schedule": "register", "merging": "off", "convolution": "direct"}
    full = build(graph, target, Options(stop_after="source", **sizes))  # type: ignore[arg-type]
    assert len(fast.plan.kernels) == len(full.plan.kernels)
    leaves = [leaf for kernel in fast.plan.kernels for leaf in kernel.leaves]
    tiles = [prod(n for _, n in leaf.register) // leaf.lanes for leaf in leaves if "r0" in leaf.order]
    assert tiles and max(tiles) <= 12
    assert not any(x.soon or x.ahead or x.together > 1 for x in (leaf.options(VectorForm) for leaf in leaves))
    assert sum(map(len, fast.sources.values())) < sum(map(len, full.sources.values()))


def test_what_the_user_asked_for_by_name_stays() -> None:
    asked = hurried_options(Options(effort="fast", convolution="winograd", contraction="strassen", schedule="none"))
    assert (asked.convolution, asked.contraction, asked.schedule) == ("winograd", "strassen", "none")
    left = hurried_options(Options(effort="fast"))
    assert (left.convolution, left.contraction, left.schedule, left.merging) == ("direct", "direct", "register", "off")


@pytest.mark.host
def test_adaptive_code_is_replaced_between_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tilewright")
    x = image()
    given = Options(cache_dir=tmp_path, effort="adaptive", threads=2)
    model = tilewright.compile(network(), options=given)
    assert model.effort == "fast"
    by_address = model.address_caller()
    before = model.profile(x, repeat=1)
    results, stop = [], Event()

    def call() -> None:
        while not stop.wait(0.02):  # what has the lowest priority needs some time, too
            results.append(model(x)[0])

    callers = [Thread(target=call) for _ in range(2)]
    for thread in callers:
        thread.start()
    try:
        assert model.settle(300)
    finally:
        time.sleep(0.05)
        stop.set()
        for thread in callers:
            thread.join()
    assert model.effort == "full" and "full code after" in caplog.text
    fast, full = (tilewright.compile(network(), options=given.override(effort=e))(x)[0] for e in ("fast", "full"))
    # every call ran one code or the other, never something between
    assert all(np.array_equal(r, fast) or np.array_equal(r, full) for r in results)
    assert np.array_equal(model(x)[0], full)
    y = np.empty_like(full)
    by_address([x.ctypes.data], [y.ctypes.data])
    assert np.array_equal(y, full)
    assert len(model.profile(x, repeat=1).calls) < len(before.calls)
    # and the next process finds the full code
    assert tilewright.compile(network(), options=given).effort == "full"


@pytest.mark.host
@pytest.mark.slow
def test_adaptive_shapes_that_calls_decide(tmp_path: Path) -> None:
    model = tilewright.compile(network("width"), options=Options(cache_dir=tmp_path, effort="adaptive"))
    for width in (8, 12):
        np.testing.assert_allclose(model(image(width))[0], wanted(image(width)), rtol=1e-4, atol=1e-6)
    assert all(kept.model.settle(300) and kept.model.effort == "full" for kept in model.kept.values())
    np.testing.assert_allclose(model(image(8))[0], wanted(image(8)), rtol=1e-4, atol=1e-6)


@pytest.mark.host
@pytest.mark.slow
def test_adaptive_modules(tmp_path: Path) -> None:
    import torch

    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)).eval()
    x = torch.from_numpy(image())
    compiled = tilewright.compile(module, (x,), options=Options(cache_dir=tmp_path, effort="adaptive"))
    want = module(x).detach()
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
    assert all(model.settle(300) and model.effort == "full" for model in compiled.models)
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.host
def test_background_work_ends_with_whoever_wants_it(tmp_path: Path) -> None:
    told: list[bool] = []
    work = Background(time.sleep, (600,), told.append)
    over = work._over
    del work
    gc.collect()
    assert over.wait(60) and not told
    # and with the process, also one that is killed; the work writes its number, then sleeps
    number = tmp_path / "number"
    program = (
        "import sys, time; from tests.unit.compiler.test_effort import write_number_and_sleep\n"
        "from tilewright.calls.background import Background\n"
        f"work = Background(write_number_and_sleep, ({str(number)!r},), print); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not number.exists() or not number.read_text():
            time.sleep(0.05)
            assert parent.poll() is None
    finally:
        parent.kill()
        parent.wait()
    process, priority, scheduled = map(int, number.read_text().split())
    assert priority == 19
    assert scheduled == getattr(os, "SCHED_IDLE", scheduled)  # or calls of the model wait for whole ticks of its
    for _ in range(600):
        if not _runs(process):
            return
        time.sleep(0.1)
    pytest.fail("background work goes on without anybody who wants it")


def write_number_and_sleep(place: str) -> None:
    scheduled = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
    Path(place).write_text(f"{os.getpid()} {os.nice(0)} {scheduled}")
    time.sleep(600)


def _runs(number: int) -> bool:
    try:
        os.kill(number, 0)
        return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
