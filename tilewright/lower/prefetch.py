"""Asks early for what a kernel's later nests read: one hint a cache line of the tile's part, before the first nest."""

from __future__ import annotations

from collections.abc import Collection

from tilewright.ir.expr import Axis, var
from tilewright.ir.loops import PREFETCH, For, ForKind, Instruction, Operand, Stmt
from tilewright.ir.simplify import simplify
from tilewright.ir.tensor import Tensor
from tilewright.lower.access import Access
from tilewright.lower.memory import ALIGNMENT
from tilewright.schedule.propagate import Box, merge, reads_box
from tilewright.schedule.streams import Phases


def prefetches(wanted: Collection[str], phases: Phases, access: Access) -> list[Stmt]:
    """Hints for the parts of the named tensors that one tile reads."""
    tensors = {t for nest in phases.nests for t in nest.reads() if t.name in wanted}
    parts: dict[Tensor, Box] = {}
    for nest in phases.nests:
        found = reads_box(nest, phases.boxes[nest], phases.reduce_boxes.get(nest, {}), tensors)
        for tensor, box in found.items():
            parts[tensor] = merge(parts[tensor], box) if tensor in parts else box
    return [s for tensor, box in parts.items() for s in _lines(tensor, box, access)]


def _lines(tensor: Tensor, box: Box, access: Access) -> tuple[Stmt, ...]:
    place = access.read[tensor]
    innermost = place.layout.order[-1].axis
    line = ALIGNMENT // tensor.dtype.bytes
    index = []
    loops = []
    for dimension, part in enumerate(box):
        step = line if dimension == innermost else 1
        count = -(-int(part.size) // step)
        if count == 1:
            index.append(part.low)
            continue
        loops.append(Axis(f"line{dimension}", count))
        index.append(simplify(part.low + var(loops[-1]) * step))
    body: tuple[Stmt, ...] = (Instruction(PREFETCH, (Operand(place.buffer, place.indices(tuple(index))),)),)
    for loop in reversed(loops):
        body = (For(loop, ForKind.SERIAL, body),)
    return body
