"""The meaning of every kind of compute, with NumPy, over blocks of axes so that memory stays bounded.

Both sides of a select are evaluated; a lane that the select discards may read out of range and gets any element.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tilewright.errors import InternalError, UnsupportedError
from tilewright.ir.analysis.simplify import linear
from tilewright.ir.forms.compute import (
    Compute,
    Host,
    Map,
    Monoid,
    Program,
    Reduce,
    Region,
    Scan,
    Scatter,
    Sort,
    reads,
)
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, Extent, Load, Op, State, Symbol, Var, axes_of, is_op, op
from tilewright.ir.forms.scalar import OPS
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.values import Dims, blocks, evaluate_exprs, flushed, gather, grid, working_type

BLOCK = 1 << 22  # elements of one evaluated block: 32 MB at eight bytes, a handful alive at a time


@dataclass
class TensorValues:
    """Values of tensors while computes run. `steps` binds the axes of the scans around."""

    tensors: dict[Tensor, np.ndarray]
    symbols: Mapping[str, int]
    wide: bool = False
    steps: dict[Axis, int] = field(default_factory=dict)
    flush: bool = False  # arithmetic takes denormals as zeros

    def working(self, dtype: DType) -> np.dtype:
        return working_type(dtype, self.wide)

    def extent(self, extent: Extent) -> int:
        if isinstance(extent, int):
            return extent
        return int(self.values((extent,), {})[0])

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(self.extent(e) for e in tensor.shape)

    def dims(self, axes: Iterable[Axis]) -> Dims:
        return tuple((a, range(self.extent(a.extent))) for a in axes)

    def values(
        self,
        roots: Sequence[Expr],
        axes: Mapping[Axis, np.ndarray],
        dims: Dims = (),
        states: Mapping[Expr, np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Expressions at `axes`; where `axes` are exactly the block `dims`, loads become views when they can."""

        def leaf(node: Expr) -> np.ndarray:
            if isinstance(node, Var):
                value = axes.get(node.axis)
                if value is None:
                    if node.axis not in self.steps:
                        raise InternalError(f"axis {node.axis.name} is used but not bound")
                    value = np.asarray(self.steps[node.axis])
                return value
            if isinstance(node, Symbol):
                if node.name not in self.symbols:
                    raise InternalError(f"symbol {node.name} has no value")
                return np.asarray(self.symbols[node.name])
            if isinstance(node, State) and states is not None and node in states:
                return states[node]
            raise InternalError(f"{type(node).__name__} {getattr(node, 'name', '')} has no value here")

        def read(node: Load, indices: tuple[np.ndarray, ...]) -> np.ndarray:
            view = self._view(node, dims) if dims else None
            return self.read(node.source, indices) if view is None else view

        return evaluate_exprs(roots, leaf, read, self.wide, self.flush)

    def read(self, tensor: Tensor, indices: tuple[np.ndarray, ...]) -> np.ndarray:
        return gather(self._array(tensor), indices)

    def _array(self, tensor: Tensor) -> np.ndarray:
        if tensor not in self.tensors:
            raise InternalError(f"tensor {tensor.name} is read before it is computed")
        return self.tensors[tensor]

    def _view(self, node: Load, dims: Dims) -> np.ndarray | None:
        """The load as a strided view over the block, when every index is affine in the axes and stays inside."""
        array = self._array(node.source)
        strides = dict.fromkeys((a for a, _ in dims), 0)
        ranges = dict(dims)
        offset: list[int] = []
        for place, index in enumerate(node.indices):
            form = linear(index)
            start = low = high = form.constant
            for term, factor in form.terms.items():
                if not isinstance(term, Var):
                    return None
                span = ranges.get(term.axis)
                if span is None:
                    step = self.steps.get(term.axis)
                    if step is None:
                        return None
                    start, low, high = (x + factor * step for x in (start, low, high))
                    continue
                if not span:
                    return None
                strides[term.axis] += factor * array.strides[place]
                start += factor * span[0]
                low += factor * (span[0] if factor > 0 else span[-1])
                high += factor * (span[-1] if factor > 0 else span[0])
            if low < 0 or high >= array.shape[place]:
                return None
            offset.append(start)
        corner = array[tuple(slice(o, None) for o in offset)]
        shape = [len(r) if strides[a] else 1 for a, r in dims]
        raw = corner.view(np.uint8) if node.dtype.is_storage else corner  # NumPy's strides know its own types alone
        view = np.lib.stride_tricks.as_strided(raw, shape, [strides[a] for a, _ in dims], writeable=False)
        return view.view(corner.dtype)

    def run(self, computes: Iterable[Compute], keep: Container[Tensor] | None = None) -> None:
        """Run in order; with `keep`, tensors no later compute reads are dropped unless they are in it."""
        order = list(computes)
        last: dict[Tensor, int] = {t: i for i, c in enumerate(order) for t in (*c.outputs, *reads(c))}
        ending: dict[int, list[Tensor]] = {}
        for tensor, place in last.items():
            if keep is not None and tensor not in keep:
                ending.setdefault(place, []).append(tensor)
        for place, compute in enumerate(order):
            self.compute(compute)
            for tensor in ending.get(place, ()):
                self.tensors.pop(tensor, None)

    def compute(self, compute: Compute) -> None:
        if isinstance(compute, Map):
            results: Sequence[np.ndarray] = (self._map(compute),)
        elif isinstance(compute, Reduce):
            results = self._reduce(compute)
        elif isinstance(compute, Scan):
            results = self._scan(compute)
        elif isinstance(compute, Scatter):
            results = (self._scatter(compute),)
        elif isinstance(compute, Sort):
            results = self._sort(compute)
        elif isinstance(compute, Region):
            results = self._region(compute)
        elif isinstance(compute, Host):
            raise UnsupportedError(f"{compute.origin or compute.function}: a host call cannot be interpreted")
        else:
            raise InternalError(f"{type(compute).__name__} is not a kind of compute")
        for tensor, array in zip(compute.outputs, results, strict=True):
            if array.shape != self.shape(tensor):
                raise InternalError(f"{tensor.name}: computed shape {array.shape}, declared {self.shape(tensor)}")
            if self.flush and isinstance(compute, Reduce):
                array = flushed(array, tensor.dtype)  # sums are computed as a whole
            self.tensors[tensor] = np.asarray(array, order="C")

    def _map(self, compute: Map) -> np.ndarray:
        dims = self.dims(compute.axes)
        out = np.empty([len(r) for _, r in dims], self.working(compute.output.dtype))
        for block in blocks(dims, BLOCK):
            out[_slices(block)] = self.values((compute.value,), grid(block), block)[0]
        return out

    def _reduce(self, compute: Reduce) -> list[np.ndarray]:
        dims = self.dims(compute.axes)
        shape = tuple(len(r) for _, r in dims)
        reduced = self.dims(compute.reduce_axes)
        product = self._product(compute) if prod(shape) * prod(len(r) for _, r in reduced) > 256 else None
        if product is not None:
            total = np.broadcast_to(self._contract(product, dims, reduced), shape)
            return self._finish(compute.monoid, [total], grid(dims))
        outs = [np.empty(shape, self.working(t.dtype)) for t in compute.outputs]
        for block in blocks(dims, max(1, BLOCK // max(1, min(BLOCK, prod(len(r) for _, r in reduced))))):
            results = self.fold(compute, grid(block), tuple(len(r) for _, r in block), block)
            for out, result in zip(outs, results, strict=True):
                out[_slices(block)] = result
        return outs

    def fold(
        self, compute: Reduce, axes: Mapping[Axis, np.ndarray], shape: tuple[int, ...], block: Dims = ()
    ) -> list[np.ndarray]:
        """A reduction at the given values of its axes, arrays that broadcast to `shape`."""
        monoid = compute.monoid
        reduced = self.dims(compute.reduce_axes)
        totals = [np.broadcast_to(i, shape) for i in self.values(monoid.identity, axes)]
        operators = plain_operators(monoid)
        outer = {a: v.reshape(*v.shape, *(1 for _ in reduced)) for a, v in axes.items()}
        for part in blocks(reduced, max(1, BLOCK // max(1, prod(shape)))):
            inner = {a: v.reshape(*(1 for _ in shape), *v.shape) for a, v in grid(part).items()}
            elements = self.values(compute.elements, {**outer, **inner}, (*block, *part) if block else ())
            sizes = tuple(len(r) for _, r in part)
            full = [np.broadcast_to(e, (*shape, *sizes)) for e in elements]
            if operators is not None:
                last = tuple(range(len(shape), len(shape) + len(part)))
                piece = [_reduce_plain(n, x, last) for n, x in zip(operators, full, strict=True)]
            else:
                piece = self._tree(monoid, [x.reshape(*shape, prod(sizes)) for x in full], axes)
            totals = self._combine(monoid, totals, piece, axes)
        return self._finish(monoid, totals, axes)

    def _combine(
        self,
        monoid: Monoid,
        left: Sequence[np.ndarray],
        right: Sequence[np.ndarray],
        axes: Mapping[Axis, np.ndarray],
    ) -> list[np.ndarray]:
        states: dict[Expr, np.ndarray] = dict(zip(monoid.left, left, strict=True))
        states.update(zip(monoid.right, right, strict=True))
        return self.values(monoid.combine, axes, states=states)

    def _tree(self, monoid: Monoid, parts: list[np.ndarray], axes: Mapping[Axis, np.ndarray]) -> list[np.ndarray]:
        """Combine neighbours along the last dimension until one is left; order is kept."""
        wider = {a: v[..., None] for a, v in axes.items()}
        while (n := parts[0].shape[-1]) > 1:
            even = n - n % 2
            merged = self._combine(monoid, [p[..., 0:even:2] for p in parts], [p[..., 1:even:2] for p in parts], wider)
            shape = (*parts[0].shape[:-1], even // 2)
            merged = [np.broadcast_to(m, shape) for m in merged]
            parts = [np.concatenate([m, p[..., even:]], -1) for m, p in zip(merged, parts, strict=True)]
        return [p[..., 0] for p in parts]

    def _finish(
        self, monoid: Monoid, totals: Sequence[np.ndarray], axes: Mapping[Axis, np.ndarray]
    ) -> list[np.ndarray]:
        states: dict[Expr, np.ndarray] = dict(zip(monoid.left, totals, strict=True))
        finals = self.values(monoid.final, axes, states=states)
        return [np.broadcast_to(f, totals[0].shape) for f in finals]

    # Sums of products go to the matrix product: a full-size model has 1e10 of them.

    def _product(self, compute: Reduce) -> tuple[Expr, Expr] | None:
        """The element as two factors when this is a sum of products, each factor over some axes only."""
        if plain_operators(compute.monoid) != ["add"] or not is_op(compute.elements[0], "mul"):
            return None
        pieces: list[Expr] = []
        stack = [compute.elements[0]]
        while stack:
            node = stack.pop()
            if is_op(node, "mul"):
                stack.extend(node.args)
            else:
                pieces.append(node)
        pieces.sort(key=lambda p: -len(axes_of(p)))
        first = pieces.pop(0)
        rest = [p for p in pieces if not set(axes_of(p)) <= set(axes_of(first))]
        if not rest:
            return None
        second = rest[0]
        for piece in pieces:
            if piece is second:
                continue
            if set(axes_of(piece)) <= set(axes_of(second)):
                second = op("mul", second, piece)
            elif set(axes_of(piece)) <= set(axes_of(first)):
                first = op("mul", first, piece)
            else:
                return None
        return first, second

    def _contract(self, factors: tuple[Expr, Expr], dims: Dims, reduced: Dims) -> np.ndarray:
        """The sum over `reduced` of the product of two factors, over `dims`; split where a factor is too big."""
        used = [set(axes_of(f)) for f in factors]
        everything = (*dims, *reduced)
        for axes in used:
            mine = [(a, r) for a, r in everything if a in axes]
            if prod(len(r) for _, r in mine) > 4 * BLOCK:
                axis, span = max(mine, key=lambda item: len(item[1]))
                halves = (span[: len(span) // 2], span[len(span) // 2 :])
                parts = [
                    self._contract(
                        factors,
                        tuple((a, h if a is axis else r) for a, r in dims),
                        tuple((a, h if a is axis else r) for a, r in reduced),
                    )
                    for h in halves
                ]
                place = next((i for i, (a, _) in enumerate(dims) if a is axis), None)
                return parts[0] + parts[1] if place is None else np.concatenate(parts, place)
        batch = tuple(d for d in dims if d[0] in used[0] and d[0] in used[1])
        free = [tuple(d for d in dims if d[0] in u and d not in batch) for u in used]
        common = tuple(d for d in reduced if d[0] in used[0] and d[0] in used[1])
        a, b = (
            self._factor(f, order, tuple(d for d in reduced if d[0] in u and d not in common))
            for f, u, order in zip(
                factors, used, ((*batch, *free[0], *common), (*batch, *common, *free[1])), strict=True
            )
        )
        lead = tuple(len(r) for _, r in batch)
        rows, columns, depth = (prod(len(r) for _, r in part) for part in (free[0], free[1], common))
        a = a.reshape(*lead, rows, depth)
        b = b.reshape(*lead, depth, columns)
        absent = prod(len(r) for x, r in reduced if x not in used[0] and x not in used[1])
        out = _matmul(a, b) * np.asarray(absent, a.dtype)
        order = (*batch, *free[0], *free[1])
        out = out.reshape([len(r) for _, r in order])
        where = {axis: i for i, (axis, _) in enumerate(order)}
        out = out.transpose([where[x] for x, _ in dims if x in where])
        return out[tuple(slice(None) if x in where else None for x, _ in dims)]

    def _factor(self, factor: Expr, order: Dims, summed: Dims) -> np.ndarray:
        block = (*order, *summed)
        value = self.values((factor,), grid(block), block)[0]
        if self.flush:
            value = flushed(value, factor.dtype)
        value = np.broadcast_to(value, [len(r) for _, r in block])
        if summed:
            value = _reduce_plain("add", value, tuple(range(len(order), len(block))))
        return value

    def _scan(self, compute: Scan) -> list[np.ndarray]:
        count = self.extent(compute.axis.extent)
        inner = TensorValues(dict(self.tensors), self.symbols, self.wide, dict(self.steps), self.flush)
        carried = [self._array(t) for t in compute.initial]
        stacks = [np.empty((count, *self.shape(t)), self.working(t.dtype)) for t, _ in compute.stacked]
        for step in reversed(range(count)) if compute.reverse else range(count):
            inner.steps[compute.axis] = step
            inner.tensors.update(zip(compute.carry, carried, strict=True))
            inner.run(compute.body)
            for stack, (tensor, _) in zip(stacks, compute.stacked, strict=True):
                stack[step] = inner.tensors[tensor]
            carried = [inner.tensors[t] for t in compute.following]
        finals = [c for c, f in zip(carried, compute.finals, strict=True) if f is not None]
        return [*finals, *stacks]

    def _scatter(self, compute: Scatter) -> np.ndarray:
        out = np.array(self._array(compute.initial), self.working(compute.output.dtype))
        dims = self.dims(compute.axes)
        for block in blocks(dims, BLOCK):  # blocks follow the order of the axes, so later updates stay later
            sizes = [len(r) for _, r in block]
            *indices, value = self.values((*compute.indices, compute.value), grid(block), block)
            places = tuple(np.broadcast_to(i, sizes).ravel() for i in indices)
            for place, size in zip(places, out.shape, strict=True):
                if place.size and (place.min() < 0 or place.max() >= size):
                    raise InternalError(f"scatter into {compute.output.name} is out of range")
            updates = np.broadcast_to(value, sizes).ravel()
            if compute.operator is None:
                out[places] = updates
            else:
                _ufunc(compute.operator).at(out, places, updates)
        return out

    def _sort(self, compute: Sort) -> list[np.ndarray]:
        dims = self.dims(compute.axes)
        sizes = [len(r) for _, r in dims]
        place = compute.axes.index(compute.axis)
        key, *payloads = (
            np.broadcast_to(v, sizes) for v in self.values((compute.key, *compute.payloads), grid(dims), dims)
        )
        if compute.key.dtype.is_float and key.dtype.itemsize == 2:
            key = key.astype(np.float32)
        if compute.descending:  # equal keys keep their order: sort the mirror image and mirror back
            mirrored = np.argsort(np.flip(key, place), place, kind="stable")
            order = key.shape[place] - 1 - np.flip(mirrored, place)
        else:
            order = np.argsort(key, place, kind="stable")
        results = []
        for tensor, payload in zip(compute.outputs, payloads, strict=True):
            kept = order.take(range(self.extent(tensor.shape[place])), place)
            results.append(np.take_along_axis(payload, kept, place))
        return results

    def _region(self, compute: Region) -> list[np.ndarray]:
        captured = [self._array(t) for t in compute.captures]
        condition = self._array(compute.condition)
        if compute.kind == "if":
            return self._branch(compute.branches[0 if bool(condition.reshape(())) else 1], captured)
        if compute.kind != "loop":
            raise InternalError(f"a region of kind {compute.kind}")
        count = len(compute.outputs)  # the first captures are what the loop carries, its condition first
        trips = 0
        while bool(condition.reshape(())) and (compute.trip_limit is None or trips < compute.trip_limit):
            captured[:count] = self._branch(compute.branches[0], captured)
            condition = captured[0]
            trips += 1
        return captured[:count]

    def _branch(self, program: Program, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors = {**program.constants, **dict(zip(program.inputs, values, strict=True))}
        inner = TensorValues(tensors, self.symbols, self.wide, self.steps, self.flush)
        inner.run(program.computes)
        return [inner.tensors[t] for t in program.outputs]


def _slices(dims: Dims) -> tuple[slice, ...]:
    return tuple(slice(r.start, r.stop) for _, r in dims)


def plain_operators(monoid: Monoid) -> list[str] | None:
    """The scalar operators when every state is combined alone by one of them; `final` may be anything."""
    names: list[str] = []
    for left, right, combined in zip(monoid.left, monoid.right, monoid.combine, strict=True):
        name = combined.op.name if isinstance(combined, Op) else ""
        plain = name in ("add", "mul", "min", "max", "and", "or") and set(combined.args) == {left, right}
        if not plain:
            return None
        names.append(name)
    return names


def _ufunc(name: str) -> np.ufunc:
    function = OPS[name].numpy
    if not isinstance(function, np.ufunc):
        raise InternalError(f"{name} cannot reduce")
    return function


def _reduce_plain(name: str, value: np.ndarray, places: tuple[int, ...]) -> np.ndarray:
    ufunc = _ufunc(name)
    if not places:
        return value
    if name in ("add", "mul") and value.dtype.kind not in "iub":
        return ufunc.reduce(value, places, np.float64).astype(value.dtype)
    return ufunc.reduce(value, places, value.dtype)


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.itemsize == 2 and a.dtype.kind not in "iu":
        return np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
    if a.dtype.kind in "iu" and a.size and b.size:
        # float64 holds these sums exactly and has a fast product
        reach = a.shape[-1] * float(np.abs(a).max()) * float(np.abs(b).max())
        if reach < 2.0**53:
            return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64).astype(a.dtype)
    return np.matmul(a, b)
