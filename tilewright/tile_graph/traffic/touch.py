"""What a leaf touches of a tensor while its axes run over parts: distinct bytes in whole lines of a cache.

Sizes may be arrays with an entry a candidate, and need not be whole: a mean over tiles is as good.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd
from typing import Any

import numpy as np

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, Var, is_op
from tilewright.tile_graph.algebra.propagate import Size, extent_of, index_size

_MOST_PLACES = 1 << 20  # of an index, that are looked at one by one


@dataclass(frozen=True, eq=False)
class Dim:
    """One dimension of storage: the axes that move along it, by so many places each; else the `index` itself."""

    terms: tuple[tuple[int, Axis], ...]
    index: Expr | None
    spread: int  # places between the first and the last of several reads that move alike
    reads: int  # of them
    extent: Size
    stride: Size  # bytes from one place to the next

    def span(self, sizes: Mapping[Axis, Size], steps: Mapping[Axis, int]) -> tuple[Size, Size]:
        """Distinct places while the axes run over these sizes, each from a multiple of its step on, and how far they
        reach."""
        if self.index is not None:
            key = tuple((a, n) for a, n in sizes.items() if a in self.index.axes)
            if all(isinstance(n, int | float) for _, n in key):
                whole = {a: max(1, ceil(n)) for a, n in key}
            else:
                whole = {a: np.maximum(1, np.ceil(n)).astype(np.int64) for a, n in key}
            covered = index_size(self.index, whole, _upper(self.extent))
            if self.index.reads:  # places that are data: as many as are looked up, anywhere
                points: Size = 1
                for size in whole.values():
                    points = points * size
                return least(points, self.extent), self.extent
            return self._over_panels(covered, whole, steps)
        count: Size = 1
        reach: Size = 1
        for step, axis in self.terms:  # the shortest step first
            more = step * (sizes.get(axis, 1) - 1)
            along = reach + more
            dense = chosen(step <= reach, least(count + more, along), count * sizes.get(axis, 1))
            count, reach = dense, along
        if self.spread:
            count, reach = least(count + self.spread, count * self.reads), reach + self.spread
        return least(count, self.extent), least(reach, self.extent)

    def _over_panels(self, covered: Size, sizes: Mapping[Axis, Size], steps: Mapping[Axis, int]) -> tuple[Size, Size]:
        """The same along panels, or inside them, of an axis whose parts need not begin with a panel."""
        index = self.index
        if index is None or not (is_op(index, "floordiv") or is_op(index, "mod")):
            return covered, covered
        place, by = index.args
        if not isinstance(place, Var) or not isinstance(by, Const):
            return covered, covered
        axis, panel = place.axis, int(by.value)
        grid = gcd(panel, steps.get(axis, 0))
        if grid == panel or axis not in sizes:
            return covered, covered
        if is_op(index, "mod"):
            return covered, chosen(sizes[axis] > 1, panel, covered)
        return least((-(-sizes[axis] // grid) * grid + panel - grid) / panel, self.extent), covered


@dataclass(frozen=True, eq=False)
class Touch:
    """Reads of one buffer that move alike, or the store to it."""

    buffer: Hashable
    element: int  # bytes
    dims: tuple[Dim, ...]  # of storage, outermost first
    is_store: bool
    follows: frozenset[Hashable] = frozenset()  # loops with which the buffer itself moves on: it is used again by each

    @cached_property
    def storage(self) -> Size:
        """Bytes of the whole buffer."""
        total: Size = self.element
        for dim in self.dims:
            total = total * dim.extent
        return total

    def bytes(
        self, sizes: Mapping[Axis, Size], line: int, steps: Mapping[Axis, int] | None = None
    ) -> tuple[Size, Size]:
        """Distinct bytes in whole lines while the axes run over these sizes, each from a multiple of its step on; and
        by how much that differs to either side where all stretches begin alike in a line, but not in every part."""
        grid: Size = line  # stretches begin at multiples of it
        for dim in reversed(self.dims) if steps else ():
            for places, axis in dim.terms:
                if steps and axis in steps:
                    grid = common(grid, places * steps[axis] * dim.stride)
        run, stretches, own = self.stretches(sizes, line, steps)
        grid = least(most(common(grid, own), min(self.element, line)), line)
        lines = stretches * (-(-run // grid) * grid + line - grid) / line
        whole = -(-self.storage // line)
        differs = chosen((grid < own) & (lines < whole), stretches * line / 2, 0.0)
        return least(lines, whole) * line, differs

    def stretches(
        self, sizes: Mapping[Axis, Size], line: int, steps: Mapping[Axis, int] | None = None
    ) -> tuple[Size, Size, Size]:
        """Bytes of one stretch without a gap of a line, how many of them there are, and what their beginnings are
        multiples of within one part."""
        run: Size = float(self.element)
        stretches: Size = 1.0
        own: Size = line
        for dim in reversed(self.dims):
            count, reach = dim.span(sizes, steps or {})
            reach = most(reach, count)
            if isinstance(reach, int | float) and reach == 1:
                continue
            step = dim.stride * (reach - 1) / most(count - 1, 1)
            dense = (step - run < line) & (stretches == 1)
            own = chosen(dense, own, common(own, step))
            stretches = chosen(dense, stretches, stretches * count)
            run = chosen(dense, run + dim.stride * (reach - 1), run)
        return run, stretches, own


def least(a: Size, b: Size) -> Size:
    return min(a, b) if isinstance(a, int | float) and isinstance(b, int | float) else np.minimum(a, b)


def most(a: Size, b: Size) -> Size:
    return max(a, b) if isinstance(a, int | float) and isinstance(b, int | float) else np.maximum(a, b)


def chosen(condition: Any, a: Size, b: Size) -> Size:
    """`a` where the condition holds, else `b`; an array only where the condition is one."""
    return (a if condition else b) if isinstance(condition, bool | np.bool_) else np.where(condition, a, b)


def common(a: Size, b: Size) -> Size:
    """The largest number that divides both, of numbers that are nearly whole."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return gcd(round(a), round(b))
    return np.gcd(np.rint(a).astype(np.int64), np.rint(b).astype(np.int64))


