"""Results as long as the data says: NonZero, Compress, Unique. How many elements there are is computed first, by a part
of the model of its own; what follows is compiled for that number."""

from __future__ import annotations

from math import isqrt, prod

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, cast, const, eq, le, load, lt, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, clamp, dims, reindex
from tilewright.ops.movement.shape import reshaped
from tilewright.ops.registry import operator
from tilewright.ops.sorting.bitonic import order, running, sorts
from tilewright.ops.sorting.sorting import MOST_COMPARISONS, ordered

_COLUMNS = 8  # of slices that are sorted: a network for each
_PLAIN = 1 << 12  # flags that are searched without a table of blocks


def places_of(b: Builder, flags: Tensor) -> Tensor:
    """The places of a row's flags, 0 or 1 in int32, that are set, in order."""
    (extent,) = dims(flags)
    total = b.reduce("count", (), (extent,), lambda i, r: load(flags, r), "add")
    found = b.decided(total, "how many elements it gives is known only at run time", most=extent)
    count = int(found.reshape(()))
    if count <= 0 or not extent:
        return b.map("places", (0,), lambda i: const(0, dtypes.int32))
    block = extent if extent <= _PLAIN else isqrt(extent - 1) + 1
    blocks = -(-extent // block)

    def flag(at: Expr) -> Expr:
        inside = load(flags, (clamp(at, extent),))
        return select(lt(at, extent), inside, const(0, dtypes.int32)) if blocks * block > extent else inside

    # of every block the flags up to each place, then those before the block
    upto = b.reduce("upto", (blocks, block), (block,), lambda i, r: select(
        le(r[0], i[1]), flag(i[0] * block + r[0]), const(0, dtypes.int32)), "add")  # fmt: skip
    before = b.reduce("before", (blocks,), (blocks,), lambda i, r: select(
        lt(r[0], i[0]), load(upto, (r[0], block - 1)), const(0, dtypes.int32)), "add")  # fmt: skip

    def passed(found: Expr) -> Expr:
        return select(found, const(1, dtypes.int32), const(0, dtypes.int32))

    home = b.reduce("block", (count,), (blocks,), lambda i, r: passed(
        le(load(before, r), cast(i[0], dtypes.int32))), "add")  # fmt: skip

    def at_block(k: Expr) -> Expr:
        return clamp(cast(load(home, (k,)), dtypes.index) - 1, blocks)

    inner = b.reduce("inner", (count,), (block,), lambda i, r: passed(le(
        load(before, (at_block(i[0]),)) + load(upto, (at_block(i[0]), r[0])), cast(i[0], dtypes.int32))),
        "add")  # fmt: skip
    return b.map("places", (count,), lambda k: cast(at_block(k) * block, dtypes.int32) + load(inner, (k,)))


def _flags(b: Builder, x: Tensor, extent: int) -> Tensor:
    """Which of the first elements of a row are not zero."""
    flat = reshaped(b, "flat", x, (prod(dims(x)),))
    return b.map("flags", (extent,), lambda i: select(
        op("ne", b.read(flat, (i,)), 0), const(1, dtypes.int32), const(0, dtypes.int32)))  # fmt: skip


@operator("NonZero", since=9, constants=(0,))
def non_zero(b: Builder, node: Node, x: Tensor) -> Tensor:
    known = b.value(x)
    if known is not None:
        found = np.nonzero(known) if x.rank else np.nonzero(known.reshape(1))[:0]
        return b.constant(np.asarray(found, np.int64).reshape(x.rank, -1), "")
    places = places_of(b, _flags(b, x, prod(dims(x))))
    (count,) = dims(places)
    if not x.rank or not count:
        return b.map("", (x.rank, count), lambda *i: const(0, dtypes.int64))

    def element(axis: Expr, k: Expr) -> Expr:
        coordinates = reindex(dims(x), (prod(dims(x)),), (cast(load(places, (k,)), dtypes.index),))
        value = coordinates[-1]
        for place in range(x.rank - 2, -1, -1):
            value = select(eq(axis, place), coordinates[place], value)
        return cast(value, dtypes.int64)

    return b.map("", (x.rank, count), element)


@operator("Compress", since=9, constants=(1,))
def compress(b: Builder, node: Node, x: Tensor, condition: Tensor) -> Tensor:
    source, axis = x, node.attributes.get("axis")
    if axis is None:
        source, axis = reshaped(b, "flat", x, (prod(dims(x)),)), 0
    axis = b.axis(axis, source.rank)
    extent, known = dims(source)[axis], b.value(condition)
    if known is not None:
        kept = np.flatnonzero(known)
        if kept.size and kept[-1] >= extent:
            where = f"an axis of {extent}" if "axis" in node.attributes else f"{extent}"
            raise b.invalid(f"its condition keeps element {kept[-1]} of {where}")
        places = b.constant(kept.astype(np.int64), "places")
    else:
        places = places_of(b, _flags(b, condition, min(prod(dims(condition)), extent)))
    shape = (*dims(source)[:axis], dims(places)[0], *dims(source)[axis + 1 :])
    return b.map("", shape, lambda *i: load(
        source, (*i[:axis], cast(b.read(places, (i[axis],)), dtypes.index), *i[axis + 1 :])))  # fmt: skip


@operator("Unique", since=11, constants=(0,))
def unique(b: Builder, node: Node, x: Tensor) -> tuple[Tensor, ...]:
    """The first of equal slices is kept. Every one is compared with every other; many are sorted first."""
    axis = node.attributes.get("axis")
    source = reshaped(b, "flat", x, (prod(dims(x)),)) if axis is None else x
    axis = b.axis(axis or 0, source.rank)
    rest = (*dims(source)[:axis], *dims(source)[axis + 1 :])
    count, width = dims(source)[axis], prod(rest)
    sort = width <= _COLUMNS and sorts(b, count * count * width, width + 1, count)
    if not sort and count * count * max(width, 1) > MOST_COMPARISONS:
        raise b.unsupported(f"it compares {count} slices of {width} elements with each other; {MOST_COMPARISONS} "
                            "comparisons are supported")  # fmt: skip
    if count == 0:
        none = b.map("none", (0,), lambda i: const(0, dtypes.int64))
        return source, none, none, none

    def at(k: Expr, column: Expr) -> tuple[Expr, ...]:
        inner = reindex(rest, (width,), (column,)) if rest else []
        return (*inner[:axis], k, *inner[axis:])

    keys = b.map("keys", (count, width), lambda k, c: ordered(b.read(source, at(k, c))))
    found = _by_sorting if sort else _by_comparing
    places, inverse, counts = found(b, keys, bool(node.attributes.get("sorted", 1)))
    kept = dims(places)[0]
    shape = (*dims(source)[:axis], kept, *dims(source)[axis + 1 :])
    values = b.map("", shape, lambda *i: b.read(
        source, (*i[:axis], clamp(cast(load(places, (i[axis],)), dtypes.index), count), *i[axis + 1 :])))  # fmt: skip
    return values, places, inverse, counts


def _by_comparing(b: Builder, keys: Tensor, in_order: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows of keys that differ from those before: where they are; of every row, which of these it is; how many each
    stands for. They come in order of their keys, or as they are."""
    count, width = dims(keys)
    differ = b.reduce("differ", (count, count), (width,), lambda i, r: select(
        op("ne", load(keys, (i[0], r[0])), load(keys, (i[1], r[0]))), cast(r[0], dtypes.int32),
        const(width, dtypes.int32)), "min")  # fmt: skip
    first = b.reduce(
        "first",
        (count,),
        (count,),
        lambda i, r: select(
            eq(load(differ, (i[0], r[0])), width), cast(r[0], dtypes.int32), const(count, dtypes.int32)
        ),
        "min",
    )

    def is_first(k: Expr) -> Expr:
        return eq(load(first, (k,)), cast(k, dtypes.int32))

    def is_before(one: Expr, other: Expr) -> Expr:
        if not in_order:
            return lt(one, other)
        column = load(differ, (one, other))
        where = clamp(cast(column, dtypes.index), width)
        return op("and", lt(column, width), lt(load(keys, (one, where)), load(keys, (other, where))))

    def one_if(condition: Expr) -> Expr:
        return select(condition, const(1, dtypes.int32), const(0, dtypes.int32))

    flags = b.map("flags", (count,), lambda k: one_if(is_first(k)))
    rank = b.reduce("rank", (count,), (count,), lambda i, r: one_if(
        op("and", is_first(r[0]), is_before(r[0], i[0]))), "add")  # fmt: skip
    total = b.reduce("count", (), (count,), lambda i, r: load(flags, r), "add")
    found = b.decided(total, "how many elements it gives is known only at run time", most=count)
    kept = max(int(found.reshape(())), 0)
    places = b.reduce("places", (kept,), (count,), lambda i, r: select(
        op("and", is_first(r[0]), eq(load(rank, r), cast(i[0], dtypes.int32))), cast(r[0], dtypes.int64),
        const(0, dtypes.int64)), "max")  # fmt: skip
    inverse = b.map("inverse", (count,), lambda k: cast(
        load(rank, (clamp(cast(load(first, (k,)), dtypes.index), count),)), dtypes.int64))  # fmt: skip
    counts = b.reduce(
        "counts",
        (kept,),
        (count,),
        lambda i, r: select(
            eq(load(inverse, r), cast(i[0], dtypes.int64)), const(1, dtypes.int64), const(0, dtypes.int64)
        ),
        "add",
    )
    return places, inverse, counts


def _by_sorting(b: Builder, keys: Tensor, in_order: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same with rows sorted, so that equal ones are neighbours."""
    count, width = dims(keys)
    sorted_to: Tensor | None = None
    for column in range(width - 1, -1, -1):  # by the last column first: what is equal in an earlier one stays in order
        sorted_to = _then_by(b, keys, column, sorted_to)
    assert sorted_to is not None
    rows = sorted_to
    back = order(b, "back", (), count, lambda k: load(rows, (k,)), dtypes.int32)  # where each row went

    def at(table: Tensor, k: Expr) -> Expr:
        return clamp(cast(load(table, (k,)), dtypes.index), count)

    def begins(s: Expr) -> Expr:
        one, other = at(rows, s), at(rows, clamp(s - 1, count))
        differ = eq(s, 0)
        for column in range(width):
            differ = op("or", differ, op("ne", load(keys, (one, column)), load(keys, (other, column))))
        return select(differ, const(1, dtypes.int32), const(0, dtypes.int32))

    runs = b.map("runs", (count,), begins)  # by place among the sorted rows, as are `heads` and `ends`
    if in_order:
        heads = places_of(b, runs)
        places = b.map("places", dims(heads), lambda g: cast(load(rows, (at(heads, g),)), dtypes.int64))
        upto = running(b, "upto_run", runs, "add")
        inverse = b.map("inverse", (count,), lambda k: cast(load(upto, (at(back, k),)), dtypes.int64) - 1)
    else:
        flags = b.map("flags", (count,), lambda k: load(runs, (at(back, k),)))
        kept = places_of(b, flags)
        places = b.map("places", dims(kept), lambda g: cast(load(kept, (g,)), dtypes.int64))
        heads = b.map("heads", dims(kept), lambda g: load(back, (at(kept, g),)))
        upto = running(b, "upto_flag", flags, "add")
        begun = b.map("begun", (count,), lambda s: select(
            eq(load(runs, (s,)), 1), cast(s, dtypes.int32), const(0, dtypes.int32)))  # fmt: skip
        head = running(b, "head", begun, "max")
        first = b.map("first", (count,), lambda k: load(rows, (at(head, at(back, k)),)))
        inverse = b.map("inverse", (count,), lambda k: cast(load(upto, (at(first, k),)), dtypes.int64) - 1)
    following = b.map("following", (count,), lambda s: select(
        eq(load(runs, (clamp(s + 1, count),)), 1) if count > 1 else lt(s, 0),
        cast(s, dtypes.int32) + 1, const(count, dtypes.int32)))  # fmt: skip
    ends = running(b, "ends", following, "min", backwards=True)
    counts = b.map("counts", dims(heads), lambda g: cast(
        load(ends, (at(heads, g),)) - load(heads, (g,)), dtypes.int64))  # fmt: skip
    return places, inverse, counts


def _then_by(b: Builder, keys: Tensor, column: int, before: Tensor | None) -> Tensor:
    """The places of rows in order of a column, and of equal ones as they were before."""
    count = dims(keys)[0]

    def row(k: Expr) -> Expr:
        return k if before is None else clamp(cast(load(before, (k,)), dtypes.index), count)

    found = order(b, "by_key", (), count, lambda k: load(keys, (row(k), column)), keys.dtype)
    if before is None:
        return found
    return b.map("rows", (count,), lambda k: load(before, (clamp(cast(load(found, (k,)), dtypes.index), count),)))
