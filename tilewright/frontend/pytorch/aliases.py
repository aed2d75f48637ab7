"""Tensors that share memory: which results of a functional fx graph are views of others, and which arguments of a call
overlap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from tilewright.errors import InputError


@dataclass(frozen=True)
class ViewCall:
    """A call that gives a view of its one tensor, apart from its node, which may be gone by the time it is repeated."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def of(self, tensor: Any) -> Any:
        args, named = fx.map_arg((self.args, dict(self.named)), lambda _: tensor)
        return self.call(*args, **named)


@dataclass(frozen=True)
class ViewChain:
    """A result as calls that give views, one of the other: the first takes `base`, which owns the memory."""

    base: fx.Node
    steps: tuple[ViewCall, ...]

    def of(self, tensor: Any) -> Any:
        """The same calls on another tensor in the place of the base."""
        for step in self.steps:
            tensor = step.of(tensor)
        return tensor


def view_of(node: fx.Node, known: Container[fx.Node] = ()) -> ViewChain:
    """Where a node's memory comes from: a node that has memory of its own, or one that is known."""
    steps: list[ViewCall] = []
    base = node
    while base not in known and (parent := _viewed(base)) is not None:
        assert callable(base.target)
        steps.append(ViewCall(base.target, base.args, base.kwargs))
        base = parent
    return ViewChain(base, tuple(reversed(steps)))


def view_beside(node: fx.Node, known: fx.Node) -> ViewChain | None:
    """A result as a view of another one with the same memory, by where both lie in it."""
    one, other = node.meta["val"], known.meta["val"]
    if one.dtype != other.dtype:
        return None
    offset = one.storage_offset() - other.storage_offset()
    return ViewChain(known, (ViewCall(_restrided, (known, tuple(one.shape), tuple(one.stride()), offset), {}),))


def _restrided(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a call gives a view of."""
    inputs = node.all_input_nodes
    if node.op != "call_function" or len(inputs) != 1:
        return None
    (parent,) = inputs
    if not storages(node) & storages(parent):
        return None
    # one of several results has memory of its own, unless the call that gave them all gives views
    is_one_of_several = isinstance(parent.meta.get("val"), tuple | list)
    return None if is_one_of_several and _viewed(parent) is None else parent


def storages(node: fx.Node) -> set[int]:
    """The memory of a node's result, or of its results, as PyTorch knew it when it followed the graph."""
    meta = node.meta.get("val")
    found = meta if isinstance(meta, tuple | list) else [meta]
    return {x.untyped_storage()._cdata for x in found if isinstance(x, torch.Tensor) and x.layout is torch.strided}


def shared_outputs(outputs: Iterable[Any]) -> dict[fx.Node, ViewChain]:
    """Of what a graph returns, the views that share memory with another result, with an argument, or with themselves;
    a compiled copy would not be changed with the other."""
    nodes = [n for n in dict.fromkeys(outputs) if isinstance(n, fx.Node)]
    nodes = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    found: dict[fx.Node, ViewChain] = {}
    for node in nodes:
        view = view_of(node)
        if not view.steps:
            continue
        own = storages(node)
        is_shared = any(other is not node and storages(other) & own for other in nodes)
        if is_shared or view.base.op in ("placeholder", "get_attr") or _overlaps_itself(node.meta["val"]):
            found[node] = view
    return found


def _overlaps_itself(value: torch.Tensor) -> bool:
    return any(stride == 0 and extent > 1 for extent, stride in zip(value.shape, value.stride(), strict=True))


def laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A new tensor with the strides that PyTorch would give it, so that views of it are made as there."""
    strides = like.stride()
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


# arguments


@dataclass(frozen=True)
class OverlapGroup:
    """Arguments that overlap, as views of one piece of memory: their places, shapes, strides and offsets in it, all in
    elements."""

    extent: int
    members: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]

    def base(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The memory, of arguments that overlap like these."""
        place, _, _, offset = self.members[0]
        first = tensors[place]
        return first.as_strided((self.extent,), (1,), first.storage_offset() - offset)

    def views(self, base: torch.Tensor) -> dict[int, torch.Tensor]:
        return {place: base.as_strided(shape, strides, offset) for place, shape, strides, offset in self.members}


def overlapping(values: Sequence[Any]) -> list[list[int]]:
    """Places of tensors whose ranges of memory meet, together."""
    ranges = []
    for place, x in enumerate(values):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.numel():
            start = x.data_ptr()
            last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            ranges.append((start, start + (last + 1) * x.element_size(), place))
    groups: list[list[int]] = []
    end = -1
    for start, stop, place in sorted(ranges):
        if groups and start < end:
            groups[-1].append(place)
        else:
            groups.append([place])
        end = max(end, stop)
    return [sorted(group) for group in groups if len(group) > 1]


def may_overlap(values: Sequence[Any]) -> bool:
    """The same of tensors without memory, as PyTorch follows a graph with them: some may, where sizes are open."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for x in values:
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            extents = (*x.shape, *x.stride(), x.storage_offset())
            is_known = all(isinstance(n, int) for n in extents)
            last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if is_known else 0
            start = x.storage_offset() * x.element_size() if is_known else 0
            end = start + (last + 1) * x.element_size() if is_known else sys.maxsize
            ranges.setdefault(x.untyped_storage()._cdata, []).append((int(start), int(end)))
    return any(b[0] < a[1] for each in ranges.values() for a, b in pairwise(sorted(each)))


def overlap_groups(values: Sequence[Any]) -> tuple[OverlapGroup, ...]:
    """The overlaps of a call's arguments; equal for calls that one model can serve."""
    found = []
    for places in overlapping(values):
        tensors = [values[k] for k in places]
        size = tensors[0].element_size()
        starts = [t.data_ptr() - min(t.data_ptr() for t in tensors) for t in tensors]
        if len({t.dtype for t in tensors}) > 1 or any(start % size for start in starts):
            raise InputError(
                f"arguments {', '.join(map(str, places))} share memory as different types, and the module changes its "
                f"arguments in place; pass copies"
            )
        offsets = [start // size for start in starts]
        lasts = [sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors]
        extent = 1 + max(offset + last for offset, last in zip(offsets, lasts, strict=True))
        members = [(k, tuple(t.shape), tuple(t.stride()), o) for k, t, o in zip(places, tensors, offsets, strict=True)]
        found.append(OverlapGroup(extent, tuple(members)))
    return tuple(found)
