"""Sequences inside a model: how many tensors one holds is known when compiling, so that none is left in the Program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.movement.shape import concatenated, parts_of, reshaped
from tilewright.ops.registry import operator

MOST_ITEMS = 1 << 12  # each is a compute of its own


@dataclass(frozen=True)
class Sequence:
    """A value of a graph that is several tensors."""

    items: tuple[Tensor, ...]


def _checked(b: Builder, x: object) -> tuple[Tensor, ...]:
    if not isinstance(x, Sequence):
        raise b.invalid("its first input is no sequence")
    return x.items


def _place(b: Builder, position: Tensor | None, count: int, default: int) -> int:
    """A position that is known, counted from the end where it is negative."""
    if position is None:
        return default
    given = int(b.known(position, "position").reshape(()))
    if not -count <= given <= count:
        raise b.invalid(f"position {given} is outside a sequence of {count}")
    return given + count if given < 0 else given


@operator("SequenceEmpty", since=11)
def sequence_empty(b: Builder, node: Node) -> Sequence:
    return Sequence(())


@operator("SequenceConstruct", since=11)
def sequence_construct(b: Builder, node: Node, *tensors: Tensor) -> Sequence:
    return Sequence(tensors)


@operator("SequenceAt", since=11, constants=(1,))
def sequence_at(b: Builder, node: Node, x: Sequence, position: Tensor) -> Tensor:
    items = _checked(b, x)
    place = _place(b, position, len(items), 0)
    if place >= len(items):
        raise b.invalid(f"position {place} is outside a sequence of {len(items)}")
    return items[place]


@operator("SequenceInsert", since=11, constants=(2,))
def sequence_insert(b: Builder, node: Node, x: Sequence, item: Tensor, position: Tensor | None = None) -> Sequence:
    items = _checked(b, x)
    place = _place(b, position, len(items), len(items))
    return Sequence((*items[:place], item, *items[place:]))


@operator("SequenceErase", since=11, constants=(1,))
def sequence_erase(b: Builder, node: Node, x: Sequence, position: Tensor | None = None) -> Sequence:
    items = _checked(b, x)
    place = _place(b, position, len(items), len(items) - 1)
    if not 0 <= place < len(items):
        raise b.invalid(f"position {place} is outside a sequence of {len(items)}")
    return Sequence((*items[:place], *items[place + 1 :]))


@operator("SequenceLength", since=11)
def sequence_length(b: Builder, node: Node, x: Sequence) -> Tensor:
    return b.constant(np.asarray(len(_checked(b, x)), np.int64), "")


@operator("SplitToSequence", since=11, constants=(1,))
def split_to_sequence(b: Builder, node: Node, x: Tensor, split: Tensor | None = None) -> Sequence:
    axis = b.axis(node.attributes.get("axis", 0), x.rank)
    extent = dims(x)[axis]
    if split is None:
        parts, keep = [1] * min(extent, MOST_ITEMS + 1), bool(node.attributes.get("keepdims", 1))
    else:
        given, keep = b.integers(split, "split"), True
        parts = given
        if split.rank == 0:
            if given[0] < 1:
                raise b.invalid(f"parts of {given[0]}; they have to be of 1 or more")
            starts = range(0, extent, given[0])[: MOST_ITEMS + 1]
            parts = [min(given[0], extent - at) for at in starts]
    if len(parts) > MOST_ITEMS:
        raise b.unsupported(f"a sequence of {len(parts)} tensors is not supported; {MOST_ITEMS} are")
    pieces = parts_of(b, x, axis, parts)
    if not keep:
        shape = (*dims(x)[:axis], *dims(x)[axis + 1 :])
        pieces = tuple(reshaped(b, f"item{k}", p, shape) for k, p in enumerate(pieces))
    return Sequence(pieces)


@operator("ConcatFromSequence", since=11)
def concat_from_sequence(b: Builder, node: Node, x: Sequence) -> Tensor:
    items = _checked(b, x)
    if not items:
        raise b.invalid("it joins a sequence of nothing")
    stacks = bool(node.attributes.get("new_axis", 0))
    axis = b.axis(node.attributes["axis"], items[0].rank + stacks)
    if stacks:
        items = tuple(reshaped(b, f"item{k}", t, (*dims(t)[:axis], 1, *dims(t)[axis:])) for k, t in enumerate(items))
    return concatenated(b, "", items, axis)
