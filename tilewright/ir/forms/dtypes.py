"""Element types: one row a type, with its NumPy meaning, its ONNX number and the name each renderer spells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    name: str
    kind: str  # "f" float, "i" signed, "u" unsigned, "b" bool, "s" storage: moved and read as bits, never computed with
    bits: int  # that an element takes in memory
    numpy: np.dtype
    onnx: int

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    @property
    def is_storage(self) -> bool:
        return self.kind == "s"

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest integer."""
        return (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1) if self.kind == "i" else (0, (1 << self.bits) - 1)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        """There is one of each in a process, also of one that came from another process."""
        return by_name, (self.name,)


float32 = DType("float32", "f", 32, np.dtype(np.float32), 1)
uint8 = DType("uint8", "u", 8, np.dtype(np.uint8), 2)
int8 = DType("int8", "i", 8, np.dtype(np.int8), 3)
uint16 = DType("uint16", "u", 16, np.dtype(np.uint16), 4)
int16 = DType("int16", "i", 16, np.dtype(np.int16), 5)
int32 = DType("int32", "i", 32, np.dtype(np.int32), 6)
int64 = DType("int64", "i", 64, np.dtype(np.int64), 7)
bool_ = DType("bool", "b", 8, np.dtype(np.bool_), 9)
float16 = DType("float16", "f", 16, np.dtype(np.float16), 10)
float64 = DType("float64", "f", 64, np.dtype(np.float64), 11)
uint32 = DType("uint32", "u", 32, np.dtype(np.uint32), 12)
uint64 = DType("uint64", "u", 64, np.dtype(np.uint64), 13)
bfloat16 = DType("bfloat16", "f", 16, np.dtype(ml_dtypes.bfloat16), 16)
# float32 numbers of 11 significant bits, as tensor cores multiply them; no model and no array of a user's has it
tf32 = DType("tf32", "f", 32, np.dtype(np.float32), 0)

# One element a byte, as NumPy holds them; what their bits mean is spelled out by ops/maps/storage.py.
float8e4m3fn = DType("float8e4m3fn", "s", 8, np.dtype(ml_dtypes.float8_e4m3fn), 17)
float8e4m3fnuz = DType("float8e4m3fnuz", "s", 8, np.dtype(ml_dtypes.float8_e4m3fnuz), 18)
float8e5m2 = DType("float8e5m2", "s", 8, np.dtype(ml_dtypes.float8_e5m2), 19)
float8e5m2fnuz = DType("float8e5m2fnuz", "s", 8, np.dtype(ml_dtypes.float8_e5m2fnuz), 20)
uint4 = DType("uint4", "s", 8, np.dtype(ml_dtypes.uint4), 21)
int4 = DType("int4", "s", 8, np.dtype(ml_dtypes.int4), 22)
float4e2m1 = DType("float4e2m1", "s", 8, np.dtype(ml_dtypes.float4_e2m1fn), 23)
float8e8m0 = DType("float8e8m0", "s", 8, np.dtype(ml_dtypes.float8_e8m0fnu), 24)
uint2 = DType("uint2", "s", 8, np.dtype(ml_dtypes.uint2), 25)
int2 = DType("int2", "s", 8, np.dtype(ml_dtypes.int2), 26)

STORAGE: tuple[DType, ...] = (
    float8e4m3fn, float8e4m3fnuz, float8e5m2, float8e5m2fnuz, uint4, int4, float4e2m1, float8e8m0, uint2, int2,
)  # fmt: skip
ALL: tuple[DType, ...] = (
    float32, uint8, int8, uint16, int16, int32, int64, bool_, float16, float64, uint32, uint64, bfloat16, *STORAGE,
)  # fmt: skip
EVERY = (*ALL, tf32)  # with what only the compiler gives a tensor
index = int64

_BY_NAME = {d.name: d for d in EVERY}
_BY_NUMPY = {d.numpy: d for d in ALL}
_BY_ONNX = {d.onnx: d for d in ALL}


def by_name(name: str) -> DType:
    return _BY_NAME[name]


def by_numpy(dtype: object) -> DType | None:
    """The element type of a NumPy dtype, or None where Tilewright has no such type."""
    return _BY_NUMPY.get(np.dtype(dtype))  # type: ignore[call-overload]


def by_onnx(number: int) -> DType | None:
    return _BY_ONNX.get(number)


def widens(narrow: DType, wide: DType) -> bool:
    """Whether a conversion of floats keeps every digit, and the one back rounds."""
    if not (narrow.is_float and wide.is_float):
        return False
    return narrow.bits < wide.bits or (narrow is tf32 and wide is float32)


def is_multiplied_narrow(dtype: DType) -> bool:
    """Whether products of such elements are summed in a wider type, as tensor cores do it."""
    return dtype in (int8, float8e4m3fn) or widens(dtype, float32)


def accumulator(dtype: DType) -> DType:
    """The type sums of `dtype` are kept in: at least float32, so that a long reduction stays accurate."""
    if dtype in (float16, bfloat16, tf32):
        return float32
    return dtype


_TF32_HALF, _TF32_KEPT = np.uint32(0x1000), np.uint32(0xFFFFE000)  # half of the last bit that is kept, and all of them


def as_tf32(values: np.ndarray) -> np.ndarray:
    """float32 rounded to tf32, halves away from zero; what is no number stays none."""
    given = np.asarray(values, np.float32)
    bits = np.ascontiguousarray(given).reshape(given.shape).view(np.uint32)
    return np.where(np.isnan(given), given, ((bits + _TF32_HALF) & _TF32_KEPT).view(np.float32))
