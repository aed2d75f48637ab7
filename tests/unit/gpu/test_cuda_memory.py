"""Room on the device: what the caller holds there is not asked for again, and what is missing is told with numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.gpu.test_cuda_calls import Driver
from tilewright.runtime import cuda
from tilewright.runtime.cache import Cache
from tilewright.runtime.cpu_model import BufferRef
from tilewright.runtime.cuda import CudaError, CudaModel
from tilewright.runtime.device_arrays import ExpectedArray, expected
from tilewright.runtime.gpu_model import GpuCall, GpuModelImage, LoadedKernel
from tilewright.runtime.nvrtc import Cubin

GIB = 1 << 30


class Status(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


class DriverWithMemory(Driver):
    """A driver with so many bytes to give."""

    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=Status(2))
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)
    CUstream, CU_STREAM_LEGACY = int, 1

    def __init__(self, total: int, taken: int) -> None:
        super().__init__()
        self.total, self.free = total, total - taken
        self.given: dict[int, int] = {}

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.free, self.total

    def cuMemAlloc(self, size: int) -> tuple[int, int | None]:
        if size > self.free:
            return self.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.free -= size
        self.number += 4096
        self.given[self.number] = size
        return 0, self.number

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:
        return 0, 0

    def cuMemsetD8(self, pointer: int, value: int, size: int) -> tuple[int]:
        return (0,)

    def cuMemFree(self, pointer: int) -> tuple[int]:
        self.free += self.given.pop(pointer)
        return (0,)


def image(input_bytes: int, shared_bytes: int = 0) -> GpuModelImage:
    calls = (GpuCall("k", (1, 1, 1), (BufferRef("input", 0), BufferRef("output", 0))),)
    kernel = LoadedKernel("k", "", 128, shared_bytes)
    return GpuModelImage((kernel,), calls, (input_bytes,), (64,), b"\0" * 256, arena_bytes=GIB)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DriverWithMemory:
    """Ten GiB, eight of which the caller holds."""
    driver = DriverWithMemory(10 * GIB, 8 * GIB)
    bindings, core = ModuleType("cuda.bindings"), ModuleType("cuda.core")
    bindings.driver = driver  # type: ignore[attr-defined]
    code = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=7))
    core.ObjectCode = SimpleNamespace(from_cubin=lambda text, name: code)  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.core", core)):
        monkeypatch.setitem(sys.modules, name, module)
    about = SimpleNamespace(multiprocessor_count=132, max_shared_memory_per_multiprocessor=233472,
                            max_shared_memory_per_block_optin=232448, max_threads_per_block=1024)  # fmt: skip
    stream = SimpleNamespace(handle=5, sync=lambda: None)
    found = SimpleNamespace(properties=about, arch="90", name="a GPU", device_id=0, create_stream=lambda: stream)
    monkeypatch.setattr(cuda, "open_device", lambda index: found)
    return driver


def loaded(made: GpuModelImage, folder: Path) -> CudaModel:
    return CudaModel(made, Cache(folder), cubins={"k": Cubin(b"code", {})})


class There:
    """Arrays of a library that lie on the device at these places."""

    def __init__(self, places: Mapping[ExpectedArray, int]) -> None:
        self.places = places

    def stream(self) -> int:
        return 5

    def pointers(self, values: Any, ports: Sequence[ExpectedArray]) -> list[int]:
        return [self.places[port] for port in ports]


def test_inputs_that_lie_on_the_device_are_not_counted_again(device: DriverWithMemory, tmp_path: Path) -> None:
    x, y = expected("input 'x'", np.dtype(np.uint8), (8 * GIB,)), expected("output 'y'", np.dtype(np.uint8), (64,))
    there: Any = There({x: 64, y: 16 * GIB})
    with closing(loaded(image(8 * GIB), tmp_path)) as model:
        model._run_there(there, [x], [y], [None], [None], lambda value, place: value, None)
        assert "cuGraphLaunch" in device.names()
        assert device.free == pytest.approx(GIB, abs=1 << 20)  # the arena, and nothing of the input's size


def test_an_array_of_the_host_that_has_no_room_is_named(device: DriverWithMemory, tmp_path: Path) -> None:
    told = "input 0 needs 8.00 GiB on the GPU, which has 1024.0 MiB free of 10.00 GiB"
    with closing(loaded(image(8 * GIB), tmp_path)) as model:
        lane = model._lane(5)
        with lane, pytest.raises(CudaError, match=told):
            lane.port(0)


def test_a_model_without_room_for_itself_is_refused(device: DriverWithMemory, tmp_path: Path) -> None:
    device.free = GIB // 2
    with pytest.raises(CudaError, match="the model needs 1.00 GiB on the GPU, which has 512.0 MiB free of 10.00 GiB"):
        loaded(image(16), tmp_path)


def test_a_kernel_beyond_the_device_is_refused_before_it_is_loaded(device: DriverWithMemory, tmp_path: Path) -> None:
    """As a model saved for a larger GPU is."""
    with pytest.raises(CudaError, match="kernel k needs 232449 bytes of shared memory, and a block may have 232448"):
        loaded(image(16, shared_bytes=232449), tmp_path)
