"""Streams a reduction axis through a connected group: blocks of it are computed, used and forgotten.

Nests with the axis among their outputs are *wide*: only a block of them exists at a time. Nests that reduce over it
are *reducers*: their state is carried from block to block. A reducer whose elements depend on another reducer's
result is corrected whenever that result changes (see separate.py). While a result carries no scale at all (a maximum
that is still -inf, a divisor that is just 0), a fixed number stands in its place: what was reduced under that follows
like anything else as soon as there is a scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.analysis.normalised import Largest, at_most_one
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Map
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    Var,
    axes_of,
    const,
    is_op,
    load,
    loads,
    maximum,
    minimum,
    op,
    replace_nodes,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.values import evaluate_exprs
from tilewright.tile_graph.algebra.nest import Nest, inline
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of
from tilewright.tile_graph.algebra.separate import change, split_product, split_sum
from tilewright.tile_graph.plan.form import Leaf, Tile

_STAND_INS = (1.0, 2.0, 0.5, 0.0)


@dataclass(frozen=True)
class Stream:
    """A streamable axis of a group: which nests carry it, and how each reducer follows the ones it depends on."""

    tensor: Tensor  # the first wide tensor, and its axis: how a plan names the stream
    axis: int
    extent: int
    wide: dict[Nest, Axis]
    reducers: dict[Nest, Axis]
    factors: dict[Nest, tuple[Expr, frozenset[Load]]]  # reducer -> (b, the results it reads)
    stand_in: float  # for results that carry no scale: a number at which every b has one

    def reduce_boxes(self, low: Expr, size: object) -> dict[Nest, dict[Axis, Range]]:
        return {n: {a: Range(low, size, self.extent)} for n, a in self.reducers.items()}


def find_stream(nests: Sequence[Nest]) -> Stream | None:
    """An axis along which the whole group can be streamed, tried from the root backwards."""
    inside = {t: n for n in nests for t in n.stores}
    for nest in reversed(nests):
        for axis in nest.reduce_axes:
            if any(n.source in inside and axis in n.axes for n in nest.element_loads):
                found = _closure(nests, nest, axis, inside)
                if found is not None:
                    return found
    return None


def _closure(nests: Sequence[Nest], start: Nest, start_axis: Axis, inside: Mapping[Tensor, Nest]) -> Stream | None:
    """Follow the axis through every read until all wide nests and reducers are known; None when a read breaks it."""
    wide: dict[Nest, Axis] = {}
    dimension: dict[Tensor, int] = {}
    reducers: dict[Nest, Axis] = {start: start_axis}
    work = [(start, start_axis)]
    while work:
        nest, axis = work.pop()
        for node in nest.loads():
            if axis not in node.axes or node.source not in inside:
                continue
            places = [d for d, i in enumerate(node.indices) if isinstance(i, Var) and i.axis is axis]
            if len(places) != 1 or sum(axis in i.axes for i in node.indices) != 1:
                return None
            producer = inside[node.source]
            producer_axis = producer.axes[places[0]]
            if wide.setdefault(producer, producer_axis) is not producer_axis:
                return None
            if node.source not in dimension:
                dimension[node.source] = places[0]
                work.append((producer, producer_axis))
    for nest in nests:  # every other reader of a wide tensor must walk it along the same axis, too
        for node in nest.loads():
            if node.source not in dimension:
                continue
            index = node.indices[dimension[node.source]]
            if not isinstance(index, Var):
                return None
            if index.axis in nest.reduce_axes:
                if reducers.setdefault(nest, index.axis) is not index.axis:
                    return None
            elif wide.get(nest) is not index.axis:
                return None
    if not wide or nests[-1] in wide:
        return None
    return along(nests, wide, reducers)


def along(nests: Sequence[Nest], wide: Mapping[Nest, Axis], reducers: Mapping[Nest, Axis]) -> Stream | None:
    """The stream of these nests, each along its own axis; None where some reducer cannot follow another's result."""
    extents = {extent_of(a.extent) for a in (*wide.values(), *reducers.values())}
    if len(extents) != 1:
        return None
    factors = _factors(nests, wide, reducers)
    stand_in = None if factors is None else _stand_in(factors)
    if factors is None or stand_in is None:
        return None
    first = next(n for n in nests if n in wide or n in reducers)
    position = first.axes.index(wide[first]) if first in wide else -1
    return Stream(first.tensor, position, extents.pop(), dict(wide), dict(reducers), factors, stand_in)


