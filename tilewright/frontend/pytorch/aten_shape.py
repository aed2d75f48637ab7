"""ATen's views, joins, pads and indexing as operators of the Graph: one row a name."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.frontend.pytorch.emitter import Emitted, Emitter, Number, Operand, Results, Shape, Size, row
from tilewright.ir.forms import dtypes

_LAST = np.iinfo(np.int64).max

# the same elements in another shape


@row("aten.view.default", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze", "aten.flatten",
     "aten._reshape_alias", "aten.unflatten")  # fmt: skip
def reshape(m: Emitter, out: Emitted, x: Emitted, *_: Any, **__: Any) -> Results:
    return m.reshaped(x, out.shape)


@row("aten.permute")
def permute(m: Emitter, out: Emitted, x: Emitted, order: Sequence[int]) -> Results:
    return m.transposed(x.name, [x.axis(a) for a in order])


@row("aten.transpose")
def transpose(m: Emitter, out: Emitted, x: Emitted, first: int, second: int) -> Results:
    order = list(range(x.rank))
    if x.rank:
        order[first], order[second] = order[second], order[first]
    return m.transposed(x.name, order)


@row("aten.t")
def t(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.transposed(x.name, range(x.rank - 1, -1, -1))


@row("aten.expand", "aten.broadcast_to")
def expand(m: Emitter, out: Emitted, x: Emitted, *_: Any, **__: Any) -> Results:
    return m.expanded(x, out.shape)


@row("aten.repeat")
def repeat(m: Emitter, out: Emitted, x: Emitted, counts: Sequence[int]) -> Results:
    full = m.reshaped(x, (*(1,) * (len(counts) - x.rank), *x.shape))
    return m.new("Tile", full, m.integers(counts)) if counts else full


# parts


@row("aten.slice")
def slice_(m: Emitter, out: Emitted, x: Emitted, dim: int = 0, start: Any = None, end: Any = None,
           step: int = 1) -> Results:  # fmt: skip
    if out.shape == x.shape:
        return x.name
    axis = x.axis(dim)
    if any(isinstance(n, Size | Emitted) for n in (x.shape[axis], start, end)):  # ends beyond are cut by Slice itself
        return m.sliced(x.name, axis, 0 if start is None else start, _LAST if end is None else end, step)
    first, stop, _ = slice(start, end, step).indices(x.shape[dim])
    return m.sliced(x.name, axis, first, max(stop, first), step)


@row("aten.select")
def select(m: Emitter, out: Emitted, x: Emitted, dim: int, index: Any) -> Results:
    axis = x.axis(dim)
    if isinstance(index, Emitted) or isinstance(x.shape[axis], Size):
        return m.new("Gather", x, m.size(index) if not isinstance(index, Emitted) else index, axis=axis)
    place = index % x.shape[dim]
    return m.reshape(m.sliced(x.name, axis, place, place + 1), out.shape)


def _split(m: Emitter, x: Emitted, sizes: Sequence[int], dim: int) -> tuple[str, ...]:
    if len(sizes) == 1:
        return (x.name,)
    return m.several("Split", len(sizes), x, m.integers(sizes), axis=x.axis(dim))


@row("aten.split_with_sizes", "aten.split", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.chunk",
     "aten.unsafe_chunk", "aten.tensor_split")  # fmt: skip
def split(m: Emitter, out: tuple[Emitted, ...], x: Emitted, _: Any, dim: int = 0) -> Results:
    return _split(m, x, [part.shape[dim] for part in out], dim)


@row("aten.unbind")
def unbind(m: Emitter, out: tuple[Emitted, ...], x: Emitted, dim: int = 0) -> Results:
    parts = _split(m, x, [1] * len(out), dim)
    return tuple(m.reshape(part, value.shape) for part, value in zip(parts, out, strict=True))


@row("aten.diagonal")
def diagonal(m: Emitter, out: Emitted, x: Emitted, offset: int = 0, first: int = 0, second: int = 1) -> Results:
    rows, columns = x.axis(first), x.axis(second)
    others = [a for a in range(x.rank) if a not in (rows, columns)]
    flat = m.reshape(m.transposed(x.name, [*others, rows, columns]), (*(x.shape[a] for a in others), -1))
    at = np.arange(out.shape[-1], dtype=np.int64)
    places = (at - min(offset, 0)) * x.shape[columns] + at + max(offset, 0)
    return m.new("Gather", flat, places, axis=len(others))


@row("aten.unfold")
def unfold(m: Emitter, out: Emitted, x: Emitted, dim: int, size: int, step: int) -> Results:
    if x.rank == 0:
        return m.reshape(x.name, out.shape)
    axis = x.axis(dim)
    count = out.shape[axis]
    places = np.arange(count, dtype=np.int64)[:, None] * step + np.arange(size)
    windows = m.new("Gather", x, places, axis=axis)
    return m.transposed(windows, [a for a in range(x.rank + 1) if a != axis + 1] + [axis + 1])


# joins and moves


@row("aten.cat")
def cat(m: Emitter, out: Emitted, tensors: Sequence[Emitted], dim: int = 0) -> Results:
    parts = [x for x in tensors if x.shape != (0,) or out.rank == 1]
    if len(parts) == 1:
        return m.typed(parts[0], out.dtype)
    return m.new("Concat", *(m.typed(x, out.dtype) for x in parts), axis=out.axis(dim))


@row("aten.stack")
def stack(m: Emitter, out: Emitted, tensors: Sequence[Emitted], dim: int = 0) -> Results:
    axis = out.axis(dim)
    shape = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
    return m.new("Concat", *(m.reshape(m.typed(x, out.dtype), shape) for x in tensors), axis=axis)


@row("aten.flip")
def flip(m: Emitter, out: Emitted, x: Emitted, dims: Sequence[int]) -> Results:
    if not dims or x.rank == 0:
        return x.name
    axes = m.integers([x.axis(d) for d in dims])
    count = len(dims)
    return m.new("Slice", x, m.integers([-1] * count), m.integers([-_LAST] * count), axes, m.integers([-1] * count))


@row("aten.roll")
def roll(m: Emitter, out: Emitted, x: Emitted, shifts: Sequence[int], dims: Sequence[int] = ()) -> Results:
    if not dims:
        flat = Emitted(m.reshape(x.name, (-1,)), x.dtype, (prod(x.shape),))
        return m.reshape(_rolled(m, flat.name, flat, shifts[0], 0), x.shape)
    result = x.name
    for shift, dim in zip(shifts, dims, strict=True):
        result = _rolled(m, result, x, shift, x.axis(dim))
    return result


def _rolled(m: Emitter, name: str, x: Emitted, shift: int, axis: int) -> str:
    extent = x.shape[axis]
    if extent == 0 or shift % extent == 0:
        return name
    cut = extent - shift % extent
    return m.new("Concat", m.sliced(name, axis, cut, extent), m.sliced(name, axis, 0, cut), axis=axis)


@row("aten.constant_pad_nd")
def constant_pad(m: Emitter, out: Emitted, x: Emitted, pads: Sequence[int], value: Number = 0) -> Results:
    return _padded(m, x, pads, "constant", m.number(value, x.dtype))


def _padding(names: Sequence[str], mode: str) -> None:
    @row(*names)
    def pad(m: Emitter, out: Emitted, x: Emitted, pads: Sequence[int]) -> Results:
        return _padded(m, x, pads, mode)


for _kind, _mode in {"reflection_pad": "reflect", "replication_pad": "edge"}.items():
    _padding([f"aten.{_kind}{n}d" for n in (1, 2, 3)], _mode)
_padding(["aten._pad_circular"], "wrap")


def _padded(m: Emitter, x: Emitted, pads: Sequence[int], mode: str, fill: str | None = None) -> str:
    """PyTorch lists pads from the last axis on, before and after in turn."""
    if not any(pads):
        return x.name
    before, after = [0] * x.rank, [0] * x.rank
    for k in range(len(pads) // 2):
        before[x.rank - 1 - k], after[x.rank - 1 - k] = pads[2 * k], pads[2 * k + 1]
    return m.new("Pad", x, m.integers(before + after), fill, mode=mode)


def _triangle(name: str, upper: int) -> None:
    @row(name)
    def triangle(m: Emitter, out: Emitted, x: Emitted, diagonal: int = 0) -> Results:
        return m.new("Trilu", x, m.integers([diagonal]), upper=upper)


_triangle("aten.triu", 1)
_triangle("aten.tril", 0)


@row("aten.slice_scatter")
def slice_scatter(m: Emitter, out: Emitted, x: Emitted, source: Emitted, dim: int = 0, start: Any = None,
                  end: Any = None, step: int = 1) -> Results:  # fmt: skip
    axis = x.axis(dim)
    extent = x.shape[axis]
    new = m.typed(source, x.dtype)
    if any(isinstance(n, Size | Emitted) for n in (extent, source.shape[axis], start, end)):
        if step != 1:
            raise m.refuse("every so many elements of a part whose size data tell are not supported")
        first = start.name if isinstance(start, Emitted) else m.size(start or 0)
        behind = Emitted(m.new("Add", first, m.size(source.shape[axis])), dtypes.int64, ())
        before = m.sliced(x.name, axis, 0, Emitted(first, dtypes.int64, ()))
        return m.new("Concat", before, new, m.sliced(x.name, axis, behind, _LAST), axis=axis)
    chosen = range(*slice(start, end, step).indices(extent))
    if step != 1:  # every place is one of the old elements or one of the new
        places = np.arange(extent, dtype=np.int64)
        places[list(chosen)] = extent + np.arange(len(chosen))
        return m.new("Gather", m.new("Concat", x, new, axis=axis), places, axis=axis)
    parts = [m.sliced(x.name, axis, 0, chosen.start)] if chosen.start > 0 else []
    parts += [new] if len(chosen) else []
    parts += [m.sliced(x.name, axis, chosen.start + len(chosen), extent)] if chosen.start + len(chosen) < extent else []
    return parts[0] if len(parts) == 1 else m.new("Concat", *parts, axis=axis)


# indices that are data


@row("aten.embedding")
def embedding(m: Emitter, out: Emitted, weight: Emitted, indices: Emitted, *_: Any) -> Results:
    return m.new("Gather", weight, indices, axis=0)


@row("aten.index_select")
def index_select(m: Emitter, out: Emitted, x: Emitted, dim: int, indices: Emitted) -> Results:
    source = m.reshaped(x, x.shape or (1,))
    return m.reshape(m.new("Gather", source, m.reshaped(indices, indices.shape or (1,)), axis=x.axis(dim)), out.shape)


@row("tilewright.taken")
def taken(m: Emitter, out: Emitted, x: Emitted, dim: int, index: Emitted) -> Results:
    """The slice at an index that data tell, which may lie outside where it is not used."""
    extent = x.shape[dim]
    lowest, highest = m.number(-extent, dtypes.int64), m.number(extent - 1, dtypes.int64)
    place = m.new("Min", m.new("Max", m.typed(index, dtypes.int64), lowest), highest)
    return m.new("Gather", x, place, axis=dim)


@row("aten.gather")
def gather(m: Emitter, out: Emitted, x: Emitted, dim: int, indices: Emitted, **_: Any) -> Results:
    if x.rank == 0 or indices.rank == 0:
        raise m.refuse("a gather of a scalar is not supported")
    return m.new("GatherElements", x, indices, axis=x.axis(dim))


@row("aten.nonzero")
def nonzero(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.new("Transpose", m.new("NonZero", x), perm=[1, 0])


@row("aten.where.default")
def places_by_axis(m: Emitter, out: tuple[Emitted, ...], x: Emitted) -> Results:
    rows = _split(m, Emitted(m.new("NonZero", x), dtypes.int64, (x.rank, *out[0].shape)), [1] * x.rank, 0)
    return tuple(m.new("Reshape", row, m.integers([-1])) for row in rows)


def _whole_indices(m: Emitter, indices: Sequence[Emitted | None], count: Any) -> list[Emitted | None]:
    """Masks as the indices of what they keep, `count` of them: one for each of their axes."""
    found: list[Emitted | None] = []
    for index in indices:
        if index is None or index.dtype not in (dtypes.bool_, dtypes.uint8):
            found.append(index)
            continue
        kept = m.new("NonZero", m.typed(index, dtypes.bool_))
        ones = m.integers([1] * index.rank)
        rows = (kept,) if index.rank == 1 else m.several("Split", index.rank, kept, ones, axis=0)
        found += [Emitted(m.new("Reshape", row, m.integers([-1])), dtypes.int64, (count,)) for row in rows]
    return found


def _are_masks(indices: Sequence[Emitted | None]) -> bool:
    return any(i is not None and i.dtype in (dtypes.bool_, dtypes.uint8) for i in indices)


def _places_of(indices: Sequence[Emitted | None]) -> list[int]:
    return [k for k, index in enumerate(indices) if index is not None]


def _common_shape(indices: Sequence[Emitted]) -> Shape:
    """The shape that indices have in common."""
    longest = max((i.shape for i in indices), key=len)
    if not any(isinstance(n, Size) for i in indices for n in i.shape):
        return tuple(np.broadcast_shapes(*(i.shape for i in indices)))
    padded = [(*(1,) * (len(longest) - i.rank), *i.shape) for i in indices]
    return tuple(next((n for n in column if n != 1), 1) for column in zip(*padded, strict=True))


def _stacked(m: Emitter, indices: Sequence[Emitted]) -> tuple[str, Shape]:
    """Indices of several axes side by side, [..., axes], and the shape they have in common."""
    shape = _common_shape(indices)
    columns = []
    for index in indices:
        wide = Emitted(m.typed(index, dtypes.int64), dtypes.int64, index.shape)
        columns.append(m.reshape(m.expanded(wide, shape), (*shape, 1)))
    return (columns[0] if len(columns) == 1 else m.new("Concat", *columns, axis=len(shape))), shape


@row("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(m: Emitter, out: Emitted, x: Emitted, indices: Sequence[Emitted | None]) -> Results:
    if _are_masks(indices):
        # how many a mask keeps is an extent of the result, where no other index is as long
        count = next((n for n in out.shape if isinstance(n, Size)), None)
        if count is None:
            raise m.refuse("a mask beside other indices is not supported; use torch.where")
        indices = _whole_indices(m, indices, count)
        m.knows(count, next((v.name, 0) for v in indices if v is not None and v.shape == (count,)))
    places = _places_of(indices)
    if len(places) == 1:
        return m.new("Gather", x, indices[places[0]], axis=places[0])
    others = [a for a in range(x.rank) if a not in places]
    stacked, shape = _stacked(m, [i for i in indices if i is not None])
    found = m.new("GatherND", m.transposed(x.name, [*places, *others]), stacked)
    if places[-1] - places[0] != len(places) - 1:
        return found  # the axes of indices apart from each other come first
    rank, first = len(shape), places[0]
    order = [*range(rank, rank + first), *range(rank), *range(rank + first, out.rank)]
    return m.transposed(found, order)


@row("aten.masked_select")
def masked_select(m: Emitter, out: Emitted, x: Emitted, mask: Emitted) -> Results:
    shape = np.broadcast_shapes(x.shape, mask.shape)
    whole, flags = (Emitted(m.expanded(v, shape), v.dtype, shape) for v in (x, mask))
    return index(m, out, whole, [flags])


@row("aten.masked_scatter")
def masked_scatter(m: Emitter, out: Emitted, x: Emitted, mask: Emitted, source: Emitted) -> Results:
    """Where a mask is set, elements of another tensor, one after the other."""
    whole, last = m.expanded(x, out.shape), prod(source.shape) - 1
    if last < 0:
        return whole
    flags = m.expanded(mask, out.shape)
    so_far = m.new("CumSum", m.reshape(m.cast(flags, dtypes.int64), (-1,)), m.integers([0]))
    first, place = m.number(0, dtypes.int64), m.new("Sub", so_far, m.number(1, dtypes.int64))
    place = m.new("Min", m.new("Max", place, first), m.number(last, dtypes.int64))  # where it is read, it is inside
    given = m.new("Gather", m.reshape(m.typed(source, x.dtype), (-1,)), place, axis=0)
    return m.new("Where", flags, m.reshape(given, out.shape), whole)


def _masked(m: Emitter, x: Emitted, indices: Sequence[Emitted | None], values: Emitted) -> str | None:
    """Elements chosen by one mask of neighbouring axes, where what they become does not depend on which one it is."""
    mask, before = indices[-1], len(indices) - 1
    if mask is None or mask.dtype is not dtypes.bool_ or any(i is not None for i in indices[:-1]):
        return None
    rest = x.rank - mask.rank - before
    if values.rank > rest and (values.rank > rest + 1 + before or values.shape[values.rank - rest - 1] != 1):
        return None
    own = values.shape[values.rank - min(values.rank, rest) :]
    if values.rank > rest + 1:
        own = (*values.shape[: values.rank - rest - 1], *(1,) * mask.rank, *own)
    flags = m.reshaped(mask, (*mask.shape, *(1,) * rest))
    return m.new("Where", flags, m.reshape(m.typed(values, x.dtype), own), x)


@row("aten.index_put", "aten._unsafe_index_put")
def index_put(m: Emitter, out: Emitted, x: Emitted, indices: Sequence[Emitted | None], values: Emitted,
              accumulate: bool = False) -> Results:  # fmt: skip
    chosen_by_mask = None if accumulate else _masked(m, x, indices, values)
    if chosen_by_mask is not None:
        return chosen_by_mask
    if _are_masks(indices):
        masks = [i for i in indices if i is not None and i.dtype in (dtypes.bool_, dtypes.uint8)]
        if len(masks) > 1:
            raise m.refuse("several masks as indices are not supported; join them with &")
        flat = m.reshape(m.cast(m.typed(masks[0], dtypes.bool_), dtypes.int64), (-1,))
        count = Size(f"kept by {masks[0].name}", None)
        m.knows(count, m.new("ReduceSum", flat, m.integers([0]), keepdims=0))
        indices = _whole_indices(m, indices, count)
    places = _places_of(indices)
    chosen = [i for i in indices if i is not None]
    is_open = any(isinstance(n, Size) for i in chosen for n in i.shape)
    if len(places) == 1 and not accumulate and chosen[0].rank <= 1 and not is_open:
        return _put_rows(m, x, places[0], chosen[0], values)
    others = [a for a in range(x.rank) if a not in places]
    order = [*places, *others]
    stacked, shape = _stacked(m, chosen)
    adjacent = places[-1] - places[0] == len(places) - 1
    given = Emitted(m.typed(values, x.dtype), x.dtype, values.shape)
    rest = tuple(x.shape[a] for a in others)
    if adjacent:
        first, rank = places[0], len(shape)
        full = m.expanded(given, (*rest[:first], *shape, *rest[first:]))
        updates = m.transposed(
            full, [*range(first, first + rank), *range(first), *range(first + rank, rank + len(rest))]
        )
    else:
        updates = m.expanded(given, (*shape, *rest))
    put = m.new("ScatterND", m.transposed(x.name, order), stacked, updates, reduction="add" if accumulate else "none")
    return m.transposed(put, [order.index(a) for a in range(x.rank)])


def _put_rows(m: Emitter, x: Emitted, axis: int, index: Emitted, values: Emitted) -> str:
    """Rows of `values` in the place of rows of `x`: each place asks which row was meant for it, so that nothing is
    written twice and no order matters."""
    extent, count = x.shape[axis], prod(index.shape)
    if count == 0 or extent == 0:
        return x.name
    at = m.reshape(m.typed(index, dtypes.int64), (count, 1))
    at = m.new(
        "Where", m.new("Less", at, m.number(0, dtypes.int64)), m.new("Add", at, m.number(extent, dtypes.int64)), at
    )
    meant = m.new("Equal", at, np.arange(extent, dtype=np.int64)[None])
    row_numbers = np.arange(count, dtype=np.int64)[:, None]
    source = m.new("ReduceMax", m.new("Where", meant, row_numbers, np.asarray(-1)), axes=[0], keepdims=0)
    given = Emitted(m.typed(values, x.dtype), x.dtype, values.shape)
    spread = m.expanded(given, (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))
    rows = m.reshape(spread, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
    if count > 1:
        rows = m.new("Gather", rows, m.new("Max", source, m.number(0, dtypes.int64)), axis=axis)
    hit = m.new("GreaterOrEqual", source, m.number(0, dtypes.int64))
    return m.new("Where", m.reshape(hit, (extent, *(1,) * (x.rank - 1 - axis))), rows, x)


# places in memory that are known


def _places(size: Sequence[int], stride: Sequence[int], offset: int | None) -> np.ndarray:
    """Places in a row of memory, as strides give them."""
    found = np.full(tuple(size), offset or 0, np.int64)
    for axis, step in enumerate(stride):
        along = [-1 if k == axis else 1 for k in range(len(size))]
        found += step * np.arange(size[axis], dtype=np.int64).reshape(along)
    return found


@row("aten.as_strided")
def as_strided(
    m: Emitter, out: Emitted, x: Emitted, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Results:
    places = _places(size, stride, storage_offset).reshape(-1)
    if places.size == prod(x.shape) and (places == np.arange(places.size)).all():
        return m.reshaped(x, out.shape)
    return m.reshape(m.new("Gather", m.reshape(x.name, [-1]), m.constant(places), axis=0), out.shape)


@row("aten.as_strided_scatter")
def as_strided_scatter(
    m: Emitter, out: Emitted, x: Emitted, source: Emitted, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> Results:  # fmt: skip
    return _overlaid(m, x, source, _places(size, stride, storage_offset))


@row("aten.diagonal_scatter")
def diagonal_scatter(
    m: Emitter, out: Emitted, x: Emitted, source: Emitted, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Results:
    numbers = np.arange(prod(x.shape), dtype=np.int64).reshape(x.shape)
    return _overlaid(m, x, source, np.diagonal(numbers, offset, dim1, dim2))


def _overlaid(m: Emitter, x: Emitted, source: Emitted, places: np.ndarray) -> str:
    """`x` with the elements of `source` at these places of the row that it is in memory."""
    flat = places.reshape(-1)
    if np.unique(flat).size != flat.size:
        raise m.refuse("places that are written twice are not supported")
    typed = m.typed(source, x.dtype)
    if flat.size == prod(x.shape) and (flat == np.arange(flat.size)).all():
        return m.reshape(typed, x.shape)
    if not flat.size:
        return x.name
    from_source = np.full(prod(x.shape), -1, np.int64)
    from_source[flat] = np.arange(flat.size)
    given = m.new("Gather", m.reshape(typed, [-1]), m.constant(np.maximum(from_source, 0)), axis=0)
    chosen = m.new("Where", m.constant(from_source >= 0), given, m.reshape(x.name, [-1]))
    return m.reshape(chosen, x.shape)


def _scattering(name: str, reduction: str) -> None:
    @row(name)
    def scatter(
        m: Emitter, out: Emitted, x: Emitted, dim: int, indices: Emitted, source: Operand, **named: Any
    ) -> Results:
        kind = {"multiply": "mul"}.get(named.get("reduce", reduction), named.get("reduce", reduction))
        if isinstance(source, Emitted):
            typed = Emitted(m.typed(source, x.dtype), x.dtype, source.shape)
            updates = typed.name
            for axis, (have, want) in enumerate(zip(source.shape, indices.shape, strict=True)):
                if have != want:
                    updates = m.sliced(updates, axis, 0, want)
        else:
            updates = m.filled(indices.shape, source, x.dtype)
        return m.new("ScatterElements", x, indices, updates, axis=x.axis(dim), reduction=kind)


_scattering("aten.scatter", "none")
_scattering("aten.scatter_add", "add")
