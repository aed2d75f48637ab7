"""Arrays that lie on a GPU already, whoever made them: where they are, which stream they belong to, new ones like them.

torch and CuPy are asked directly, which costs a microsecond where DLPack costs five; everything else goes by DLPack.
None of them is imported here before an array of theirs was given."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from tilewright.errors import InputError
from tilewright.runtime import dlpack
from tilewright.runtime.cuda_device import DeviceMemory
from tilewright.runtime.gpu_model import ALIGNMENT


class ExpectedArray(NamedTuple):
    """An input or output as a call must hand it over."""

    what: str  # "input 'x'"
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    type_name: str  # of `dtype`: NumPy makes it anew each time it is asked
    size: int  # bytes


def expected(what: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ExpectedArray:
    return ExpectedArray(what, dtype, shape, dtype.name, prod(shape) * dtype.itemsize)


class Library(Protocol):
    """How a library's arrays are read and made."""

    def stream(self) -> int | None:
        """The stream its work goes to at the moment; None where results must be whole when they are handed over."""

    def pointers(self, values: Sequence[Any], ports: Sequence[ExpectedArray]) -> list[int] | None:
        """Where arrays of this library lie, told without delay; None where one is not as it must be, or of another."""

    def view(self, value: Any, port: ExpectedArray, stream: int) -> dlpack.View:
        """Where the array lies."""

    def empty(self, port: ExpectedArray) -> Any:
        """A new array, not written yet."""

    def handed_over(self, results: Sequence[Any]) -> list[Any]:
        """The results as a caller of this library wants them."""


class DeviceArray:
    """An array on a GPU that any library with DLPack can take; `numpy()` brings it to the host."""

    def __init__(self, memory: DeviceMemory, port: ExpectedArray, device: int) -> None:
        self._memory = memory
        self._device = device
        self.shape = port.shape
        self.dtype = port.dtype

    @property
    def pointer(self) -> int:
        return self._memory.pointer

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """Its contents are whole before anybody can hold it, so that no stream has to wait."""
        return dlpack.capsule_of(self.pointer, self.shape, self.dtype.name, self._device, self._memory)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._device

    def numpy(self) -> np.ndarray[Any, Any]:
        from cuda.bindings import driver

        from tilewright.runtime.cuda_device import check

        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            check(driver.cuMemcpyDtoH(array.ctypes.data, self.pointer, array.nbytes))
        return array

    def __repr__(self) -> str:
        return f"<tilewright.DeviceArray {self.dtype.name}{list(self.shape)} on GPU {self._device}>"


class TorchArrays:
    def __init__(self, device: int) -> None:
        import torch

        self._torch = torch
        self._tensor = torch.Tensor
        self._index = device
        self._device = torch.device("cuda", device)
        self._types: dict[str, Any] = {}
        # The public way makes a Stream object: four microseconds instead of a tenth.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def stream(self) -> int | None:
        if self._raw_stream is not None:
            return int(self._raw_stream(self._index))
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)

    def pointers(self, values: Sequence[Any], ports: Sequence[ExpectedArray]) -> list[int] | None:
        found = []
        for value, port in zip(values, ports, strict=True):
            if (
                type(value) is not self._tensor
                or value.dtype is not self._type(port)
                or value.shape != port.shape
                or value.get_device() != self._index
                or not value.is_contiguous()
            ):
                return None
            pointer = value.data_ptr()
            if pointer % ALIGNMENT:
                return None
            found.append(pointer)
        return found

    def _type(self, port: ExpectedArray) -> Any:
        known = self._types.get(port.type_name)
        if known is None:
            known = self._types[port.type_name] = getattr(self._torch, port.type_name)
        return known

    def view(self, value: Any, port: ExpectedArray, stream: int) -> dlpack.View:
        name = str(value.dtype).removeprefix("torch.")
        return dlpack.View(value.data_ptr(), tuple(value.shape), name, value.get_device(), value.is_contiguous(), value)

    def empty(self, port: ExpectedArray) -> Any:
        return self._torch.empty(port.shape, dtype=self._type(port), device=self._device)

    def handed_over(self, results: Sequence[Any]) -> list[Any]:
        return list(results)