def _upper(extent: Size) -> int:
    return int(np.max(extent))


def touch(
    buffer: Hashable, element: int, indices: Sequence[Sequence[Expr]], shape: Sequence[Size], is_store: bool,
    follows: frozenset[Hashable] = frozenset(),
) -> Touch:  # fmt: skip
    """Reads at several indices of storage that differ by constants alone, in a buffer of this shape."""
    strides: list[Size] = []
    stride: Size = element
    for size in reversed(shape):
        strides.insert(0, stride)
        stride = stride * size
    dims = []
    for number, (extent, each) in enumerate(zip(shape, strides, strict=True)):
        found = [linear(simplify(index[number])) for index in indices]
        constants = sorted({f.constant for f in found})
        spread = constants[-1] - constants[0]
        plain = all(isinstance(t, Var) and c > 0 for t, c in found[0].terms.items())
        if plain:
            terms = [(c, t.axis) for t, c in found[0].terms.items() if isinstance(t, Var)]
            terms.sort(key=lambda term: term[0])
            dims.append(Dim(tuple(terms), None, spread, len(constants), extent, each))
        else:
            dims.append(Dim((), simplify(indices[0][number]), spread, len(constants), extent, each))
    return Touch(buffer, element, tuple(dims), is_store, follows)


def moving_alike(indices: Sequence[Sequence[Expr]]) -> list[list[Sequence[Expr]]]:
    """Indices in groups that differ by constants alone."""
    groups: dict[Hashable, list[Sequence[Expr]]] = {}
    for index in indices:
        key = tuple(frozenset(linear(simplify(i)).terms.items()) for i in index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def inside_share(index: Expr, extent: int) -> float:
    """The part of all values of an index, its axes running over their extents, that lies inside a dimension."""
    found = linear(simplify(index))
    steps = [(step, extent_of(t.axis.extent)) for t, step in found.terms.items() if isinstance(t, Var)]
    lowest = found.constant + sum(min(0, step * (n - 1)) for step, n in steps)
    highest = found.constant + sum(max(0, step * (n - 1)) for step, n in steps)
    if len(steps) < len(found.terms) or (lowest >= 0 and highest < extent):
        return 1.0
    values: Any = np.array([found.constant])
    for step, n in steps:
        places = np.arange(n) * step
        if len(values) * len(places) > _MOST_PLACES:
            return 1.0
        values = np.add.outer(values, places).ravel()
    return float(np.mean((values >= 0) & (values < extent))) if len(values) else 1.0


def merged(found: Touch, run: Sequence[Axis], as_one: Axis) -> Touch:
    """A touch whose neighbouring dimensions several axes walk as one."""
    places = [i for i, d in enumerate(found.dims) if any(a in run for _, a in d.terms)]
    one = [found.dims[i] for i in places]
    plain = all(len(d.terms) == 1 and d.index is None and not d.spread for d in one)
    steps = [d.terms[0][0] for d in one] if plain else []
    is_run = plain and len(one) == len(run) and [d.terms[0][1] for d in one] == list(run) and set(steps) == {1}
    if not is_run or places != list(range(places[0], places[0] + len(run))):
        return found
    extent: Size = 1
    for dim in one:
        extent = extent * dim.extent
    joined = Dim(((1, as_one),), None, 0, 1, extent, one[-1].stride)
    dims = (*found.dims[: places[0]], joined, *found.dims[places[-1] + 1 :])
    return Touch(found.buffer, found.element, dims, found.is_store, found.follows)
