"""Computes that are alike: of one form, reading the same tensors, with constants of their own.

Only computes that read the same tensors count: none of them can then depend on another, because what one gives would
have to be among what both read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tilewright.ir.forms.compute import Map, Reduce
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, load, rewrite, used_as_numbers, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.transform.layout.choose import digits_of
from tilewright.transform.merge.forms import ComputeForm, form_of, sums_of

# --- constants in one order


@dataclass(frozen=True)
class _Transposed:
    """A constant as its reader goes through it: elements picked along some axes, axes split, then put in order."""

    source: Tensor
    picked: tuple[int | None, ...]  # an index along axes that are read at one place alone
    shape: tuple[int, ...]
    order: tuple[int, ...]


class Constants:
    """The constants of a Program, each also with its axes in the order of its reader's axes: equal reads of weights
    that are stored in different orders look equal."""

    def __init__(self, arrays: Mapping[Tensor, np.ndarray]) -> None:
        self._arrays = arrays
        self._transposed: dict[Tensor, _Transposed] = {}
        self._made: dict[_Transposed, Tensor] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._arrays or tensor in self._transposed

    def array(self, tensor: Tensor) -> np.ndarray:
        transposed = self._transposed.get(tensor)
        if transposed is None:
            return self._arrays[tensor]
        picked = self._arrays[transposed.source][tuple(slice(None) if p is None else p for p in transposed.picked)]
        return picked.reshape(transposed.shape).transpose(transposed.order)

    def origin(self, tensor: Tensor) -> Tensor:
        """The constant of the model."""
        transposed = self._transposed.get(tensor)
        return tensor if transposed is None else transposed.source

    def is_turned(self, tensor: Tensor) -> bool:
        return tensor in self._transposed

    def stored_order(self, tensor: Tensor) -> tuple[int, ...]:
        """The axes of a transposed constant in the order in which the model stores them."""
        transposed = self._transposed.get(tensor)
        if transposed is None:
            return tuple(range(tensor.rank))
        return tuple(transposed.order.index(d) for d in range(len(transposed.order)))

    def ordered(self, values: Iterable[Expr], axes: Mapping[Axis, int]) -> tuple[Expr, ...]:
        """The values with every constant that is read along axes of its own read in the order of these axes."""

        def rule(node: Expr) -> Expr | None:
            return self._ordered(node, axes) if isinstance(node, Load) and node.source in self._arrays else None

        return tuple(rewrite(v, rule) for v in values)

    def _ordered(self, node: Load, axes: Mapping[Axis, int]) -> Expr | None:
        picked: list[int | None] = []
        own: list[Axis] = []
        for index, extent in zip(node.indices, node.source.shape, strict=True):
            parts = [index.axis] if isinstance(index, Var) else digits_of(index, extent)
            if isinstance(index, Const):
                picked.append(int(index.value))
            elif parts is None:
                return None
            else:
                picked.append(None)
                own.extend(parts)
        if len(set(own)) < len(own) or any(a not in axes or not isinstance(a.extent, int) for a in own):
            return None
        order = tuple(sorted(range(len(own)), key=lambda d: axes[own[d]]))
        if order == tuple(range(node.source.rank)):
            return None
        transposed = _Transposed(node.source, tuple(picked), tuple(int(a.extent) for a in own), order)  # type: ignore[arg-type]
        if transposed not in self._made:
            tensor = Tensor(node.source.name, tuple(transposed.shape[d] for d in order), node.source.dtype)
            self._made[transposed] = tensor
            self._transposed[tensor] = transposed
        return load(self._made[transposed], [var(own[d]) for d in order])


# --- groups


@dataclass(frozen=True, eq=False)
class Member:
    """A compute that may be one of a group, with views looked through and constants in one order."""

    place: int  # in the list of computes
    compute: Map | Reduce
    values: tuple[Expr, ...]
    form: ComputeForm

    @property
    def extents(self) -> tuple[object, ...]:
        return tuple(a.extent for a in self.compute.axes)


@dataclass(frozen=True)
class MergeGroup:
    """Members that can be one compute: put one behind the other along output axis `axis`, or, where that is None, along
    a new first axis. `steps` are what the numbers in indices grow by from member to member; empty where members read
    the same elements, or read further along by as much as they are put further along."""

    members: tuple[Member, ...]
    axis: int | None
    steps: tuple[int, ...] = ()

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(1 if self.axis is None else int(m.compute.axes[self.axis].extent) for m in self.members)  # type: ignore[arg-type]

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(sum(self.widths[:k]) for k in range(len(self.members)))


def member_of(
    place: int, compute: Map | Reduce, values: Sequence[Expr], constants: Constants, outer: Sequence[Axis] = ()
) -> tuple[Hashable, Member] | None:
    """A compute as a member, under a key that is equal for those that may be alike; `outer` axes are of a Scan."""
    if len(compute.outputs) != 1:
        return None
    summed = compute.reduce_axes if isinstance(compute, Reduce) else ()
    axes = {a: n for n, a in enumerate((*outer, *compute.axes, *summed))}
    ordered = constants.ordered(values, axes)
    form = form_of(ordered, axes)
    if form is None:
        return None
    sources = tuple((t.rank, t.dtype.name) if t in constants else t for t in form.sources)
    monoid = compute.monoid if isinstance(compute, Reduce) else None
    key = (monoid, len(compute.axes), tuple(a.extent for a in summed), compute.outputs[0].dtype.name, sources,
           form.tokens)  # fmt: skip
    return key, Member(place, compute, ordered, form)


def alternatives(members: Sequence[Member], constants: Constants) -> list[list[MergeGroup]]:
    """Ways to make fewer computes of members with equal keys, each a list of groups that share no member."""
    beside = _side_by_side(members, constants)
    taken = {m for group in beside for m in group.members}
    left = [m for m in members if m not in taken]
    stepped = [more for along in (True, False) if (more := _in_steps(left, constants, along))]
    ways = [[*beside, *more] for more in stepped] or [beside]
    return [way for way in ways if way]


def _side_by_side(members: Sequence[Member], constants: Constants) -> list[MergeGroup]:
    """Groups along the output axis that puts most members together."""
    best: list[MergeGroup] = []
    for axis in range(len(members[0].compute.axes)):
        buckets: dict[Hashable, list[tuple[Member, tuple[int, ...]]]] = {}
        for member in members:
            factors = _factors(member, axis, constants)
            if factors is not None:
                buckets.setdefault(_what_stays(member, axis, factors, constants), []).append((member, factors))
        found = [g for bucket in buckets.values() if len(bucket) > 1 for g in _runs(bucket, axis)]
        found = [g for g in found if not _is_loop(g.members, constants)]
        if sum(len(g.members) for g in found) > sum(len(g.members) for g in best):
            best = found
    return best


def _factors(member: Member, number: int, constants: Constants) -> tuple[int, ...] | None:
    """What one step along an output axis adds to each index of the form; None where the member cannot be continued
    along the axis: everything read must move evenly with it, constants be read along it from first to last."""
    axis = member.compute.axes[number]
    if not isinstance(axis.extent, int) or axis in used_as_numbers(member.values):
        return None
    factors = [0] * len(member.form.numbers)
    moves = False
    for read, start in zip(member.form.reads, member.form.starts, strict=True):
        sums = sums_of(read)
        along = [d for d, total in enumerate(sums) if any(axis in t.axes for t in total.terms)]
        if read.source in constants:
            if len(along) > 1 or any(not _is_plain(read, d, axis) for d in along):
                return None
            moves = moves or bool(along)
            continue
        for dim in along:
            terms = sums[dim].terms
            if var(axis) not in terms or any(axis in t.axes for t in terms if t is not var(axis)):
                return None
            factors[start + dim] = terms[var(axis)]
            moves = True
    return tuple(factors) if moves else None


def _is_plain(read: Load, dim: int, axis: Axis) -> bool:
    return read.indices[dim] is var(axis) and read.source.shape[dim] == axis.extent


def _what_stays(member: Member, axis: int, factors: Sequence[int], constants: Constants) -> Hashable:
    """What members along one axis must have in common."""
    own = member.compute.axes[axis]
    kept: list[Any] = []
    for read in member.form.reads:
        if read.source in constants:
            along = next((d for d, i in enumerate(read.indices) if i is var(own)), None)
            shape = read.source.shape
            kept.append(read.source if along is None else (*shape[:along], along, *shape[along + 1 :]))
    numbers = tuple(n for n, f in zip(member.form.numbers, factors, strict=True) if f == 0)
    extents = member.extents
    return extents[:axis], extents[axis + 1 :], tuple(factors), numbers, tuple(kept)


def _runs(bucket: Sequence[tuple[Member, tuple[int, ...]]], axis: int) -> Iterator[MergeGroup]:
    """Members one behind the other. Where they read along the axis, they must continue each other."""
    factors = bucket[0][1]
    moving = [n for n, f in enumerate(factors) if f]
    if not moving:
        # wide powers of two first: what follows then begins at a multiple of a vector, whatever the machine's is
        members = sorted((m for m, _ in bucket), key=lambda m: -_alignment(m.compute.axes[axis].extent))
        yield MergeGroup(tuple(members), axis)
        return
    signs = {n: 1 if factors[n] > 0 else -1 for n in moving}
    members = sorted((m for m, _ in bucket), key=lambda m: [m.form.numbers[n] * signs[n] for n in moving])
    run = [members[0]]
    for before, after in pairwise(members):
        width = before.compute.axes[axis].extent
        gaps = [after.form.numbers[n] - before.form.numbers[n] for n in moving]
        if gaps != [factors[n] * width for n in moving]:
            if len(run) > 1:
                yield MergeGroup(tuple(run), axis)
            run = []
        run.append(after)
    if len(run) > 1:
        yield MergeGroup(tuple(run), axis)


def _is_loop(members: Sequence[Member], constants: Constants) -> bool:
    """Whether sums read the same weights at other places: the steps of a loop, and no layers side by side."""
    weights = {tuple(t for t in m.form.sources if t in constants) for m in members}
    return len(weights) == 1 and weights != {()} and isinstance(members[0].compute, Reduce)


def _alignment(extent: object) -> int:
    assert isinstance(extent, int)
    return extent & -extent


def _in_steps(members: Sequence[Member], constants: Constants, along: bool) -> list[MergeGroup]:
    """Groups of equal members that read further on by equal steps: convolutions of the parts of one tensor. They are
    put `along` the output axis of their constants, as in a grouped convolution, or each apart on a new axis."""
    buckets: dict[Hashable, list[Member]] = {}
    for member in members:
        shapes = tuple(t.shape for t in member.form.sources if t in constants)
        buckets.setdefault((member.extents, shapes), []).append(member)
    found: list[MergeGroup] = []
    for bucket in buckets.values():
        if len(bucket) < 2 or not all(isinstance(e, int) for e in bucket[0].extents):
            continue
        if _is_loop(bucket, constants):
            continue
        ordered = sorted(bucket, key=lambda m: m.form.numbers)
        first, second = ordered[0].form.numbers, ordered[1].form.numbers
        steps = tuple(b - a for a, b in zip(first, second, strict=True))
        if any(m.form.numbers != tuple(a + k * s for a, s in zip(first, steps, strict=True))
               for k, m in enumerate(ordered)):  # fmt: skip
            continue
        axis = _weights_axis(ordered, constants) if along else None
        if (axis is not None) == along:
            found.append(MergeGroup(tuple(ordered), axis, steps))
    return found


def _weights_axis(members: Sequence[Member], constants: Constants) -> int | None:
    """The widest output axis along which members read their own constants and nothing else."""
    best: int | None = None
    for axis in range(len(members[0].compute.axes)):
        factors = [_factors(m, axis, constants) for m in members]
        if any(f is None or any(f) for f in factors):
            continue
        kept = {tuple(r.source for r in m.form.reads if r.source in constants and m.compute.axes[axis] not in r.axes)
                for m in members}  # fmt: skip
        if len(kept) > 1:
            continue
        extents = members[0].compute.axes
        if best is None or extents[axis].extent > extents[best].extent:  # type: ignore[operator]
            best = axis
    return best
