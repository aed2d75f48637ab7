"""NonMaxSuppression: each step of a Scan takes the best box that is left and drops those that overlap it."""

from __future__ import annotations

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Scan
from tilewright.ir.forms.expr import Axis, Expr, cast, const, eq, le, load, lt, maximum, minimum, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, clamp, dims, reindex
from tilewright.ops.registry import operator
from tilewright.ops.sorting.selecting import places_of
from tilewright.ops.sorting.sorting import ordered


@operator("NonMaxSuppression", since=10, constants=(0, 1, 2, 3, 4))
def non_max_suppression(
    b: Builder, node: Node, boxes: Tensor, scores: Tensor, most: Tensor | None = None,
    overlap: Tensor | None = None, least: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if boxes.rank != 3 or scores.rank != 3 or dims(boxes)[2] != 4 or dims(boxes)[:2] != dims(scores)[::2]:
        raise b.invalid(f"boxes {list(dims(boxes))} and scores {list(dims(scores))} do not fit each other")
    batches, classes, count = dims(scores)
    wanted = 0 if most is None else int(b.known(most, "max_output_boxes_per_class").reshape(-1)[0])
    steps = min(max(wanted, 0), count)
    if not steps or not batches * classes:
        return b.map("", (0, 3), lambda *i: const(0, dtypes.int64))
    edges = _edges(b, node, boxes)
    picked = _picked(b, scores, edges, steps, overlap, least)
    rows = batches * classes * steps

    def place(k: Expr) -> list[Expr]:
        return reindex((batches, classes, steps), (rows,), (k,))

    def step(k: Expr) -> Expr:
        batch, kind, at = place(k)
        return load(picked, (at, batch, kind))

    flags = b.map("flags", (rows,), lambda k: select(
        le(0, step(k)), const(1, dtypes.int32), const(0, dtypes.int32)))  # fmt: skip
    found = places_of(b, flags)

    def element(k: Expr, column: Expr) -> Expr:
        row = clamp(cast(load(found, (k,)), dtypes.index), rows)
        batch, kind, _ = place(row)
        return select(eq(column, 0), cast(batch, dtypes.int64), select(
            eq(column, 1), cast(kind, dtypes.int64), cast(step(row), dtypes.int64)))  # fmt: skip

    return b.map("", (dims(found)[0], 3), element)


def _edges(b: Builder, node: Node, boxes: Tensor) -> Tensor:
    """Of every box the lower and the upper edge on both axes: [batch, box, low or high, axis]."""
    batches, count, _ = dims(boxes)
    centred = bool(node.attributes.get("center_point_box", 0))

    def element(*i: Expr) -> Expr:
        batch, box, side, axis = i
        one, other = load(boxes, (batch, box, axis)), load(boxes, (batch, box, axis + 2))
        half = other / const(2, boxes.dtype)
        low, high = (one - half, one + half) if centred else (minimum(one, other), maximum(one, other))
        return select(eq(side, 0), low, high)

    return b.map("edges", (batches, count, 2, 2), element)


def _picked(
    b: Builder, scores: Tensor, edges: Tensor, steps: int, overlap: Tensor | None, least: Tensor | None
) -> Tensor:
    """[step, batch, class]: the box that each step takes, or -1 once none is left."""
    batches, classes, count = dims(scores)
    keys = b.map("keys", dims(scores), lambda *i: ordered(b.read(scores, i)))

    def one_if(condition: Expr) -> Expr:
        return select(condition, const(1, dtypes.int32), const(0, dtypes.int32))

    def is_open(*i: Expr) -> Expr:
        return const(1, dtypes.int32) if least is None else one_if(lt(_scalar(b, least), b.read(scores, i)))

    # a constant would be shared with others; a Scan's state starts from a tensor of its own kind
    start = b.map("open", dims(scores), is_open)
    left = b.tensor("left", dims(scores), dtypes.int32)
    whole = keys.dtype
    best = b.reduce_compute("best", (batches, classes), (count,), lambda i, r: select(
        op("ne", load(left, (*i, *r)), 0), load(keys, (*i, *r)), const(whole.limits[0], whole)), "max")  # fmt: skip
    none = const(count, dtypes.int32)
    at = b.reduce_compute("at", (batches, classes), (count,), lambda i, r: select(
        op("and", op("ne", load(left, (*i, *r)), 0), eq(load(keys, (*i, *r)), load(best.outputs[0], i))),
        cast(r[0], dtypes.int32), none), "min")  # fmt: skip
    taken = b.map_compute("taken", (batches, classes), lambda *i: select(
        lt(load(at.outputs[0], i), none), load(at.outputs[0], i), const(-1, dtypes.int32)))  # fmt: skip

    def stays(batch: Expr, kind: Expr, box: Expr) -> Expr:
        chosen = load(at.outputs[0], (batch, kind))
        other = clamp(cast(chosen, dtypes.index), count)
        is_over = _overlaps(b, edges, batch, box, other, overlap)
        kept = op("and", op("ne", cast(box, dtypes.int32), chosen), op("not", is_over))
        return select(kept, load(left, (batch, kind, box)), const(0, dtypes.int32))

    following = b.map_compute("rest", dims(scores), stays)
    picked = b.tensor("picked", (steps, batches, classes), dtypes.int32)
    b.emit(Scan(Axis("t", steps), (start,), (left,), (best, at, taken, following), (following.output,), (None,),
                ((taken.output, picked),), origin=b.origin))  # fmt: skip
    return picked


def _overlaps(b: Builder, edges: Tensor, batch: Expr, one: Expr, other: Expr, overlap: Tensor | None) -> Expr:
    """Whether what two boxes share is more than the threshold's part of what they cover together."""

    def edge(box: Expr, side: int, axis: int) -> Expr:
        return load(edges, (batch, box, side, axis))

    def area(box: Expr) -> Expr:
        return (edge(box, 1, 0) - edge(box, 0, 0)) * (edge(box, 1, 1) - edge(box, 0, 1))

    sides = [minimum(edge(one, 1, a), edge(other, 1, a)) - maximum(edge(one, 0, a), edge(other, 0, a)) for a in (0, 1)]
    zero = const(0, edges.dtype)
    shared = maximum(sides[0], zero) * maximum(sides[1], zero)
    covered = area(one) + area(other) - shared
    threshold = zero if overlap is None else cast(_scalar(b, overlap), edges.dtype)
    return op("and", lt(zero, shared), lt(threshold, shared / covered))


def _scalar(b: Builder, x: Tensor) -> Expr:
    return b.read(x, (0,) * x.rank)
