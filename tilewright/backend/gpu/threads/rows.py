"""Which tiles of a block lie in shared memory in rows that are a packet longer than what is in them.

The threads of a warp that multiply read an element each of many rows of a tile, and store a few each to many rows: of
rows as long as all banks together they all wait for the same banks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilewright.backend.gpu.threads.window_plan import is_window
from tilewright.ir.forms.expr import Load, axes_of
from tilewright.ir.forms.tensor import Tensor
from tilewright.target.instruction_sets import PACKET_BYTES
from tilewright.tile_graph.algebra.context import NestContext, is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Size, box_elements
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import PADDED, Hold, Leaf, Tile
from tilewright.tile_graph.traffic.moving import carried_copies


def padded_nests(
    nests: Sequence[Nest], leaves: Sequence[Leaf], stored: frozenset[Tensor], stream: Stream | None,
    context: NestContext,
) -> frozenset[Nest]:  # fmt: skip
    """Products whose tiles stay in the block, and nests of whose tile a product there reads rows, its sum along them,
    or a stream reduces them."""
    carried = () if stream is None else stream.reducers
    made = {t: n for n in nests for t in n.stores if t not in stored or n in carried}
    found: set[Nest] = set()
    for nest, leaf in zip(nests, leaves, strict=True):
        if leaf.instruction is not None or nest.monoid is None or is_window(leaf, nest):
            continue
        if nest not in carried and (not is_contraction(nest) or (leaf.vector is not None and leaf.vector[0] == "r")):
            continue  # neighbours read along a row
        if is_contraction(nest):
            found.update(made[t] for t in nest.stores if t in made and len(nest.axes) > 1)
        found.update(made[n.source] for n in nest.element_loads if n.source in made and _reads_rows(n, nest, context))
    return frozenset(found)


def _reads_rows(node: Load, nest: Nest, context: NestContext) -> bool:
    order = context.layout(node.source).order
    if not order:
        return False
    along, others = order[-1].axis, [i for i in range(len(node.indices)) if i != order[-1].axis]
    rows = {a for i in others for a in axes_of(node.indices[i])}
    return not rows.isdisjoint(nest.axes) and not set(nest.reduce_axes).isdisjoint(axes_of(node.indices[along]))


def _even_rows(tensor: Tensor, box: Box, context: NestContext) -> Size:
    """How many rows of a box (numbers or arrays) have an even number of packets: none, or all of several."""
    row = box[context.layout(tensor).order[-1].axis].size
    rows = box_elements(box) // np.maximum(row, 1)
    return np.where((rows > 1) & (row * tensor.dtype.bytes % (2 * PACKET_BYTES) == 0), rows, 0)


def padding_bytes(
    boxes: Mapping[Nest, Box], padded: frozenset[Nest], stream: Stream | None, context: NestContext
) -> dict[Tensor, Size]:
    """What the ends of all such rows take."""
    found: dict[Tensor, Size] = {}
    copies = carried_copies(stream)
    for nest in padded:
        for tensor in nest.stores:
            found[tensor] = _even_rows(tensor, boxes[nest], context) * PACKET_BYTES * copies.get(nest, 1)
    return found


def with_padded_rows(
    kernel: Tile, nests: Sequence[Nest], leaves: Sequence[Leaf], boxes: Mapping[Nest, Box], stream: Stream | None,
    context: NestContext,
) -> Tile:  # fmt: skip
    """The kernel with how such tiles lie: those of several rows, each of an even number of packets."""
    stored = frozenset(t for n in nests if n.tensor.name not in kernel.held for t in n.stores)
    found = padded_nests(nests, leaves, stored, stream, context)
    names = {n.tensor.name for n in found if all(_even_rows(t, boxes[n], context) for t in n.stores)}

    def is_padded(hold: Hold) -> bool:
        return hold.tensor in names and hold.fill is None and hold.mode != "rolling"

    def changed(tile: Tile) -> Tile:
        body = tuple(changed(n) if isinstance(n, Tile) else n for n in tile.body)
        holds = tuple(replace(h, layout=PADDED) if is_padded(h) else h for h in tile.holds)
        return replace(tile, body=body, holds=holds)

    return changed(kernel) if names else kernel
