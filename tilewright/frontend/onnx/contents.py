"""The elements of tensors in a model file, dense or sparse."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
from onnx import numpy_helper

from tilewright.errors import ModelError, UnsupportedError
from tilewright.frontend.onnx.mapped import is_mapped, mapped_array
from tilewright.ir.forms import dtypes

_MOST_DENSE = 1 << 30  # bytes of a sparse tensor written out: a few numbers in a file can name any shape


def line_of(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def array_of(tensor: onnx.TensorProto, label: str) -> np.ndarray:
    dtype = dtypes.by_onnx(tensor.data_type)
    if dtype is None and tensor.data_type == onnx.TensorProto.STRING:
        return _strings(tensor, label)
    if dtype is None:
        raise UnsupportedError(f"{label} has element type {type_name(tensor.data_type)}, which is not supported")
    if is_mapped(tensor):
        return mapped_array(tensor, label)
    try:
        # older ONNX packages give bfloat16 as float32
        array = numpy_helper.to_array(tensor).astype(dtype.numpy, copy=False)
    except (ValueError, TypeError, OSError) as error:
        raise ModelError(f"{label} cannot be read: {line_of(error)}") from error
    return array


def _strings(tensor: onnx.TensorProto, label: str) -> np.ndarray:
    """Text, which no native code reads."""
    try:
        found = [text.decode("utf-8") for text in tensor.string_data]
        return np.array(found, dtype=object).reshape(tuple(tensor.dims))
    except ValueError as error:
        raise ModelError(f"{label} cannot be read: {line_of(error)}") from error


def type_name(number: int) -> str:
    try:
        return onnx.TensorProto.DataType.Name(number).lower()
    except ValueError:
        return f"number {number}"


def dense_of(sparse: onnx.SparseTensorProto, label: str) -> np.ndarray:
    """A sparse tensor with its zeros; places are given by one number each, or by one for every axis."""
    values, places = array_of(sparse.values, label), array_of(sparse.indices, f"{label}: its indices")
    shape = tuple(sparse.dims)
    if any(n < 0 for n in shape) or values.dtype.kind == "O" or prod(shape) * values.itemsize > _MOST_DENSE:
        raise UnsupportedError(f"{label} is sparse, with the shape {list(shape)}; {_MOST_DENSE} bytes are supported")
    if places.dtype != np.int64 or places.shape not in ((values.size,), (values.size, len(shape))):
        raise ModelError(f"{label}: {values.size} values at indices of shape {list(places.shape)} are no sparse tensor")
    limits = np.array(shape if places.ndim == 2 else [prod(shape)], np.int64)
    if np.any(places < 0) or np.any(places >= limits):
        raise ModelError(f"{label}: a place is outside the shape {list(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[tuple(places.T) if places.ndim == 2 else np.unravel_index(places, shape)] = values.ravel()
    return dense
