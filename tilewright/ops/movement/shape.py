"""Operators that move elements without computing: reshapes, slices, joins, pads and constant makers."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, all_of, cast, const, le, load, lt, maximum, minimum, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import (
    MOST_KNOWN,
    MOST_OPERANDS,
    Builder,
    Shape,
    clamp,
    dims,
    distinct_axes,
    literal,
    reindex,
)
from tilewright.ops.registry import operator


def reshaped(b: Builder, hint: str, x: Tensor, shape: Shape) -> Tensor:
    """`x` with other axes over the same elements."""
    if dims(x) == shape:
        return x
    if prod(dims(x)) != prod(shape):
        raise b.invalid(f"shape {list(dims(x))} cannot become {list(shape)}")
    return b.map(hint, shape, lambda *i: b.read(x, reindex(dims(x), shape, i)))


@operator("Identity")
def identity(b: Builder, node: Node, x: Tensor) -> Tensor:
    return x


@operator("Reshape", since=1)
def reshape_by_attribute(b: Builder, node: Node, x: Tensor) -> Tensor:
    return reshaped(b, "", x, _target(b, node, x, list(node.attributes["shape"])))


@operator("Reshape", since=5, constants=(1,))
def reshape(b: Builder, node: Node, x: Tensor, shape: Tensor) -> Tensor:
    return reshaped(b, "", x, _target(b, node, x, b.integers(shape, "shape")))


def _target(b: Builder, node: Node, x: Tensor, wanted: list[int]) -> Shape:
    """The new shape with ONNX's 0 (copy) and -1 (the rest) filled in."""
    if not node.attributes.get("allowzero", 0):
        if any(n == 0 and place >= x.rank for place, n in enumerate(wanted)):
            raise b.invalid(f"shape {wanted} copies an axis that its input {list(dims(x))} does not have")
        wanted = [dims(x)[place] if n == 0 else n for place, n in enumerate(wanted)]
    if wanted.count(-1) > 1:
        raise b.invalid(f"shape {wanted} leaves more than one axis open")
    if -1 in wanted:
        rest = prod(n for n in wanted if n != -1)
        if rest == 0 or prod(dims(x)) % rest:
            raise b.invalid(f"shape {list(dims(x))} cannot become {wanted}")
        wanted = [prod(dims(x)) // rest if n == -1 else n for n in wanted]
    return tuple(wanted)


@operator("Flatten")
def flatten(b: Builder, node: Node, x: Tensor) -> Tensor:
    axis = node.attributes.get("axis", 1)
    if not -x.rank <= axis <= x.rank:
        raise b.invalid(f"axis {axis} is outside a tensor of {x.rank} axes")
    axis = axis + x.rank if axis < 0 else axis
    return reshaped(b, "", x, (prod(dims(x)[:axis]), prod(dims(x)[axis:])))


@operator("Squeeze", since=1)
def squeeze_by_attribute(b: Builder, node: Node, x: Tensor) -> Tensor:
    return _squeeze(b, x, node.attributes.get("axes"))


@operator("Squeeze", since=13, constants=(1,))
def squeeze(b: Builder, node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return _squeeze(b, x, None if axes is None else b.integers(axes, "axes"))


def _squeeze(b: Builder, x: Tensor, axes: list[int] | None) -> Tensor:
    chosen = [a for a, n in enumerate(dims(x)) if n == 1] if axes is None else distinct_axes(b, axes, x.rank)
    if any(dims(x)[a] != 1 for a in chosen):
        raise b.invalid(f"cannot squeeze axes {chosen} of shape {list(dims(x))}")
    return reshaped(b, "", x, tuple(n for a, n in enumerate(dims(x)) if a not in chosen))


@operator("Unsqueeze", since=1)
def unsqueeze_by_attribute(b: Builder, node: Node, x: Tensor) -> Tensor:
    return _unsqueeze(b, x, list(node.attributes["axes"]))


@operator("Unsqueeze", since=13, constants=(1,))
def unsqueeze(b: Builder, node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return _unsqueeze(b, x, b.integers(axes, "axes"))


def _unsqueeze(b: Builder, x: Tensor, axes: list[int]) -> Tensor:
    rank = x.rank + len(axes)
    chosen = set(distinct_axes(b, axes, rank))
    rest = iter(dims(x))
    return reshaped(b, "", x, tuple(1 if a in chosen else next(rest) for a in range(rank)))


@operator("Transpose")
def transpose(b: Builder, node: Node, x: Tensor) -> Tensor:
    order = list(node.attributes.get("perm", range(x.rank - 1, -1, -1)))
    if sorted(order) != list(range(x.rank)):
        raise b.invalid(f"perm {order} is no permutation of {x.rank} axes")
    if order == list(range(x.rank)):
        return x
    shape = tuple(dims(x)[a] for a in order)
    return b.map("", shape, lambda *i: b.read(x, [i[order.index(a)] for a in range(x.rank)]))


@operator("Slice", since=1)
def slice_by_attributes(b: Builder, node: Node, x: Tensor) -> Tensor:
    starts, ends = list(node.attributes["starts"]), list(node.attributes["ends"])
    axes = list(node.attributes.get("axes", range(len(starts))))
    return _slice(b, x, starts, ends, axes, [1] * len(starts))


@operator("Slice", since=10, constants=(1, 2, 3, 4))
def slice_(
    b: Builder,
    node: Node,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    count = prod(dims(starts))
    chosen = list(range(count)) if axes is None else b.integers(axes, "axes")
    stride = [1] * count if steps is None else b.integers(steps, "steps")
    if b.value(starts) is None and b.value(ends) is None:
        return _window(b, x, starts, ends, chosen, stride)
    return _slice(b, x, b.integers(starts, "starts"), b.integers(ends, "ends"), chosen, stride)


def _slice(b: Builder, x: Tensor, starts: list[int], ends: list[int], axes: list[int], steps: list[int]) -> Tensor:
    ranges = [range(n) for n in dims(x)]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise b.invalid("a slice with step 0")
        place = b.axis(axis, x.rank)
        # Python's own slice rules are ONNX's, once an end before the start of a backward slice is "none"
        stop = None if step < 0 and end < -dims(x)[place] else end
        ranges[place] = range(*slice(start, stop, step).indices(dims(x)[place]))
    if all(r == range(n) for r, n in zip(ranges, dims(x), strict=True)):
        return x
    return b.map(
        "",
        [len(r) for r in ranges],
        lambda *i: b.read(x, [v * r.step + r.start for v, r in zip(i, ranges, strict=True)]),
    )


def _window(b: Builder, x: Tensor, starts: Tensor, ends: Tensor, axes: list[int], steps: list[int]) -> Tensor:
    """A slice both of whose bounds are data: how many elements it has is asked for, and where it begins stays data. A
    window that moves, step by step of a loop, is thus one code."""
    if not len(axes) == len(steps) == prod(dims(starts)) == prod(dims(ends)):
        raise b.invalid(
            f"{len(axes)} axes with {list(dims(starts))} starts, {list(dims(ends))} ends and {len(steps)} steps"
        )
    places = [b.axis(axis, x.rank) for axis in axes]
    firsts, counts = [], []
    for k, (place, step) in enumerate(zip(places, steps, strict=True)):
        if step == 0:
            raise b.invalid("a slice with step 0")
        extent = dims(x)[place]
        first, last = (_bound(b.read(t, (k,)), extent, step) for t in (starts, ends))
        firsts.append(first)
        counts.append(_steps_between(first, last, step))
    found = b.decided(
        b.map("counts", (len(axes),), lambda k: _picked(counts, k)),
        "where it begins and ends is known only at run time",
    )
    shape = list(dims(x))
    for place, count in zip(places, found.tolist(), strict=True):
        shape[place] = count
    begins = b.map("begins", (len(axes),), lambda k: _picked(firsts, k))

    def element(*i: Expr) -> Expr:
        at = list(i)
        for k, (place, step) in enumerate(zip(places, steps, strict=True)):
            at[place] = clamp(i[place] * step + load(begins, (k,)), dims(x)[place])
        return b.read(x, at)

    return b.map("", shape, element)


def _bound(index: Expr, extent: int, step: int) -> Expr:
    """Where a slice of an axis begins or ends: counted from the end where negative, and not beyond one before or one
    behind all elements."""
    low, high = (0, extent) if step > 0 else (-1, extent - 1)
    place = cast(index, dtypes.index)
    return minimum(maximum(select(lt(place, 0), place + extent, place), low), high)


def _steps_between(first: Expr, last: Expr, step: int) -> Expr:
    """How many steps it takes from one number to another or beyond it, none where that lies behind."""
    way = maximum(last - first if step > 0 else first - last, 0)
    return way if abs(step) == 1 else (way + (abs(step) - 1)) // abs(step)


def _picked(values: list[Expr], k: Expr) -> Expr:
    result = values[-1]
    for place in range(len(values) - 2, -1, -1):
        result = select(le(k, place), values[place], result)
    return result


@operator("Split", since=1, constants=(1,))
def split(b: Builder, node: Node, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = b.axis(node.attributes.get("axis", 0), x.rank)
    extent = dims(x)[axis]
    if sizes is not None:
        parts = b.integers(sizes, "split")
    elif "split" in node.attributes:
        parts = list(node.attributes["split"])
    else:
        count = int(node.attributes.get("num_outputs", len(node.outputs)))
        size = -(-extent // count)
        parts = [min(size, extent - k * size) for k in range(count)]
    return parts_of(b, x, axis, parts)


def parts_of(b: Builder, x: Tensor, axis: int, parts: list[int]) -> tuple[Tensor, ...]:
    """A tensor cut along an axis into parts of these extents."""
    extent = dims(x)[axis]
    if sum(parts) != extent or any(p < 0 for p in parts):
        raise b.invalid(f"parts {parts} do not add up to the axis of {extent}")
    results = []
    for place, part in enumerate(parts):
        start = sum(parts[:place])
        shape = (*dims(x)[:axis], part, *dims(x)[axis + 1 :])
        results.append(
            b.map(
                "" if place == 0 else f"part{place}",
                shape,
                lambda *i, start=start: b.read(x, (*i[:axis], i[axis] + start, *i[axis + 1 :])),
            )
        )
    return tuple(results)


@operator("Concat")
def concat(b: Builder, node: Node, *tensors: Tensor) -> Tensor:
    axis = b.axis(node.attributes.get("axis", 1), tensors[0].rank)
    return concatenated(b, "", tensors, axis)


def concatenated(b: Builder, hint: str, tensors: tuple[Tensor, ...], axis: int) -> Tensor:
    """Tensors one behind the other along an axis."""
    rest = {(*dims(t)[:axis], *dims(t)[axis + 1 :]) for t in tensors}
    if len(rest) > 1 or len({t.dtype for t in tensors}) > 1:
        raise b.invalid(f"its inputs do not fit: {', '.join(map(repr, tensors))}")
    parts = [t for t in tensors if dims(t)[axis] > 0] or [tensors[0]]
    while len(parts) > MOST_OPERANDS:  # parts of parts
        groups = [tuple(parts[k : k + MOST_OPERANDS]) for k in range(0, len(parts), MOST_OPERANDS)]
        parts = [concatenated(b, f"{hint}_part{k}", group, axis) for k, group in enumerate(groups)]
    if len(parts) == 1:
        return parts[0]
    starts = [sum(dims(t)[axis] for t in parts[:k]) for k in range(len(parts) + 1)]
    shape = (*dims(parts[0])[:axis], starts[-1], *dims(parts[0])[axis + 1 :])

    def element(*i: Expr) -> Expr:
        def part(k: int) -> Expr:
            return b.read(parts[k], (*i[:axis], i[axis] - starts[k], *i[axis + 1 :]))

        result = part(len(parts) - 1)
        for k in range(len(parts) - 2, -1, -1):
            result = select(lt(i[axis], starts[k + 1]), part(k), result)
        return result

    return b.map(hint, shape, element)


@operator("Expand", since=8, constants=(1,))
def expand(b: Builder, node: Node, x: Tensor, shape: Tensor) -> Tensor:
    target = tuple(b.integers(shape, "shape"))
    try:
        full = np.broadcast_shapes(dims(x), target)
    except ValueError:
        raise b.invalid(f"shape {list(dims(x))} does not broadcast to {list(target)}") from None
    return x if full == dims(x) else b.map("", full, lambda *i: b.read(x, i))


@operator("Tile", since=6, constants=(1,))
def tile(b: Builder, node: Node, x: Tensor, repeats: Tensor) -> Tensor:
    counts = b.integers(repeats, "repeats")
    if len(counts) != x.rank or any(c < 0 for c in counts):
        raise b.invalid(f"repeats {counts} has to be a number of 0 or more for each of {x.rank} axes")
    shape = tuple(n * c for n, c in zip(dims(x), counts, strict=True))
    if shape == dims(x):
        return x
    return b.map("", shape, lambda *i: b.read(x, [v % max(n, 1) for v, n in zip(i, dims(x), strict=True)]))


@operator("Pad", since=1)
def pad_by_attributes(b: Builder, node: Node, x: Tensor) -> Tensor:
    pads = list(node.attributes.get("pads", node.attributes.get("paddings", ())))
    fill = const(node.attributes.get("value", 0.0), x.dtype)
    return _pad(b, x, pads, fill, node.attributes.get("mode", "constant"))


@operator("Pad", since=11, constants=(1, 3))
def pad(
    b: Builder, node: Node, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    given = b.integers(pads, "pads")
    if axes is not None:
        chosen = distinct_axes(b, b.integers(axes, "axes"), x.rank)
        full = [0] * (2 * x.rank)
        for place, axis in enumerate(chosen):
            full[axis], full[axis + x.rank] = given[place], given[place + len(chosen)]
        given = full
    fill = const(0, x.dtype) if value is None else b.read(value, (0,) * value.rank)
    return _pad(b, x, given, fill, node.attributes.get("mode", "constant"))


def _pad(b: Builder, x: Tensor, pads: list[int], fill: Expr, mode: str) -> Tensor:
    if len(pads) != 2 * x.rank:
        raise b.invalid(f"pads {pads} has {len(pads)} numbers; {2 * x.rank} are needed for {x.rank} axes")
    before, after = pads[: x.rank], pads[x.rank :]
    shape = b.checked_shape([n + p + q for n, p, q in zip(dims(x), before, after, strict=True)])
    if mode != "constant" and any(n == 0 and m for n, m in zip(dims(x), shape, strict=True)):
        raise b.invalid(f"mode '{mode}' repeats elements, and shape {list(dims(x))} has none")
    if not any(pads):
        return x

    def place(i: Expr, n: int, p: int, q: int) -> Expr:
        if p == 0 and q == 0:
            return i
        at = i - p
        if mode == "edge":
            return clamp(at, n)
        if mode == "wrap":
            return at % n
        if mode == "reflect":
            period = max(2 * (n - 1), 1)
            return minimum(at % period, period - at % period) if n > 1 else const(0)
        return at

    def element(*i: Expr) -> Expr:
        places = [place(v, n, p, q) for v, n, p, q in zip(i, dims(x), before, after, strict=True)]
        if mode != "constant":
            return b.read(x, places)
        inside = [le(0, at) for at, p in zip(places, before, strict=True) if p > 0]
        inside += [lt(at, n) for at, n, q in zip(places, dims(x), after, strict=True) if q > 0]
        return select(all_of(inside), load(x, places), fill) if inside else load(x, places)

    if mode not in ("constant", "edge", "wrap", "reflect"):
        raise b.unsupported(f"mode '{mode}' is not known; use constant, edge, reflect or wrap")
    return b.map("", shape, element)


@operator("Shape")
def shape_(b: Builder, node: Node, x: Tensor) -> Tensor:
    start, end = node.attributes.get("start", 0), node.attributes.get("end")
    return b.constant(np.asarray(dims(x)[slice(start, end)], np.int64))


@operator("Size")
def size(b: Builder, node: Node, x: Tensor) -> Tensor:
    return b.constant(np.asarray(prod(dims(x)), np.int64))


@operator("Constant")
def constant(b: Builder, node: Node) -> Tensor:
    for name, array in node.attributes.items():
        if name in ("value", "sparse_value"):
            return b.constant(array, "")
        if name in ("value_float", "value_floats"):
            return b.constant(np.asarray(array, np.float32), "")
        if name in ("value_int", "value_ints"):
            return b.constant(np.asarray(array, np.int64), "")
    raise b.unsupported(f"a constant given by {', '.join(node.attributes)} is not supported; use a dense tensor")


@operator("ConstantOfShape", since=9, constants=(0,))
def constant_of_shape(b: Builder, node: Node, shape: Tensor) -> Tensor:
    value = np.asarray(node.attributes.get("value", np.zeros(1, np.float32)))
    dtype = dtypes.by_numpy(value.dtype)
    if dtype is None:
        raise b.unsupported(f"element type {value.dtype} is not supported")
    return b.map("", b.integers(shape, "input"), lambda *i: literal(value.reshape(-1)[:1].reshape(()), dtype))


@operator("Range", since=11, constants=(0, 1, 2))
def range_(b: Builder, node: Node, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    step = b.known(delta, "delta").reshape(())
    if step == 0:
        raise b.invalid("a range with step 0 never ends")
    if b.value(start) is None and b.value(limit) is None:
        return _moving_range(b, start, limit, step)
    first, end = (b.known(t, n).reshape(()) for t, n in ((start, "start"), (limit, "limit")))
    count = max(int(np.ceil((float(end) - float(first)) / float(step))), 0)
    b.checked_shape([count], whole=True)
    if count > MOST_KNOWN:
        return b.map("", [count], lambda i: cast(i, start.dtype) * step.item() + first.item())
    counted = b.map_compute("", [count], lambda i: cast(i, start.dtype) * step.item() + first.item())
    return b.known_map(counted, (np.arange(count).astype(first.dtype) * step + first).astype(first.dtype))


def _moving_range(b: Builder, start: Tensor, limit: Tensor, step: np.ndarray) -> Tensor:
    """A range both of whose ends are data: how many numbers there are is asked for, and the first one stays data."""

    def only(x: Tensor) -> Expr:
        return b.read(x, (0,) * x.rank)

    def count() -> Expr:
        if start.dtype.is_float:
            first, last = (cast(only(t), dtypes.float64) for t in (start, limit))
            return cast(maximum(op("ceil", op("div", last - first, float(step))), 0.0), dtypes.index)
        first, last = (cast(only(t), dtypes.index) for t in (start, limit))
        return _steps_between(first, last, int(step))

    found = b.decided(b.map("count", (), count), "where it begins and ends is known only at run time")
    return b.map("", (int(found),), lambda i: cast(i, start.dtype) * step.item() + only(start))


@operator("EyeLike", since=9)
def eye_like(b: Builder, node: Node, x: Tensor) -> Tensor:
    dtype = dtypes.by_onnx(node.attributes["dtype"]) if "dtype" in node.attributes else x.dtype
    if dtype is None:
        raise b.unsupported("its dtype is not supported")
    k = int(node.attributes.get("k", 0))
    return b.map("", dims(x), lambda i, j: cast(op("eq", j, i + k), dtype))


@operator("Trilu", since=14, constants=(1,))
def trilu(b: Builder, node: Node, x: Tensor, k: Tensor | None = None) -> Tensor:
    shift = 0 if k is None else b.integers(k, "k")[0]
    upper = bool(node.attributes.get("upper", 1))

    def element(*i: Expr) -> Expr:
        keep = le(i[-2] + shift, i[-1]) if upper else le(i[-1], i[-2] + shift)
        return select(keep, b.read(x, i), const(0, x.dtype))

    return b.map("", dims(x), element)


def _blocks(b: Builder, x: Tensor, size: int) -> Shape:
    if x.rank != 4 or size < 1:
        raise b.invalid(f"blocksize {size} of shape {list(dims(x))}: it has to be 1 or more, of 4 axes")
    return dims(x)


@operator("DepthToSpace")
def depth_to_space(b: Builder, node: Node, x: Tensor) -> Tensor:
    size, mode = int(node.attributes["blocksize"]), node.attributes.get("mode", "DCR")
    n, c, h, w = _blocks(b, x, size)
    depth = c // (size * size)
    if c % (size * size):
        raise b.invalid(f"{c} channels do not make blocks of {size} x {size}")

    def element(i: Expr, channel: Expr, y: Expr, z: Expr) -> Expr:
        block = (y % size) * size + z % size
        source = block * depth + channel if mode == "DCR" else channel * (size * size) + block
        return b.read(x, (i, source, y // size, z // size))

    return b.map("", (n, depth, h * size, w * size), element)


@operator("SpaceToDepth")
def space_to_depth(b: Builder, node: Node, x: Tensor) -> Tensor:
    size, mode = int(node.attributes["blocksize"]), node.attributes.get("mode", "DCR")
    n, c, h, w = _blocks(b, x, size)
    if h % size or w % size:
        raise b.invalid(f"an image of {h} x {w} does not consist of blocks of {size} x {size}")

    def element(i: Expr, channel: Expr, y: Expr, z: Expr) -> Expr:
        if mode == "DCR":
            block, source = channel // c, channel % c
        else:
            block, source = channel % (size * size), channel // (size * size)
        return b.read(x, (i, source, y * size + block // size, z * size + block % size))

    return b.map("", (n, c * size * size, h // size, w // size), element)