class CupyArrays:
    def __init__(self, device: int) -> None:
        import cupy

        self._cupy = cupy
        self._index = device

    def stream(self) -> int | None:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def pointers(self, values: Sequence[Any], ports: Sequence[ExpectedArray]) -> list[int] | None:
        return None

    def view(self, value: Any, port: ExpectedArray, stream: int) -> dlpack.View:
        return dlpack.View(
            value.data.ptr, value.shape, value.dtype.name, value.device.id, value.flags.c_contiguous, value
        )

    def empty(self, port: ExpectedArray) -> Any:
        with self._cupy.cuda.Device(self._index):
            return self._cupy.empty(port.shape, port.dtype)

    def handed_over(self, results: Sequence[Any]) -> list[Any]:
        return list(results)


class DlpackArrays:
    """Whatever has DLPack; results are ours, and JAX's where JAX asked."""

    def __init__(self, device: int, context: Any, is_jax: bool) -> None:
        self._device = device
        self._context = context
        self._is_jax = is_jax

    def stream(self) -> int | None:
        return None

    def pointers(self, values: Sequence[Any], ports: Sequence[ExpectedArray]) -> list[int] | None:
        return None

    def view(self, value: Any, port: ExpectedArray, stream: int) -> dlpack.View:
        return dlpack.read(value, stream)

    def empty(self, port: ExpectedArray) -> Any:
        return DeviceArray(DeviceMemory(port.size, self._context, port.what), port, self._device)

    def handed_over(self, results: Sequence[Any]) -> list[Any]:
        if not self._is_jax:
            return list(results)
        from jax.dlpack import from_dlpack

        return [from_dlpack(result) for result in results]


class Libraries:
    """The libraries whose arrays were seen, each asked for once."""

    def __init__(self, device: int, context: Any) -> None:
        self._device = device
        self._context = context
        self._known: dict[str, Library] = {}

    def of(self, value: Any) -> Library | None:
        """The library of an array on a GPU; None where it lies on the host."""
        name = type(value).__module__.partition(".")[0]
        if name == "numpy":
            return None
        if name == "torch":
            return self._library("torch") if value.is_cuda else None
        if name == "cupy":
            return self._library("cupy")
        return self._library("jax" if name.startswith("jax") else "") if dlpack.on_cuda(value) else None

    def _library(self, name: str) -> Library:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._made(name)
        return known

    def _made(self, name: str) -> Library:
        if name == "torch":
            return TorchArrays(self._device)
        if name == "cupy":
            return CupyArrays(self._device)
        return DlpackArrays(self._device, self._context, name == "jax")


def checked(found: dlpack.View, port: ExpectedArray, device: int) -> int:
    """The array's place, if it is what the kernels read as it lies; an error that says what it must be."""
    if found.dtype != port.type_name:
        raise InputError(f"{port.what} must be {port.type_name}, not {found.dtype}")
    if found.shape != port.shape:
        raise InputError(f"{port.what} must have shape {port.shape}, not {found.shape}")
    if found.device != device:
        raise InputError(f"{port.what} lies on GPU {found.device}, and the model on GPU {device}; move it there")
    if not found.is_contiguous:
        raise InputError(f"{port.what} must be contiguous on the GPU; make it so, as torch's .contiguous() does")
    return found.pointer


def check_disjoint(
    inputs: Sequence[int],
    input_ports: Sequence[ExpectedArray],
    outputs: Sequence[int],
    output_ports: Sequence[ExpectedArray],
) -> None:
    """Outputs are written while inputs, and the other outputs, are still read."""
    taken = list(zip(inputs, input_ports, strict=True))
    for pointer, port in zip(outputs, output_ports, strict=True):
        for other, earlier in taken:
            if pointer < other + earlier.size and other < pointer + port.size:
                raise InputError(f"{port.what} lies in the memory of {earlier.what}; give it an array of its own")
        taken.append((pointer, port))


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream, as cuda-core, torch, CuPy or a number gives it."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise InputError(f"stream must be a CUDA stream or its handle, not a {type(stream).__name__}")
