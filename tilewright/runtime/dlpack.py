"""DLPack as its two sides need it: what a foreign array on a device is, and an array of ours that others can take."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

CUDA = 2  # DLPack's number for memory of an NVIDIA GPU
LEGACY_STREAM = 1  # its name for CUDA's default stream, whose handle is 0
_CAPSULE = b"dltensor"
# Element types by DLPack's code and width.
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_api = ctypes.pythonapi
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_has_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_raw_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)


@dataclass(frozen=True)
class View:
    """An array that lies on a device; `owner` keeps its memory alive."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str  # as NumPy names it; "bfloat16" beside
    device: int
    is_contiguous: bool
    owner: Any


def on_cuda(value: Any) -> bool:
    """Whether an object says by DLPack that it lies on an NVIDIA GPU."""
    asked = getattr(value, "__dlpack_device__", None)
    return asked is not None and int(asked()[0]) == CUDA


def read(value: Any, stream: int) -> View:
    """The array behind an object that has DLPack, ready for work on this stream."""
    capsule = value.__dlpack__(stream=stream or LEGACY_STREAM)
    tensor = ctypes.cast(_pointer_of(capsule, _CAPSULE), ctypes.POINTER(_Managed)).contents.tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    return View(
        (tensor.data or 0) + tensor.byte_offset, shape, _type_name(tensor.dtype), tensor.device.index,
        strides is None or _is_contiguous(shape, strides), capsule,
    )  # fmt: skip


def capsule_of(pointer: int, shape: tuple[int, ...], dtype: str, device: int, owner: Any) -> Any:
    """A DLPack capsule over memory that `owner` keeps alive for as long as the receiver wants it."""
    held = _Held(pointer, shape, dtype, device, owner)
    _keep(held)
    return _new_capsule(ctypes.addressof(held.managed), _CAPSULE, ctypes.cast(_forget_capsule, ctypes.c_void_p))


class _Held:
    """The C record that a capsule points to, with what it points to in turn."""

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: str, device: int, owner: Any) -> None:
        self.owner = owner
        self.extents = (ctypes.c_int64 * len(shape))(*shape)
        steps = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            steps[i] = steps[i + 1] * max(1, shape[i + 1])
        self.strides = (ctypes.c_int64 * len(shape))(*steps)
        tensor = _Tensor(
            pointer, _Device(CUDA, device), len(shape), _type_of(dtype),
            ctypes.cast(self.extents, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64)), 0,
        )  # fmt: skip
        self.managed = _Managed(tensor, id(self), ctypes.cast(_release, ctypes.c_void_p))


def _keep(held: _Held) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _release(managed: int) -> None:
    """What a receiver calls when it is done with the array."""
    context = ctypes.cast(managed, ctypes.POINTER(_Managed)).contents.context
    ctypes.pythonapi.Py_DecRef(ctypes.cast(context, ctypes.py_object))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _forget_capsule(capsule: int) -> None:
    """A capsule that nobody took is still ours to release; one that was taken has another name."""
    if _has_name(capsule, _CAPSULE):
        _release(_raw_pointer_of(capsule, _CAPSULE))


def _type_of(dtype: str) -> _Type:
    if dtype == "bool":
        return _Type(_CODES["bool"], 8, 1)
    word = dtype.rstrip("0123456789")
    return _Type(_CODES[word], int(dtype[len(word) :]), 1)


def _type_name(found: _Type) -> str:
    word = next((name for name, code in _CODES.items() if code == found.code), f"code{found.code}_")
    name = word if word == "bool" else f"{word}{found.bits}"
    return name if found.lanes == 1 else f"{name}x{found.lanes}"


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
