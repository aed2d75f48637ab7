"""Arrays on a GPU by DLPack, as far as it goes without one: records are read as they were written, owners let go."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.gpu_stages import graph
from tilewright import Options
from tilewright import compile as compile_model
from tilewright.errors import InputError
from tilewright.runtime import dlpack
from tilewright.runtime.device_arrays import Libraries, check_disjoint, checked, expected, stream_handle


class Owner:
    """Memory that can be seen to be let go."""


class Foreign:
    """An array of a library that has DLPack; its capsule is made anew each time, as libraries do."""

    def __init__(self, shape: tuple[int, ...], dtype: str, owner: Owner, device: int = 0) -> None:
        self.about = (0x7000, shape, dtype, device, owner)
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.about[3]

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        return dlpack.capsule_of(*self.about)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 5), (0, 4)])
def test_a_record_is_read_as_it_was_written(dtype: str, shape: tuple[int, ...]) -> None:
    array = Foreign(shape, dtype, Owner(), device=3)
    found = dlpack.read(array, stream=0)
    assert (found.pointer, found.shape, found.dtype, found.device) == (0x7000, shape, dtype, 3)
    assert found.is_contiguous
    assert array.streams == [dlpack.LEGACY_STREAM]  # the default stream has a number of its own there


def test_memory_lives_as_long_as_its_capsule() -> None:
    owner = Owner()
    seen = weakref.ref(owner)
    found = dlpack.read(Foreign((4,), "float32", owner), stream=7)
    del owner
    gc.collect()
    assert seen() is not None
    del found
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("shape", "strides", "whole"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((1, 3), (99, 1), True),
        ((2, 0), (7, 7), True),
        ((4,), (2,), False),
    ],
)
def test_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], whole: bool) -> None:
    assert dlpack._is_contiguous(shape, strides) == bool(whole)


def test_what_lies_on_the_host_is_nobodys() -> None:
    libraries = Libraries(0, None)
    assert libraries.of(np.zeros(3)) is None
    assert libraries.of([1.0]) is None
    found = libraries.of(Foreign((1,), "float32", Owner()))
    assert found is not None and found.stream() is None and libraries.of(Foreign((1,), "float32", Owner())) is found


def view(**changes: Any) -> dlpack.View:
    about = {"pointer": 64, "shape": (2, 3), "dtype": "float32", "device": 0, "is_contiguous": True, "owner": None}
    return dlpack.View(**(about | changes))


X = expected("input 'x'", np.dtype(np.float32), (2, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "input 'x' must be float32, not float16"),
        ({"shape": (3, 2)}, r"input 'x' must have shape \(2, 3\), not \(3, 2\)"),
        ({"device": 1}, "input 'x' lies on GPU 1, and the model on GPU 0; move it there"),
        ({"is_contiguous": False}, "input 'x' must be contiguous on the GPU"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(view(**changes), X, 0)
    assert checked(view(), X, 0) == 64
    assert checked(view(pointer=72), X, 0) == 72  # inside a packet: the call copies it


def test_outputs_have_memory_of_their_own() -> None:
    y = expected("output 'y'", np.dtype(np.float32), (2, 3))
    check_disjoint([1024], [X], [1048], [y])  # 24 bytes each
    with pytest.raises(InputError, match="output 'y' lies in the memory of input 'x'"):
        check_disjoint([1024], [X], [1047], [y])


def test_streams_by_any_name() -> None:
    assert stream_handle(5) == 5
    assert stream_handle(SimpleNamespace(cuda_stream=6)) == 6
    assert stream_handle(SimpleNamespace(ptr=7)) == 7
    assert stream_handle(SimpleNamespace(__cuda_stream__=lambda: (0, 8))) == 8
    with pytest.raises(InputError, match="stream must be a CUDA stream or its handle, not a str"):
        stream_handle("default")


class OnDevice:
    """As PyTorch's tensors are on a GPU: NumPy cannot read it, and a copy in the host's memory can be had."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("it lies on a GPU")

    def cpu(self) -> np.ndarray:
        return self._array


def test_a_model_is_profiled_with_arrays_on_a_device(tmp_path: Path) -> None:
    model = compile_model(graph([("Relu", ["x"], "y", {})], [("x", (3, 5))], [("y", (3, 5))]),
                          options=Options(target="cuda-emulated", cache_dir=tmp_path))  # fmt: skip
    assert model.profile(OnDevice(np.ones((3, 5), np.float32)), repeat=1).calls
