"""What a tile moves and holds: transactions, footprint with liveness, and the bytes no schedule can avoid.

Shared by the cost models of all targets; sizes may be arrays with an entry a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Known, Size, box_elements, extent_of
from tilewright.tile_graph.algebra.streams import Stream

_LINE_SECONDS = 150e-9  # of a line that two units write: measured with rows cut in two
_RUN_SECONDS = 10e-9  # the same by the lines of a short run: many are on their way at a time
_WHOLE_LINES = 0.2  # of it for runs of whole lines: buffers of ours begin with a line, a user's may not


def transactions(tensor: Tensor, box: Box, context: NestContext, elements: Size = None) -> Size:
    """Bytes of a box to or from main memory, each contiguous run rounded up to whole transactions; `elements` of the
    box, where they have been counted."""
    width = context.target.main.transaction
    if not tensor.rank:
        return width
    size = (box_elements(box) if elements is None else elements) * tensor.dtype.bytes
    run = np.maximum(_run(tensor, box, context)[0], 1) * tensor.dtype.bytes
    return size * 1.0 * (-(-run // width) * width) / run  # 64 bits do not count gigabytes by gigabytes


def _run(tensor: Tensor, box: Box, context: NestContext) -> tuple[Size, Size]:
    """Elements of a box that are one contiguous run of storage, and whether the whole box is."""
    run: Size = 1
    goes_on: Size = True
    layout = context.layout(tensor)
    for part in reversed(layout.order):
        if goes_on is False:
            break
        along, extent = box[part.axis].size, extent_of(tensor.shape[part.axis])
        more = run * (along if part.size is None else np.minimum(along, part.size))
        run = more if goes_on is True else np.where(goes_on, more, run)
        goes_on = along >= extent if goes_on is True else goes_on & (along >= extent)
        if layout.gap:
            return run, False  # a row ends before the next one begins
    return run, goes_on


def accessed(nest: Nest, tensor: Tensor, box: Box, context: NestContext) -> Size:
    """The most bytes that a nest can read of a tensor on a box of its own: every read at every point, runs in whole
    transactions. Rows that are rolled or shuffled, or two halves of one axis, span far more than is read of them."""
    width = context.target.main.transaction
    sizes: dict[Axis, Size] = {a: extent_of(a.extent) for a in nest.reduce_axes}
    sizes.update({a: part.size for a, part in zip(nest.axes, box, strict=True)})
    if not tensor.rank:
        return width
    innermost = context.layout(tensor).order[-1].axis
    total: Size = 0
    for axes, runs in nest.paths[tensor]:
        count: Size = tensor.dtype.bytes
        for axis in axes:
            count = count * sizes.get(axis, 1)
        along = runs[innermost]
        run = np.maximum(sizes.get(along, 1) if along is not None else 1, 1) * tensor.dtype.bytes
        moved = count * 1.0 * (-(-run // width) * width) / run
        total = np.maximum(total, moved) if tensor in nest.alternatives else total + moved
    return total


def looked_up(nest: Nest, tensor: Tensor, points: Size, context: NestContext) -> Size:
    """The most bytes that points of a nest can read of one of its tables."""
    nodes = nest.tables[tensor]
    steps = prod(extent_of(a.extent) for a in nest.reduce_axes) * len(nodes)
    innermost = context.layout(tensor).order[-1].axis
    alone = any(n.indices[innermost].reads for n in nodes)  # no run: a line for every element
    return points * steps * (context.target.main.transaction if alone else tensor.dtype.bytes)


def shared_seconds(tensor: Tensor, box: Box, context: NestContext, elements: Size = None) -> Size:
    """What a tile loses to neighbours that write the same lines at the same time: a line goes to and fro between units
    wherever a contiguous run of the tile ends inside one, and runs of whole lines need not begin with one."""
    width = context.target.main.transaction
    run, whole = _run(tensor, box, context)
    goes_on: Size = True
    in_lines: Size = True  # from one run to the next are whole lines
    pitch = tensor.dtype.bytes
    for part in reversed(context.layout(tensor).order):
        extent = extent_of(tensor.shape[part.axis])
        if pitch % width:
            in_lines = in_lines & goes_on
        pitch *= part.size or -(-extent // part.step)
        goes_on = goes_on & (box[part.axis].size >= extent)
    count = (box_elements(box) if elements is None else elements) / np.maximum(run, 1)
    size = run * tensor.dtype.bytes
    is_whole = np.logical_and(in_lines, size % width == 0)
    each = np.minimum(_LINE_SECONDS, _RUN_SECONDS * size / width) * np.where(is_whole, _WHOLE_LINES, 1.0)
    return np.where(whole, 0.0, count * each)


def carried_copies(stream: Stream | None) -> dict[Nest, int]:
    """How many tiles of what a stream carries along lie there: the state and what it ends as, and for those that read
    it on the way what it is now and was before."""
    if stream is None:
        return {}
    followed = {t for n in (*stream.wide, *stream.reducers) for t in n.reads()}
    return {n: 4 if n.tensor in followed else 2 for n in stream.reducers}


def footprint(
    nests: Sequence[Nest], boxes: Mapping[Nest, Box], stored: frozenset[Tensor], stream: Stream | None,
    steps: bool = False, known: Known | None = None,
) -> Size:  # fmt: skip
    """Most bytes of intermediate tiles alive at once; in a stream all of them, and the states carried along; all of
    them too in the steps of windows, which stay from one to the next. `known` has counted the elements of boxes."""
    counted = box_elements if known is None else known.elements
    if steps:
        inside = [(n, t) for n in nests for t in n.stores if t not in stored]
        return sum((counted(boxes[n]) * t.dtype.bytes for n, t in inside), np.int64(0))
    if stream is not None:
        copies = carried_copies(stream)
        parts = [counted(boxes[n]) * n.tensor.dtype.bytes * copies.get(n, 1) for n in nests]
        return sum(parts, np.int64(0))
    last_use = {t: i for i, n in enumerate(nests) for t in n.reads()}
    most: Size = np.int64(0)
    total: Size = np.int64(0)
    alive: dict[Tensor, Size] = {}
    for number, nest in enumerate(nests):
        more = {t: counted(boxes[nest]) * t.dtype.bytes for t in nest.stores if t not in stored}
        if more:  # else there is no more than before
            alive |= more
            total = sum(more.values(), total)
            most = np.maximum(most, total)
        for tensor in [t for t in alive if last_use.get(t, -1) <= number]:
            total = total - alive.pop(tensor)
    return most


def compulsory(nests: Sequence[Nest], stored: frozenset[Tensor], context: NestContext) -> int:
    """Bytes every schedule of the group moves: what it reads from outside and what it stores, once each; of a table
    no more than is looked up."""
    inside = {t for n in nests for t in n.stores}
    outside = {t for n in nests for t in n.reads() if t not in inside}
    total = 0
    for tensor in outside | (inside & stored):
        size = tensor.most_bytes
        readers = [n for n in nests if tensor in n.reads()]
        if readers and all(tensor in n.tables for n in readers):
            points = [prod(extent_of(a.extent) for a in n.axes) for n in readers]
            size = min(size, sum(looked_up(n, tensor, p, context) for n, p in zip(readers, points, strict=True)))
        total += size
    return total
