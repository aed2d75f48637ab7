"""Scatters: every element finds the update that it takes.

Known indices become a table of who writes where. A few others are compared with every place; many are sorted, and every
place finds its own by halving.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import neutral
from tilewright.ir.forms.expr import Expr, all_of, cast, const, eq, le, load, lt, maximum, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, Shape, clamp, dims, expect, reindex, wrapped
from tilewright.ops.registry import operator
from tilewright.ops.sorting.bitonic import combined, sorted_pairs, sorts, writers

MOST_COMPARISONS = 1 << 32  # of places with indices: some seconds
MOST_PLACES = 1 << 24  # of a table of who writes where
_COMBINERS = {"none": None, "add": "add", "mul": "mul", "max": "max", "min": "min"}


def _combiner(b: Builder, node: Node, dtype: dtypes.DType) -> str | None:
    name = node.attributes.get("reduction", "none")
    if name not in _COMBINERS:
        raise b.unsupported(f"reduction '{name}' is not known; use none, add, mul, max or min")
    combiner = _COMBINERS[name]
    return {"add": "or", "mul": "and"}.get(combiner or "", combiner) if dtype is dtypes.bool_ else combiner


@operator("ScatterElements", "Scatter", since=9)
def scatter_elements(b: Builder, node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis = b.axis(node.attributes.get("axis", 0), x.rank)
    if indices.rank != x.rank or dims(updates) != dims(indices) or updates.dtype is not x.dtype:
        raise b.invalid(f"indices {list(dims(indices))} and updates {updates!r} do not fit {x!r}")
    if any(n > m for a, (n, m) in enumerate(zip(dims(indices), dims(x), strict=True)) if a != axis):
        raise b.invalid(f"indices {list(dims(indices))} reach outside {list(dims(x))}")
    combiner, extent, steps = _combiner(b, node, x.dtype), dims(x)[axis], dims(indices)[axis]
    if prod(dims(indices)) == 0:
        return x
    # every other axis of an update is its own; only along this one has it to be found
    places = (*dims(indices)[:axis], extent, *dims(indices)[axis + 1 :])

    def along(i: Sequence[Expr], k: Expr) -> tuple[Expr, ...]:
        return (*i[:axis], k, *i[axis + 1 :])

    known = b.value(indices) if prod(places) <= MOST_PLACES else None
    rows = (*dims(indices)[:axis], *dims(indices)[axis + 1 :])

    def of_row(i: Sequence[Expr]) -> tuple[Expr, ...]:
        """Where indices that end with the place along the axis stand in `indices`."""
        return (*i[:axis], i[-1], *i[axis:-1])

    def in_row(i: Sequence[Expr]) -> tuple[Expr, ...]:
        return (*i[:axis], *i[axis + 1 :], i[axis])

    def inside(i: Sequence[Expr]) -> Expr:
        return all_of(
            lt(v, n) for a, (v, n, m) in enumerate(zip(i, dims(indices), dims(x), strict=True)) if a != axis and n < m
        )

    def within(i: Sequence[Expr]) -> tuple[Expr, ...]:
        return tuple(v if a == axis or n == m else clamp(v, n)
                     for a, (v, n, m) in enumerate(zip(i, dims(indices), dims(x), strict=True)))  # fmt: skip

    writer = None
    if known is not None:
        wrapped(b, indices, tuple(const(0) for _ in dims(x)), extent)  # the check of what is out of range
        writer = _known_writer(np.moveaxis(np.where(known < 0, known + extent, known), axis, 0), extent, combiner)
    pairs = None
    if writer is None and _is_sorted(b, prod(places) * steps, prod(rows), steps, extent):
        pairs = sorted_pairs(b, "updates", rows, steps, lambda *i: cast(
            wrapped(b, indices, of_row(i), extent), dtypes.int32))  # fmt: skip
    if writer is not None:
        found = b.constant(np.ascontiguousarray(np.moveaxis(writer, 0, axis)), "writer")
    elif pairs is not None and combiner is None:
        last = writers(b, pairs, extent)
        found = b.map("last_writer", places, lambda *i: load(last, in_row(i)))
    elif combiner is None:
        found = b.reduce("writer", places, (steps,), lambda i, r: _if_here(
            [(wrapped(b, indices, along(i, r[0]), extent), i[axis])], cast(r[0], dtypes.int32),
            const(-1, dtypes.int32)), "max")  # fmt: skip
    else:
        wide = dtypes.accumulator(x.dtype)
        if pairs is not None:
            sums = combined(b, pairs, steps, extent, (), lambda *i: cast(load(updates, of_row(i)), wide), combiner)
            total = b.map("totals", places, lambda *i: load(sums, in_row(i)))
        else:
            nothing = neutral(combiner, wide)
            total = b.reduce("total", places, (steps,), lambda i, r: _if_here(
                [(wrapped(b, indices, along(i, r[0]), extent), i[axis])], cast(load(updates, along(i, r[0])), wide),
                nothing), combiner)  # fmt: skip
        return b.map(
            "",
            dims(x),
            lambda *i: select(
                inside(i), cast(op(combiner, cast(b.read(x, i), wide), load(total, within(i))), x.dtype), b.read(x, i)
            ),
        )

    def element(*i: Expr) -> Expr:
        at = load(found, within(i))
        update = load(updates, within(along(i, clamp(cast(at, dtypes.index), steps))))
        value = update if combiner is None else op(combiner, b.read(x, i), update)
        return select(op("and", inside(i), le(0, at)), value, b.read(x, i))

    return b.map("", dims(x), element)


@operator("ScatterND", since=11)
def scatter_nd(b: Builder, node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    depth, outer = dims(indices)[-1], dims(indices)[:-1]
    if depth > x.rank or dims(updates) != (*outer, *dims(x)[depth:]) or updates.dtype is not x.dtype:
        raise b.invalid(f"indices {list(dims(indices))} and updates {updates!r} do not fit {x!r}")
    combiner, head, count = _combiner(b, node, x.dtype), dims(x)[:depth], prod(outer)
    if count == 0:
        return x

    def place(u: Sequence[Expr]) -> list[Expr]:
        return [wrapped(b, indices, (*u, k), head[k]) for k in range(depth)]

    def update(u: Expr, rest: Sequence[Expr]) -> Expr:
        return load(updates, (*reindex(outer, (count,), (u,)), *rest))

    known = b.value(indices) if prod(head) <= MOST_PLACES else None
    writer = None
    if known is not None:
        places = np.zeros(count, np.int64)
        for k in range(depth):
            wrapped(b, indices, (*(const(0) for _ in outer), k), head[k])
            column = known.reshape(count, depth)[:, k]
            places = places * head[k] + np.where(column < 0, column + head[k], column)
        writer = _known_writer(places, prod(head), combiner)
    work = (prod(head) if combiner is None else prod(dims(x))) * count
    pairs = None
    if writer is None and _is_sorted(b, work, 1, count, prod(head)):

        def flat(u: Expr) -> Expr:
            at: Expr = const(0)
            for k, index in enumerate(place(reindex(outer, (count,), (u,)))):
                at = at * head[k] + index
            return cast(at, dtypes.int32)

        pairs = sorted_pairs(b, "updates", (), count, flat)

    def here(i: Sequence[Expr], r: Sequence[Expr]) -> list[tuple[Expr, Expr]]:
        return list(zip(place(reindex(outer, (count,), r)), i[:depth], strict=True))

    if writer is not None:
        found = b.constant(writer.reshape(head), "writer")
    elif pairs is not None and combiner is None:
        last = writers(b, pairs, prod(head))
        found = b.map("last_writer", head, lambda *i: load(last, reindex((prod(head),), head, i)))
    elif combiner is None:
        found = b.reduce("writer", head, (count,), lambda i, r: _if_here(
            here(i, r), cast(r[0], dtypes.int32), const(-1, dtypes.int32)), "max")  # fmt: skip
    else:
        wide = dtypes.accumulator(x.dtype)
        if pairs is not None:
            rest = dims(x)[depth:]
            sums = combined(b, pairs, count, prod(head), rest, lambda u, *r: cast(update(u, r), wide), combiner)
            total = b.map("totals", dims(x), lambda *i: load(
                sums, (*reindex((prod(head),), head, i[:depth]), *i[depth:])))  # fmt: skip
        else:
            nothing = neutral(combiner, wide)
            total = b.reduce("total", dims(x), (count,), lambda i, r: _if_here(
                here(i, r), cast(update(r[0], i[depth:]), wide), nothing), combiner)  # fmt: skip
        return b.map("", dims(x), lambda *i: cast(op(combiner, cast(b.read(x, i), wide), load(total, i)), x.dtype))

    def element(*i: Expr) -> Expr:
        at = load(found, i[:depth])
        taken = update(clamp(cast(at, dtypes.index), count), i[depth:])
        value = taken if combiner is None else op(combiner, b.read(x, i), taken)
        return select(le(0, at), value, b.read(x, i))

    return b.map("", dims(x), element)


def _if_here(pairs: list[tuple[Expr, Expr]], value: Expr, otherwise: Expr) -> Expr:
    return select(all_of(eq(a, b) for a, b in pairs), value, otherwise)


def _known_writer(places: np.ndarray, extent: int, combiner: str | None) -> np.ndarray | None:
    """By place along the first axis, which update is the last to write it, or -1; None where several are combined."""
    writer = np.full((extent, *places.shape[1:]), -1, np.int32)
    rest = np.indices(places.shape[1:], sparse=True) if places.ndim > 1 else ()
    for k, at in enumerate(places) if places.ndim > 1 else ():
        if combiner is not None and (writer[(at, *rest)] >= 0).any():
            return None
        writer[(at, *rest)] = k
    if places.ndim == 1:
        if combiner is not None and np.unique(places).size < places.size:
            return None
        writer[places] = np.arange(places.size)  # of equal places the last one stays
    return writer


def _is_sorted(b: Builder, comparisons: int, rows: int, count: int, extent: int) -> bool:
    if sorts(b, comparisons, rows, count, extent):
        return True
    if comparisons > MOST_COMPARISONS:
        raise b.unsupported(f"it would take {comparisons} comparisons; {MOST_COMPARISONS} are supported")
    return False


@operator("TensorScatter", since=24)
def tensor_scatter(b: Builder, node: Node, past: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    """Every place knows the update that it would take: no search."""
    axis = b.axis(node.attributes.get("axis", -2), past.rank)
    mode = node.attributes.get("mode", "linear")
    if mode not in ("linear", "circular"):
        raise b.unsupported(f"mode '{mode}' is not known; use linear or circular")
    most, count = dims(past)[axis], dims(update)[axis]
    if count > most or axis == 0 or dims(update) != (*dims(past)[:axis], count, *dims(past)[axis + 1 :]):
        raise b.invalid(f"update {list(dims(update))} does not fit the cache {list(dims(past))}")
    expect(b, "write_indices", starts, (dims(past)[0],))
    if count == 0:
        return past

    def element(*i: Expr) -> Expr:
        start = const(0) if starts is None else cast(b.read(starts, (i[0],)), dtypes.index)
        k = i[axis] - start
        k = k % most if mode == "circular" else k
        taken = load(update, (*i[:axis], clamp(k, count), *i[axis + 1 :]))
        return select(op("and", le(0, k), lt(k, count)), taken, b.read(past, i))

    return b.map("", dims(past), element)


def unpooled_shape(b: Builder, node: Node, x: Tensor) -> Shape:
    """What a pooling of the node's attributes made `x` of."""
    kernel = [int(k) for k in node.attributes["kernel_shape"]]
    strides = [int(s) for s in node.attributes.get("strides", [1] * len(kernel))]
    pads = [int(p) for p in node.attributes.get("pads", [0] * 2 * len(kernel))]
    if x.rank != len(kernel) + 2 or len(strides) != len(kernel) or len(pads) != 2 * len(kernel):
        raise b.invalid(f"kernel_shape {kernel}, strides {strides} and pads {pads} do not fit {list(dims(x))}")
    spatial = zip(dims(x)[2:], kernel, strides, pads, pads[len(kernel) :], strict=False)
    return (*dims(x)[:2], *((n - 1) * s - p - q + k for n, k, s, p, q in spatial))


