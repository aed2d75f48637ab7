"""The GPUs of this machine through cuda-core: found, opened, and their memory taken and given back."""

from __future__ import annotations

import ctypes
import importlib.util
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from tilewright.errors import ToolError
from tilewright.runtime.nvrtc import OLDEST, exact_architecture

_HOW_TO_GET_IT = "pip install 'tilewright[cuda]'"
_ELSEWHERE = "the target cuda-emulated needs none"


class CudaError(ToolError):
    """No usable GPU, or it refused something."""


@dataclass(frozen=True)
class CudaDevice:
    """What is known of a GPU in this machine."""

    index: int
    name: str
    arch: str  # what code is compiled for: "sm_80", "sm_90a"
    multiprocessors: int
    shared_bytes: int  # the most a block may have
    l2_bytes: int
    memory_bytes: int


def devices() -> tuple[CudaDevice, ...]:
    """The GPUs that can be used; none where the packages or the driver are missing."""
    if not is_installed():
        return ()
    from cuda.core import Device

    try:
        found = Device.get_all_devices()
    except RuntimeError:  # no driver library, or a driver without a device
        return ()
    return tuple(_describe(index, device) for index, device in enumerate(found))


def is_installed() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None


def capability(device: Any) -> int:
    """9.0 as 90."""
    return int(device.arch)


def _describe(index: int, device: Any) -> CudaDevice:
    properties = device.properties
    return CudaDevice(
        index=index,
        name=device.name,
        arch=exact_architecture(capability(device)),
        multiprocessors=properties.multiprocessor_count,
        shared_bytes=properties.max_shared_memory_per_block_optin,
        l2_bytes=properties.l2_cache_size,
        memory_bytes=_total_memory(device),
    )


def _total_memory(device: Any) -> int:
    from cuda.bindings import driver

    return int(check(driver.cuDeviceTotalMem(device.device_id))[0])


def open_device(index: int) -> Any:
    """The GPU of that number, its primary context made: the one that torch, CuPy and JAX use too."""
    if not is_installed():
        raise CudaError(f"cuda-core is not installed: {_HOW_TO_GET_IT}; {_ELSEWHERE}")
    from cuda.core import Device

    try:
        device = Device(index)
        device.set_current()
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise CudaError(f"no GPU {index} to run on ({reason}); {_ELSEWHERE}") from error
    if capability(device) < OLDEST:
        needs = f"kernels need sm_{OLDEST} (Ampere) or newer"
        raise CudaError(f"GPU {index}, {device.name}, is sm_{device.arch}, and {needs}; {_ELSEWHERE}")
    return device


def identity(index: int = 0) -> bytes:
    """By which a GPU is told from all others, of other computers too."""
    return str(open_device(index).uuid).encode()


def check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the driver gave beside its status."""
    if result[0]:
        raise CudaError(f"the CUDA driver answered {result[0].name}")
    return result[1:]


@contextmanager
def current(context: Any) -> Iterator[None]:
    """The context current on this thread, and the caller's own afterwards: it may be at work on another GPU."""
    from cuda.bindings import driver

    check(driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        check(driver.cuCtxPopCurrent())


def require_memory(needed: int, what: str) -> None:
    """An error with numbers where so many bytes are not free on the current device."""
    from cuda.bindings import driver

    free, total = check(driver.cuMemGetInfo())
    if needed > free:
        raise _too_little(needed, what, free, total)


def _too_little(needed: int, what: str, free: int, total: int) -> CudaError:
    return CudaError(
        f"{what} needs {_amount(needed)} on the GPU, which has {_amount(free)} free of {_amount(total)}; "
        "free some of it, or take a smaller batch"
    )


class DeviceMemory:
    """Bytes on the current device, given back when nobody holds them any more."""

    def __init__(self, size: int, context: Any, what: str = "the model") -> None:
        """`what` they are for, as an error says it."""
        from cuda.bindings import driver

        result = driver.cuMemAlloc(max(size, 1))
        if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise _too_little(size, what, *check(driver.cuMemGetInfo()))
        (pointer,) = check(result)
        self.pointer = int(pointer)
        self.size = size
        self._finalizer = weakref.finalize(self, _give_back, self.pointer, context)

    def close(self) -> None:
        self._finalizer()


class HostMemory:
    """Pages of the host that stay where they are, so that the device reads them while kernels run: arrays one behind
    the other, each by a number."""

    def __init__(self, sizes: Mapping[int, int], context: Any) -> None:
        from cuda.bindings import driver

        (pointer,) = check(driver.cuMemHostAlloc(max(1, sum(sizes.values())), 0))
        self._pointer = int(pointer)
        starts = accumulate(sizes.values(), initial=self._pointer)
        self.addresses: dict[int, int] = dict(zip(sizes, starts, strict=False))
        self._finalizer = weakref.finalize(self, _give_back, self._pointer, context, True)

    def fill(self, number: int, piece: memoryview) -> None:
        data = np.frombuffer(piece, np.uint8)
        ctypes.memmove(self.addresses[number], data.ctypes.data, data.nbytes)

    def close(self) -> None:
        self._finalizer()


def zeroed_memory(size: int, context: Any) -> DeviceMemory:
    """Memory of zeros, there when this returns."""
    from cuda.bindings import driver

    memory = DeviceMemory(size, context)
    check(driver.cuMemsetD8(memory.pointer, 0, size))
    check(driver.cuStreamSynchronize(driver.CUstream(driver.CU_STREAM_LEGACY)))
    return memory


def _give_back(pointer: int, context: Any, is_host: bool = False) -> None:
    from cuda.bindings import driver

    if int(driver.cuCtxPushCurrent(context)[0]) != 0:
        return  # the process is ending, and the driver with it
    (driver.cuMemFreeHost if is_host else driver.cuMemFree)(pointer)
    driver.cuCtxPopCurrent()


def _amount(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
