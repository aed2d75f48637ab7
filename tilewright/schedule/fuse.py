"""Connecting at register level: maps computed on the registers of their producer, or composed into their consumers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from tilewright.ir.compute import Compute, Map, Reduce, expressions, reads
from tilewright.ir.expr import loads, walk
from tilewright.ir.tensor import Tensor
from tilewright.schedule.nest import data_cost, is_identity_read, is_view
from tilewright.schedule.propagate import extent_of

_LARGEST_VALUE = 150  # expression nodes a composed map may reach
_CHEAP = 4  # operations that may be repeated in several consumers


@dataclass
class Fused:
    """Which maps ride on a reduction (`epilogues`, by its first output) and which vanish into their readers."""

    epilogues: dict[Tensor, list[Map]] = field(default_factory=dict)
    inlined: dict[Tensor, Map] = field(default_factory=dict)


def fuse_registers(computes: Sequence[Compute], kept: frozenset[Tensor]) -> Fused:
    """`kept` tensors must exist in memory: outputs, and what other lists of computes read."""
    result = Fused()
    users: dict[Tensor, list[Compute]] = {}
    for compute in computes:
        for tensor in reads(compute):
            users.setdefault(tensor, []).append(compute)
    absorbed: set[Tensor] = set()
    for compute in computes:
        if isinstance(compute, Reduce) and len(compute.outputs) == 1:
            chain = _epilogue(compute, users, kept)
            if chain:
                result.epilogues[compute.outputs[0]] = chain
                absorbed.update(m.output for m in chain)
    for compute in computes:
        if isinstance(compute, Map) and compute.output not in absorbed and compute.output not in kept:
            if _composes(compute, users.get(compute.output, [])):
                result.inlined[compute.output] = compute
    return result


def _epilogue(reduce: Reduce, users: dict[Tensor, list[Compute]], kept: frozenset[Tensor]) -> list[Map]:
    """The chain of maps that read the reduction's result point for point and are its only readers."""
    chain: list[Map] = []
    current = reduce.outputs[0]
    while current not in kept:
        readers = users.get(current, [])
        if len(readers) != 1 or not isinstance(readers[0], Map):
            break
        reader = readers[0]
        own = [n for n in loads(reader.value) if n.source is current]
        same_shape = tuple(a.extent for a in reader.axes) == tuple(a.extent for a in reduce.axes)
        if not same_shape or not all(is_identity_read(n, reader.axes) for n in own):
            break
        chain.append(reader)
        current = reader.output
    return chain


def _composes(compute: Map, readers: Sequence[Compute]) -> bool:
    """Whether every reader may compute the map's elements itself."""
    if not readers or not all(isinstance(r, Map | Reduce) for r in readers):
        return False
    cost = data_cost(compute.value)
    size = sum(1 for _ in walk(compute.value))
    if size > _LARGEST_VALUE:
        return False
    if cost > _CHEAP and len(readers) > 1:
        return False
    return all(_reader_accepts(compute, r, cost) for r in readers)


def _reader_accepts(compute: Map, reader: Compute, cost: int) -> bool:
    own = [n for n in loads(*expressions(reader)) if n.source is compute.output]
    elements = prod(extent_of(a.extent) for a in compute.axes)
    domain = prod(extent_of(a.extent) for a in reader.axes)  # type: ignore[union-attr]
    if isinstance(reader, Reduce):
        domain *= prod(extent_of(a.extent) for a in reader.reduce_axes)
    times = domain * len(own) / max(1, elements)
    if is_view(compute):
        # moved data is free to address again, unless the reader would choose between several sources very often
        sources = len({n.source for n in loads(compute.value)})
        return sources <= 1 or times <= 1.5
    if isinstance(reader, Reduce):
        return times <= 1.01
    return times <= 1.01 or (cost <= _CHEAP and times <= 4)
