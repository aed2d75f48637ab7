"""Operators that say what PyTorch's cannot, registered with it under our name: all give tensors of their own."""

from __future__ import annotations

import torch


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("tilewright::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that PyTorch would hand on itself."""
    return _dense(x)


@torch.library.custom_op("tilewright::lent", mutates_args=())
def lent(x: torch.Tensor) -> torch.Tensor:
    """What a body works on in the place of a tensor from around it, which it changes."""
    return _dense(x)


@torch.library.custom_op("tilewright::given_back", mutates_args=())
def given_back(x: torch.Tensor) -> torch.Tensor:
    """What a body has made of a tensor that was lent to it."""
    return _dense(x)


@torch.library.custom_op("tilewright::taken", mutates_args=())
def taken(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """A copy of the slice at an index that a tensor holds; the nearest one where there is none."""
    extent = x.shape[dim]
    place = index.reshape(1).to(torch.int64).clamp(-extent, extent - 1)
    return x.index_select(dim, torch.where(place < 0, place + extent, place)).squeeze(dim)


@torch.library.custom_op("tilewright::one_of", mutates_args=())
def one_of(x: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
    """What one of several tensors has, which data chose: a copy of that one."""
    return _dense(x)


copied.register_fake(_like)
lent.register_fake(_like)
given_back.register_fake(_like)


@one_of.register_fake
def _(x: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
    return _like(x)


@taken.register_fake
def _(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return torch.empty((*x.shape[:dim], *x.shape[dim + 1 :]), dtype=x.dtype, device=x.device)
