"""What is asked of the CUDA driver, told by one that is not there: every call is written down and answered with a
number."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tilewright.runtime.cpu_model import BufferRef
from tilewright.runtime.cuda import CudaModel
from tilewright.runtime.cuda_graph import LaunchGraph
from tilewright.runtime.gpu_model import GpuCall, GpuModelImage, LoadedKernel

RECORDS = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeValue", "CUDA_KERNEL_NODE_PARAMS",
           "CUgraphEdgeData", "CUDA_MEMCPY3D")  # fmt: skip


class Numbers:
    """Names of an enumeration, each its own value."""

    def __getattr__(self, name: str) -> int:
        return hash(name) & 0xFF


class Driver(ModuleType):
    """Writes down what is called; elapsed times grow by a millisecond from event to event."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.said: list[tuple[str, tuple[Any, ...]]] = []
        self.number = 1000

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not name.startswith("cu") or name.startswith("cuda"):
            return SimpleNamespace if name in RECORDS else int if name == "CUfunction" else Numbers()

        def called(*given: Any) -> tuple[Any, ...]:
            self.said.append((name, given))
            self.number += 1
            answer = {"cuDeviceGetAttribute": 9, "cuEventElapsedTime": 0.001 * len(self.said)}
            return (0, answer.get(name, self.number))

        return called

    def names(self) -> list[str]:
        return [name for name, _ in self.said]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return made


def image() -> GpuModelImage:
    """Three launches, the second of nothing."""
    buffers = (BufferRef("input", 0), BufferRef("output", 0))
    calls = tuple(GpuCall("k", (blocks, 1, 1), buffers) for blocks in (2, 0, 3))
    return GpuModelImage((LoadedKernel("k", "", 128, starts_early=True),), calls, (24,), (24,))


def graph(made: GpuModelImage) -> LaunchGraph:
    return LaunchGraph(made, {"k": SimpleNamespace(handle=7)}, {"weight": 0, "arena": 0, "ring": 0}, 0, {})


def test_a_profile_is_one_replay_with_events_between_launches(driver: Driver) -> None:
    made = graph(image())
    driver.said.clear()
    taken = made.profile(5, (64, 128))
    assert len(taken) == 3 and taken[1] == 0 and taken[0] > 0 and taken[2] > 0
    order = [n for n in driver.names() if n not in ("cuEventCreate", "cuEventDestroy", "cuEventElapsedTime")]
    assert order == [
        "cuStreamBeginCapture", "cuEventRecordWithFlags", "cuLaunchKernelEx", "cuEventRecordWithFlags",
        "cuLaunchKernelEx", "cuEventRecordWithFlags", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphLaunch",
        "cuStreamSynchronize", "cuGraphExecDestroy", "cuGraphDestroy",
    ]  # fmt: skip
    configs = [given[0] for name, given in driver.said if name == "cuLaunchKernelEx"]
    assert not any(hasattr(config, "attrs") for config in configs), "no kernel starts while one is timed"
    created, destroyed = (driver.names().count(name) for name in ("cuEventCreate", "cuEventDestroy"))
    assert created == destroyed == 3


class Lane:
    """Memory of a stream's own for every input and output, far from the caller's."""

    def __init__(self, made: LaunchGraph) -> None:
        self.graph, self.lock = made, threading.Lock()

    def port(self, place: int) -> int:
        return 4096 * (place + 1)


@pytest.mark.parametrize(("x", "y", "copies"), [(64, 128, []), (68, 128, ["in"]), (64, 132, ["out"]),
                                                (68, 132, ["in", "out"])])  # fmt: skip
def test_arrays_inside_a_packet_pass_through_memory_of_ours(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, x: int, y: int, copies: list[str]
) -> None:
    """On the caller's stream, inputs before the launch and outputs after it."""
    made = object.__new__(CudaModel)
    monkeypatch.setattr(made, "_image", image(), raising=False)
    monkeypatch.setattr(made, "_driver", driver, raising=False)
    lane: Any = Lane(graph(made.image))
    launched: list[tuple[int, ...]] = []

    def launch(stream: int, pointers: tuple[int, ...]) -> None:
        driver.said.append(("launch", (stream,)))
        launched.append(pointers)

    monkeypatch.setattr(lane.graph, "launch", launch)
    driver.said.clear()
    made._launch_aligned(lane, 5, (x, y), 1)
    assert launched == [(4096 if x % 16 else x, 8192 if y % 16 else y)]
    wanted: list[Any] = [("launch", (5,))]
    if "in" in copies:
        wanted.insert(0, ("cuMemcpyDtoDAsync", (4096, x, 24, 5)))
    if "out" in copies:
        wanted.append(("cuMemcpyDtoDAsync", (y, 8192, 24, 5)))
    assert driver.said == wanted
