"""Elements of tensors at indices that tensors hold: what stands between brackets, taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.own_operators import one_of, taken
from tilewright.frontend.pytorch.python.selections import Selection, map_elements
from tilewright.frontend.pytorch.python.values import is_data, is_number, is_numeral, made_of, number_like


def get(x: Any, key: Any) -> Any:
    """x[key]; what data choose is a copy, but for slices between places that they tell."""
    if isinstance(x, list | tuple) and _is_index(key):
        return _one_of(x, key)
    if isinstance(x, dict) and is_data(key):
        return looked_up(x, key)
    chosen = _masked(x, key)
    if chosen is not None:
        return chosen.apart()
    if isinstance(x, Selection):
        return x[key]
    for dim, index in _chosen(x, key):
        x = taken(x, dim, index)
    return _left(key, x)


def put(x: Any, key: Any, value: Any) -> None:
    """x[key] = value."""
    if is_chosen_slot(x, key):
        x[:] = [
            made_of(torch.where(at, value, each), (value, each)) for at, each in zip(places_of(x, key), x, strict=True)
        ]
        return
    if isinstance(x, dict) and is_data(key):
        raise UnsupportedError("a key of a dict is a number that data tell; write into a list or a tensor by it")
    chosen = _masked(x, key)
    if isinstance(x, Selection):
        x[key] = value
    elif chosen is None or not _put_elements(chosen, value):
        _put_chosen(x, key, map_elements(value))


def is_chosen_slot(x: Any, key: Any) -> bool:
    """Whether a key is a place in a list that data tell."""
    return isinstance(x, list) and _is_index(key)


def places_of(x: Sequence[Any], key: torch.Tensor) -> list[torch.Tensor]:
    """For each place in a list whether it is the one that data tell."""
    place = _place(key, len(x))
    return [place == k for k in range(len(x))]


def looked_up(x: dict[Any, Any], key: torch.Tensor, *default: Any) -> Any:
    """What a dict has under a number that data tell; of one that it does not have the last value."""
    places = [(k, number) for k, number in enumerate(x) if is_number(number)]
    if not places or len(places) < len(x):
        raise UnsupportedError("a dict whose keys are no numbers is asked for one that data tell")
    place: Any = torch.full((), len(x) if default else len(x) - 1, dtype=torch.int64)
    for k, number in places:
        place = torch.where(key == number, k, place)
    return _one_of([*x.values(), *default], place)


def _one_of(values: Sequence[Any], place: torch.Tensor) -> Any:
    """The value at a place that data tell, which of tensors is a copy."""
    if not values or not all(is_number(x) or is_data(x) for x in values):
        raise UnsupportedError("data choose an element of a list or a dict that is no tensor and no number")
    tensors = [x for x in values if is_data(x) and not is_numeral(x)]
    if len({x.shape for x in map(number_like, values)}) > 1 or len({x.dtype for x in tensors}) > 1:
        raise UnsupportedError("data choose an element of a list or a dict of tensors of several shapes or types")
    found = taken(torch.stack([number_like(x) for x in values]), 0, place)
    return made_of(one_of(found, tensors) if tensors else found, values)


def _change_one_of(values: Sequence[Any], place: torch.Tensor, change: Callable[[Any], Any]) -> None:
    """A change in place of the tensor at a place that data tell."""
    for is_at, each in zip(places_of(values, place), values, strict=True):
        each.copy_(torch.where(is_at, change(each.clone()), each))


def _are_tensors(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(is_data(each) and not is_numeral(each) for each in x)


def _put_chosen(x: Any, key: Any, value: Any) -> None:
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


def change_part(x: Any, key: Any, name: str, *args: Any, **named: Any) -> Any:
    """x[key].add_(...), or another such: of a part that data choose, a new value."""
    if _is_index(key) and _are_tensors(x):
        _change_one_of(x, key, lambda each: getattr(each, name)(*args, **named))
        return get(x, key)
    masked = _masked(x, key)
    if masked is not None:
        return masked.apart().change(name, *args, **named)
    chosen = _chosen(x, key)
    if not chosen and not isinstance(x, Selection):
        return getattr(get(x, key), name)(*args, **named)
    part = _left(key, _parts(x, chosen)[-1]).clone()
    getattr(part, name)(*args, **named)
    put(x, key, part)
    return get(x, key)


def put_changed(x: Any, key: Any, change: Any, value: Any) -> None:
    """x[key] += value, or another such."""
    if _is_index(key) and _are_tensors(x):
        _change_one_of(x, key, lambda each: change(each, value))
        return
    if is_chosen_slot(x, key):
        put(x, key, change(get(x, key), value))
        return
    masked = _masked(x, key)
    if masked is not None and _put_elements(masked, change(masked.copy(), value)):
        return
    chosen = _chosen(x, key)
    if chosen:
        put(x, key, change(_left(key, _parts(x, chosen)[-1]), value))
        return
    if isinstance(x, Selection):
        x[key] = change(x[key].clone(), value)
    else:
        x[key] = map_elements(change(x[key], value))


# elements where a mask is set


def _masked(x: Any, key: Any) -> Selection | None:
    """What a key with a mask in front, or a slice up to a number that data tell, chooses, as a view of the tensor."""
    if not isinstance(x, torch.Tensor) or not all(isinstance(n, int) for n in x.shape):
        return None
    first, *rest = key if isinstance(key, tuple) and key else (key,)
    if not all(isinstance(k, int | slice) and not _has_data(k) for k in rest):
        return None
    if isinstance(first, torch.Tensor) and first.dtype is torch.bool and 0 < first.ndim <= x.ndim:
        if first.shape != x.shape[: first.ndim]:
            return None
        return Selection(x[(*[slice(None)] * first.ndim, *rest)], first)
    if isinstance(first, slice) and _has_data(first) and first.step in (None, 1) and x.ndim:
        return Selection.between(x[(slice(None), *rest)], first.start, first.stop)
    return None


def _has_data(part: Any) -> bool:
    return isinstance(part, slice) and any(isinstance(p, torch.Tensor) for p in (part.start, part.stop, part.step))


def _put_elements(chosen: Selection, value: Any) -> bool:
    """Give chosen elements of a tensor other values; False where these are as many as data tell, by other means."""
    new = _with_elements(chosen, value)
    if new is not None:
        chosen.whole.copy_(new)
    return new is not None


def _with_elements(chosen: Selection, value: Any) -> torch.Tensor | None:
    """The tensor with other elements where a mask is set."""
    x, mask = chosen.whole, chosen.mask
    if isinstance(value, Selection):
        return value.put_into(x, chosen)
    tail = x.ndim - mask.ndim
    wide = mask.reshape(*mask.shape, *[1] * tail)
    if not isinstance(value, torch.Tensor):
        return torch.where(wide, value, x).to(x.dtype)
    if not all(isinstance(n, int) for n in value.shape):
        return None
    if value.ndim <= tail or (value.ndim == tail + 1 and value.shape[0] == 1):
        one = value if value.ndim <= tail else value[0]
        return torch.where(wide, one.to(x.dtype), x)
    if value.ndim != tail + 1:
        return None
    # as many as there are, in order
    place = (mask.flatten().cumsum(0) - 1).clamp(0, value.shape[0] - 1)
    rows = value.index_select(0, place).reshape(*mask.shape, *value.shape[1:])
    return torch.where(wide, rows.to(x.dtype), x)


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
