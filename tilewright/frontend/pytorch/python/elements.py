"""Elements of tensors at indices that tensors hold: what stands between brackets, taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.frontend.pytorch.own_operators import taken


def get(x: Any, key: Any) -> Any:
    """x[key]; what data choose is a copy."""
    for dim, index in _chosen(x, key):
        x = taken(x, dim, index)
    return _left(key, x)


def put(x: Any, key: Any, value: Any) -> None:
    """x[key] = value."""
    chosen = _chosen(x, key)
    if not chosen:
        x[key] = value
        return
    parts = _parts(x, chosen)
    part = parts.pop().clone()
    part[_rest(key) or ...] = value
    for (dim, index), outer in zip(reversed(chosen), reversed(parts), strict=True):
        part = _with_slice(outer, dim, index, part)
    x.copy_(part)


def put_changed(x: Any, key: Any, change: Any, value: Any) -> None:
    """x[key] += value, or another such."""
    chosen = _chosen(x, key)
    if not chosen:
        x[key] = change(x[key], value)
    else:
        put(x, key, change(_left(key, _parts(x, chosen)[-1]), value))


def _parts(x: torch.Tensor, chosen: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """A tensor, its slice at the first index, the slice of that at the next, ..."""
    found = [x]
    for dim, index in chosen:
        found.append(_slice_at(found[-1], dim, index))
    return found


def _chosen(x: Any, key: Any) -> list[tuple[int, torch.Tensor]]:
    """Dimensions of a tensor that are indexed by tensors which hold one integer, the last first so that each keeps its
    place."""
    if not isinstance(x, torch.Tensor):
        return []
    parts = key if isinstance(key, tuple) else (key,)
    if not any(_is_index(k) for k in parts):
        return []
    count = sum(_dimensions(k) for k in parts)
    dim, found = 0, []
    for part in parts:
        if part is Ellipsis:
            dim += x.ndim - count
            continue
        if _is_index(part):
            found.append((dim, part))
        dim += _dimensions(part)
    return list(reversed(found))


def _is_index(part: Any) -> bool:
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return isinstance(part, torch.Tensor) and part.ndim == 0 and part.dtype in integers


def _dimensions(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1


def _rest(key: Any) -> tuple[Any, ...]:
    parts = key if isinstance(key, tuple) else (key,)
    return tuple(k for k in parts if not _is_index(k))


def _left(key: Any, x: Any) -> Any:
    """What the other parts of a key take of what its tensors have chosen."""
    parts = key if isinstance(key, tuple) else (key,)
    rest = _rest(key)
    if len(rest) == len(parts):
        return x[key]
    return x[rest] if rest else x


def _slice_at(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """The slice at an index; the nearest one where there is none, as in a branch that is not taken."""
    place = _place(index, x.shape[dim]).clamp(0, x.shape[dim] - 1)
    return x.index_select(dim, place.reshape(1)).squeeze(dim)


def _place(index: torch.Tensor, extent: int) -> torch.Tensor:
    place = index.to(torch.int64)
    return torch.where(place < 0, place + extent, place)


def _with_slice(x: torch.Tensor, dim: int, index: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The tensor with another slice at an index."""
    extent = x.shape[dim]
    place = _place(index, extent)
    at = torch.arange(extent).reshape([-1 if k == dim else 1 for k in range(x.ndim)])
    return torch.where(at == place, part.unsqueeze(dim), x)
