"""Calling a compiled model on tensors: their memory in, new tensors out, nothing copied on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tilewright.frontend.pytorch.tensors import array_of, tensor_of
from tilewright.ir.forms.graph import Graph


class Callee(Protocol):
    """What a compiled model offers here."""

    @property
    def outputs(self) -> Sequence[Any]: ...
    def __call__(self, /, *args: Any) -> list[Any]: ...
    def address_caller(self) -> Callable[[Sequence[int], Sequence[int]], None] | None: ...
    def explain(self) -> str: ...
    def profile(self, /, *args: Any, repeat: int = ...) -> Any: ...
    def save(self, folder: str | os.PathLike[str]) -> None: ...


Build = Callable[[Graph], Callee]
"""How a Graph becomes a model; the options are in it."""


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and type


def _new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


# PyTorch's dispatcher takes longer than a small model; there is a way round it, which its own backend takes too.
_new_tensor: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", _new)


def _form(shape: Sequence[int], dtype: torch.dtype) -> Form:
    """The form of a contiguous tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(shape), tuple(strides), dtype


class TensorCall:
    """A model as a function of tensors, which have the types and shapes that it was compiled for."""

    def __init__(self, model: Callee) -> None:
        self.model = model
        self.models = [model]
        self._native = model.address_caller()
        # of a tensor, shape and type are asked for by those who know them already: dynamo, or the key of a shape
        ports = () if self._native is None else model.outputs
        self._forms = [_form(p.shape, getattr(torch, p.dtype.name)) for p in ports]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        native = self._native
        if native is None:
            return self._by_arrays(tensors)
        addresses = []
        for tensor in tensors:
            if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
                return self._by_arrays(tensors)
            addresses.append(tensor.data_ptr())
        results = [_new_tensor(*form) for form in self._forms]
        native(addresses, [result.data_ptr() for result in results])
        return results

    def _by_arrays(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The way that copies what is not contiguous, and knows devices."""
        results = self.model(*[array_of(t.resolve_neg()) if t.is_cpu else t for t in tensors])
        return [r if isinstance(r, torch.Tensor) else tensor_of(r) for r in results]
