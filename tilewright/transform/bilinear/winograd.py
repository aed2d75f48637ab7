"""Convolutions with windows of three taps at stride 1 as Winograd's fast algorithms, chosen by predicted time.

F(m, 3) computes m neighbouring outputs of a window of three from m + 2 products instead of 3m: inputs, filters and
products are moved to and from the values of polynomials at m + 2 points by small constant matrices. Over two axes
F(4x4, 3x3) needs a quarter of the products of the direct sum, F(2x2, 3x3) 16 of 36. The transforms are Maps like any
other, a select between sums of neighbours; the products are a batched contraction; filters are transformed here, in
float64. In float32 against float64 the relative error (norm of the difference by norm of the result) of one layer of
64 to 512 channels is 3e-7 to 7e-7 for F(2x2) and 8e-7 to 2e-6 for F(4x4), where the direct sum has 4e-7 to 1.2e-6.
F(2, 3) keeps to the windows: no output sums products of inputs that it does not depend on. Those of F(4, 3) share the
rounding errors of their tile, however large their neighbours are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import numpy as np

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import fixed
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, factors, plain_monoid
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Var,
    all_of,
    const,
    flattened,
    is_op,
    le,
    load,
    lt,
    select,
    var,
)
from tilewright.ir.forms.spilled import spilled
from tilewright.ir.forms.tensor import Layout, StorageAxis, Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.bilinear.toom_cook import MATRICES, SIZES, TAPS, transformed_input, transformed_output

_LONG = 16  # tiles along the last window that are rows enough for a register tile
_WORTH = 0.9  # a less accurate algorithm must save a tenth of the time at least
_COLUMNS = 512  # of filters transformed at once: what stays in a cache, and is too little for BLAS to use threads
_MOST_WINDOWS = 2  # over three axes F(2, 3) alone would have 64 transformed values, more than registers hold

Predict = Callable[[Program], float]
Known = dict[Hashable, int | None]  # sizes that were chosen, by the form of a convolution
"""The time a Program is predicted to take, in seconds."""


# --- recognition


@dataclass(frozen=True)
class WindowAxis:
    """One axis that windows slide along: the data is read at position + tap - begin, as zero outside."""

    dim: int  # of the data read
    position: Axis
    tap: Axis
    begin: int
    size: int  # of the data along `dim`


@dataclass(frozen=True)
class Sliding:
    """A convolution at stride 1 found in a Reduce."""

    reduce: Reduce
    data: Load
    weight: Load
    windows: tuple[WindowAxis, ...]
    batch: tuple[Axis, ...]  # output axes that index the data alone
    channels: tuple[Axis, ...]  # summed over besides the taps
    outputs: Axis  # the output axis that indexes the weights


def find_sliding(compute: Compute, constants: object) -> Sliding | None:
    """The convolution a Reduce computes when it is one of three taps an axis, stride 1, one group; else None."""
    both = factors(compute)
    if not both or not isinstance(compute, Reduce) or compute.outputs[0].dtype is not dtypes.float32:
        return None
    for data, weight in (both, both[::-1]):
        if isinstance(weight, Load) and weight.source in constants and weight.dtype is dtypes.float32:  # type: ignore[operator]
            found = _sliding(compute, data, weight)
            if found is not None:
                return found
    return None


def _sliding(compute: Reduce, guarded: Expr, weight: Load) -> Sliding | None:
    conditions: list[Expr] = []
    data = guarded
    if is_op(guarded, "select"):
        condition, data, otherwise = guarded.args
        if not isinstance(otherwise, Const) or otherwise.value != 0:
            return None
        conditions = flattened(condition, "and")
    if not isinstance(data, Load) or any(not isinstance(i, Var) for i in weight.indices):
        return None
    own = [i.axis for i in weight.indices if isinstance(i, Var)]
    outputs = [a for a in own if a in compute.axes]
    if len(set(own)) != len(own) or len(outputs) != 1 or any(not isinstance(a.extent, int) for a in own):
        return None
    windows: list[WindowAxis] = []
    plain: list[Axis] = []
    for dim, index in enumerate(data.indices):
        window = _window(compute, dim, index, data)
        if window is not None:
            windows.append(window)
        elif isinstance(index, Var):
            plain.append(index.axis)
        else:
            return None
    batch = tuple(a for a in plain if a in compute.axes)
    channels = tuple(a for a in plain if a in compute.reduce_axes)
    used = [*batch, *channels, *outputs, *(w.position for w in windows), *(w.tap for w in windows)]
    everything = {*compute.axes, *compute.reduce_axes}
    if not 0 < len(windows) <= _MOST_WINDOWS or len(used) != len(everything) or set(used) != everything:
        return None
    if set(own) != {*channels, *outputs, *(w.tap for w in windows)} or not channels:
        return None
    if any(not _is_range_check(c, data, windows) for c in conditions):
        return None
    return Sliding(compute, data, weight, tuple(windows), batch, channels, outputs[0])


def _window(compute: Reduce, dim: int, index: Expr, data: Load) -> WindowAxis | None:
    total = linear(simplify(index))
    size = data.source.shape[dim]
    axes = [t.axis for t in total.terms if isinstance(t, Var)]
    if len(total.terms) != 2 or len(axes) != 2 or any(c != 1 for c in total.terms.values()):
        return None
    position, tap = axes if axes[0] in compute.axes else axes[::-1]
    if position not in compute.axes or tap not in compute.reduce_axes or tap.extent != TAPS:
        return None
    if not isinstance(size, int) or not isinstance(position.extent, int):
        return None
    return WindowAxis(dim, position, tap, -total.constant, size)


def _is_range_check(condition: Expr, data: Load, windows: Sequence[WindowAxis]) -> bool:
    """Whether a condition says no more than that the read lies inside the data."""
    for window in windows:
        place = simplify(data.indices[window.dim])
        if is_op(condition, "le") and _is_const(condition.args[0], 0) and simplify(condition.args[1]) is place:
            return True
        if is_op(condition, "lt") and simplify(condition.args[0]) is place:
            return _is_const(condition.args[1], window.size)
    return False


def _is_const(node: Expr, value: int) -> bool:
    return isinstance(node, Const) and node.value == value


# --- the rewrite


class Winograd:
    """One convolution as F(m, 3) along each of its windows: `computes` gives what it gave, reading `filters`."""

    def __init__(self, found: Sliding, m: int, names: set[str]) -> None:
        self.found = found
        self.m = m
        self.names = names
        self.points = m + 2
        self.output = found.reduce.outputs[0]
        self.tiles = [-(-fixed(w.position.extent) // m) for w in found.windows]
        self.blocks = [fixed(a.extent) for a in found.batch] + self.tiles
        # Tiles of all images and windows make one axis, long enough for the rows of a register tile; where the last
        # windows alone are, they keep an axis of their own, and a cut through it cuts what is read.
        self.split = len(self.blocks) - 1 if len(self.blocks) > 1 and self.tiles[-1] >= _LONG else 0
        groups = [self.blocks[: self.split], self.blocks[self.split :]] if self.split else [self.blocks]
        self.merged = [prod(group) for group in groups]
        self.inner = [fixed(a.extent) for a in found.channels]
        rank = len(found.windows)
        self.filters = self._tensor("filters", (*([self.points] * rank), *self.inner, fixed(found.outputs.extent)))
        self.layouts: dict[Tensor, Layout] = {}
        self.computes = self._computes()

    def _computes(self) -> list[Compute]:
        rank = len(self.found.windows)
        computes: list[Compute] = []
        current: Tensor | None = None
        # the last axis first: its transform reads the data, each further one what came before
        for axis in reversed(range(rank)):
            label = "values" if axis == 0 else "rows"
            current = self._input_map(computes, axis, current, label)
        assert current is not None
        summed = self._products(computes, current)
        self.layouts = {tensor: self._layout(tensor) for tensor in (current, summed)}
        for axis in range(rank - 1):
            summed = self._output_map(computes, axis, summed)
        self._last_map(computes, summed)
        return computes

    def _input_map(self, computes: list[Compute], axis: int, before: Tensor | None, label: str) -> Tensor:
        rank = len(self.found.windows)
        tensor = self._tensor(label, (*([self.points] * rank), *self.merged, *self.inner))
        axes = self._axes(tensor)
        here: list[Expr] = [var(a) for a in axes]
        values = []
        for position in range(self.points):
            places = [*here[:axis], const(position), *here[axis + 1 : rank]]
            values.append(self._data(places, here[rank:]) if before is None else load(before, (*places, *here[rank:])))
        self._add_map(computes, tensor, axes, transformed_input(self.m, here[axis], values))
        return tensor

    def _data(self, places: Sequence[Expr], rest: Sequence[Expr]) -> Expr:
        """The input of a tile at `places` within it; zero outside the data."""
        digits = self._digits(rest[: len(self.merged)])
        batch = dict(zip(self.found.batch, digits, strict=False))
        channels = dict(zip(self.found.channels, rest[len(self.merged) :], strict=True))
        conditions: list[Expr] = []
        indices: list[Expr] = []
        by_dim = {w.dim: number for number, w in enumerate(self.found.windows)}
        for dim, index in enumerate(self.found.data.indices):
            if dim not in by_dim:
                assert isinstance(index, Var)
                indices.append({**batch, **channels}[index.axis])
                continue
            number = by_dim[dim]
            window = self.found.windows[number]
            place = digits[len(batch) + number] * self.m + places[number] - window.begin
            if window.begin > 0:
                conditions.append(le(0, place))
            if (self.tiles[number] - 1) * self.m + self.points - 1 - window.begin >= window.size:
                conditions.append(lt(place, window.size))
            indices.append(place)
        value = load(self.found.data.source, [simplify(i) for i in indices])
        return select(all_of(simplify(c) for c in conditions), value, const(0, value.dtype)) if conditions else value

    def _digits(self, merged: Sequence[Expr]) -> list[Expr]:
        """The position in every axis of tiles."""
        if len(merged) > 1:
            return [*_unmerged(merged[0], self.blocks[: self.split]), *_unmerged(merged[1], self.blocks[self.split :])]
        return _unmerged(merged[0], self.blocks)

    def transformed(self, weights: np.ndarray) -> np.ndarray:
        """The filters over (points..., channels..., outputs), transformed in float64 and rounded once."""
        order = [w.tap for w in self.found.windows] + [*self.found.channels, self.found.outputs]
        given = [i.axis for i in self.found.weight.indices if isinstance(i, Var)]
        taps = np.ascontiguousarray(weights.transpose([given.index(a) for a in order]))
        taps = taps.reshape(TAPS ** len(self.found.windows), -1)
        along_one = np.array([[float(c) for c in row] for row in MATRICES[self.m].filter])
        matrix = reduce(np.kron, [along_one] * len(self.found.windows))
        result = np.empty((len(matrix), taps.shape[1]), np.float32)
        for start in range(0, taps.shape[1], _COLUMNS):
            part = slice(start, start + _COLUMNS)
            result[:, part] = matrix @ taps[:, part].astype(np.float64)
        return result.reshape(*([self.points] * len(self.found.windows)), *self.inner, fixed(self.found.outputs.extent))

    def _products(self, computes: list[Compute], values: Tensor) -> Tensor:
        rank = len(self.found.windows)
        extents = (*([self.points] * rank), *self.merged, fixed(self.found.outputs.extent))
        tensor = self._tensor("products", extents)
        axes = self._axes(tensor)
        summed = tuple(Axis(f"c{i}" if i else "c", n) for i, n in enumerate(self.inner))
        here = [var(a) for a in axes]
        over = [var(a) for a in summed]
        element = load(values, (*here[:-1], *over)) * load(self.filters, (*here[:rank], *over, here[-1]))
        monoid = plain_monoid("add", dtypes.float32)
        computes.append(Reduce((tensor,), axes, summed, (element,), monoid, self.found.reduce.origin))
        return tensor

    def _output_map(self, computes: list[Compute], axis: int, before: Tensor) -> Tensor:
        shape = (*before.shape[:axis], self.m, *before.shape[axis + 1 :])
        tensor = self._tensor("columns", shape)
        axes = self._axes(tensor)
        here: list[Expr] = [var(a) for a in axes]
        values = [load(before, (*here[:axis], k, *here[axis + 1 :])) for k in range(self.points)]
        self._add_map(computes, tensor, axes, transformed_output(self.m, here[axis], values))
        return tensor

    def _last_map(self, computes: list[Compute], before: Tensor) -> None:
        """The convolution's own result: each output finds its tile and its place in it."""
        found, m = self.found, self.m
        axes = found.reduce.axes
        digits = [var(a) for a in found.batch] + [var(w.position) // m for w in found.windows]
        parts = [slice(0, self.split), slice(self.split, None)] if self.split else [slice(None)]
        merged = [_merged(digits[part], self.blocks[part]) for part in parts]
        within = [simplify(var(w.position) % m) for w in found.windows]
        values = [load(before, (*within[:-1], k, *merged, var(found.outputs))) for k in range(self.points)]
        self._add_map(computes, self.output, axes, transformed_output(m, within[-1], values))

    def _layout(self, tensor: Tensor) -> Layout:
        """All points of a row of tiles side by side, so that what one step makes and the next one reads is near.

        A transform writes, or reads, all points of a tile at once. An odd number of tiles lies between one point and
        the next: they then fall on as many sets of a cache as the channels allow, where an even number, say a power of
        two, has them throw each other out."""
        rank, last = len(self.found.windows), len(self.found.windows) + len(self.merged) - 1
        extent = fixed(tensor.shape[last])
        size = extent | 1
        apart = (StorageAxis(last, size), StorageAxis(last, 1, size)) if size > extent else (StorageAxis(last),)
        outer, points, inner = range(rank, last), range(rank), range(last + 1, tensor.rank)
        return Layout((*map(StorageAxis, (*outer, *points)), *apart, *map(StorageAxis, inner)))

    def _axes(self, tensor: Tensor) -> tuple[Axis, ...]:
        rank = len(self.found.windows)
        count = len(self.merged)
        inner = tensor.rank - rank - count
        names = [*("ij"[:rank]), *("tu"[:count]), *(f"c{n}" if n else "c" for n in range(inner))]
        return tuple(Axis(name, extent) for name, extent in zip(names, tensor.shape, strict=True))

    def _add_map(self, computes: list[Compute], tensor: Tensor, axes: tuple[Axis, ...], value: Expr) -> None:
        computes.append(Map(tensor, axes, value, self.found.reduce.origin))

    def _tensor(self, label: str, shape: Sequence[object]) -> Tensor:
        name = f"{self.output.name}_{label}"
        while name in self.names:
            name += "_"
        self.names.add(name)
        return Tensor(name, tuple(int(e) for e in shape), dtypes.float32)  # type: ignore[call-overload]


def _unmerged(merged: Expr, sizes: Sequence[int]) -> list[Expr]:
    result = []
    for number, size in enumerate(sizes):
        below = prod(sizes[number + 1 :])
        digit = merged // below if below > 1 else merged
        result.append(simplify(digit % size if number else digit))
    return result


def _merged(digits: Sequence[Expr], sizes: Sequence[int]) -> Expr:
    merged: Expr = const(0)
    for digit, size in zip(digits, sizes, strict=True):
        merged = merged * size + digit
    return simplify(merged)


# --- the choice


def choose_convolutions(
    program: Program, predict: Predict, sizes: Sequence[int] = SIZES, known: Known | None = None
) -> Program:
    """The Program with every convolution rewritten whose fast form, of one of these `sizes`, is predicted to pay;
    `known` is what was chosen before, by the same that predicts, and is added to."""
    names = {t.name for t in program.tensors()}
    chosen: Known = {} if known is None else known
    weights = sum(t.most_bytes for t in program.constants)  # how many there are decides where they come from
    computes: list[Compute] = []
    constants = dict(program.constants)
    layouts = dict(program.layouts)
    for compute in program.computes:
        found = find_sliding(compute, program.constants)
        if found is None:
            computes.append(compute)
            continue
        key = ("convolution", _shape_of(found, program), tuple(sizes), weights)
        if key not in chosen:
            chosen[key] = fastest(found, program, predict, sizes)
        m = chosen[key]
        if not m:
            computes.append(compute)
            continue
        fast = Winograd(found, m, names)
        computes.extend(fast.computes)
        layouts.update(fast.layouts)
        constants[fast.filters] = spilled(fast.transformed(program.constants[found.weight.source]))
    if len(computes) == len(program.computes):
        return program
    return without_dead(replace(program, computes=tuple(computes), constants=constants, layouts=layouts))


def fastest(found: Sliding, program: Program, predict: Predict, sizes: Sequence[int] = SIZES) -> int:
    """The m of `sizes` whose F(m, 3) is predicted to be fastest; 0 for the sum as it stands."""
    weight = found.weight.source
    best, m = predict(_alone(found, [found.reduce], weight, program)), 0
    direct = best
    for size in sorted(sizes, reverse=True):  # the one that saves most first: the others may have no chance then
        if m and best <= direct * _least_work(found, size) * _WORTH:
            continue
        fast = Winograd(found, size, set())
        alone = _alone(found, fast.computes, fast.filters, program)
        seconds = predict(replace(alone, layouts={**alone.layouts, **fast.layouts}))
        if seconds * _WORTH < best if m else seconds < best * _WORTH:
            best, m = seconds, size
    return m


def _least_work(found: Sliding, m: int) -> float:
    """The part of the direct products that F(m, 3) still does."""
    return ((m + 2) / (m * TAPS)) ** len(found.windows)


def _alone(found: Sliding, computes: Sequence[Compute], weight: Tensor, program: Program) -> Program:
    """A Program of one convolution, its data and result stored as they will be: channels innermost.

    It keeps the constants of all others: that they are read in between decides where its own come from."""
    data, result = found.data.source, found.reduce.outputs[0]
    inner = [d for d, i in enumerate(found.data.indices) if isinstance(i, Var) and i.axis in found.channels]
    last = found.reduce.axes.index(found.outputs)
    layouts = {}
    if data not in program.inputs:
        layouts[data] = Layout.permuted((*(d for d in range(data.rank) if d not in inner), *inner))
    if result not in program.outputs:
        layouts[result] = Layout.permuted((*(d for d in range(result.rank) if d != last), last))
    values = np.broadcast_to(np.float32(0), tuple(int(e) for e in weight.shape))  # type: ignore[arg-type]
    return Program((data,), (result,), tuple(computes), {**program.constants, weight: values}, layouts)


def _shape_of(found: Sliding, program: Program) -> Hashable:
    """Convolutions of one shape are decided once."""
    axes = {a: n for n, a in enumerate((*found.reduce.axes, *found.reduce.reduce_axes))}
    order = tuple(axes[i.axis] for i in found.weight.indices if isinstance(i, Var))
    windows = tuple((w.dim, axes[w.position], axes[w.tap], w.begin) for w in found.windows)
    plain = tuple((axes[i.axis] if isinstance(i, Var) else -1) for i in found.data.indices)
    kept = found.data.source in program.inputs, found.reduce.outputs[0] in program.outputs
    types = found.data.dtype.name, found.weight.dtype.name, found.reduce.outputs[0].dtype.name
    return found.data.source.shape, tuple(a.extent for a in axes), order, windows, plain, kept, types
