"""What a Program says of its computes before anything is chosen: how results rely on what they read, operations for
each byte, how deep computes lie, which do not depend on each other, and how long tensors live.

Everything is found in one walk over the computes; whether two depend on each other is a search between their depths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isinf, prod

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import bounds, upper
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, expressions, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, Op, loads, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target


class Relies(Enum):
    """On how many elements of a tensor one element of a result relies."""

    ONE = "one"  # elementwise, and whatever moves data
    MANY = "many"  # sums, windows, recurrences


@dataclass(frozen=True)
class LiveRange:
    """The computes between which a tensor is alive: made by the first, read for the last time by the last.

    Inputs are there before the first compute (-1); outputs live on after the last.
    """

    first: int
    last: int


@dataclass(frozen=True)
class Analysis:
    """Facts about a list of computes, by their places in it."""

    computes: tuple[Compute, ...]
    relations: Mapping[tuple[int, Tensor], Relies]
    depth: tuple[int, ...]
    live: Mapping[Tensor, LiveRange]
    needs: tuple[tuple[int, ...], ...]  # the computes each one reads from

    def independent(self, one: int, other: int) -> bool:
        """Whether neither can wait for the other: no way leads from one to the other."""
        early, late = sorted((one, other), key=lambda p: self.depth[p])
        stack, seen = [late], {late}
        while stack:
            place = stack.pop()
            if place == early:
                return False
            for before in self.needs[place]:
                if before not in seen and self.depth[before] >= self.depth[early]:
                    seen.add(before)
                    stack.append(before)
        return True


def analyse(program: Program) -> Analysis:
    """The facts about a Program's computes; constants are always there, and have no range of life."""
    computes = program.computes
    maker: dict[Tensor, int] = {}
    first = dict.fromkeys(program.inputs, -1)
    last = dict.fromkeys(program.inputs, -1)
    relations: dict[tuple[int, Tensor], Relies] = {}
    depth: list[int] = []
    needs: list[tuple[int, ...]] = []
    for place, compute in enumerate(computes):
        read = reads(compute)
        before = tuple(dict.fromkeys(maker[t] for t in read if t in maker))
        needs.append(before)
        depth.append(1 + max((depth[b] for b in before), default=0))
        for tensor in read:
            relations[place, tensor] = relies_on(compute, tensor)
            if tensor not in program.constants:
                last[tensor] = place
        for tensor in compute.outputs:
            maker[tensor] = place
            first[tensor] = last[tensor] = place
    last |= {t: len(computes) for t in program.outputs if t in first}
    live = {t: LiveRange(start, last[t]) for t, start in first.items()}
    return Analysis(computes, relations, tuple(depth), live, tuple(needs))


def relies_on(compute: Compute, tensor: Tensor) -> Relies:
    """How one element of the results relies on a tensor that is read."""
    if not isinstance(compute, Map | Reduce):
        return Relies.MANY
    places = {tuple(simplify(i) for i in n.indices) for n in loads(*expressions(compute)) if n.source is tensor}
    summed = compute.reduce_axes if isinstance(compute, Reduce) else ()
    moving = {a for a in summed if upper(a.extent) > 1}
    is_one = len(places) == 1 and all(moving.isdisjoint(i.axes) for i in next(iter(places)))
    return Relies.ONE if is_one else Relies.MANY


# --- arithmetic


def operations(compute: Compute) -> float:
    """Scalar operations on data; those that find a place in memory do not count."""
    if isinstance(compute, Scan):
        return upper(compute.axis.extent) * sum(map(operations, compute.body))
    if not isinstance(compute, Map | Reduce):
        return 0.0
    own = _data_operations(expressions(compute))
    if isinstance(compute, Map):
        return own * _domain(compute.axes)
    combining = sum(1 for n in walk(*compute.monoid.combine) if isinstance(n, Op))
    return (own + combining) * _domain((*compute.axes, *compute.reduce_axes))


def compulsory_bytes(compute: Compute) -> float:
    """Bytes that must move whatever the plan: each element that is read or given, once."""
    given = sum(prod(map(upper, t.shape)) * t.dtype.bytes for t in compute.outputs)
    if not isinstance(compute, Map | Reduce):
        return given + sum(prod(map(upper, t.shape)) * t.dtype.bytes for t in reads(compute))
    touched: dict[Tensor, float] = {}
    for node in loads(*expressions(compute)):
        touched[node.source] = touched.get(node.source, 0.0) + _touched(node)
    whole = {t: prod(map(upper, t.shape)) for t in touched}
    return given + sum(min(n, whole[t]) * t.dtype.bytes for t, n in touched.items())


def intensity(compute: Compute) -> float:
    """Operations for each byte of compulsory traffic."""
    return operations(compute) / max(1.0, compulsory_bytes(compute))


def is_compute_bound(compute: Compute, target: Target) -> bool:
    """Whether a unit takes longer to compute than to move what must be moved from and to main memory."""
    return intensity(compute) * target.main.bandwidth > 2 * target.fma_rate


def peak_bytes(program: Program) -> float:
    """The most bytes of tensors between computes that are alive at a time, each stored by itself."""
    changes = [0.0] * (len(program.computes) + 2)
    kept = {*program.inputs, *program.outputs}
    for tensor, span in analyse(program).live.items():
        if tensor not in kept:
            size = prod(map(upper, tensor.shape)) * tensor.dtype.bytes
            changes[span.first] += size
            changes[span.last + 1] -= size
    most = now = 0.0
    for change in changes:
        now += change
        most = max(most, now)
    return most


def _data_operations(values: Sequence[Expr]) -> int:
    """Operations on what is read, each counted once; not those on indices and on conditions of indices alone."""
    count = 0
    stack = [v for v in values if v.reads]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if isinstance(node, Load):
            continue
        count += 1
        for arg in node.args:
            if arg.reads and arg not in seen:
                seen.add(arg)
                stack.append(arg)
    return count


def _domain(axes: Sequence[Axis]) -> float:
    return prod(upper(a.extent) for a in axes)


def _touched(node: Load) -> float:
    """Elements between the least and the largest place that a read reaches along each axis."""
    sizes = []
    for index, extent in zip(node.indices, node.source.shape, strict=True):
        low, high = bounds(simplify(index))
        whole = upper(extent)
        sizes.append(whole if isinf(low) or isinf(high) else min(whole, high - low + 1))
    return prod(sizes)