def _factors(
    nests: Sequence[Nest], wide: Mapping[Nest, Axis], reducers: Mapping[Nest, Axis]
) -> dict[Nest, tuple[Expr, frozenset[Load]]] | None:
    """For every reducer that depends on others: b of its split element; None when some element does not split."""
    maps: dict[Tensor, Map] = {}
    for nest in nests:
        if nest in wide and nest.monoid is None:
            maps[nest.tensor] = Map(nest.tensor, nest.axes, nest.values[0])
    results = {t for n in reducers for t in n.stores}
    for nest in nests:
        if nest in wide and nest.monoid is not None and any(n.source in results for n in nest.loads()):
            return None  # a wide reduction under a moving result: its own partial sums would have to follow, too
    factors: dict[Nest, tuple[Expr, frozenset[Load]]] = {}
    late = {t for n in reducers for t in n.stores[1:]}  # only a reducer's first result is kept up to date in a block
    if any(x.source in late for n in (*wide, *reducers) for x in n.loads()):
        return None
    by_result = {n.tensor: n for n in reducers}

    def largest(tensor: object) -> Largest | None:
        known = by_result.get(tensor) if isinstance(tensor, Tensor) else None
        if known is None or known.monoid is None or known.monoid.operator != "max" or known.epilogue:
            return None
        return Largest(known.axes, known.reduce_axes, inline(known.elements[0], maps))

    for nest in reducers:
        if nest.monoid is None:
            return None
        if not any(n.source in results for n in loads(nest.elements[0], *(m.value for m in maps.values()))):
            continue
        element = inline(nest.elements[0], maps)
        moving = frozenset(n for n in loads(element) if n.source in results)
        if not moving:
            continue
        if nest.monoid.operator not in ("add", "max", "min") or any(n.source is nest.tensor for n in moving):
            return None
        if any(a not in nest.axes for n in moving for a in n.axes):
            return None
        if nest.monoid.operator == "add":
            split = split_product(element, moving, lambda node: at_most_one(node, largest))
        else:
            split = split_sum(element, moving)
        if split is None or split[1] is None or not split[1].dtype.is_float:
            return None
        factors[nest] = (split[1], moving)
    return factors


def _stand_in(factors: Mapping[Nest, tuple[Expr, frozenset[Load]]]) -> float | None:
    for value in _STAND_INS:
        scales = []
        for nest, (factor, moving) in factors.items():
            fixed: dict[Expr, Expr] = {x: const(value, x.dtype) for x in moving}
            assert nest.monoid is not None and nest.monoid.operator is not None
            scales.append(change(nest.monoid.operator, factor, fixed, fixed))
        if all(np.isfinite(found) for found in evaluate_exprs(scales, _no_leaf, _no_leaf)):
            return value
    return None


def _no_leaf(*_: object) -> np.ndarray:
    raise InternalError("a factor of a streamed reduction reads more than the results it follows")


def _states(nest: Nest) -> tuple[Tensor, ...]:
    """What a reducer carries from block to block."""
    assert nest.monoid is not None
    if nest.monoid.operator is not None:
        return (Tensor(f"{nest.tensor.name}@state", nest.tensor.shape, nest.accumulated[0].dtype),)
    return tuple(
        Tensor(f"{nest.tensor.name}@state{number}", nest.tensor.shape, left.dtype)
        for number, left in enumerate(nest.monoid.left)
    )


@dataclass(frozen=True)
class Work:
    """A nest as it is run: how, on which box, and over which part of its reductions; `owner` is the nest of the model
    whose place what it stores has, where it is not a result of the model itself."""

    nest: Nest
    leaf: Leaf
    box: Box
    limits: Mapping[Axis, Range] = field(default_factory=dict)
    owner: Nest | None = None
    along: tuple[Axis, ...] = ()  # the owner's axes that those of the nest stand for, where they are not the same
    prologue: int = 0  # before the first step of a window, the first, second.. one: places are those of that step
    shifted: int = 0  # at another part of a loop, the first, second.. such part: places are those of that part


