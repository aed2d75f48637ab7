"""A group of alike computes as one: constants put one behind the other at compile time, results read as slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import fixed
from tilewright.ir.forms.compute import Compute, Map, Reduce
from tilewright.ir.forms.expr import Axis, Expr, Load, is_op, load, loads, substitute, var
from tilewright.ir.forms.spilled import spilled
from tilewright.ir.forms.tensor import Tensor
from tilewright.transform.merge.alike import Constants, Member, MergeGroup
from tilewright.transform.merge.forms import affine, choices_of, rebuilt, without_choices


@dataclass(frozen=True)
class _Joined:
    """A constant to be made of others: along an axis of theirs, or a new first one; then its axes in another order."""

    parts: tuple[Tensor, ...]
    axis: int | None
    order: tuple[int, ...]


@dataclass
class Joiner:
    """Writes groups as single computes; equal constants are joined once."""

    constants: Constants
    names: set[str]
    made: dict[_Joined, Tensor] = field(default_factory=dict)

    def arrays(self, wanted: Mapping[Tensor, object]) -> dict[Tensor, np.ndarray]:
        """The constants that were joined, those `wanted` alone."""
        found = {}
        for joined, tensor in self.made.items():
            if tensor in wanted:
                parts = [self.constants.array(t) for t in joined.parts]
                whole = spilled(np.stack(parts) if joined.axis is None else np.concatenate(parts, joined.axis))
                found[tensor] = np.ascontiguousarray(whole.transpose(joined.order))
        return found

    @staticmethod
    def placeholders(tensors: Iterable[Tensor]) -> dict[Tensor, np.ndarray]:
        """Zeros for constants that would be joined: enough to predict with."""
        return {t: np.broadcast_to(np.zeros((), t.dtype.numpy), tuple(map(int, t.shape))) for t in tensors}  # type: ignore[arg-type]

    def parts(self, tensors: Iterable[Tensor]) -> set[Tensor]:
        """The model's constants that these are made of."""
        wanted = set(tensors)
        return {self.constants.origin(p) for joined, t in self.made.items() if t in wanted for p in joined.parts}

    def join(self, group: MergeGroup) -> tuple[Compute, list[Map]]:
        """The one compute, and for each member what it gave as a slice of that."""
        first = group.members[0]
        old = first.compute
        summed = old.reduce_axes if isinstance(old, Reduce) else ()
        count = sum(group.widths)
        axes = {a: Axis(a.name, a.extent) for a in (*old.axes, *summed)}
        if group.axis is None:
            added = Axis("g", count)
            outer: tuple[Axis, ...] = (added,)
            number: Expr = var(added)
        else:
            merged = Axis(old.axes[group.axis].name, count)
            axes[old.axes[group.axis]] = merged
            outer = ()
            number = var(merged) // group.widths[0]
        values = rebuilt(
            first.values,
            lambda n, indices: self._read(group, n, indices, outer),
            lambda n: affine(first.form.numbers[n], group.steps[n] if group.steps else 0, number),
        )
        values = tuple(simplify(substitute(v, {a: var(new) for a, new in axes.items()})) for v in values)
        places = (*outer, *(axes[a] for a in old.axes))
        tensor = self._tensor(old.outputs[0].name, tuple(a.extent for a in places), old.outputs[0])
        origin = " to ".join(dict.fromkeys(m.compute.origin for m in (first, group.members[-1])))
        compute: Compute
        if isinstance(old, Map):
            compute = Map(tensor, places, values[0], origin)
        else:
            over = tuple(axes[a] for a in old.reduce_axes)
            compute = Reduce((tensor,), places, over, values, old.monoid, origin)
        return compute, [_slice(m, tensor, group.axis, s) for m, s in zip(group.members, group.starts, strict=True)]

    def _read(self, group: MergeGroup, place: int, indices: tuple[Expr, ...], outer: tuple[Axis, ...]) -> Expr:
        sources = tuple(m.form.sources[place] for m in group.members)
        if sources[0] not in self.constants:
            return load(sources[0], indices)
        own = None if group.axis is None else group.members[0].compute.axes[group.axis]
        axis = next((d for d, i in enumerate(indices) if own is not None and i is var(own)), None)
        if axis is None and (group.axis is not None or all(t is sources[0] for t in sources)):
            return self._constant((sources[0],), 0, indices)
        return self._constant(sources, axis, (*map(var, outer), *indices))

    def _constant(self, parts: tuple[Tensor, ...], axis: int | None, indices: tuple[Expr, ...]) -> Expr:
        """A read of constants as one, which is stored in the order in which the model stores the first."""
        order = self.constants.stored_order(parts[0])
        if len(parts) == 1 and not self.constants.is_turned(parts[0]):
            return load(parts[0], indices)
        if axis is None:
            order = (0, *(d + 1 for d in order))
        joined = _Joined(parts, axis, order)
        if joined not in self.made:
            shape = [fixed(e) for e in parts[0].shape]
            if axis is None:
                shape.insert(0, len(parts))
            else:
                shape[axis] = sum(fixed(t.shape[axis]) for t in parts)
            self.made[joined] = self._tensor(parts[0].name, tuple(shape[d] for d in order), parts[0])
        return load(self.made[joined], [indices[d] for d in order])

    def _tensor(self, name: str, shape: Sequence[object], like: Tensor) -> Tensor:
        name += "_merged"
        while name in self.names:
            name += "_"
        self.names.add(name)
        return Tensor(name, tuple(shape), like.dtype)  # type: ignore[arg-type]


def _slice(member: Member, whole: Tensor, axis: int | None, start: int) -> Map:
    output = member.compute.outputs[0]
    axes = tuple(Axis(f"i{d}", extent) for d, extent in enumerate(output.shape))
    places: list[Expr] = [var(a) for a in axes]
    if axis is None:
        value = load(whole, (start, *places))
    else:
        places[axis] = places[axis] + start if start else places[axis]
        value = load(whole, places)
    return Map(output, axes, value, member.compute.origin)


def without_seams(compute: Map, value: Expr) -> Expr:
    """A choice between slices that lie one behind the other in one tensor, as a read of the tensor."""
    if not is_op(value, "select") or len({n.source for n in loads(value)}) > 1:
        return value
    parts, limits, axis = choices_of(value)
    if axis is None or not isinstance(axis.extent, int):
        return value
    ends = [*limits, axis.extent]
    if any(a >= b for a, b in zip([0, *ends], ends, strict=False)):
        return value
    seen: Expr | None = None
    for start, end, part in zip([0, *limits], ends, parts, strict=True):
        within = Axis(axis.name, end - start)
        moved = simplify(substitute(part, {axis: var(within) + start}))  # its range says more of its indices
        back = simplify(substitute(moved, {within: var(axis) - start}))
        if not isinstance(back, Load) or seen not in (None, back):
            return without_choices(value, {a: n for n, a in enumerate(compute.axes)})
        seen = back
    return value if seen is None else seen
