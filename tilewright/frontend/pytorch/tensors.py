"""Tensors of PyTorch as NumPy arrays over the same memory, and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from tilewright.errors import UnsupportedError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory as an array; nothing is copied where it lies on the CPU."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.dtype is torch.bfloat16:  # NumPy has no such type: the same bits by another name
        return plain.view(torch.int16).numpy().view(_BFLOAT16)
    return plain.numpy()


def constant_of(tensor: torch.Tensor, name: str) -> np.ndarray:
    """A parameter as the Graph keeps it: a view of its memory, or a copy where it lies elsewhere or is not dense."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"parameter '{name}' is {tensor.layout}, which is not supported; make it dense")
    plain = tensor.detach()
    if type(plain) is not torch.Tensor and not isinstance(plain, torch.nn.Parameter):
        raise UnsupportedError(f"parameter '{name}' is a {type(plain).__name__}, which is not supported; make it plain")
    return array_of(plain.cpu().resolve_conj().resolve_neg())


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """The array's own memory as a tensor."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