@operator("MaxUnpool", since=9, constants=(2,))
def max_unpool(b: Builder, node: Node, x: Tensor, indices: Tensor, output_shape: Tensor | None = None) -> Tensor:
    """Maxima put back where they were; a place that several name takes the last one."""
    expect(b, "I", indices, dims(x))
    inferred = b.checked_shape(unpooled_shape(b, node, x))
    shape = inferred if output_shape is None else tuple(b.integers(output_shape, "output_shape"))
    if len(shape) != len(inferred) or any(n < m for n, m in zip(shape, inferred, strict=True)):
        raise b.invalid(f"output_shape {list(shape)} does not hold {list(inferred)}")
    # an index counts over the whole tensor, but a window lies in one image
    image, count = prod(inferred[2:]), prod(dims(x)[2:])
    if prod(inferred) * count > MOST_COMPARISONS:
        raise b.unsupported(f"it compares {prod(inferred)} places with {count} indices each; {MOST_COMPARISONS} "
                            "comparisons are supported")  # fmt: skip

    def here(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        at = (*i[:2], *reindex(dims(x)[2:], (count,), r))
        flat = (i[0] * inferred[1] + i[1]) * image + i[2]
        return select(eq(load(indices, at), flat), cast(r[0], dtypes.int32), const(-1, dtypes.int32))

    writer = b.reduce("writer", (*inferred[:2], image), (count,), here, "max")

    def element(*i: Expr) -> Expr:
        inside = all_of(lt(v, m) for v, n, m in zip(i, shape, inferred, strict=True) if m < n)
        near = tuple(clamp(v, m) if m < n else v for v, n, m in zip(i, shape, inferred, strict=True))
        at = load(writer, (*near[:2], *reindex((image,), inferred[2:], near[2:])))
        place = maximum(cast(at, dtypes.index), 0)
        taken = load(x, (*near[:2], *reindex(dims(x)[2:], (count,), (place,))))
        return select(op("and", inside, le(0, at)), taken, const(0, x.dtype))

    return b.map("", shape, element)