class Carrier:
    """Writes what the leaves of a streamed group run: starts, steps and ends of what is carried along."""

    def __init__(self, stream: Stream, leaves: Mapping[Nest, Leaf]) -> None:
        self.stream = stream
        self.given = leaves
        # a reducer read by wide nests or other reducers in the block needs its current value there
        read_inside = {x.source for n in stream.wide for x in n.loads()}
        read_inside.update(x.source for n in stream.reducers for x in loads(*n.elements))
        self.current = {n: Tensor(f"{n.tensor.name}@now", n.tensor.shape, n.tensor.dtype)
                        for n in stream.reducers if n.tensor in read_inside}  # fmt: skip
        self.previous = {n: Tensor(f"{n.tensor.name}@old", n.tensor.shape, n.tensor.dtype) for n in self.current}
        self.states = {n: _states(n) for n in stream.reducers}

    def kept(self, nest: Nest) -> tuple[Tensor, ...]:
        """All that is carried along of a reducer."""
        values = (values[nest] for values in (self.current, self.previous) if nest in values)
        return (*self.states[nest], *values)

    def start(self, nest: Nest, box: Box) -> list[Work]:
        """The states of a reducer before the first block."""
        assert nest.monoid is not None
        begun = zip(self.states[nest], nest.monoid.identity, strict=True)
        made = [self._point(nest, state, nothing, box) for state, nothing in begun]
        if nest in self.current:
            made.append(self._point(nest, self.current[nest], self._guarded(nest), box))
        return made

    def step(self, nest: Nest, box: Box, limits: Mapping[Axis, Range]) -> list[Work]:
        """A block reduced into the state, which follows the results that it depends on."""
        monoid = nest.monoid
        assert monoid is not None
        here = [var(a) for a in nest.axes]
        states = self.states[nest]
        initial: tuple[Expr, ...] = tuple(load(state, here) for state in states)
        made: list[Work] = []
        if nest in self.current:
            made.append(self._point(nest, self.previous[nest], load(self.current[nest], here), box))
        if nest in self.stream.factors:
            shift, shift_here = self._row(nest, "shift", self._correction(nest), box)
            made.append(shift)
            initial = (op("mul" if monoid.operator == "add" else "add", initial[0], shift_here),)
        # results may be fewer than states: what is stored between blocks are the states themselves
        kept = nest.accumulated if monoid.operator is not None else states
        update = replace(
            nest,
            stores=states,
            elements=tuple(self._now(e) for e in nest.elements),
            monoid=monoid if monoid.operator is not None else replace(monoid, final=monoid.left),
            accumulated=kept,
            initial=initial,
            values=tuple(load(t, here) for t in kept),
            epilogue=(),
        )
        made.append(Work(update, replace(self.given[nest], tensor=states[0].name), box, limits, nest))
        if nest in self.current:
            made.append(self._point(nest, self.current[nest], self._guarded(nest), box))
        return made

    def finish(self, nest: Nest, box: Box) -> list[Work]:
        """The result of a reducer, from its state after the last block."""
        made = []
        for tensor, stored in zip(nest.stores, nest.values, strict=True):
            value = self._from_states(nest, stored)
            if nest in self.stream.factors:
                # a scale that never came (every element masked): the plain reduction has no number either
                factor, moving = self.stream.factors[nest]
                lost = self._unscaled(nest, factor, {x: x for x in moving})
                value = select(lost, self._of_nothing(nest, stored), value)
            made.append(replace(self._point(nest, tensor, value, box), owner=None))
        return made

    def _of_nothing(self, nest: Nest, stored: Expr) -> Expr:
        """What is stored where the reduction is no number: none either, or what its conversion to an integer gives."""
        if stored.dtype.is_float:
            return const(float("nan"), stored.dtype)
        own = [n for n in loads(stored) if n.source in nest.accumulated]
        return self._from_states(nest, replace_nodes(stored, {n: const(float("nan"), n.dtype) for n in own}))

    def wide(self, nest: Nest, box: Box) -> list[Work]:
        """One block of a nest that has the axis among its outputs."""
        made = replace(
            nest, elements=tuple(self._now(e) for e in nest.elements), values=tuple(self._now(v) for v in nest.values)
        )
        return [Work(made, self.given[nest], box)]

    def _now(self, node: Expr) -> Expr:
        """Results of reducers are read at their value of this block."""
        names = {n.tensor: t for n, t in self.current.items()}
        return replace_nodes(node, {x: load(names[x.source], x.indices) for x in loads(node) if x.source in names})

    def _from_states(self, nest: Nest, value: Expr) -> Expr:
        """What the nest stores, from its states."""
        assert nest.monoid is not None
        here = [var(a) for a in nest.axes]
        states = zip(nest.monoid.left, self.states[nest], strict=True)
        now: dict[Expr, Expr] = {left: load(state, here) for left, state in states}
        results = zip(nest.accumulated, nest.monoid.final, strict=True)
        return replace_nodes(value, {load(t, here): replace_nodes(final, now) for t, final in results})

    def _guarded(self, nest: Nest) -> Expr:
        """The nest's value as others follow it in the block: the stand-in where it carries no scale."""
        value = self._now(self._from_states(nest, nest.values[0]))
        lost: dict[Expr, None] = {}
        for reducer, (factor, moving) in self.stream.factors.items():
            own = [x for x in moving if x.source is nest.tensor]
            if own:
                fixed = {x: const(self.stream.stand_in, x.dtype) for x in moving}
                alone: dict[Expr, Expr] = {x: value if x in own else fixed[x] for x in moving}
                lost[self._unscaled(reducer, factor, alone)] = None
        for condition in lost:
            value = select(condition, const(self.stream.stand_in, value.dtype), value)
        return value

    def _unscaled(self, reducer: Nest, factor: Expr, values: Mapping[Expr, Expr]) -> Expr:
        assert reducer.monoid is not None and reducer.monoid.operator is not None
        same = change(reducer.monoid.operator, factor, values, values)
        return op("isnan", same.args[0] if is_op(same, "exp") else same)  # exp makes no number of none, nor none of one

    def _correction(self, nest: Nest) -> Expr:
        """What the old state is multiplied by (or added to)."""
        factor, moving = self.stream.factors[nest]
        assert nest.monoid is not None and nest.monoid.operator is not None
        owner = {n.tensor: n for n in self.current}
        old: dict[Expr, Expr] = {x: load(self.previous[owner[x.source]], x.indices) for x in moving}
        new: dict[Expr, Expr] = {x: load(self.current[owner[x.source]], x.indices) for x in moving}
        correction = change(nest.monoid.operator, factor, old, new)
        if nest.monoid.operator != "add":
            return correction
        # finite, so that an empty sum stays 0 however far the first scale is from the stand-in
        largest = float(ml_dtypes.finfo(correction.dtype.numpy).max)
        return minimum(maximum(correction, -largest), largest)

    def _row(self, nest: Nest, label: str, value: Expr, box: Box) -> tuple[Work, Expr]:
        """A value kept along those of the reducer's axes it depends on, and how the reducer reads it."""
        used = [a for a in nest.axes if a in axes_of(value)]
        tensor = Tensor(f"{nest.tensor.name}@{label}", tuple(a.extent for a in used), value.dtype)
        axes = tuple(Axis(a.name, a.extent) for a in used)
        moved = substitute(value, {a: var(b) for a, b in zip(used, axes, strict=True)})
        made = Nest((tensor,), axes, (), (), None, (), (simplify(moved),), tensor.name)
        own = tuple(box[nest.axes.index(a)] for a in used)
        leaf = Leaf(tensor.name, tensor.name, order=tuple(f"o{i}" for i in range(len(axes))))
        return Work(made, leaf, own, owner=nest, along=tuple(used)), load(tensor, [var(a) for a in used])

    def _point(self, nest: Nest, tensor: Tensor, value: Expr, box: Box) -> Work:
        """A map over the reducer's own axes."""
        axes = tuple(Axis(a.name, a.extent) for a in nest.axes)
        moved = substitute(value, {a: var(b) for a, b in zip(nest.axes, axes, strict=True)})
        made = Nest((tensor,), axes, (), (), None, (), (simplify(moved),), tensor.name)
        given = self.given[nest]
        vector = given.vector if given.vector and given.vector[0] == "o" else None
        leaf = Leaf(
            tensor.name, tensor.name, vector=vector, lanes=given.lanes if vector else 1,
            register=tuple((a, n) for a, n in given.register if a == vector),
            order=tuple(f"o{i}" for i in range(len(axes))),
        )  # fmt: skip
        return Work(made, leaf, box, owner=nest, along=nest.axes)


def stream_of(tile: Tile, nests: Sequence[Nest]) -> Stream | None:
    """What a kernel carries along an axis, from the axis that its plan binds to reductions."""
    walked = tile.stream
    if walked is None:
        return None
    by_name = {n.tensor.name: n for n in nests}
    carried = {h.axis for h in walked.holds if h.mode == "carry"}
    (axis,) = (a for a in walked.axes if a.name in carried)
    members = {b.tensor: by_name[b.tensor].named(b.axis) for b in axis.binds}
    wide = {by_name[b.tensor]: members[b.tensor] for b in axis.binds if b.axis[0] == "o"}
    reducers = {by_name[b.tensor]: members[b.tensor] for b in axis.binds if b.axis[0] == "r"}
    stream = along(nests, wide, reducers)
    if stream is None:
        raise ValueError(f"nothing can be carried along {axis.name} in kernel {tile.name}")
    return stream
