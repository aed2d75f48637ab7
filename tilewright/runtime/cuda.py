"""Runs a GPU model on a real device through cuda-core: one stream, the launches in order."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tilewright.errors import ToolError
from tilewright.runtime.cache import Cache
from tilewright.runtime.gpu_model import GpuCall, GpuModelImage, check_arrays
from tilewright.runtime.nvrtc import cached_cubin

_FREE_SHARED_BYTES = 48 << 10  # beyond this a kernel must ask for its dynamic shared memory
_HOW_TO_GET_IT = "pip install 'cuda-core[cu13]' nvidia-cuda-nvrtc"


class CudaError(ToolError):
    """No usable GPU, or it refused something."""


@dataclass(frozen=True)
class CudaDevice:
    """What is known of a GPU in this machine."""

    index: int
    name: str
    arch: str  # "sm_90"
    multiprocessors: int
    shared_bytes: int  # the most a block may have
    l2_bytes: int


def devices() -> tuple[CudaDevice, ...]:
    """The GPUs that can be used; none where the packages or the driver are missing."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return ()
    from cuda.core import Device

    try:
        found = Device.get_all_devices()
    except RuntimeError:  # no driver library, or a driver without a device
        return ()
    return tuple(_describe(index, device) for index, device in enumerate(found))


def _describe(index: int, device: Any) -> CudaDevice:
    properties = device.properties
    return CudaDevice(
        index=index,
        name=device.name,
        arch=f"sm_{device.arch}",
        multiprocessors=properties.multiprocessor_count,
        shared_bytes=properties.max_shared_memory_per_block_optin,
        l2_bytes=properties.l2_cache_size,
    )


@dataclass(frozen=True)
class _Launch:
    config: Any
    kernel: Any
    arguments: list[Any]


class CudaModel:
    """A model on a GPU: weights and arena stay there, inputs and outputs are copied at each run."""

    def __init__(self, image: GpuModelImage, cache: Cache, device: int = 0, jobs: int = 2) -> None:
        self._image = image
        self._lock = threading.Lock()
        self._device = _open_device(device)
        self._stream = self._device.create_stream()
        self._kernels = self._load_kernels(cache, jobs)
        self._weights = self._allocate(memoryview(image.weights).nbytes)
        self._arena = self._allocate(image.arena_bytes)
        self._inputs = [self._allocate(size) for size in image.input_bytes]
        self._outputs = [self._allocate(size) for size in image.output_bytes]
        self._launches = [self._prepare(call) for call in image.calls]
        self._upload(self._weights, np.frombuffer(image.weights, np.uint8))
        self._stream.sync()

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Calls from several threads take turns."""
        self._execute(inputs, outputs, timed=False)

    def profile(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> list[int]:
        """Nanoseconds of each launch on the device."""
        return self._execute(inputs, outputs, timed=True)

    def _execute(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], timed: bool) -> list[int]:
        from cuda.core import EventOptions, launch

        check_arrays(self._image, inputs, outputs)
        options = EventOptions(timing_enabled=True)
        with self._lock:
            self._device.set_current()
            kept = [np.ascontiguousarray(a) for a in inputs]  # alive until the copies are done
            for buffer, array in zip(self._inputs, kept, strict=True):
                self._upload(buffer, array)
            events = [self._stream.record(options=options)] if timed else []
            for prepared in self._launches:
                if prepared is not None:
                    launch(self._stream, prepared.config, prepared.kernel, *prepared.arguments)
                if timed:
                    events.append(self._stream.record(options=options))
            results = [np.empty(a.nbytes, np.uint8) for a in outputs]
            for buffer, result in zip(self._outputs, results, strict=True):
                self._download(buffer, result)
            self._stream.sync()
        for output, result in zip(outputs, results, strict=True):
            np.copyto(output, result.view(output.dtype).reshape(output.shape))
        # an event difference is in milliseconds
        return [round((after - before) * 1e6) for before, after in pairwise(events)]

    # ---- set-up

    def _load_kernels(self, cache: Cache, jobs: int) -> dict[str, Any]:
        from cuda.core import ObjectCode

        arch = f"sm_{self._device.arch}"
        with ThreadPoolExecutor(jobs) as pool:
            cubins = list(pool.map(lambda k: cached_cubin(k.source, arch, cache), self._image.kernels))
        loaded = {}
        for kernel, cubin in zip(self._image.kernels, cubins, strict=True):
            code = ObjectCode.from_cubin(cubin, name=kernel.name).get_kernel(kernel.name)
            if kernel.shared_bytes > _FREE_SHARED_BYTES:
                self._allow_shared(code, kernel.name, kernel.shared_bytes)
            loaded[kernel.name] = code
        return loaded

    def _allow_shared(self, code: Any, name: str, size: int) -> None:
        most = self._device.properties.max_shared_memory_per_block_optin
        if size > most:
            raise CudaError(f"kernel {name} needs {size} bytes of shared memory, the device has {most} for a block")
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuKernelSetAttribute(attribute, size, code.handle, self._device.device_id))

    def _allocate(self, size: int) -> Any:
        return self._device.allocate(max(size, 1), stream=self._stream)

    def _prepare(self, call: GpuCall) -> _Launch | None:
        from cuda.core import LaunchConfig

        if 0 in call.grid:  # nothing to do, and the driver refuses an empty grid
            return None
        kernel = self._image.kernel(call.kernel)
        config = LaunchConfig(grid=call.grid, block=(kernel.block, 1, 1), shmem_size=kernel.shared_bytes)
        arguments: list[Any] = []
        for ref in call.buffers:
            if ref.space == "input":
                arguments.append(int(self._inputs[ref.value].handle))
            elif ref.space == "output":
                arguments.append(int(self._outputs[ref.value].handle))
            else:
                base = self._weights if ref.space == "weight" else self._arena
                arguments.append(int(base.handle) + ref.value)
        arguments += [np.int64(extent) for extent in call.extents]
        if call.step is not None:
            arguments.append(np.int32(call.step))
        return _Launch(config, self._kernels[call.kernel], arguments)

    # ---- copies

    def _upload(self, buffer: Any, array: np.ndarray) -> None:
        if array.nbytes == 0:
            return
        from cuda.bindings import driver

        _check(driver.cuMemcpyHtoDAsync(int(buffer.handle), array.ctypes.data, array.nbytes, self._stream.handle))

    def _download(self, buffer: Any, array: np.ndarray) -> None:
        if array.nbytes == 0:
            return
        from cuda.bindings import driver

        _check(driver.cuMemcpyDtoHAsync(array.ctypes.data, int(buffer.handle), array.nbytes, self._stream.handle))


def _open_device(index: int) -> Any:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        raise CudaError(f"cuda-core is not installed: {_HOW_TO_GET_IT}")
    from cuda.core import Device

    try:
        device = Device(index)
        device.set_current()
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise CudaError(f"no GPU {index} to run on ({reason}); the target cuda-emulated needs none") from error
    return device


def _check(result: tuple[Any, ...]) -> None:
    status = result[0]
    if int(status) != 0:
        raise CudaError(f"the CUDA driver answered {status.name}")
